"""Gradients of a dispatch whose rows travelled as fp8: as though they had travelled as they were.

An fp8 tensor cannot have a gradient of a wider type, so none flows through the rows that travelled. It goes round them, from
the rows that experts read straight to the rows that were quantised, and moves between ranks in its own, wide type.
"""

from __future__ import annotations

from typing import Any

import torch

from thunderep.api import DispatchOutput, PermuteOutput
from thunderep.ops.permute import gradient


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        expert_x: torch.Tensor,
        recv_topk_weights: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        row_id_map: torch.Tensor,
        recv_topk_idx: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        buffer: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.buffer = buffer
        ctx.save_for_backward(row_id_map, recv_topk_idx, is_token_in_rank)
        return expert_x.view_as(expert_x), recv_topk_weights.view_as(recv_topk_weights)

    @staticmethod
    def backward(ctx: Any, grad_expert_x: torch.Tensor, grad_weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_id_map, recv_topk_idx, is_token_in_rank = ctx.saved_tensors
        grad_recv_x = gradient(grad_expert_x, row_id_map)
        grad_x, grad_topk_weights = torch.ops.thunderep.dispatch_backward(
            grad_recv_x, grad_weights, recv_topk_idx, is_token_in_rank, ctx.buffer
        )
        return None, None, grad_x, grad_topk_weights, None, None, None, None


def straight_through(
    received: DispatchOutput, groups: PermuteOutput, x: torch.Tensor, topk_weights: torch.Tensor, buffer: str
) -> tuple[DispatchOutput, PermuteOutput]:
    """Give what came out of an fp8 dispatch the gradients of a wide one. The backward is collective, as dispatch's is.

    Args:
        received: What dispatching x as fp8, with detached weights, gave.
        groups: What `permute_fp8` made of it; expert_x has x's type.
        x: [T, H], the rows before they were quantised.
        topk_weights: [T, K], as they were before they were detached.
        buffer: The Buffer's name.

    Returns:
        The same values: gradients of expert_x reach x, and those of recv_topk_weights reach topk_weights.
    """
    expert_x, weights = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        groups.expert_x, received.recv_topk_weights, x, topk_weights,
        groups.row_id_map, received.recv_topk_idx, received.is_token_in_rank, buffer,
    )  # fmt: skip
    return received._replace(recv_topk_weights=weights), groups._replace(expert_x=expert_x)
