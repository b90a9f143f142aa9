"""Gather rows into expert order, device to device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

MAX_BLOCK = 2048
"""Elements that a program moves: at 2 bytes and 4 warps, two 16-byte loads a thread."""


@triton.jit
def _gather_rows(
    x: tl.tensor, source: tl.tensor, out: tl.tensor, columns: int, x_row: int, x_column: int, BLOCK: tl.constexpr
) -> None:
    # 64 bits from here on: a row times a stride may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    origin = tl.load(source + row)
    readable = tl.where(origin >= 0, columns, 0)
    bits = tl.load(x + origin * x_row + column.to(tl.int64) * x_column, mask=column < readable, other=0)
    tl.store(out + row * columns + column, bits, mask=column < columns)


@on_its_device
def gather_rows(x: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = x[source[i]], or zero where source[i] is -1; launched on the current stream.

    Args:
        x: [R, H] integers of any width, any strides.
        source: [C] int64, contiguous.
        out: [C, H], x's type, contiguous.
    """
    rows, columns = out.shape
    if out.numel() == 0:
        return
    block = min(triton.next_power_of_2(columns), MAX_BLOCK)
    with torch.cuda.device_of(out):
        _gather_rows[(rows, triton.cdiv(columns, block))](x, source, out, columns, *x.stride(), BLOCK=block)
