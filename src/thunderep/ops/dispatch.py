"""`thunderep::dispatch`: every token goes to the ranks that own the experts it chose. See the contract in `api.dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunderep.background import Rest
from thunderep.buffer import Buffer, lookup
from thunderep.ops.combine import SUM_DTYPES
from thunderep.ops.dispatch_arguments import check_ids, checked, validate
from thunderep.ops.library import library
from thunderep.ops.rows import kernels, kernels_in, rows_call, rows_sum
from thunderep.runtime.trace import phase
from thunderep.runtime.transport import Call, Transport

_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def run(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: str,
    max_tokens: int = -1,
    x_scales: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> _Outputs:
    """What the operator does."""
    return begin(x, topk_idx, topk_weights, num_experts, buffer, max_tokens, x_scales, async_op=False).run()  # type: ignore[no-any-return]


def begin(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: str,
    max_tokens: int,
    x_scales: torch.Tensor | None,
    async_op: bool = True,
) -> Rest:
    """What of it moves data, and what is left."""
    owner = lookup(buffer)
    call = checked(owner, x, topk_idx, topk_weights, num_experts, max_tokens, x_scales, async_op)
    if not async_op:  # then its start has
        check_ids(topk_idx, num_experts)
    with owner.operation() as transport:
        direct = kernels(owner, transport, call)
        if direct is not None:
            return Rest.of(*direct.dispatch(x, topk_idx, topk_weights, x_scales, call.max_tokens, call))
        if transport.routing is None or async_op:  # beside other work kernels would wait for SMs
            return _move(owner, transport, call, x, topk_idx, topk_weights, x_scales)
        recv_x = x.new_empty(owner.num_ranks * call.max_tokens, x.shape[1])
        with transport.dispatch(call, [x.contiguous()], [recv_x]) as moved:
            routing = kernels_in(owner, transport.routing)
            received = routing.exchange_routing(topk_idx, topk_weights, x_scales, call.max_tokens)
            moved.own()
        return Rest.of(recv_x, *received)


def _move(
    owner: Buffer,
    transport: Transport,
    call: Call,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scales: torch.Tensor | None,
) -> Rest:
    """Move rows and routing alike; what is left makes ids local."""
    tokens, max_rows = call.tokens, call.max_tokens
    inputs = [x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous()]
    if x_scales is not None:
        inputs.append(x_scales.contiguous())
    outputs = [t.new_empty(owner.num_ranks * max_rows, t.shape[1]) for t in inputs]
    if x.is_cuda and tokens < max_rows:  # no rank's host learns how many tokens the others have
        inputs[1] = topk_idx.new_full((max_rows, owner.topk), -1)
        inputs[1][:tokens] = topk_idx
    with transport.dispatch(call, inputs, outputs) as moved:
        pass

    def rest() -> _Outputs:
        moved.own()
        recv_x, recv_idx, recv_weights = outputs[:3]
        recv_scales = outputs[3] if x_scales is not None else recv_weights.new_empty(recv_x.shape[0], 0)
        in_rank = _localize(owner, recv_idx, recv_weights, moved.rows, inputs[1][:tokens])
        return recv_x, recv_idx, recv_weights, recv_scales, in_rank

    return Rest(rest, (*inputs, *outputs))


@phase("localize")
def _localize(
    owner: Buffer, idx: torch.Tensor, weights: torch.Tensor, rows: Sequence[int], sent_idx: torch.Tensor
) -> torch.Tensor:
    """Turn received global ids into local ones, in place: -1, and weight 0, for padding and for other ranks' experts.

    Returns:
        [T, N] bool: token i, of which sent_idx is [T, K], went to rank r.
    """
    if idx.is_cuda:
        from thunderep.ops.kernels.localize import in_rank, localize

        localize(idx, weights, owner.local_experts)
        return in_rank(sent_idx, owner.expert_bounds, owner.bad_ids)
    max_rows = len(idx) // owner.num_ranks
    for rank, count in enumerate(rows):
        idx[rank * max_rows + count : (rank + 1) * max_rows] = -1
    mine = owner.local_experts
    elsewhere = (idx < mine.start) | (idx >= mine.stop)
    idx.sub_(mine.start).masked_fill_(elsewhere, -1)
    weights.masked_fill_(elsewhere, 0.0)
    chosen, bounds = sent_idx.unsqueeze(-1), owner.expert_bounds
    return ((chosen >= bounds[:-1]) & (chosen < bounds[1:])).any(dim=1)


@torch.library.register_fake("thunderep::dispatch", lib=library)
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: str,
    max_tokens: int = -1,
    x_scales: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> _Outputs:
    owner = lookup(buffer)
    validate(owner, x, topk_idx, topk_weights, num_experts, x_scales)
    received = owner.num_ranks * (max_tokens if isinstance(max_tokens, torch.SymInt) or max_tokens != -1 else x.shape[0])
    return (
        x.new_empty(received, x.shape[1]),
        topk_idx.new_empty(received, topk_idx.shape[1]),
        topk_weights.new_empty(received, topk_weights.shape[1]),
        topk_weights.new_empty(received, 0 if x_scales is None else x_scales.shape[1]),
        topk_idx.new_empty(x.shape[0], owner.num_ranks, dtype=torch.bool),
    )


def run_backward(
    grad_recv_x: torch.Tensor,
    grad_recv_topk_weights: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and topk_weights: what each rank holds for a token's row and choices, summed as `combine` sums.

    Rows without columns, as `rows_gradient` gives them, do not travel.
    """
    rest = begin_backward(grad_recv_x, grad_recv_topk_weights, recv_topk_idx, is_token_in_rank, buffer, async_op=False)
    return rest.run()  # type: ignore[no-any-return]


