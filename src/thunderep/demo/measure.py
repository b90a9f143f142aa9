"""dispatch and combine beside torch.distributed doing the same job, at the demo's own shapes, in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import thunderep
from thunderep.demo.config import DemoConfig

_ROUND_SECONDS = 0.1

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Exchange:
    """One operation at one shape, by thunderep and by torch.distributed."""

    name: str
    tokens: int
    """Tokens on every rank."""
    nbytes: int
    """Bytes that each rank takes from its peers."""
    seconds: float
    """By thunderep: median of the rounds, each as long as its slowest rank took."""
    baseline_seconds: float
    """By torch.distributed, likewise; rounds of both alternate."""


def measure(buffer: thunderep.Buffer, config: DemoConfig) -> list[Exchange]:
    """Time both operations for the tokens of a training step and for one token. Collective.

    Raises:
        RuntimeError: The two ways gave different rows.
    """
    return [row for tokens in (config.max_tokens, 1) for row in _measure(buffer, config, tokens)]


def _measure(buffer: thunderep.Buffer, config: DemoConfig, tokens: int) -> list[Exchange]:
    sizes, ranks = config.model, buffer.num_ranks
    generator = torch.Generator().manual_seed(config.seed + buffer.rank)
    x = torch.randn(tokens, sizes.hidden, generator=generator).to(config.device)
    scores = torch.randn(tokens, sizes.experts, generator=generator).to(config.device)
    weights, idx = scores.softmax(dim=-1).topk(sizes.topk)
    gathered = [tensor.new_empty(ranks * tokens, tensor.shape[1]) for tensor in (x, idx, weights)]
    reduced = torch.empty_like(x)

    def gather() -> None:
        for output, tensor in zip(gathered, (x, idx, weights), strict=True):
            _all_gather(output, tensor)

    def dispatch() -> thunderep.DispatchOutput:
        return thunderep.dispatch(x, idx, weights, sizes.experts, buffer)

    received = dispatch()
    gather()
    chosen = (received.recv_topk_idx >= 0).any(dim=1, keepdim=True)
    rows = torch.where(chosen, gathered[0], 0.0)

    def scatter() -> None:
        _reduce_scatter(reduced, rows)

    def combine() -> torch.Tensor:
        return thunderep.combine(rows, received, buffer)

    scatter()
    if not torch.equal(rows, torch.where(chosen, received.recv_x, 0.0)) or not torch.allclose(reduced, combine()):
        raise RuntimeError("thunderep and torch.distributed moved different rows")
    row_bytes = x[0].nbytes
    entry_bytes = idx[0].nbytes + weights[0].nbytes
    return [
        Exchange("dispatch", tokens, (ranks - 1) * tokens * (row_bytes + entry_bytes), *_race(dispatch, gather, config)),
        Exchange("combine", tokens, (ranks - 1) * tokens * row_bytes, *_race(combine, scatter, config)),
    ]


def _race(ours: Callable[[], object], theirs: Callable[[], object], config: DemoConfig) -> tuple[float, float]:
    """Seconds a call of each takes; rounds of both alternate, so that what else the machine does meets both."""
    calls = [_calls(operation, config.device) for operation in (ours, theirs)]
    rounds = [[_round(op, n, config.device) for op, n in zip((ours, theirs), calls, strict=True)] for _ in range(config.rounds)]
    first, second = zip(*rounds, strict=True)
    return statistics.median(first), statistics.median(second)


def _calls(operation: Callable[[], object], device: str) -> int:
    """How many calls fill a round; every rank gets the same number."""
    return max(1, int(_ROUND_SECONDS / _round(operation, 5, device)))


def _round(operation: Callable[[], object], calls: int, device: str) -> float:
    """Seconds a call takes on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        operation()
    if device == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor([(time.perf_counter() - begin) / calls], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
