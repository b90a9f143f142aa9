"""`dispatch` and `combine` in two halves, start and wait: what `async_op=True` calls, and what a compiler may keep apart.

A start returns a handle, one float32 on the operation's device: data that ties the wait to it, in whatever order a compiler
puts what lies between. Gradients take the same way back: the gradient of a wait starts the operation's gradient and returns
its handle as the handle's gradient; that of a start waits for it. So the backward pass overlaps what the forward pass does.

Under a compiler every start and every wait comes after those before it on the same Buffer (`library`): what is to run beside
an operation may move, but not the start that follows behind the wait that it precedes.

A handle is told by its address while it lives, so it must reach its wait as the tensor that it is.
"""

from __future__ import annotations

from typing import Any

import torch

from thunderep.buffer import lookup
from thunderep.ops import combine, dispatch
from thunderep.ops.library import library

_Received = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Gradients = tuple[torch.Tensor, torch.Tensor]


def _start(buffer: str, operation: Any, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Start `operation(*tensors)` and return its handle."""
    owner = lookup(buffer)
    handle = torch.zeros(1, dtype=torch.float32, device=owner.device)
    owner.start(handle, operation, *tensors)
    return handle


def _wait(handle: torch.Tensor, buffer: str) -> Any:
    return lookup(buffer).finish(handle)


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
    dispatch.checked(lookup(buffer), x, topk_idx, topk_weights, num_experts, max_tokens, x_scales)

    def run(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None) -> _Received:
        return dispatch.run(x, idx, weights, num_experts, buffer, max_tokens, scales)

    return _start(buffer, run, x, topk_idx, topk_weights, x_scales)


def _dispatch_wait(
    handle: torch.Tensor,
    received: int,
    tokens: int,
    dtype: torch.dtype,
    idx_dtype: torch.dtype,
    scales: int,
    buffer: str,
    after: torch.Tensor | None = None,
) -> _Received:
    result: _Received = _wait(handle, buffer)
    return result


def _combine_start(
    y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    combine.checked(lookup(buffer), y, recv_topk_idx, is_token_in_rank)
    return _start(buffer, lambda y, idx, in_rank: combine.run(y, idx, in_rank, buffer), y, recv_topk_idx, is_token_in_rank)


def _combine_wait(
    handle: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    dtype: torch.dtype,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    result: torch.Tensor = _wait(handle, buffer)
    return result


def _dispatch_backward_start(
    grad_recv_x: torch.Tensor,
    grad_recv_topk_weights: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    tensors = (grad_recv_x, grad_recv_topk_weights, recv_topk_idx, is_token_in_rank)
    return _start(buffer, lambda x, weights, idx, in_rank: dispatch.run_backward(x, weights, idx, in_rank, buffer), *tensors)


def _dispatch_backward_wait(
    handle: torch.Tensor, tokens: int, dtype: torch.dtype, buffer: str, after: torch.Tensor | None = None
) -> _Gradients:
    result: _Gradients = _wait(handle, buffer)
    return result


def _combine_backward_start(
    grad: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return _start(
        buffer,
        lambda grad, idx, in_rank: combine.run_backward(grad, idx, in_rank, buffer),
        grad,
        recv_topk_idx,
        is_token_in_rank,
    )


def _combine_backward_wait(
    handle: torch.Tensor, received: int, dtype: torch.dtype, buffer: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    result: torch.Tensor = _wait(handle, buffer)
    return result


@torch.library.register_fake("thunderep::dispatch_start", lib=library)
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: str,
    max_tokens: int = -1,
    x_scales: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    dispatch.validate(lookup(buffer), x, topk_idx, topk_weights, num_experts, x_scales)
    return x.new_empty(1, dtype=torch.float32)


@torch.library.register_fake("thunderep::dispatch_wait", lib=library)
def _(
    handle: torch.Tensor,
    received: int,
    tokens: int,
    dtype: torch.dtype,
    idx_dtype: torch.dtype,
    scales: int,
    buffer: str,
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


@torch.library.register_fake("thunderep::combine_start", lib=library)
def _(
    y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    combine.validate(lookup(buffer), "y", y, recv_topk_idx, is_token_in_rank)
    return y.new_empty(1, dtype=torch.float32)


@torch.library.register_fake("thunderep::combine_wait", lib=library)
def _(
    handle: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    dtype: torch.dtype,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return handle.new_empty(is_token_in_rank.shape[0], lookup(buffer).hidden, dtype=dtype)


@torch.library.register_fake("thunderep::dispatch_backward_start", lib=library)
def _(
    grad_recv_x: torch.Tensor,
    grad_recv_topk_weights: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return grad_recv_x.new_empty(1, dtype=torch.float32)


@torch.library.register_fake("thunderep::dispatch_backward_wait", lib=library)
def _(handle: torch.Tensor, tokens: int, dtype: torch.dtype, buffer: str, after: torch.Tensor | None = None) -> _Gradients:
    owner = lookup(buffer)
    return handle.new_empty(tokens, owner.hidden, dtype=dtype), handle.new_empty(tokens, owner.topk)


@torch.library.register_fake("thunderep::combine_backward_start", lib=library)
def _(
    grad: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return grad.new_empty(1, dtype=torch.float32)


@torch.library.register_fake("thunderep::combine_backward_wait", lib=library)
def _(handle: torch.Tensor, received: int, dtype: torch.dtype, buffer: str, after: torch.Tensor | None = None) -> torch.Tensor:
    return handle.new_empty(received, lookup(buffer).hidden, dtype=dtype)


def _dispatch_start_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.tokens, ctx.dtype, ctx.buffer = inputs[0].shape[0], inputs[0].dtype, inputs[4]


def _dispatch_start_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weights = torch.ops.thunderep.dispatch_backward_wait(grad, ctx.tokens, ctx.dtype, ctx.buffer)
    return x, None, weights, None, None, None, None, None


def _dispatch_wait_context(ctx: Any, inputs: tuple[Any, ...], output: _Received) -> None:
    ctx.buffer = inputs[6]
    ctx.mark_non_differentiable(output[1], output[3], output[4])
    ctx.save_for_backward(output[1], output[4])


def _dispatch_wait_backward(
    ctx: Any, grad_x: torch.Tensor, _idx: None, grad_weights: torch.Tensor, _scales: None, _in_rank: None
) -> tuple[Any, ...]:
    handle = torch.ops.thunderep.dispatch_backward_start(grad_x, grad_weights, *ctx.saved_tensors, ctx.buffer)
    return handle, None, None, None, None, None, None, None


def _combine_start_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.received, ctx.dtype, ctx.buffer = inputs[0].shape[0], inputs[0].dtype, inputs[3]


def _combine_start_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.thunderep.combine_backward_wait(grad, ctx.received, ctx.dtype, ctx.buffer), None, None, None, None


def _combine_wait_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.buffer = inputs[4]
    ctx.save_for_backward(inputs[1], inputs[2])


def _combine_wait_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.thunderep.combine_backward_start(grad, *ctx.saved_tensors, ctx.buffer), None, None, None, None, None


for _name, _setup, _backward in (
    ("dispatch_start", _dispatch_start_context, _dispatch_start_backward),
    ("dispatch_wait", _dispatch_wait_context, _dispatch_wait_backward),
    ("combine_start", _combine_start_context, _combine_start_backward),
    ("combine_wait", _combine_wait_context, _combine_wait_backward),
):
    torch.library.register_autograd(f"thunderep::{_name}", _backward, setup_context=_setup, lib=library)
for _key in ("CPU", "CUDA"):
    library.impl("dispatch_start", _dispatch_start, _key)
    library.impl("dispatch_wait", _dispatch_wait, _key)
    library.impl("combine_start", _combine_start, _key)
    library.impl("combine_wait", _combine_wait, _key)
    library.impl("dispatch_backward_start", _dispatch_backward_start, _key)
    library.impl("dispatch_backward_wait", _dispatch_backward_wait, _key)
    library.impl("combine_backward_start", _combine_backward_start, _key)
    library.impl("combine_backward_wait", _combine_backward_wait, _key)
