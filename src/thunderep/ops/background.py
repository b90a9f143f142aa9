"""`dispatch` and `combine` in two halves, start and wait: what `async_op=True` calls, and what a compiler may keep apart.

A start returns a handle, one float32 on the operation's device: data that ties the wait to it, in whatever order a compiler
puts what lies between. Gradients take the same way back: the gradient of a wait starts the operation's gradient and returns
its handle as the handle's gradient; that of a start waits for it. So the backward pass overlaps what the forward pass does.

Under a compiler every start and every wait comes after those before it on the same Buffer (`library`): what is to run beside
an operation may move, but not the start that follows behind the wait that it precedes.

A handle is told by its address while it lives, so it must reach its wait as the tensor that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunderep.background import Operation, Rest
from thunderep.buffer import lookup
from thunderep.ops import combine, dispatch, dispatch_arguments
from thunderep.ops.library import HALVED, library
from thunderep.ops.rows import no_second_derivative

_Received = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _start(buffer: str, operation: Operation, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Start `operation(*tensors)` and return its handle."""
    owner = lookup(buffer)
    handle = torch.zeros(1, dtype=torch.float32, device=owner.device)
    owner.pending.start(handle, operation, *tensors)
    return handle


def _dispatch_start(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: str,
    max_tokens: int = -1,
    x_scales: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    dispatch_arguments.checked(lookup(buffer), x, topk_idx, topk_weights, num_experts, max_tokens, x_scales, True)
    dispatch_arguments.check_ids(topk_idx, num_experts)

    def begin(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None) -> Rest:
        return dispatch.begin(x, idx, weights, num_experts, buffer, max_tokens, scales)

    return _start(buffer, begin, x, topk_idx, topk_weights, x_scales)


def _combine_start(
    y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    combine.checked(lookup(buffer), y, recv_topk_idx, is_token_in_rank, True)
    return _start_of(combine.begin, 3)(y, recv_topk_idx, is_token_in_rank, buffer)


def _start_of(begin: Operation, tensors: int) -> Callable[..., torch.Tensor]:
    """What starts an operator that takes so many tensors, then the Buffer's name."""

    def start(*arguments: Any) -> torch.Tensor:
        buffer = arguments[tensors]
        return _start(buffer, lambda *kept: begin(*kept, buffer), *arguments[:tensors])

    return start


def _wait(handle: torch.Tensor, buffer: str, *_: Any) -> Any:
    return lookup(buffer).pending.finish(handle)


def _fake_start(first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return first.new_empty(1, dtype=torch.float32)


@torch.library.register_fake("thunderep::dispatch_wait", lib=library)
def _(
    handle: torch.Tensor,
    buffer: str,
    received: int,
    tokens: int,
    dtype: torch.dtype,
    idx_dtype: torch.dtype,
    scales: int,
    after: torch.Tensor | None = None,
) -> _Received:
    owner = lookup(buffer)
    return (
        handle.new_empty(received, owner.hidden, dtype=dtype),
        handle.new_empty(received, owner.topk, dtype=idx_dtype),
        handle.new_empty(received, owner.topk),
        handle.new_empty(received, scales),
        handle.new_empty(tokens, owner.num_ranks, dtype=torch.bool),
    )


@torch.library.register_fake("thunderep::combine_wait", lib=library)
def _(
    handle: torch.Tensor,
    buffer: str,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    dtype: torch.dtype,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return handle.new_empty(is_token_in_rank.shape[0], lookup(buffer).hidden, dtype=dtype)


@torch.library.register_fake("thunderep::dispatch_backward_wait", lib=library)
def _(
    handle: torch.Tensor, buffer: str, tokens: int, dtype: torch.dtype, after: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    owner = lookup(buffer)
    width = owner.hidden if dtype in combine.SUM_DTYPES else 0
    return handle.new_empty(tokens, width, dtype=dtype), handle.new_empty(tokens, owner.topk)


@torch.library.register_fake("thunderep::combine_backward_wait", lib=library)
def _(handle: torch.Tensor, buffer: str, received: int, dtype: torch.dtype, after: torch.Tensor | None = None) -> torch.Tensor:
    return handle.new_empty(received, lookup(buffer).hidden, dtype=dtype)


def _dispatch_start_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.tokens, ctx.dtype, ctx.buffer = inputs[0].shape[0], inputs[0].dtype, inputs[4]


def _dispatch_start_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weights = torch.ops.thunderep.dispatch_backward_wait(grad, ctx.buffer, ctx.tokens, ctx.dtype)
    return x if ctx.dtype in combine.SUM_DTYPES else None, None, weights, None, None, None, None, None


def _dispatch_wait_context(ctx: Any, inputs: tuple[Any, ...], output: _Received) -> None:
    ctx.buffer = inputs[1]
    dispatch.save_received(ctx, output)


def _dispatch_wait_backward(
    ctx: Any, grad_x: torch.Tensor, _idx: None, grad_weights: torch.Tensor, _scales: None, _in_rank: None
) -> tuple[Any, ...]:
    rows = dispatch.rows_gradient(grad_x)
    handle = torch.ops.thunderep.dispatch_backward_start(rows, grad_weights, *ctx.saved_tensors, ctx.buffer)
    return handle, None, None, None, None, None, None, None


def _combine_start_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.received, ctx.dtype, ctx.buffer = inputs[0].shape[0], inputs[0].dtype, inputs[3]


def _combine_start_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.thunderep.combine_backward_wait(grad, ctx.buffer, ctx.received, ctx.dtype), None, None, None, None


def _combine_wait_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.buffer = inputs[1]
    ctx.save_for_backward(inputs[2], inputs[3])


def _combine_wait_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    handle = torch.ops.thunderep.combine_backward_start(grad, *ctx.saved_tensors, ctx.buffer)
    return handle, None, None, None, None, None


_STARTS = {
    "dispatch": _dispatch_start,
    "combine": _combine_start,
    "dispatch_backward": _start_of(dispatch.begin_backward, 4),
    "combine_backward": _start_of(combine.begin_backward, 3),
}
for _name, _setup, _backward in (
    ("dispatch_start", _dispatch_start_context, _dispatch_start_backward),
    ("dispatch_wait", _dispatch_wait_context, _dispatch_wait_backward),
    ("combine_start", _combine_start_context, _combine_start_backward),
    ("combine_wait", _combine_wait_context, _combine_wait_backward),
):
    torch.library.register_autograd(f"thunderep::{_name}", _backward, setup_context=_setup, lib=library)
for _name in ("dispatch_backward", "combine_backward"):
    for _half in ("", "_start", "_wait"):
        torch.library.register_autograd(f"thunderep::{_name}{_half}", no_second_derivative, lib=library)
for _name in HALVED:
    torch.library.register_fake(f"thunderep::{_name}_start", _fake_start, lib=library)
    for _key in ("CPU", "CUDA"):
        library.impl(f"{_name}_start", _STARTS[_name], _key)
        library.impl(f"{_name}_wait", _wait, _key)
