"""Where each choice goes when rows are grouped by expert, and the rows moved there. Device to device.

A stable counting sort. Choices are numbered r * K + k and cut into blocks; a choice's row is where its expert's group begins,
plus what earlier blocks, and earlier choices of its block, chose of that expert. Few choices take one launch, in which every
block counts all of them; more take two, the first of which counts each block's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

MAX_BLOCK = 2048
"""Elements of a row that a program moves: at 2 bytes and 4 warps, two 16-byte loads a thread."""

MAX_EXPERTS = 128
"""Experts that a program counts."""

TILE = 8192
"""Choices times experts that a program looks at at a time: 64 a thread."""

MAX_BLOCKS = 256
"""Blocks of choices."""

FEW = 512
"""Choices up to which one launch takes less time than two. Source of this and the above: sweeps on an H200."""


@triton.jit
def _chosen(idx: tl.tensor, at: tl.tensor, choices: int, experts: int) -> tl.tensor:
    """The expert of each choice, -1 for none."""
    expert = tl.load(idx + at, mask=at < choices, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit
def _hits(chosen: tl.tensor, expert: tl.tensor) -> tl.tensor:
    """[choices, experts]: 1 where a choice is of an expert."""
    return (chosen[:, None] == expert[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["choices", "experts", "length"])
def _count(
    idx: tl.tensor, counts: tl.tensor, choices: int, experts: int, length: int, CHOICES: tl.constexpr, EXPERTS: tl.constexpr
) -> None:
    block = tl.program_id(0)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, length, CHOICES):
        at = block.to(tl.int64) * length + start + tl.arange(0, CHOICES)
        total += tl.sum(_hits(_chosen(idx, at, choices, experts), expert), 0)
    tl.store(counts + block * experts + expert, total, mask=expert < experts)


@triton.jit
def _totals(
    idx: tl.tensor,
    counts: tl.tensor,
    expert: tl.tensor,
    choices: int,
    experts: int,
    length: int,
    blocks: int,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How often each expert was chosen, by all blocks and by those before this one."""
    mine = tl.program_id(0)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    if COUNTED:
        for first in range(0, blocks, CHOICES):
            block = first + tl.arange(0, CHOICES)
            inside = (block < blocks)[:, None] & (expert < experts)[None, :]
            count = tl.load(counts + block[:, None] * experts + expert[None, :], mask=inside, other=0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where((block < mine)[:, None], count, 0), 0)
    else:
        for start in range(0, choices, CHOICES):
            at = start + tl.arange(0, CHOICES)
            hits = _hits(_chosen(idx, at, choices, experts), expert)
            total += tl.sum(hits, 0)
            before += tl.sum(tl.where((at < mine * length)[:, None], hits, 0), 0)
    return total, before


