"""Rows to e4m3 with a scale per group of columns, and back while they are grouped by expert. Device to device.

Codes are made and read in integers: cards without 8-bit floats do it too, and the CPU gets the same bits.
The arithmetic is that of `thunderep.ops.quantize` and `thunderep.ops.permute_fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device
from thunderep.ops.kernels.permute import clear_padding, goes_somewhere, put

GROUP = 128
"""Columns that share a scale."""

MAX_GROUPS = 16
"""Groups that a program handles: at 2 bytes and 4 warps, two 16-byte loads a thread."""


@triton.jit
def _encode(value: tl.tensor) -> tl.tensor:
    """The e4m3 code nearest to a float32 of at most 448, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The 20 bits that go are rounded away; what is left has float32's exponent, 120 too large.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count 2^-9, which is also what the last bit of 2^14 counts: the addition rounds.
    sum = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = sum.to(tl.int32, bitcast=True) - 0x46800000
    return ((bits >> 24) & 0x80) | tl.where(magnitude < (121 << 23), subnormal, normal)


@triton.jit
def _decode(code: tl.tensor) -> tl.tensor:
    """The float32 that an e4m3 code stands for."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    # Its negation would lose the sign of zero.
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    groups: tl.int64,
    groups_a_row: int,
    columns: int,
    x_row: int,
    x_column: int,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row = (group // groups_a_row)[:, None]
    column = (group % groups_a_row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (group < groups)[:, None] & (column < columns)
    value = tl.load(x + row * x_row + column * x_column, mask=inside, other=0).to(tl.float32)
    finite = tl.abs(value) < float("inf")
    absmax = tl.max(tl.where(finite, tl.abs(value), 0.0), axis=1)
    scale = tl.maximum(tl.div_rn(absmax, tl.full([GROUPS], 448.0, tl.float32)), 1.1754943508222875e-38)
    ratio = tl.div_rn(tl.where(finite, value, 0.0), tl.broadcast_to(scale[:, None], [GROUPS, GROUP]))
    code = tl.where(finite, _encode(ratio), 0x7F).to(tl.uint8)
    tl.store(codes + row * columns + column, code, mask=inside)
    tl.store(scales + group, scale, mask=group < groups)


@on_its_device
def quantize(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise rows; launched on the current stream.

    Args:
        x: [T, H] bf16, fp16 or fp32, any strides.
        codes: [T, H] uint8, contiguous: becomes the e4m3 codes.
        scales: [T, S] float32, contiguous, S = ceil(H / 128).
    """
    groups = scales.numel()
    if groups == 0:
        return
    block = min(triton.next_power_of_2(groups), MAX_GROUPS)
    with torch.cuda.device_of(codes):
        _quantize[(triton.cdiv(groups, block),)](
            x, codes, scales, groups, scales.shape[1], codes.shape[1], *x.stride(), GROUPS=block, GROUP=GROUP, num_warps=4
        )


@triton.jit(do_not_specialize=["rows"])
def _scatter_dequantized(
    codes: tl.tensor,
    scales: tl.tensor,
    row_id_map: tl.tensor,
    filled: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    rows: int,
    groups_a_row: int,
    columns: int,
    codes_row: int,
    codes_column: int,
    scales_row: int,
    scales_column: int,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # 64 bits from here on: a row times a stride may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    column = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    if row < rows:
        chosen = goes_somewhere(row_id_map, row, K)
        scale = tl.load(scales + row * scales_row + group * scales_column, mask=chosen & (group < groups_a_row), other=0.0)
        code = tl.load(codes + row * codes_row + column * codes_column, mask=chosen & (column < columns), other=0)
        value = (_decode(code.to(tl.int32)) * scale[:, None]).to(out.dtype.element_ty)
        put(value, row_id_map, row, out, column, columns, K)
    else:
        clear_padding(tl.zeros([GROUPS, GROUP], out.dtype.element_ty), filled, offsets, row - rows, out, column, columns)


@on_its_device
def scatter_dequantized(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_id_map: torch.Tensor,
    filled: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[row_id_map[r, k]] = row r, dequantised, and zero in rows filled[e] to offsets[e]; launched on the current stream.

    Args:
        codes: [R, H] uint8, e4m3 codes, any strides. Rows that go nowhere are not read.
        scales: [R, S] float32, any strides, S = ceil(H / 128).
        row_id_map: [R, K] int32, contiguous; -1: nowhere.
        filled: [L] int32, where each group's padding begins.
        offsets: [L] int32, where groups end.
        out: [C, H] bf16, fp16 or fp32, contiguous. No other rows are written.
    """
    rows, columns = codes.shape
    if out.numel() == 0:
        return
    block = min(triton.next_power_of_2(scales.shape[1]), MAX_GROUPS)
    with torch.cuda.device_of(out):
        _scatter_dequantized[(rows + len(filled), triton.cdiv(scales.shape[1], block))](
            codes, scales, row_id_map, filled, offsets, out, rows, scales.shape[1], columns, *codes.stride(), *scales.stride(),
            K=row_id_map.shape[1], GROUPS=block, GROUP=GROUP, num_warps=4,
        )  # fmt: skip
