"""One rank's side of the property tests: exchange tokens, compare with the reference all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from thunderep import reference
from thunderep.testing.inputs import Tokens, random_rows, random_tokens, same_bits, strided

SUMMED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    """An exchange among the first `len(tokens)` of the processes."""

    tokens: tuple[int, ...]
    num_experts: int = 8
    topk: int = 2
    hidden: int = 16
    extra_rows: int = 0
    dtype: torch.dtype = torch.bfloat16
    idx_dtype: torch.dtype = torch.int64
    scales: int = 0
    drop: float = 0.0
    skew: float = 0.0
    distinct: bool = True
    strides: str = "contiguous"
    staging_bytes: int | None = None
    in_flight: int = 1
    two_buffers: bool = False
    transport: str = "shm"
    device: str = "cpu"
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        return max(1, *self.tokens) + self.extra_rows

    def of(self, rank: int, operation: int) -> Tokens:
        """What a rank brings to one of the operations."""
        return random_tokens(
            self.seed * 1000 + operation * 10 + rank,
            self.tokens[rank],
            hidden=self.hidden,
            num_experts=self.num_experts,
            topk=self.topk,
            dtype=self.dtype,
            idx_dtype=self.idx_dtype,
            scales=self.scales,
            drop=self.drop,
            skew=self.skew,
            distinct=self.distinct,
        )

    def result_of(self, rank: int, operation: int) -> torch.Tensor:
        """What a rank's experts are taken to return, [R, H]."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + operation * 10 + rank + 500)
        dtype = self.dtype if self.dtype in SUMMED else torch.float32
        return random_rows((len(self.tokens) * self.max_tokens, self.hidden), dtype, generator)


_groups: dict[int, dist.ProcessGroup] = {}


def group_of(num_ranks: int) -> dist.ProcessGroup | None:
    """The group of the first `num_ranks` processes; all processes call this. None where this one is not in it."""
    if num_ranks not in _groups:
        _groups[num_ranks] = dist.new_group(list(range(num_ranks)))
    return _groups[num_ranks] if dist.get_rank() < num_ranks else None


def exchange(case: Case) -> str | None:
    """Run `case`; None, or what was wrong."""
    group = group_of(len(case.tokens))
    if group is None:
        return None
    names = ["a", "b"] if case.two_buffers else ["a"]
    buffers = []
    try:
        for _ in names:
            buffers.append(
                thunderep.Buffer(
                    group,
                    num_experts=case.num_experts,
                    hidden=case.hidden,
                    topk=case.topk,
                    max_tokens=case.max_tokens,
                    dtype=case.dtype if case.dtype.itemsize > 1 else torch.bfloat16,
                    device=case.device,
                    transport=case.transport,  # type: ignore[arg-type]
                    staging_bytes=case.staging_bytes,
                    timeout=60.0 if case.device == "cpu" else 20.0,
                )
            )
        return _exchange(case, buffers)
    finally:
        for buffer in buffers:
            buffer.close()


def _exchange(case: Case, buffers: list[thunderep.Buffer]) -> str | None:
    """`in_flight` dispatches, then as many combines, spread over the Buffers."""
    rank, num_ranks = buffers[0].rank, len(case.tokens)
    dispatched: list[Any] = []
    for operation in range(case.in_flight):
        mine = case.of(rank, operation)
        x, idx, weights = (strided(t, case.strides).to(case.device) for t in (mine.x, mine.topk_idx, mine.topk_weights))
        scales = None if mine.x_scales is None else mine.x_scales.to(case.device)
        buffer = buffers[operation % len(buffers)]
        arguments = (x, idx, weights, case.num_experts, buffer, case.max_tokens, scales)
        if case.in_flight == 1:
            dispatched.append(thunderep.dispatch(*arguments))
        else:
            dispatched.append(thunderep.dispatch(*arguments, async_op=True))
            for tensor in (x, idx, weights):
                tensor.fill_(0)  # the inputs are free at once
    if case.in_flight > 1:
        dispatched = [work.wait() for work in dispatched]
    everyone = [[case.of(r, operation) for r in range(num_ranks)] for operation in range(case.in_flight)]
    expected = [
        reference.dispatch(
            [t.x for t in tokens],
            [t.topk_idx for t in tokens],
            [t.topk_weights for t in tokens],
            case.num_experts,
            case.max_tokens,
            [t.x_scales for t in tokens] if case.scales else None,  # type: ignore[misc]
        )
        for tokens in everyone
    ]
    for operation, (got, want) in enumerate(zip(dispatched, expected, strict=True)):
        problem = _compare_dispatch(thunderep.DispatchOutput(*(t.cpu() for t in got)), want[rank])
        if problem:
            return f"operation {operation}: {problem}"
    results: list[Any] = []
    for operation, got in enumerate(dispatched):
        y = case.result_of(rank, operation)
        y[(got.recv_topk_idx.cpu() < 0).all(dim=1)] = float("nan")  # nothing may read these rows
        y = strided(y, case.strides).to(case.device)
        buffer = buffers[operation % len(buffers)]
        results.append(thunderep.combine(y, got, buffer, async_op=case.in_flight > 1))  # type: ignore[call-overload]
    if case.in_flight > 1:
        results = [work.wait() for work in results]
    for operation, got in enumerate(results):
        summed = reference.combine(
            [case.result_of(r, operation) for r in range(num_ranks)], [e[4] for e in expected[operation]]
        )
        if not same_bits(got.cpu(), summed[rank]):
            return f"operation {operation}: combine differs from the float32 sum in rank order"
    return None


def _compare_dispatch(got: thunderep.DispatchOutput, want: reference.Received) -> str | None:
    chosen = (want[1] >= 0).any(dim=1)
    for name, value, expected in zip(got._fields, got, want, strict=True):
        if name in ("recv_x", "recv_x_scales"):
            value, expected = value[chosen], expected[chosen]
        if not same_bits(value, expected):
            return f"{name} differs"
    return None
