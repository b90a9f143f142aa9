"""One rank's side of the GPU tests: Buffers over one GPU transport, and operations on them, eager and replayed."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from thunderep import reference
from thunderep.runtime.chunks import MIN_SLOT_BYTES, Staging
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


def many_times_the_staging(transport: str, tokens: int) -> list[str]:
    """A dispatch and a combine of so many tokens through the smallest staging, eager and replayed: which differ."""
    staging = Staging.slots_for(dist.get_world_size()) * MIN_SLOT_BYTES
    with make(transport, max_tokens=tokens, staging_bytes=staging) as buffer:
        round_ = Round(buffer, tokens, 2)
        wrong = [f"eager {seed}" for seed in range(4) if not round_.check(seed, replay=False)]
        round_.capture()
        return wrong + [f"replayed {seed}" for seed in range(4, 8) if not round_.check(seed, replay=True)]


def keep(transport: str, **options: Any) -> str:
    """Make a Buffer and keep it."""
    _kept["buffer"] = make(transport, **options)
    return _kept["buffer"].transport


def kept() -> thunderep.Buffer:
    """The Buffer of `keep`."""
    return _kept["buffer"]


def close() -> float:
    """Close it; seconds that it took."""
    began = time.monotonic()
    _kept.pop("buffer").close()
    return time.monotonic() - began


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


def once(tokens: int = MOST, delay: float = 0.0) -> bool:
    """One dispatch and one combine after `delay` seconds; whether they are right."""
    time.sleep(delay)
    return Round(_kept["buffer"], tokens, 2).check(7, replay=False)


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


def one_replays_what_others_issue(transport: str, steps: int) -> list[int]:
    """In turn another rank replays a graph of the operations that the others run eagerly: steps in which it differs."""
    with make(transport) as buffer:
        round_ = Round(buffer, 8, 2)
        round_.capture()
        if buffer.rank == 0:
            round_.check(0, replay=True)  # ranks have issued different numbers of operations from here on
        else:
            round_.check(0, replay=False)
        return [s for s in range(1, steps) if not round_.check(s, replay=s % buffer.num_ranks == buffer.rank)]


def from_several_streams(transport: str, steps: int) -> list[int]:
    """Operations from two streams that nobody orders among themselves, where ranks are late on different ones: wrong steps."""
    with make(transport) as buffer:
        rounds = [Round(buffer, tokens, 2) for tokens in (8, MOST)]
        wanted = [[result.clone() for result in round_.run()] for round_ in rounds]
        streams = [torch.cuda.Stream() for _ in rounds]
        busy = torch.randn(2048, 2048, device="cuda")
        torch.cuda.synchronize()
        wrong = []
        for step in range(steps):
            with torch.cuda.stream(streams[(step + buffer.rank) % 2]):
                for _ in range(20):
                    torch.mm(busy, busy)
            results = []
            for stream, round_ in zip(streams, rounds, strict=True):
                with torch.cuda.stream(stream):
                    results.append(round_.run())
            torch.cuda.synchronize()
            pairs = zip(results, wanted, strict=True)
            if not all(same_bits(a, b) for got, want in pairs for a, b in zip(got, want, strict=True)):
                wrong.append(step)
        return wrong
