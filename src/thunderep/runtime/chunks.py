"""What ranks send each other, how it is cut into chunks, and which slots of their rings the chunks take.

Letters and units as in `plan`, which also says who writes a slot when, and who reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 256
"""Bytes that chunks and the sections in them start at a multiple of: what copy engines and vector loads like."""

HOST_GRAIN = 64 << 10
"""`grain` of a CPU's copies."""

_CHUNK_US = 9.5
"""Microseconds that a chunk more costs copy engines, its signals included. Source: sweeps on an H200, in CUDA graphs."""

MIN_SLOT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Staging:
    """The shape of every rank's ring: `slots` chunk slots, an even number, of `slot_bytes` bytes each."""

    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes in a rank's ring."""
        return self.slots * self.slot_bytes

    @staticmethod
    def slots_for(num_ranks: int) -> int:
        """Slots in a ring: in either half the same number for each peer, at least 2, and at least 8 in all."""
        peers = max(1, num_ranks - 1)
        return 2 * peers * max(2, math.ceil(8 / peers))

    @classmethod
    def of(cls, num_ranks: int, nbytes: int) -> Staging:
        """The largest ring of at most `nbytes` bytes. Raises ValueError if slots would be smaller than a page."""
        slots = cls.slots_for(num_ranks)
        slot_bytes = nbytes // slots // ALIGNMENT * ALIGNMENT
        if slot_bytes < MIN_SLOT_BYTES:
            raise ValueError(f"staging_bytes: got {nbytes}; {num_ranks} ranks need at least {slots * MIN_SLOT_BYTES}")
        return cls(slots, slot_bytes)


class Section(NamedTuple):
    """The part of a message that belongs to one payload: where it comes from and where it goes."""

    payload: int
    src: int
    dst: int
    nbytes: int


class Message(NamedTuple):
    """What `owner` puts into its ring once for all of `readers`."""

    owner: int
    readers: tuple[int, ...]
    sections: tuple[Section, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the message takes in slots."""
        return sum(_align(s.nbytes) for s in self.sections)


class Piece(NamedTuple):
    """The part of a section that lies in one chunk."""

    section: Section
    at: int  # offset in the section
    slot_offset: int
    nbytes: int


class Chunk(NamedTuple):
    """The part of a message that takes one slot of its owner's ring."""

    turn: int  # how many chunks took slots before
    slot: int
    at: int  # where the slot begins in the staging
    message: Message
    pieces: list[Piece]


def dispatch_messages(owner: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int) -> tuple[Message, ...]:
    """A dispatch sends one message: all rows of every payload, to all peers. Rank r's row i lands in row r * M + i."""
    sections = tuple(
        Section(p, 0, owner * max_rows * width, rows[owner] * width) for p, width in enumerate(row_bytes) if rows[owner] * width
    )
    return (Message(owner, peers_of(owner, len(rows)), sections),)


def combine_messages(owner: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int) -> tuple[Message, ...]:
    """A combine sends each peer the T[peer] rows that came from it: [N * M] rows in, [N, M] partial results out, by rank."""
    return tuple(
        Message(
            owner,
            (peer,),
            tuple(
                Section(p, peer * max_rows * width, owner * max_rows * width, rows[peer] * width)
                for p, width in enumerate(row_bytes)
                if rows[peer] * width
            ),
        )
        for peer in peers_of(owner, len(rows))
    )


def peers_of(rank: int, num_ranks: int) -> tuple[int, ...]:
    """All other ranks, beginning with the next one, so that not all turn to the same rank at once."""
    return tuple((rank + i) % num_ranks for i in range(1, num_ranks))


def in_turn(messages: Sequence[Message], staging: Staging, bank: int, grain: int) -> Iterator[Chunk]:
    """Chunks in the order in which they take slots: the first chunk of every message, then the second, ...

    Args:
        messages: All that one rank sends.
        staging: Its ring.
        bank: The half of the ring that the first chunk goes to.
        grain: Bytes that could be moved in the time that a chunk more costs. Receiving begins when the first chunk is there,
            so n bytes in c chunks take as long as n + n / c + c * grain: the fastest c is the root of n / grain.
    """
    messages = [m for m in messages if m.readers and m.nbytes]
    half, total = staging.slots // 2, sum(m.nbytes for m in messages)
    # A slot for each message, and the others of the half by size: then a call that fits there does, however uneven it is.
    targets = [1 + max(0, half - len(messages)) * m.nbytes // total for m in messages]
    chunked = [list(_chunks(m, _chunk_bytes(m.nbytes, t, staging, grain))) for m, t in zip(messages, targets, strict=True)]
    turn, first = 0, bank * half
    for c in range(max((len(chunks) for chunks in chunked), default=0)):
        for message, chunks in zip(messages, chunked, strict=True):
            if c < len(chunks):
                slot = (first + turn) % staging.slots
                yield Chunk(turn, slot, slot * staging.slot_bytes, message, chunks[c])
                turn += 1


def side_by_side(messages: Sequence[Message], staging: Staging, bank: int) -> list[Chunk]:
    """Chunks that fill their slots, each message's in slots that follow each other."""
    chunks = [(message, pieces) for message in messages if message.readers for pieces in _chunks(message, staging.slot_bytes)]
    first = bank * staging.slots // 2
    return [Chunk(i, first + i, (first + i) * staging.slot_bytes, *chunk) for i, chunk in enumerate(chunks)]


def gpu_grain(one_way_gbps: float) -> int:
    """`grain` of copy engines behind a link of so many GB/s."""
    return max(1, round(_CHUNK_US * one_way_gbps * 1e3))


def chunk_count(nbytes: int, grain: int) -> int:
    """Chunks that a message is best cut into."""
    return max(1, round(math.sqrt(nbytes / grain)))


def _chunk_bytes(nbytes: int, most: int, staging: Staging, grain: int) -> int:
    """Bytes in a chunk: a message is cut into at most so many chunks, more if a slot holds no more."""
    return min(staging.slot_bytes, _align(-(-nbytes // min(most, chunk_count(nbytes, grain)))))


def _chunks(message: Message, chunk_bytes: int) -> Iterator[list[Piece]]:
    """Cut a message, its sections laid one after another, into chunks of `chunk_bytes`; a section may span several."""
    pieces: list[Piece] = []
    used = 0
    for section in message.sections:
        at = 0
        while at < section.nbytes:
            if used >= chunk_bytes:
                yield pieces
                pieces, used = [], 0
            nbytes = min(section.nbytes - at, chunk_bytes - used)
            pieces.append(Piece(section, at, used, nbytes))
            at += nbytes
            used = _align(used + nbytes)
    if pieces:
        yield pieces


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
