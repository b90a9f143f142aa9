"""How a call of `direct` is cut into launches, chunks, blocks and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from thunderep.runtime.window import FLAGS, MAX_CHUNK_ROWS

WARPS = 16
BLOCK_WORDS = 4096
"""64-bit words that a block has in flight: 8 a thread, 32 KiB."""

CHUNK = 64 << 10
"""Bytes of rows behind a flag: few and large ones win, as a system-wide fence takes a microsecond or two."""


class Shape(NamedTuple):
    """Blocks of each kind.

    Attributes:
        limit: Bytes of rows of one rank up to which this shape is used.
        writers: Blocks that publish; in a combine, for each peer.
        movers: Blocks of a dispatch that copy own rows.
        readers: Blocks of a dispatch that pull, for each peer.
        summers: Blocks of a combine that pull and sum.
    """

    limit: int
    writers: int
    movers: int
    readers: int
    summers: int


SHAPES = (
    Shape(64 << 10, 1, 1, 1, 1),
    Shape(256 << 10, 2, 2, 2, 2),
    Shape(1 << 20, 4, 4, 4, 4),
    Shape(2 << 20, 4, 4, 4, 8),
    Shape(8 << 20, 8, 8, 8, 16),
    Shape(1 << 62, 16, 8, 16, 32),
)
"""The best of a sweep with two processes on one H200, which share its link. More blocks than that get in each other's way."""


ROUTING = Shape(1 << 62, 2, 2, 2, 0)
"""For routing without rows, which has time: copy engines move the rows meanwhile, and the SMs have other work."""

ROUTING_ROWS = 64
"""Tokens in a chunk of routing without rows."""


class Round(NamedTuple):
    """One launch's part of a call: `length` rows of every rank from `start` on, `rows` of them a chunk."""

    start: int
    length: int
    rows: int
    shape: Shape


def rounds(max_rows: int, row_bytes: int, per_row: int, room: int) -> Iterator[Round]:
    """The launches of a call, the same on all ranks.

    Args:
        max_rows: M.
        row_bytes: Bytes of a row; 0, only routing travels.
        per_row: Bytes that a row and its routing take in a slot.
        room: Bytes of the slot, or of a peer's part of it.

    Raises:
        RuntimeError: Not even one row fits.
    """
    if per_row > room:
        raise RuntimeError(f"staging_bytes: a row takes {per_row} bytes of staging, more than the {room} for one peer")
    start = 0
    while start < max_rows:
        left = max_rows - start
        shape = next(s for s in SHAPES if left * row_bytes <= s.limit) if row_bytes else ROUTING
        most = min(MAX_CHUNK_ROWS, max(1, CHUNK // row_bytes)) if row_bytes else ROUTING_ROWS
        rows = 1
        while rows * 2 <= min(most, room // per_row):
            rows *= 2
        length = min(left, min(FLAGS, room // (rows * per_row)) * rows)
        yield Round(start, length, rows, shape)
        start += length


def word(row_bytes: int) -> torch.dtype:
    """The widest word of which rows are whole multiples."""
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.int8) if row_bytes % t.itemsize == 0)


def columns(words: int, rows: int, itemsize: int) -> int:
    """Words of a row that a block moves at a time."""
    return min(power_of_two(words), max(1, BLOCK_WORDS * 8 // itemsize // rows))


def spread(width: int, rows: int, warps: int) -> int:
    """Columns of a tile of a chunk's routing: an element a thread at most.

    Threads that hold copies of an element would each load it, and loads of one line of host memory wait for each other.
    """
    return max(power_of_two(width), warps * 32 // rows)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()