def begin_backward(
    grad_recv_x: torch.Tensor,
    grad_recv_topk_weights: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    async_op: bool = True,
) -> Rest:
    """What of it moves data, and what is left."""
    owner = lookup(buffer)
    weights = grad_recv_topk_weights.masked_fill(recv_topk_idx < 0, 0.0)
    payloads = [grad_recv_x, weights] if grad_recv_x.shape[1] else [weights]
    call = rows_call(owner, "dispatch_backward", payloads, is_token_in_rank, async_op=async_op)
    rest = rows_sum(owner, call, payloads, recv_topk_idx, is_token_in_rank)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        *grad_x, grad_weights = rest.run()
        return grad_x[0] if grad_x else grad_recv_x.new_empty(is_token_in_rank.shape[0], 0), grad_weights

    return Rest(both, rest.reads)


@torch.library.register_fake("thunderep::dispatch_backward", lib=library)
def _(
    grad_recv_x: torch.Tensor,
    grad_recv_topk_weights: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = is_token_in_rank.shape[0]
    return grad_recv_x.new_empty(tokens, grad_recv_x.shape[1]), grad_recv_topk_weights.new_empty(
        tokens, grad_recv_topk_weights.shape[1]
    )


def save_received(ctx: Any, output: _Outputs) -> None:
    """Keep what gradients need, and have none flow through ids, scales, and rows that cannot be summed, such as 8-bit ones."""
    recv_x, recv_topk_idx, _, recv_x_scales, is_token_in_rank = output
    without = recv_topk_idx, recv_x_scales, is_token_in_rank
    ctx.mark_non_differentiable(*without, *(() if recv_x.dtype in SUM_DTYPES else (recv_x,)))
    ctx.save_for_backward(recv_topk_idx, is_token_in_rank)


def rows_gradient(grad_recv_x: torch.Tensor) -> torch.Tensor:
    """What of recv_x's gradient is to travel: [R, H], or [R, 0] where there is none."""
    return grad_recv_x if grad_recv_x.dtype in SUM_DTYPES else grad_recv_x[:, :0]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Outputs) -> None:
    ctx.buffer = inputs[4]
    save_received(ctx, output)


def _backward(
    ctx: Any, grad_x: torch.Tensor, _idx: None, grad_weights: torch.Tensor, _scales: None, _in_rank: None
) -> tuple[Any, ...]:
    rows = rows_gradient(grad_x)
    x, weights = torch.ops.thunderep.dispatch_backward(rows, grad_weights, *ctx.saved_tensors, ctx.buffer)
    return x if x.dtype in SUM_DTYPES else None, None, weights, None, None, None, None, None


torch.library.register_autograd("thunderep::dispatch", _backward, setup_context=_setup_context, lib=library)
for _key in ("CPU", "CUDA"):
    library.impl("dispatch", run, _key)
    library.impl("dispatch_backward", run_backward, _key)
