"""One rank's side of the tests of dense collectives: run them, compare with plain torch on every rank's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import thunderep
from tests.dist.exchange import group_of
from thunderep.testing.inputs import random_rows, random_tokens, same_bits, strided


@dataclass(frozen=True)
class Case:
    """All three among the first `len(sizes)` of the processes; rank r has `sizes[r]` rows of shape `row`."""

    sizes: tuple[int, ...]
    row: tuple[int, ...] = (16,)
    dtype: torch.dtype = torch.bfloat16
    strides: str = "contiguous"
    hidden: int = 16
    staging_bytes: int | None = None
    transport: str = "shm"
    device: str = "cpu"
    seed: int = 0

    def rows(self, rank: int, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows that any rank can make for every rank."""
        return random_rows((count, *self.row), dtype or self.dtype, torch.Generator().manual_seed(self.seed * 10 + rank))


def rank_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in float32 in rank order, rounded once."""
    total = torch.zeros(tensors[0].shape)
    for tensor in tensors:
        total += tensor.float()
    return total.to(tensors[0].dtype)


def collectives(case: Case) -> str | None:
    """Run `case`; None, or what was wrong."""
    group = group_of(len(case.sizes))
    if group is None:
        return None
    with thunderep.Buffer(
        group, num_experts=1, hidden=case.hidden, topk=1, max_tokens=1, device=case.device, timeout=60,
        transport=case.transport, staging_bytes=case.staging_bytes,  # type: ignore[arg-type]
    ) as buffer:  # fmt: skip
        return next(filter(None, (check(case, buffer) for check in (_gathered, _scattered, _reduced, _gathered))), None)


def _gathered(case: Case, buffer: thunderep.Buffer) -> str | None:
    everyone = [case.rows(rank, size) for rank, size in enumerate(case.sizes)]
    got = thunderep.all_gather(_strided(case, everyone[buffer.rank]), buffer, case.sizes)
    return None if same_bits(got.cpu(), torch.cat(everyone)) else "all_gather differs"


def _scattered(case: Case, buffer: thunderep.Buffer) -> str | None:
    everyone = [case.rows(rank, sum(case.sizes), _summed(case)) for rank in range(len(case.sizes))]
    got = thunderep.reduce_scatter(_strided(case, everyone[buffer.rank]), buffer, case.sizes)
    return None if same_bits(got.cpu(), rank_sum(everyone).split(case.sizes)[buffer.rank]) else "reduce_scatter differs"


def _reduced(case: Case, buffer: thunderep.Buffer) -> str | None:
    everyone = [case.rows(rank, case.sizes[0], _summed(case)) for rank in range(len(case.sizes))]
    got = thunderep.all_reduce(_strided(case, everyone[buffer.rank]), buffer)
    return None if same_bits(got.cpu(), rank_sum(everyone)) else "all_reduce differs"


def _summed(case: Case) -> torch.dtype:
    return case.dtype if case.dtype in (torch.bfloat16, torch.float16) else torch.float32


def _strided(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    how = "contiguous" if case.strides == "transposed" and tensor.dim() != 2 else case.strides
    return strided(tensor, how).to(case.device)


def _buffer() -> thunderep.Buffer:
    return thunderep.Buffer(num_experts=4, hidden=8, topk=2, max_tokens=8, dtype=torch.float32, device="cpu", timeout=60)


def gradients() -> list[bool]:
    """The gradients, of ragged and even rows, are those of plain torch over all ranks' tensors."""
    ranks, good = range(dist.get_world_size()), []
    sizes = [rank + 1 for rank in ranks]
    with _buffer() as buffer:
        me = buffer.rank
        factors = [torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(rank)) for rank in ranks]
        cuts = [factor.split(sizes) for factor in factors]
        x = torch.randn(sizes[me], 3, requires_grad=True)
        (thunderep.all_gather(x, buffer, sizes) * factors[me]).sum().backward()
        good.append(torch.allclose(x.grad, rank_sum([cut[me] for cut in cuts])))  # type: ignore[arg-type]
        y = torch.randn(sum(sizes), 3, requires_grad=True)
        (thunderep.reduce_scatter(y, buffer, sizes) * cuts[me][me]).sum().backward()
        good.append(torch.equal(y.grad, torch.cat([cuts[rank][rank] for rank in ranks])))  # type: ignore[arg-type]
        z = torch.randn(sum(sizes), 3, requires_grad=True)
        (thunderep.all_reduce(z, buffer) * factors[me]).sum().backward()
        good.append(torch.equal(z.grad, rank_sum(factors)))  # type: ignore[arg-type]
    return good


def compiles() -> list[Any]:
    """Dense collectives between a dispatch and a combine, in one graph: as eager, and compiled once."""
    torch._dynamo.reset()
    with _buffer() as buffer:

        def program(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            everyone = thunderep.all_gather(x * 2, buffer)
            d = thunderep.dispatch(x, idx, weights, 4, buffer)
            thunderep.all_reduce(x, buffer)  # unused: the other ranks run theirs
            y = thunderep.combine(d.recv_x * (d.recv_topk_idx >= 0).any(1, keepdim=True), d, buffer)
            return thunderep.reduce_scatter(everyone.sin(), buffer) + y

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(program, fullgraph=True, backend=counter)
        same = []
        for seed in range(3):
            made = random_tokens(seed * 10 + buffer.rank, 6, hidden=8, num_experts=4, topk=2, dtype=torch.float32)
            results = []
            for call in (program, compiled):
                x = made.x.clone().requires_grad_()
                out = call(x, made.topk_idx, made.topk_weights)
                results.append((out, *torch.autograd.grad(out.square().sum(), x)))
            same.append(all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results, strict=True)))
        return [all(same), counter.frame_count]


def disagree() -> list[str]:
    """What every rank raises when ranks call different things; the Buffer works on."""
    messages = []
    with _buffer() as buffer:
        me, ranks = buffer.rank, buffer.num_ranks
        calls: list[Callable[[], torch.Tensor]] = [
            lambda: thunderep.all_gather(torch.ones(2, 3 + (me == 1)), buffer),
            lambda: thunderep.all_gather(torch.ones(2, 3), buffer, [2] * (ranks - 1) + [2 - (me == 1)]),
            lambda: thunderep.all_gather(torch.ones(2 * (me != 1), 3), buffer),
            lambda: thunderep.all_reduce(torch.ones(2 * (me != 1)), buffer),
            lambda: (thunderep.all_reduce if me == 1 else thunderep.reduce_scatter)(torch.ones(ranks, 8), buffer),
        ]
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                messages.append(str(error).split(":")[0])
            else:
                messages.append("none")
        if not torch.equal(thunderep.all_reduce(torch.ones(3), buffer), torch.full((3,), float(ranks))):
            messages.append("the Buffer is broken")
    return messages
