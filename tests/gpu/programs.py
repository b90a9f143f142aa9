"""One rank's side of the GPU tests: Buffers over one GPU transport, eager, captured and compiled."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from thunderep import reference
from thunderep.testing.inputs import Tokens, random_tokens, same_bits

EXPERTS, HIDDEN, TOPK, MOST = 8, 72, 3, 16
_kept: dict[str, thunderep.Buffer] = {}


def make(transport: str, **options: Any) -> thunderep.Buffer:
    """A Buffer of the tests' shape on this rank's GPU."""
    arguments: dict[str, Any] = {
        "num_experts": EXPERTS,
        "hidden": HIDDEN,
        "topk": TOPK,
        "max_tokens": MOST,
        "device": "cuda",
        "transport": transport,
        "timeout": 30.0,
    }
    return thunderep.Buffer(**arguments | options)


def everyone(seed: int, tokens: int) -> list[Tokens]:
    """What all ranks bring to an operation."""
    return [
        random_tokens(seed * 100 + rank, tokens, hidden=HIDDEN, num_experts=EXPERTS, topk=TOPK)
        for rank in range(dist.get_world_size())
    ]


class Round:
    """Operations on static tensors: `length` of them, dispatch and combine in turn. Eager or captured."""

    def __init__(self, buffer: thunderep.Buffer, tokens: int, length: int) -> None:
        self._buffer, self._tokens, self._length = buffer, tokens, length
        mine = everyone(0, tokens)[buffer.rank]
        self._inputs = [mine.x.cuda(), mine.topk_idx.cuda(), mine.topk_weights.cuda()]
        self.run()
        torch.cuda.synchronize()
        self.graph: torch.cuda.CUDAGraph | None = None
        self._captured: list[torch.Tensor] = []

    def run(self) -> list[torch.Tensor]:
        """All operations; the last one's results."""
        d: Any = None
        x = self._inputs[0]
        results: list[torch.Tensor] = []
        for i in range(self._length):
            if i % 2 == 0:
                _, idx, weights = self._inputs
                d = thunderep.dispatch(x, idx, weights, EXPERTS, self._buffer)
                results = [d.recv_topk_idx, d.recv_topk_weights, self._read(d)]
            else:
                x = thunderep.combine(d.recv_x, d, self._buffer)
                results = [x]
        return results

    def _read(self, d: thunderep.DispatchOutput) -> torch.Tensor:
        return d.recv_x.masked_fill((d.recv_topk_idx < 0).all(dim=1, keepdim=True), 0)

    def capture(self) -> None:
        """Capture `run` as a graph."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._captured = self.run()

    def check(self, seed: int, *, replay: bool) -> bool:
        """Whether the results for new data are those of the reference, bit by bit."""
        tokens = everyone(seed, self._tokens)
        mine = tokens[self._buffer.rank]
        for static, new in zip(self._inputs, (mine.x, mine.topk_idx, mine.topk_weights), strict=True):
            static.copy_(new)
        if replay:
            assert self.graph is not None
            self.graph.replay()
        results = self._captured if replay else self.run()
        x, idx, weights = ([getattr(t, n) for t in tokens] for n in ("x", "topk_idx", "topk_weights"))
        wanted: list[torch.Tensor] = []
        for i in range(self._length):
            if i % 2 == 0:
                received = reference.dispatch(x, idx, weights, EXPERTS, self._tokens)
                own = received[self._buffer.rank]
                wanted = [own[1], own[2], own[0].masked_fill((own[1] < 0).all(dim=1, keepdim=True), 0)]
            else:
                x = reference.combine([r[0] for r in received], [r[4] for r in received])
                wanted = [x[self._buffer.rank]]
        return all(same_bits(got.cpu(), want) for got, want in zip(results, wanted, strict=True))


def replay_in_random_order(transport: str, replays: int, seed: int) -> list[str]:
    """Graphs of 1, 2 and 3 operations for 1, 2, 4 and 8 tokens, between eager calls, ranks capturing at different times."""
    with make(transport) as buffer:
        rounds = [Round(buffer, tokens, length) for tokens, length in itertools.product((1, 2, 4, 8), (1, 2, 3))]
        for index, each in enumerate(rounds):
            if index % 4 == buffer.rank:
                time.sleep(0.3)
            each.capture()
        order = random.Random(seed)
        wrong = []
        for step in range(replays):
            each = order.choice(rounds)
            replay = order.random() < 0.8
            if not each.check(seed * 100_000 + step, replay=replay):
                wrong.append(f"step {step}: {'replayed' if replay else 'eager'}")
        return wrong


def replay_often(transport: str, replays: int) -> int:
    """How many of so many replays of a dispatch and a combine, new data each time, differ from the reference."""
    with make(transport) as buffer:
        round_ = Round(buffer, 8, 2)
        round_.capture()
        return sum(not round_.check(step, replay=True) for step in range(replays))


def keep(transport: str, **options: Any) -> str:
    """Make a Buffer and keep it."""
    _kept["buffer"] = make(transport, **options)
    return _kept["buffer"].transport


def keep_impatient(transport: str) -> str:
    """Make a Buffer that waits for 2 s, and keep it."""
    return keep(transport, timeout=2.0)


def close() -> float:
    """Close it; seconds that it took."""
    began = time.monotonic()
    _kept.pop("buffer").close()
    return time.monotonic() - began


def once(tokens: int = MOST, delay: float = 0.0) -> bool:
    """One dispatch and one combine after `delay` seconds; whether they are right."""
    time.sleep(delay)
    return Round(_kept["buffer"], tokens, 2).check(7, replay=False)


def forever(captured: bool) -> None:
    """Operations without an end."""
    round_ = Round(_kept["buffer"], 8, 2)
    if captured:
        round_.capture()
    while True:
        if captured and round_.graph is not None:
            round_.graph.replay()
        else:
            round_.run()
        torch.cuda.synchronize()
        _kept["buffer"].check()


def until_error(captured: bool) -> tuple[str, int, str, float]:
    """Operations until one raises: the error's type, rank and text, and the time (CLOCK_MONOTONIC, alike in all processes)."""
    try:
        forever(captured)
    except RuntimeError as error:
        at = time.monotonic()
        return type(error).__name__, getattr(error, "rank", -1), str(error), at
    raise AssertionError("unreachable")


