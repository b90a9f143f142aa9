"""unpermute: bring expert outputs back into the order of the received rows, weighted and summed.

**Arithmetic.** Row r is built in float32, in this order and no other: begin with +0; for k = 0, 1, ..., K-1, where choice
(r, k) has a row, round the product `topk_weights[r, k] * expert_y[row]` to float32, add it, and round. At the end, round once
to expert_y's type, to nearest even. Product and sum are never fused, so the CPU, the Triton kernel and `thunderep.reference`
agree bit for bit. float64 takes the same steps in float64.

Shape legend: R rows; H hidden; K choices per row; C rows of expert_y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from thunderep.ops.library import library
from thunderep.ops.rows import require

_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _unpermute_cpu(expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    _validate(expert_y, row_id_map, topk_weights)
    total = torch.zeros((row_id_map.shape[0], expert_y.shape[1]), dtype=_sum_type(expert_y))
    for k in range(row_id_map.shape[1]):
        chosen = (row_id_map[:, k] >= 0).nonzero().squeeze(1)
        product = expert_y.index_select(0, row_id_map[:, k].index_select(0, chosen)).to(total.dtype)
        product *= topk_weights[:, k].index_select(0, chosen).unsqueeze(1)
        total.index_add_(0, chosen, product)
    return total.to(expert_y.dtype)


def _unpermute_cuda(expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    _validate(expert_y, row_id_map, topk_weights)
    from thunderep.ops.kernels.unpermute import weighted_sum

    return weighted_sum(expert_y, row_id_map, topk_weights, _sum_type(expert_y))


def _unpermute_backward_cpu(
    grad: torch.Tensor, expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products w * grad, rounded once, and dot products of rows of grad and expert_y; in float32, or float64 if they are."""
    num_choices, num_rows = row_id_map.numel(), expert_y.shape[0]
    placed = (row_id_map.reshape(-1) >= 0).nonzero().squeeze(1)
    choice_of = torch.full((num_rows,), -1).index_copy_(
        0, row_id_map.reshape(-1).index_select(0, placed).to(torch.int64), placed
    )
    row = (choice_of >= 0).nonzero().squeeze(1)
    choice = choice_of.index_select(0, row)
    named = expert_y if row.numel() == num_rows else expert_y.index_select(0, row)
    row_grad = grad.index_select(0, choice // row_id_map.shape[1]).to(_sum_type(expert_y))
    dots = (row_grad * named).sum(-1).to(topk_weights.dtype)
    grad_weights = torch.zeros(num_choices, dtype=topk_weights.dtype).index_copy_(0, choice, dots).view(topk_weights.shape)
    row_grad *= topk_weights.reshape(-1).index_select(0, choice).unsqueeze(1)
    grad_rows = row_grad.to(expert_y.dtype)
    if row.numel() < num_rows:
        grad_rows = torch.zeros(expert_y.shape, dtype=expert_y.dtype).index_copy_(0, row, grad_rows)
    return grad_rows, grad_weights


def _unpermute_backward_cuda(
    grad: torch.Tensor, expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from thunderep.ops.kernels.unpermute import weighted_sum_backward

    return weighted_sum_backward(grad, expert_y, row_id_map, topk_weights, _sum_type(expert_y))


def _sum_type(expert_y: torch.Tensor) -> torch.dtype:
    return torch.float64 if expert_y.dtype == torch.float64 else torch.float32


def _validate(expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raise ValueError for what shapes, types and devices alone tell, real or fake. Sizes that are not known yet pass."""
    require(expert_y.dim() == 2, "expert_y", expert_y, "[C, H]")
    require(expert_y.dtype in _TYPES, "expert_y", expert_y.dtype, f"one of {_TYPES}")
    require(row_id_map.dim() == 2, "row_id_map", row_id_map, "[R, K]")
    require(row_id_map.dtype == torch.int32, "row_id_map", row_id_map.dtype, torch.int32)
    require(topk_weights.dim() == 2, "topk_weights", topk_weights, "[R, K]")
    for got, expected in zip(topk_weights.shape, row_id_map.shape, strict=True):
        require(
            not guard_or_false(got != expected), "topk_weights", topk_weights, f"{list(row_id_map.shape)}, as row_id_map has"
        )
    require(
        topk_weights.dtype in (torch.float32, _sum_type(expert_y)),
        "topk_weights", topk_weights.dtype, "torch.float32 (or torch.float64, with expert_y of that type)",
    )  # fmt: skip
    for name, tensor in (("row_id_map", row_id_map), ("topk_weights", topk_weights)):
        require(
            tensor.device == expert_y.device, name, f"a tensor on {tensor.device}", f"one on {expert_y.device}, as expert_y is"
        )


def _fake(expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    _validate(expert_y, row_id_map, topk_weights)
    return expert_y.new_empty((row_id_map.shape[0], expert_y.shape[1]))


def _fake_backward(
    grad: torch.Tensor, expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return expert_y.new_empty(expert_y.shape), topk_weights.new_empty(topk_weights.shape)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    grad_expert_y, grad_topk_weights = torch.ops.thunderep.unpermute_backward(grad, *ctx.saved_tensors)
    return grad_expert_y, None, grad_topk_weights


library.impl("unpermute", _unpermute_cpu, "CPU")
library.impl("unpermute", _unpermute_cuda, "CUDA")
library.impl("unpermute_backward", _unpermute_backward_cpu, "CPU")
library.impl("unpermute_backward", _unpermute_backward_cuda, "CUDA")
torch.library.register_fake("thunderep::unpermute", _fake, lib=library)
torch.library.register_fake("thunderep::unpermute_backward", _fake_backward, lib=library)
torch.library.register_autograd("thunderep::unpermute", _backward, setup_context=_setup_context, lib=library)
