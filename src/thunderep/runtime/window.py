"""Pinned host memory that the kernels of `direct` write to and read from, and what lies where in it.

| part, for N ranks | size | written by |
| --- | --- | --- |
| headers | a page, 64 bytes a rank: three 32-bit words, see below | its rank |
| flags | 2 banks x N owners x N readers x `FLAGS` x 8 bytes | owner |
| words | 2 banks x N owners, up to `LATENCY_BYTES` each: what small calls move | owner |
| slots | 2 banks x N owners, equal parts of the rest: what large calls move | owner |

A rank's header: its CPU sets the first word to have its kernels stop waiting; they write the number of the operation that
has begun last into the second, and of the one that has ended last into the third. All memory starts as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from thunderep.runtime import arena

if TYPE_CHECKING:
    from thunderep.runtime.announce import Announcer

HEADER_BYTES = 64
HEADERS_BYTES = 4096
FLAGS = 512
"""Chunks that a launch moves at most."""

LATENCY_BYTES = 96 << 10
"""Calls of which a rank publishes, and pulls, no more in words that carry their own signals go that way: 16 tokens of 4 KiB.

Above, the third more bytes and the polls cost more than flags do.
"""

OPERATION = 1 << 16
"""What the blocks of one launch add to the ticket in all; more than the blocks of any launch."""

MAX_RANKS = 31
"""Ranks are bits of a signed word in the kernels."""

MAX_CHUNK_ROWS = 16
"""Rows behind a flag at most: it says bit by bit which of them are needed."""

MAX_ROUTING_ROWS = 128
"""The same where rows have no bytes: then routing travels of all."""


@dataclass(frozen=True)
class Region:
    """The layout of `nbytes` bytes for `num_ranks` ranks; offsets and sizes in 64-bit words unless they say otherwise."""

    num_ranks: int
    nbytes: int

    @cached_property
    def flags_at(self) -> int:
        """Where flags begin."""
        return HEADERS_BYTES // 8

    @cached_property
    def words_at(self) -> int:
        """Where words begin."""
        return aligned(HEADERS_BYTES + 2 * self.num_ranks**2 * FLAGS * 8, HEADERS_BYTES) // 8

    @cached_property
    def words(self) -> int:
        """128-bit words of each owner in each bank; at most a quarter of what there is for it."""
        room = max(0, self.nbytes - self.words_at * 8) // (2 * self.num_ranks)
        return min(LATENCY_BYTES, room // 4) // HEADERS_BYTES * HEADERS_BYTES // 16

    @cached_property
    def slots_at(self) -> int:
        """Where slots begin."""
        return self.words_at + 2 * self.num_ranks * self.words * 2

    @cached_property
    def slot(self) -> int:
        """Size of a slot. Kernels count in 32 bits to the end of a bank: of a larger region they use 32 GiB."""
        return min(max(0, self.nbytes // 8 - self.slots_at) // 2, 2**31 - 1) // self.num_ranks // 32 * 32

    @cached_property
    def share(self) -> int:
        """Size of a peer's part of a slot in a combine."""
        return self.slot // max(1, self.num_ranks - 1) // 32 * 32

    def holds(self, outward: bool, row_bytes: int, topk: int, scales: int) -> bool:
        """Whether a slot, or a peer's part of it where rows come back, has room for a row and what travels with it."""
        row = aligned(row_bytes, 16)
        if outward:
            return row + routing_words(topk, scales) * 4 <= self.slot * 8
        return row + aligned(topk * 4, 16) <= self.share * 8

    def parts(self, rank: int) -> list[tuple[int, int]]:
        """Where the words and slots of a rank lie: byte offsets, and how many bytes."""
        banks = range(rank, 2 * self.num_ranks, self.num_ranks)
        words = [(self.words_at * 8 + bank * self.words * 16, self.words * 16) for bank in banks]
        return words + [((self.slots_at + bank * self.slot) * 8, self.slot * 8) for bank in banks]

    @classmethod
    def for_calls(cls, num_ranks: int, max_tokens: int, row_bytes: int, topk: int, scales: int = 0) -> Region:
        """The region in which every call of up to `max_tokens` tokens a rank is one launch.

        Args:
            num_ranks: N.
            max_tokens: Tokens per rank.
            row_bytes: Bytes of the widest row, dispatched or combined.
            topk: K.
            scales: S.
        """
        rows = aligned(max_tokens, MAX_CHUNK_ROWS)
        dispatch = rows * (aligned(row_bytes, 16) + routing_words(topk, scales) * 4)
        combine = max(1, num_ranks - 1) * (rows * (aligned(row_bytes, 16) + aligned(topk * 4, 16)) + 256)
        return cls._for_slots(num_ranks, max(dispatch, combine))

    @classmethod
    def for_routing(cls, num_ranks: int, max_tokens: int, topk: int, scales: int) -> Region:
        """As `for_calls`, of dispatches without rows alone."""
        return cls._for_slots(num_ranks, aligned(max_tokens, MAX_ROUTING_ROWS) * routing_words(topk, scales) * 4)

    @classmethod
    def _for_slots(cls, num_ranks: int, nbytes: int) -> Region:
        slot = aligned(nbytes, 256) + 256
        words = min(LATENCY_BYTES, aligned(slot // 3, HEADERS_BYTES))
        return cls(num_ranks, cls(num_ranks, 0).words_at * 8 + 2 * num_ranks * (slot + words))


class Window:
    """One rank's view of the region.

    Args:
        segment: The mapped segment, pinned.
        pinned: The device's address of the segment.
        offset: Where the region begins in it.
        region: Its layout.
        rank: This rank.
        device: This rank's GPU.
        announcer: Tells the peers of a call before its kernels are launched; None: the ranks know of it.

    Attributes:
        address: Where the device sees the region.
        ticket: One int64 on the device, which numbers the operations: the kernels count it up, so a graph may be replayed.
    """

    def __init__(
        self,
        segment: arena.Segment,
        pinned: int,
        offset: int,
        region: Region,
        rank: int,
        device: torch.device,
        announcer: Announcer | None = None,
    ) -> None:
        self.region, self.rank, self.address, self.announcer = region, rank, pinned + offset, announcer
        self.ticket = torch.full((1,), OPERATION, dtype=torch.int64, device=device)  # flags of zeros are of operation 0
        self._segment, self._header = segment, offset + rank * HEADER_BYTES

    def state(self) -> bytes:
        """What changes from operation to operation; empty while none is under way."""
        begun, ended = (self._segment.bytes[self._header + at : self._header + at + 4] for at in (4, 8))
        return begun if begun != ended else b""

    def release(self) -> None:
        """Have this rank's kernels stop waiting, those that run and those to come."""
        self._segment.words[self._header // 4] = 1


def routing_words(topk: int, scales: int) -> int:
    """32-bit words of a row's ids, weights and scales, 16-byte aligned."""
    return aligned(2 * topk + scales, 4)


def aligned(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not less than n."""
    return -(-n // unit) * unit
