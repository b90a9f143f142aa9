"""silu(gate) * up for the rows that experts have, and its gradient. Device to device.

How many rows there are is known on the device only, so a fixed number of programs share what there is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

ROWS = 4
COLUMNS = 256
"""Rows and columns of a tile: at 2 bytes and 4 warps a 16-byte load of each half a thread."""

PROGRAMS = 16
"""Programs for each of the device's multiprocessors."""


@triton.jit
def _tile(
    tile: int, rows: int, inner: int, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where a tile's elements lie in [C, I], where in the first half of [C, 2 I], and which of them there are."""
    across = tl.cdiv(inner, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    begin = row.to(tl.int64)[:, None] * inner
    at = begin + column[None, :]
    return at, at + begin, (row < rows)[:, None] & (column < inner)[None, :]


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    end: tl.tensor,
    out: tl.tensor,
    inner: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.load(end)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * tl.cdiv(inner, COLUMNS), tl.num_programs(0)):
        at, halves, inside = _tile(tile, rows, inner, ROWS, COLUMNS)
        gate = tl.load(gate_up + halves, mask=inside, other=0).to(tl.float32)
        up = tl.load(gate_up + halves + inner, mask=inside, other=0).to(tl.float32)
        tl.store(out + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    grad: tl.tensor,
    gate_up: tl.tensor,
    end: tl.tensor,
    grad_gate_up: tl.tensor,
    inner: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.load(end)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * tl.cdiv(inner, COLUMNS), tl.num_programs(0)):
        at, halves, inside = _tile(tile, rows, inner, ROWS, COLUMNS)
        g = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        gate = tl.load(gate_up + halves, mask=inside, other=0).to(tl.float32)
        up = tl.load(gate_up + halves + inner, mask=inside, other=0).to(tl.float32)
        share = tl.sigmoid(gate)
        grad_gate = g * up * share * (1 + gate * (1 - share))
        tl.store(grad_gate_up + halves, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(grad_gate_up + halves + inner, (g * gate * share).to(grad_gate_up.dtype.element_ty), mask=inside)


def _programs(out: torch.Tensor) -> tuple[int]:
    tiles = triton.cdiv(out.shape[0], ROWS) * triton.cdiv(out.shape[1], COLUMNS)
    units = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else 1
    return (min(tiles, PROGRAMS * units),)


@on_its_device
def swiglu(gate_up: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = silu(gate) * up in float32, rounded once, for rows up to the last group's end; launched on the current stream.

    Args:
        gate_up: [C, 2 I], any strides: gate in the first half of the columns, up in the second.
        offsets: [L] int32, contiguous, where groups end.
        out: [C, I], gate_up's type, contiguous.
    """
    if out.numel() and len(offsets):
        with torch.cuda.device_of(out):
            _swiglu[_programs(out)](gate_up.contiguous(), offsets[-1:], out, out.shape[1], ROWS=ROWS, COLUMNS=COLUMNS)


@on_its_device
def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor, grad_gate_up: torch.Tensor) -> None:
    """The gradient of gate_up, given that of `swiglu`'s result, for the same rows; launched on the current stream.

    Args:
        grad: [C, I], any strides.
        gate_up: [C, 2 I], any strides.
        offsets: [L] int32, contiguous.
        grad_gate_up: [C, 2 I], gate_up's type, contiguous.
    """
    if grad.numel() and len(offsets):
        with torch.cuda.device_of(grad):
            _swiglu_backward[_programs(grad)](
                grad.contiguous(), gate_up.contiguous(), offsets[-1:], grad_gate_up, grad.shape[1], ROWS=ROWS, COLUMNS=COLUMNS
            )
