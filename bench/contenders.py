"""Who is compared at which model shapes, and the proof that they do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import typer

import thunderep
from bench import baseline


class Shape(NamedTuple):
    """What of a model matters here."""

    hidden: int
    num_experts: int
    topk: int

    def buffer(self, transport: Any, tokens: int, device: torch.device) -> thunderep.Buffer:
        """A Buffer for calls of up to so many tokens a rank."""
        return thunderep.Buffer(
            num_experts=self.num_experts,
            hidden=self.hidden,
            topk=self.topk,
            max_tokens=tokens,
            device=device,
            transport=transport,
        )


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 128, 8),
    "gpt-oss-120b": Shape(2880, 128, 4),
    "glm-4.5-air": Shape(4096, 128, 8),
}


def chosen(names: Sequence[str] | None) -> list[str]:
    """The shapes that `--shape` names, all if it names none; raises what typer shows to users for others."""
    unknown = sorted(set(names or ()) - set(SHAPES))
    if unknown:
        raise typer.BadParameter(f"got {', '.join(unknown)}; expected {', '.join(SHAPES)}", param_hint="--shape")
    return list(names or SHAPES)


class Inputs(NamedTuple):
    """One rank's tokens: x [T, H], topk_idx [T, K], topk_weights [T, K]."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, rank: int, device: torch.device) -> Inputs:
        """Rows of bfloat16, each with K different experts, all alike likely."""
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
        topk_idx = torch.rand(tokens, shape.num_experts, generator=generator).topk(shape.topk).indices
        topk_weights = torch.rand(tokens, shape.topk, generator=generator)
        return cls(x.to(device), topk_idx.to(device), topk_weights.to(device))


class Ours:
    """ThunderEP over one transport."""

    def __init__(self, name: str, inputs: Inputs, y: torch.Tensor, shape: Shape, buffer: thunderep.Buffer) -> None:
        self.name = name
        self._inputs = inputs
        self._y = y
        self._num_experts = shape.num_experts
        self._buffer = buffer

    def dispatch(self) -> thunderep.DispatchOutput:
        """Send this rank's tokens to their experts."""
        return thunderep.dispatch(*self._inputs, self._num_experts, self._buffer)

    def start_dispatch(self) -> Callable[[], thunderep.DispatchOutput]:
        """Begin to `dispatch`. Call to wait."""
        return thunderep.dispatch(*self._inputs, self._num_experts, self._buffer, async_op=True).wait

    def combine(self, dispatched: thunderep.DispatchOutput) -> torch.Tensor:
        """Bring the partial results back and sum them."""
        return thunderep.combine(self._y, dispatched, self._buffer)


class Theirs:
    """torch.distributed alone."""

    def __init__(self, name: str, inputs: Inputs, y: torch.Tensor) -> None:
        self.name = name
        self._inputs = inputs
        self._y = y

    def dispatch(self) -> baseline.Gathered:
        """All-gather."""
        return baseline.dispatch(*self._inputs)

    def start_dispatch(self) -> Callable[[], baseline.Gathered]:
        """Begin to `dispatch`. Call to wait."""
        return baseline.start_dispatch(*self._inputs)

    def combine(self, dispatched: baseline.Gathered) -> torch.Tensor:
        """Reduce-scatter."""
        return baseline.combine(self._y)


def partial_results(inputs: Inputs, shape: Shape) -> torch.Tensor:
    """This rank's y [N * T, H] as experts would leave it: random where a row chose a local expert, 0 elsewhere."""
    gathered = baseline.dispatch(*inputs)
    chosen = _is_local(gathered.topk_idx, shape).any(dim=1, keepdim=True)
    return torch.where(chosen, torch.randn_like(gathered.x), 0)


def verify(ours: Ours, inputs: Inputs, y: torch.Tensor, shape: Shape) -> None:
    """Raise AssertionError unless ours equals torch.distributed: what is moved bit by bit, sums within one rounding."""
    got, expected = ours.dispatch(), baseline.dispatch(*inputs)
    first = thunderep.local_experts(shape.num_experts, dist.get_rank(), dist.get_world_size()).start
    local = _is_local(expected.topk_idx, shape)
    rows = local.any(dim=1)
    for actual, wanted in (
        (got.recv_x[rows], expected.x[rows]),
        (got.recv_topk_idx, torch.where(local, expected.topk_idx - first, -1)),
        (got.recv_topk_weights, torch.where(local, expected.topk_weights, 0)),
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    # The baseline sums in float32 here, in an order of its own; then both round once.
    torch.testing.assert_close(ours.combine(got), baseline.combine(y.float()).to(y.dtype), rtol=2**-7, atol=2**-12)


def _is_local(topk_idx: torch.Tensor, shape: Shape) -> torch.Tensor:
    experts = thunderep.local_experts(shape.num_experts, dist.get_rank(), dist.get_world_size())
    return (topk_idx >= experts.start) & (topk_idx < experts.stop)
