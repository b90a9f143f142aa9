"""Matrix products of rows grouped by expert, where the host does not know how many rows an expert has. Device to device.

For what PyTorch has no such kernel for: its own are for 16-bit rows of compute capability 9 and 10, and its other way reads the
offsets on the host, so that it cannot be captured in a CUDA graph, and launches a product for each expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

DTYPES = (torch.bfloat16, torch.float16)
"""What is multiplied, and summed in float32."""

PROGRAMS = 4
"""Programs for each of the device's multiprocessors, among which the tiles are shared."""


class Tiling(NamedTuple):
    """Sizes of a program's tiles: `rows` by `columns` of the result, `inner` of the sum at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


FEW, SOME, MANY = Tiling(16, 64, 64, 4, 4), Tiling(64, 128, 32, 4, 4), Tiling(128, 128, 32, 8, 4)
"""By rows of a group; not timed. All fit into the 99 KiB of shared memory of compute capability 8.6, 8.9 and 12."""


def tiling(capacity: int, groups: int) -> Tiling:
    """The tiles of rows: by room for them, of which 1/N is used on N ranks."""
    room = capacity // max(1, groups)
    return FEW if room <= 64 else SOME if room <= 256 else MANY


@triton.jit
def _multiply(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    columns: int,
    start: tl.tensor,
    end: tl.tensor,
    a_row: int,
    a_column: int,
    b_row: int,
    b_column: int,
    INNER: tl.constexpr,
) -> None:
    """A tile of out [rows, columns]: the sum of a[row, k] * b[k, column] over k from `start` to `end`, rounded once."""
    row, column = row.to(tl.int64), column.to(tl.int64)  # a row times a stride may exceed 2^31
    above, across = (row < rows)[:, None], (column < columns)[None, :]
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for first in range(start, end, INNER):
        k = (first + tl.arange(0, INNER)).to(tl.int64)
        left = tl.load(a + row[:, None] * a_row + k[None, :] * a_column, mask=above & (k < end)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * b_row + column[None, :] * b_column, mask=(k < end)[:, None] & across, other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=above & across)


@triton.jit
def _rows_by_matrices(
    a: tl.tensor,
    b: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    groups: int,
    inner: int,
    columns: int,
    a_row: int,
    a_column: int,
    b_group: int,
    b_row: int,
    b_column: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    start, done = 0, 0  # rows and tiles of the groups before
    for group in range(groups):
        end = tl.load(offsets + group)
        tiles = tl.cdiv(end - start, ROWS) * across
        while tile < done + tiles:
            row = start + (tile - done) // across * ROWS + tl.arange(0, ROWS)
            column = (tile - done) % across * COLUMNS + tl.arange(0, COLUMNS)
            _multiply(a, b, out, row, end, column, columns, 0, inner, a_row, a_column, b_row, b_column, INNER)
            tile += tl.num_programs(0)
        done += tiles
        start = end
        b += b_group


@triton.jit
def _matrices_of_rows(
    a: tl.tensor,
    b: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    rows: int,
    columns: int,
    a_row: int,
    a_column: int,
    b_row: int,
    b_column: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group)
    out += group.to(tl.int64) * rows * columns
    _multiply(a, b, out, row, rows, column, columns, start, end, a_row, a_column, b_row, b_column, INNER)


@on_its_device
def rows_by_matrices(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = a[i] @ b[e] for each row i of group e; launched on the current stream.

    Args:
        a: [C, A], bf16 or fp16, any strides.
        b: [L, A, B], a's type, any strides.
        offsets: [L] int32, contiguous, where groups end.
        out: [C, B], a's type, contiguous. Rows past the last group are not written.
    """
    if out.numel() == 0 or len(b) == 0:
        return
    size = tiling(len(a), len(b))
    tiles = (triton.cdiv(len(a), size.rows) + len(b)) * triton.cdiv(b.shape[2], size.columns)
    units = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 1
    with torch.cuda.device_of(a):
        _rows_by_matrices[(min(tiles, PROGRAMS * units),)](
            a, b, offsets, out, len(b), a.shape[1], b.shape[2], *a.stride(), *b.stride(),
            ROWS=size.rows, COLUMNS=size.columns, INNER=size.inner, num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip


@on_its_device
def matrices_of_rows(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """out[e] = a[:, g] @ b[g], g the columns of a and rows of b in group e; launched on the current stream.

    Args:
        a: [A, C], bf16 or fp16, any strides.
        b: [C, B], a's type, any strides.
        offsets: [L] int32, contiguous, where groups end.
        out: [L, A, B], a's type, contiguous; zero for groups without rows.
    """
    if out.numel() == 0:
        return
    tiles = triton.cdiv(a.shape[0], SOME.rows) * triton.cdiv(b.shape[1], SOME.columns)
    with torch.cuda.device_of(a):
        _matrices_of_rows[(tiles, len(offsets))](
            a, b, offsets, out, a.shape[0], b.shape[1], *a.stride(), *b.stride(),
            ROWS=SOME.rows, COLUMNS=SOME.columns, INNER=SOME.inner, num_warps=SOME.warps, num_stages=SOME.stages,
        )  # fmt: skip