@triton.jit(do_not_specialize=["choices", "experts", "capacity", "alignment", "length", "blocks"])
def _place(
    idx: tl.tensor,
    counts: tl.tensor,
    offsets: tl.tensor,
    filled: tl.tensor,
    row_id_map: tl.tensor,
    choices: int,
    experts: int,
    capacity: int,
    alignment: int,
    length: int,
    blocks: int,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
) -> None:
    block, first = tl.program_id(0), tl.program_id(1) * EXPERTS
    origin = 0
    for other in range(0, first, EXPERTS):
        total, _ = _totals(
            idx, counts, other + tl.arange(0, EXPERTS), choices, experts, length, blocks, CHOICES, EXPERTS, COUNTED
        )
        origin += tl.sum((total + alignment - 1) // alignment * alignment, 0)
    expert = first + tl.arange(0, EXPERTS)
    total, before = _totals(idx, counts, expert, choices, experts, length, blocks, CHOICES, EXPERTS, COUNTED)
    padded = (total + alignment - 1) // alignment * alignment
    end = origin + tl.cumsum(padded, 0)
    start = end - padded
    if block == 0:
        tl.store(offsets + expert, tl.minimum(end, capacity), mask=expert < experts)
        tl.store(filled + expert, tl.minimum(start + total, capacity), mask=expert < experts)
    place = start + before
    for tile in range(0, length, CHOICES):
        at = block.to(tl.int64) * length + tile + tl.arange(0, CHOICES)
        chosen = _chosen(idx, at, choices, experts)
        hits = _hits(chosen, expert)
        row = tl.sum(hits * (place[None, :] + tl.cumsum(hits, 0) - 1), 1)
        mine = (chosen >= first) & (chosen < first + EXPERTS)
        nobody = (chosen < 0) & (first == 0)
        tl.store(row_id_map + at, tl.where(mine & (row < capacity), row, -1), mask=(at < choices) & (mine | nobody))
        place += tl.sum(hits, 0)


@on_its_device
def place(
    topk_idx: torch.Tensor, num_local_experts: int, capacity: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Say where choices go, stably; launched on the current stream.

    Args:
        topk_idx: [R, K] int32 or int64; what is outside 0..L-1 goes nowhere.
        num_local_experts: L.
        capacity: Rows from here on there are none.
        alignment: Groups are multiples of so many rows.

    Returns:
        offsets: int32 [L], where groups end.
        filled: int32 [L], where their padding begins.
        row_id_map: int32 [R, K], each choice's row, or -1.
    """
    topk_idx = topk_idx.contiguous()
    choices = topk_idx.numel()
    experts = min(triton.next_power_of_2(max(1, num_local_experts)), MAX_EXPERTS)
    tile = min(triton.next_power_of_2(max(16, choices)), TILE // experts)
    length = triton.cdiv(max(1, choices), MAX_BLOCKS * tile) * tile
    blocks = triton.cdiv(max(1, choices), length)
    counted = choices > FEW
    offsets, filled = topk_idx.new_empty((2, num_local_experts), dtype=torch.int32).unbind()
    row_id_map = topk_idx.new_empty(topk_idx.shape, dtype=torch.int32)
    counts = topk_idx.new_empty((blocks, num_local_experts), dtype=torch.int32) if counted else filled
    grid = (blocks, triton.cdiv(max(1, num_local_experts), experts))
    with torch.cuda.device_of(topk_idx):
        if counted:
            _count[grid](topk_idx, counts, choices, num_local_experts, length, CHOICES=tile, EXPERTS=experts)
        _place[grid](
            topk_idx, counts, offsets, filled, row_id_map, choices, num_local_experts, capacity, alignment, length, blocks,
            CHOICES=tile, EXPERTS=experts, COUNTED=counted,
        )  # fmt: skip
    return offsets, filled, row_id_map


@triton.jit
def goes_somewhere(row_id_map: tl.tensor, row: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Whether a row has a place among the experts' rows."""
    last = -1
    for k in tl.static_range(K):
        last = tl.maximum(last, tl.load(row_id_map + row * K + k))
    return last >= 0


@triton.jit
def put(
    value: tl.tensor, row_id_map: tl.tensor, row: tl.tensor, out: tl.tensor, column: tl.tensor, columns: int, K: tl.constexpr
) -> None:
    """Store some columns of a row at all its places."""
    for k in tl.static_range(K):
        place = tl.load(row_id_map + row * K + k).to(tl.int64)
        tl.store(out + place * columns + column, value, mask=(column < columns) & (place >= 0))


@triton.jit
def clear_padding(
    nothing: tl.tensor,
    filled: tl.tensor,
    offsets: tl.tensor,
    expert: tl.tensor,
    out: tl.tensor,
    column: tl.tensor,
    columns: int,
) -> None:
    """Store zeros, which `nothing` holds, in some columns of the rows between an expert's last one and its group's end."""
    first = tl.load(filled + expert).to(tl.int64)
    for padding in range(tl.load(offsets + expert) - first):
        tl.store(out + (first + padding) * columns + column, nothing, mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _scatter_rows(
    x: tl.tensor,
    row_id_map: tl.tensor,
    filled: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    rows: int,
    columns: int,
    x_row: int,
    x_column: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # 64 bits from here on: a row times a stride may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if row < rows:
        inside = (column < columns) & goes_somewhere(row_id_map, row, K)
        put(tl.load(x + row * x_row + column * x_column, mask=inside, other=0), row_id_map, row, out, column, columns, K)
    else:
        clear_padding(tl.zeros([BLOCK], out.dtype.element_ty), filled, offsets, row - rows, out, column, columns)


@on_its_device
def scatter_rows(
    x: torch.Tensor, row_id_map: torch.Tensor, filled: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
) -> None:
    """out[row_id_map[r, k]] = x[r], and zero in rows filled[e] to offsets[e]; launched on the current stream.

    Args:
        x: [R, H] integers of any width, any strides. Rows that go nowhere are not read.
        row_id_map: [R, K] int32, contiguous; -1: nowhere.
        filled: [L] int32, where each group's padding begins.
        offsets: [L] int32, where groups end.
        out: [C, H], x's type, contiguous. No other rows are written.
    """
    rows, columns = x.shape
    if out.numel() == 0:
        return
    block = min(triton.next_power_of_2(columns), MAX_BLOCK)
    with torch.cuda.device_of(out):
        _scatter_rows[(rows + len(filled), triton.cdiv(columns, block))](
            x, row_id_map, filled, offsets, out, rows, columns, *x.stride(), K=row_id_map.shape[1], BLOCK=block
        )
