"""One rank's side of the GPU tests of memory: reused while operations are under way, and growing over many."""

from __future__ import annotations

import torch

import thunderep
from tests.dist.failures import resources
from tests.gpu.programs import EXPERTS, MOST, TOPK, Round, make


def under_pressure(transport: str, steps: int) -> int:
    """Outputs and inputs freed and their memory reused at once while copies still run: how many results were wrong."""
    wrong = 0
    with make(transport, hidden=2048, max_tokens=512) as buffer:
        generator = torch.Generator().manual_seed(3)
        for step in range(steps):
            x = torch.full((512, 2048), float(step + buffer.rank), device="cuda", dtype=torch.bfloat16)
            idx = torch.randint(0, EXPERTS, (512, TOPK), generator=generator).cuda()
            weights = torch.rand(512, TOPK, device="cuda")
            d = thunderep.dispatch(x, idx, weights, EXPERTS, buffer)
            x.fill_(-1)
            del x
            torch.full((512, 2048), -2.0, device="cuda", dtype=torch.bfloat16)
            y = d.recv_x.clone()
            d = d._replace(recv_x=y[:0])
            torch.full((1024, 2048), -3.0, device="cuda", dtype=torch.bfloat16)
            out = thunderep.combine(y, d, buffer)
            del y
            torch.full((1024, 2048), -4.0, device="cuda", dtype=torch.bfloat16)
            expected = (step + buffer.rank) * d.is_token_in_rank.sum(dim=1, keepdim=True).float()
            wrong += not torch.equal(out.float(), expected.bfloat16().float().expand_as(out))
    return wrong


def in_flight(transport: str, steps: int) -> list[str]:
    """Three operations beside a matrix product, inputs overwritten and freed at once, eager and captured: what is wrong."""
    problems = []
    with make(transport, hidden=512, max_tokens=256) as buffer:
        generator = torch.Generator().manual_seed(buffer.rank)
        idx = torch.randint(0, EXPERTS, (256, TOPK), generator=generator).cuda()
        weights = torch.rand(256, TOPK, generator=generator).cuda()
        base = torch.randn(256, 512, generator=generator).bfloat16().cuda()
        square = torch.eye(1024, device="cuda", dtype=torch.bfloat16)

        def run() -> list[torch.Tensor]:
            works = []
            for i in range(3):
                x = base + i
                works.append(thunderep.dispatch(x, idx, weights, EXPERTS, buffer, async_op=True))
                x.fill_(-1)
                del x
                torch.full((256, 512), -2.0, device="cuda", dtype=torch.bfloat16)
            product = square @ square
            combined = []
            for work in works:
                d = work.wait()
                y = d.recv_x + d.recv_x
                combined.append((thunderep.combine(y, d, buffer, async_op=True), d.is_token_in_rank))
                y.fill_(-3)
                del y
                torch.full((512, 512), -4.0, device="cuda", dtype=torch.bfloat16)
            return [product, *(work.wait() * 1 for work, _ in combined), combined[0][1]]

        def check(results: list[torch.Tensor], what: str) -> None:
            product, *outs, in_rank = results
            ranks = in_rank.sum(dim=1, keepdim=True).float()
            if not torch.equal(product, square):
                problems.append(f"{what}: product")
            for i, out in enumerate(outs):
                row = (base + i) + (base + i)
                if not torch.equal(out, (row.float() * ranks).bfloat16()):
                    problems.append(f"{what}: operation {i}")

        for step in range(steps):
            check(run(), f"eager {step}")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for step in range(steps):
            base.add_(0.125)
            graph.replay()
            check(captured, f"replay {step}")
            if step % 3 == 0:
                check(run(), f"eager between {step}")
    return problems


def soak(transport: str, operations: int) -> tuple[int, int, int, int]:
    """Eager operations: wrong ones, and growth of descriptors, of allocated GPU bytes and of resident KiB in the later half."""
    with make(transport) as buffer:
        round_ = Round(buffer, MOST, 2)

        def some(count: int) -> None:
            for step in range(count):
                round_.run()
                if step % 100 == 0:
                    torch.cuda.synchronize()
                    buffer.check()

        some(operations // 4)
        before, allocated = resources(), torch.cuda.memory_allocated()
        some(operations // 4)
        torch.cuda.synchronize()
        after = resources()
        wrong = not round_.check(9, replay=False)
        return (
            int(wrong),
            after["descriptors"] - before["descriptors"],
            torch.cuda.memory_allocated() - allocated,
            after["resident"] - before["resident"],
        )
