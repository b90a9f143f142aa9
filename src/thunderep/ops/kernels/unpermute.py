"""Weighted sums of expert rows, in the order of the received rows; and their gradient. Device to device.

The arithmetic is that of `thunderep.ops.unpermute`. Fusing a product and a sum would round once where two roundings are due, so
the kernels are compiled without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

MAX_BLOCK = 1024
"""Elements of a row that a program sums at a time."""

_TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _weighted_sum(
    y: tl.tensor,
    row_id_map: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    columns: int,
    y_row: int,
    y_column: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], SUM)
    for k in tl.static_range(K):
        place = tl.load(row_id_map + row * K + k).to(tl.int64)
        if place >= 0:  # with N ranks 1 of N is, and the products of the others would take longer than the reading
            weight = tl.load(weights + row * K + k).to(SUM)
            term = tl.load(y + place * y_row + column.to(tl.int64) * y_column, mask=column < columns, other=0).to(SUM)
            total += weight * term
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


@on_its_device
def weighted_sum(y: torch.Tensor, row_id_map: torch.Tensor, weights: torch.Tensor, sum_type: torch.dtype) -> torch.Tensor:
    """Row r of the result is the sum over k of weights[r, k] * y[row_id_map[r, k]]; launched on the current stream.

    Args:
        y: [C, H] floating point, any strides.
        row_id_map: [R, K] int32; -1: no row.
        weights: [R, K] floating point.
        sum_type: float32 or float64.

    Returns:
        [R, H], y's type, contiguous.
    """
    rows, columns = row_id_map.shape[0], y.shape[1]
    out = y.new_empty((rows, columns))
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(columns), MAX_BLOCK)
    with torch.cuda.device_of(out):
        _weighted_sum[(rows, triton.cdiv(columns, block))](
            y, row_id_map.contiguous(), weights.contiguous(), out, columns, *y.stride(),
            K=row_id_map.shape[1], BLOCK=block, SUM=_TRITON_TYPES[sum_type], enable_fp_fusion=False, num_warps=2,
        )  # fmt: skip
    return out


@triton.jit
def _weighted_sum_backward(
    grad: tl.tensor,
    y: tl.tensor,
    row_id_map: tl.tensor,
    weights: tl.tensor,
    grad_y: tl.tensor,
    grad_weights: tl.tensor,
    columns: int,
    grad_row: int,
    grad_column: int,
    y_row: int,
    y_column: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    place = tl.load(row_id_map + row * K + k).to(tl.int64)
    dot = tl.zeros([BLOCK], SUM)
    if place >= 0:
        weight = tl.load(weights + row * K + k).to(SUM)
        for start in range(0, columns, BLOCK):
            column = (start + tl.arange(0, BLOCK)).to(tl.int64)
            inside = column < columns
            g = tl.load(grad + row * grad_row + column * grad_column, mask=inside, other=0).to(SUM)
            dot += g * tl.load(y + place * y_row + column * y_column, mask=inside, other=0).to(SUM)
            tl.store(grad_y + place * columns + column, (weight * g).to(grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row * K + k, tl.sum(dot, 0).to(grad_weights.dtype.element_ty))


@on_its_device
def weighted_sum_backward(
    grad: torch.Tensor, y: torch.Tensor, row_id_map: torch.Tensor, weights: torch.Tensor, sum_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of y and weights, given that of `weighted_sum`'s result; launched on the current stream.

    Args:
        grad: [R, H], y's type, any strides.
        y: [C, H], any strides.
        row_id_map: [R, K] int32; -1: no row. No row is named twice.
        weights: [R, K] floating point.
        sum_type: float32 or float64.

    Returns:
        [C, H] of y's type, zero in rows that are not named, and [R, K] of weights' type; contiguous.
    """
    grad_y = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
    grad_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=y.device)
    if grad_weights.numel() == 0 or grad_y.numel() == 0:
        return grad_y, grad_weights
    block = min(triton.next_power_of_2(y.shape[1]), MAX_BLOCK)
    with torch.cuda.device_of(y):
        _weighted_sum_backward[row_id_map.shape](
            grad, y, row_id_map.contiguous(), weights.contiguous(), grad_y, grad_weights,
            y.shape[1], *grad.stride(), *y.stride(),
            K=row_id_map.shape[1], BLOCK=block, SUM=_TRITON_TYPES[sum_type], enable_fp_fusion=False,
        )  # fmt: skip
    return grad_y, grad_weights