def after_the_error() -> tuple[str, float, bool]:
    """What the next call raises, how long closing takes, and whether the GPU still computes."""
    try:
        once()
        said = "nothing"
    except RuntimeError as error:
        said = type(error).__name__
    seconds = close()
    a = torch.ones(512, 512, device="cuda")
    return said, seconds, bool((a @ a == 512).all())


def out_of_range() -> list[str]:
    """What an id outside -1..E-1 leads to: the operation runs, the next one raises, the one after that runs."""
    buffer = _kept["buffer"]
    mine = everyone(1, 4)[buffer.rank]
    x, idx, weights = mine.x.cuda(), mine.topk_idx.cuda(), mine.topk_weights.cuda()
    wrong = idx.clone()
    wrong[0, 0] = EXPERTS
    said = []
    for ids in (wrong, idx, idx):
        try:
            d = thunderep.dispatch(x, ids, weights, EXPERTS, buffer)
            torch.cuda.synchronize()
            said.append(f"rows for {int((d.recv_topk_idx >= 0).sum()) > 0}")
        except ValueError as error:
            said.append(str(error))
    return said


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


def started_before_capture() -> str:
    """What an operation in a capture says while one that began before it has not been waited for."""
    buffer = _kept["buffer"]
    mine = everyone(1, 4)[buffer.rank]
    x, idx, weights = mine.x.cuda(), mine.topk_idx.cuda(), mine.topk_weights.cuda()
    thunderep.dispatch(x, idx, weights, EXPERTS, buffer)
    work = thunderep.dispatch(x, idx, weights, EXPERTS, buffer, async_op=True)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            thunderep.dispatch(x, idx, weights, EXPERTS, buffer)
    except RuntimeError as error:
        said = str(error)
    work.wait()
    torch.cuda.synchronize()
    return said


