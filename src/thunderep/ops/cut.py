"""How a call of `direct` is cut into launches, chunks, blocks and tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from thunderep.runtime.window import FLAGS, MAX_CHUNK_ROWS, MAX_ROUTING_ROWS

WARPS = 16
BLOCK_WORDS = 4096
"""64-bit words that a block has in flight: 8 a thread, 32 KiB."""


class Shape(NamedTuple):
    """Blocks of each kind, for a rank with one peer, and what they move at a time.

    Attributes:
        limit: Bytes of rows of one rank up to which this shape is used.
        writers: Blocks that publish.
        readers: Blocks that pull, and in a combine sum.
        movers: Blocks of a dispatch that copy own rows.
        chunk_bytes: Bytes of rows behind a flag. Few and large ones win, as a system-wide fence takes a microsecond or two,
            as long as every block has some.
        chunk_rows: Rows behind a flag at most.
    """

    limit: int
    writers: int
    readers: int
    movers: int = 0
    chunk_bytes: int = 64 << 10
    chunk_rows: int = MAX_CHUNK_ROWS


_ANY = 1 << 62

DISPATCH = (
    Shape(64 << 10, 1, 1, 1),
    Shape(256 << 10, 2, 2, 4),
    Shape(1 << 20, 4, 4, 8),
    Shape(8 << 20, 8, 8, 8),
    Shape(_ANY, 16, 16, 8),
)
"""By size. The best of sweeps on an H200 that played its peers itself. More blocks than that get in each other's way."""

COMBINE = (
    Shape(64 << 10, 1, 1),
    Shape(8 << 20, 16, 16, chunk_bytes=32 << 10),
    Shape(_ANY, 16, 32),
)
"""As `DISPATCH`."""

ROUTING = (Shape(_ANY, 1, 1, 1, chunk_rows=MAX_ROUTING_ROWS),)
"""For routing without rows, which has time: copy engines move the rows meanwhile, and the SMs have other work."""

_MAX_SUMMERS = 32


def readers_per_peer(shape: Shape, num_ranks: int) -> int:
    """Blocks of a dispatch that pull from each peer: all share one link."""
    return max(min(2, shape.readers), 2 * shape.readers // num_ranks)


def writers_per_peer(shape: Shape, num_ranks: int) -> int:
    """Blocks of a combine that publish for each peer."""
    return max(min(4, shape.writers), 2 * shape.writers // num_ranks)


def summers(shape: Shape, num_ranks: int) -> int:
    """Blocks of a combine that pull and sum."""
    return min(_MAX_SUMMERS, max(1, shape.readers * num_ranks // 2))


class Round(NamedTuple):
    """One launch's part of a call: `length` rows of every rank from `start` on, `rows` of them a chunk."""

    start: int
    length: int
    rows: int
    shape: Shape


def rounds(shapes: Sequence[Shape], max_rows: int, row_bytes: int, per_row: int, room: int) -> Iterator[Round]:
    """The launches of a call, the same on all ranks.

    Args:
        shapes: `DISPATCH`, `COMBINE` or `ROUTING`.
        max_rows: M.
        row_bytes: Bytes of a row.
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
        shape = next(s for s in shapes if left * row_bytes <= s.limit)
        rows = 1
        while rows * 2 <= min(shape.chunk_rows, max(1, shape.chunk_bytes // max(1, row_bytes)), room // per_row):
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