def from_another_device(transport: str) -> bool:
    """Whether operations are right while another GPU than the Buffer's is the current one."""
    with make(transport) as buffer:
        own = torch.cuda.current_device()
        right = []
        for tokens in (1, MOST):
            round_ = Round(buffer, tokens, 2)
            with torch.cuda.device((own + 1) % torch.cuda.device_count()):
                mine = everyone(5, tokens)[buffer.rank]
                x, idx, weights = (t.to(buffer.device) for t in (mine.x, mine.topk_idx, mine.topk_weights))
                d = thunderep.dispatch(x, idx, weights, EXPERTS, buffer)
                out = thunderep.combine(d.recv_x, d, buffer, async_op=True).wait()
                torch.cuda.synchronize(buffer.device)
            tokens_of_all = everyone(5, tokens)
            xs, ids, ws = ([getattr(t, n) for t in tokens_of_all] for n in ("x", "topk_idx", "topk_weights"))
            received = reference.dispatch(xs, ids, ws, EXPERTS, tokens)
            wanted = reference.combine([r[0] for r in received], [r[4] for r in received])[buffer.rank]
            right += [same_bits(out.cpu(), wanted), round_.check(3, replay=False)]
        return all(right)


def soak(transport: str, operations: int) -> tuple[int, int, int, int]:
    """Eager operations: wrong ones, and growth of descriptors, of allocated GPU bytes and of resident KiB in the later half."""
    from tests.dist.failures import resources

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


def _finished(result: Any) -> Any:
    return result.wait() if isinstance(result, thunderep.Work) else result


def compiled(transport: str, mode: str, halves: bool) -> list[str]:
    """A layer compiled whole, forward and backward, in `mode`: what differs from eager, over several calls with new data."""
    problems = []
    torch._dynamo.reset()  # what was compiled for other Buffers counts towards how often this may be
    with make(transport) as buffer:

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            d = _finished(thunderep.dispatch(x, idx, weights, EXPERTS, buffer, async_op=halves))  # type: ignore[call-overload]
            present = (d.recv_topk_idx >= 0).any(dim=1, keepdim=True)
            scale = d.recv_topk_weights.sum(dim=1, keepdim=True).to(x.dtype)
            y = torch.where(present, d.recv_x * scale, 0)
            return _finished(thunderep.combine(y, d, buffer, async_op=halves))  # type: ignore[call-overload, no-any-return]

        step: Callable[..., torch.Tensor] = torch.compile(layer, fullgraph=True, mode=None if mode == "default" else mode)
        for seed in range(6):
            mine = everyone(seed, 8)[buffer.rank]
            results = []
            for function in (layer, step):
                x, weights = mine.x.cuda().requires_grad_(), mine.topk_weights.cuda().requires_grad_()
                out = function(x, mine.topk_idx.cuda(), weights)
                out.float().square().sum().backward()
                assert x.grad is not None
                assert weights.grad is not None
                results.append([t.detach().clone() for t in (out, x.grad, weights.grad)])
            for name, eager, other in zip(("output", "x.grad", "topk_weights.grad"), *results, strict=True):
                if not torch.allclose(eager.float(), other.float(), rtol=2e-2, atol=2e-2):
                    problems.append(f"call {seed}: {name} differs by {(eager.float() - other.float()).abs().max():.3g}")
    return problems


def profiled(transport: str) -> tuple[list[str], thunderep.Stats]:
    """What a profiler sees of a dispatch and a combine of `MOST` tokens, and what the Buffer counts of them."""
    with make(transport) as buffer:
        round_ = Round(buffer, MOST, 2)
        before = buffer.stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            round_.run()
        with torch.autograd.profiler.emit_nvtx():
            round_.run()
        after = buffer.stats()
    counts = {kind: after.operations[kind] - count for kind, count in before.operations.items()}
    names = sorted({event.key for event in profile.key_averages() if event.key.startswith("thunderep")})
    return names, thunderep.Stats(counts, after[1] - before[1], after[2] - before[2], after.waited)


def logged_thresholds() -> str:
    """What is logged of the thresholds of a Buffer that chooses by itself."""
    logged: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("thunderep")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    make("auto").close()
    logger.removeHandler(handler)
    return next(text for text in logged if text.startswith("auto: kernels"))


def sharing(transport: str) -> str:
    """What making a Buffer says where ranks have one GPU."""
    try:
        make(transport).close()
    except RuntimeError as error:
        return str(error)
    return "no error"
