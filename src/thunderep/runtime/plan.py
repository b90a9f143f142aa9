"""Schedules as data, and the planners that make them.

One operation of one rank is a `Schedule`: lanes that run side by side, each a list of steps that run in order. An
operation begins when the rank's previous one has ended, and ends when all its lanes have. Nothing here touches
memory: `host` executes schedules on CPU memory, `check` explores their interleavings.

**Staging.** Every rank owns a ring of `slots` chunk slots in the shared segment. Who sends writes chunks into slots
of its own ring; who receives copies them out: one hop. For each slot and each reader there is one flag, a binary
semaphore: 0, the slot is free as far as that reader is concerned; 1, the slot holds a chunk that this reader has yet
to copy. The writer waits for 0 (its credit), writes and signals 1; the reader waits for 1, copies and signals 0.
Flags carry no sequence numbers and come back to 0, so a schedule may be replayed at any time and in any order that
all ranks share.

**Double-buffering and streaming.** Operation i starts at the ring's first or second half in turn (`bank`), so a call
that fits one half never waits for the readers of the call before. A larger call runs on round the ring as credits
come back. Sending and each receiving direction are lanes of their own, so a full ring never deadlocks.

Shape legend: N ranks; T[r] rows of rank r; M `max_rows`, the row stride between ranks in a receive buffer; all sizes
in bytes unless they are called rows. Python integers have no width, so nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ALIGNMENT = 256
"""Bytes that chunks and the sections in them start at a multiple of: what copy engines and vector loads like."""

MIN_CHUNK_BYTES = 256 << 10
"""Below this a chunk costs more to signal than its overlap saves."""

MIN_SLOT_BYTES = 4096

MAX_DEFAULT_STAGING = 256 << 20
"""Bytes of staging that a rank takes at most when its user names no number."""

GPU_WAYS = 2
"""`ways` where copy engines execute a schedule."""


class Memory(NamedTuple):
    """A memory that a copy reads or writes: a payload of a rank's input or output, or a rank's staging."""

    kind: Literal["input", "output", "staging"]
    rank: int
    payload: int = 0


class Place(NamedTuple):
    """A byte offset in a memory."""

    memory: Memory
    offset: int


class Flag(NamedTuple):
    """The binary semaphore of one slot in `owner`'s ring towards one reader."""

    owner: int
    slot: int
    reader: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `nbytes` bytes from `src` to `dst`."""

    src: Place
    dst: Place
    nbytes: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Set every flag to `value`, after all earlier steps of the lane are visible to whoever waits for it."""

    flags: tuple[Flag, ...]
    value: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Let no later step of the lane start before every flag is `value`."""

    flags: tuple[Flag, ...]
    value: int


Step = Copy | Signal | Wait


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps that run in order.

    Attributes:
        turns: For each step when it is to be issued, see `Schedule.issue_order`; empty: all steps at once.
    """

    name: str
    steps: tuple[Step, ...]
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does for one operation: lanes that run side by side."""

    rank: int
    lanes: tuple[Lane, ...]

    def issue_order(self) -> list[tuple[int, Step]]:
        """All steps with their lanes' numbers, in an order in which a single queue could run them on every rank.

        Hardware gives lanes queues that they may have to share: what waits at the head of one holds up all behind it. In
        this order nothing that a wait depends on, on any rank, is ever behind that wait.
        """
        turns = [(turn, i) for i, lane in enumerate(self.lanes) for turn in lane.turns or (0,) * len(lane.steps)]
        steps = [(i, step) for i, lane in enumerate(self.lanes) for step in lane.steps]
        return [step for _, step in sorted(zip(turns, steps, strict=True), key=lambda pair: pair[0])]


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


class _Piece(NamedTuple):
    section: Section
    at: int  # offset in the section
    slot_offset: int
    nbytes: int


class _Chunk(NamedTuple):
    turn: int  # how many chunks took slots before
    slot: int
    at: int  # where the slot begins in the staging
    message: Message
    pieces: list[_Piece]


class _Part(NamedTuple):
    turn: int
    slot: int
    steps: list[Step]  # a wait, copies, a signal


def dispatch_messages(owner: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int) -> tuple[Message, ...]:
    """A dispatch sends one message: all rows of every payload, to all peers. Rank r's row i lands in row r * M + i."""
    sections = tuple(
        Section(p, 0, owner * max_rows * width, rows[owner] * width) for p, width in enumerate(row_bytes) if rows[owner] * width
    )
    return (Message(owner, _peers(owner, len(rows)), sections),)


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
        for peer in _peers(owner, len(rows))
    )


def plan_dispatch(
    rank: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int, staging: Staging, bank: int, ways: int = 1
) -> Schedule:
    """The schedule of one rank's dispatch.

    Args:
        rank: Whose schedule.
        rows: T[r] of every rank r; any of them may be 0.
        row_bytes: Bytes in a row of each payload (rows, ids, weights, ...).
        max_rows: M; row i of rank r arrives in row r * M + i of every rank's outputs.
        staging: The ring, the same on all ranks.
        bank: 0 or 1, in turn from operation to operation, the same on all ranks.
        ways: Lanes for sending, and for receiving from an only peer, the same on all ranks. With two, one lane's signals and
            waits overlap the other's copies; several peers' lanes overlap each other's as it is.
    """
    _validate(rank, rows, max_rows, bank)
    outgoing = [dispatch_messages(owner, rows, row_bytes, max_rows) for owner in range(len(rows))]
    local = tuple(
        Copy(Place(Memory("input", rank, s.payload), s.src), Place(Memory("output", rank, s.payload), s.dst), s.nbytes)
        for s in outgoing[rank][0].sections
    )
    return _plan(rank, outgoing, local, staging, bank, ways)


def plan_combine(
    rank: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int, staging: Staging, bank: int, ways: int = 1
) -> Schedule:
    """The schedule of one rank's combine; arguments as `plan_dispatch` has them.

    Inputs and outputs have N * M rows: rank s's partial result for this rank's row i arrives in row s * M + i. This
    rank's own partial results are not copied: who sums reads them where they are.
    """
    _validate(rank, rows, max_rows, bank)
    outgoing = [combine_messages(owner, rows, row_bytes, max_rows) for owner in range(len(rows))]
    return _plan(rank, outgoing, (), staging, bank, ways)


def most_lanes(num_ranks: int, ways: int) -> int:
    """Lanes that a schedule has at most."""
    return ways + (ways if num_ranks == 2 else num_ranks - 1) + 1


def plan_combine_in_place(
    rank: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int, staging: Staging, bank: int
) -> Schedule | None:
    """The schedule of one rank's combine whose rows are used where they lie, or None if a rank's do not fit half a ring.

    Every message takes slots side by side, so what a rank receives from a peer is in one piece. All that it receives is
    one lane: wait for everything, then the copies, then give all slots back. Who executes the schedule may use the
    copies' sources instead of copying.
    """
    _validate(rank, rows, max_rows, bank)
    outgoing = [combine_messages(owner, rows, row_bytes, max_rows) for owner in range(len(rows))]
    rings = [_side_by_side(messages, staging, bank) for messages in outgoing]
    if any(len(ring) > staging.slots // 2 for ring in rings):
        return None
    send = [step for part in _send(rank, len(rows), rings[rank]) for step in part.steps]
    received = [
        step for owner in _peers(rank, len(rows)) for part in _receive(rank, owner, rings[owner]) for step in part.steps
    ]
    copies = [step for step in received if isinstance(step, Copy)]
    receive: list[Step] = []
    if copies:
        chunks = tuple(flag for step in received if isinstance(step, Wait) for flag in step.flags)
        receive = [Wait(chunks, 1), *copies, Signal(chunks, 0)]
    lanes = (Lane("send", tuple(send)), Lane("receive", tuple(receive)))
    return Schedule(rank, tuple(lane for lane in lanes if lane.steps))


def _plan(
    rank: int, outgoing: Sequence[Sequence[Message]], local: tuple[Copy, ...], staging: Staging, bank: int, ways: int
) -> Schedule:
    chunks = {"send": _send(rank, len(outgoing), _ring(outgoing[rank], staging, bank))}
    for owner in reversed(_peers(rank, len(outgoing))):
        chunks[f"receive from {owner}"] = _receive(rank, owner, _ring(outgoing[owner], staging, bank))
    lanes = []
    for name, parts in chunks.items():
        count = ways if name == "send" or len(outgoing) == 2 else 1
        by_way: list[list[_Part]] = [[] for _ in range(count)]
        for part in parts:
            # By slot, so that all that comes into a slot stays in one lane, in order: a flag does not say which chunk it means.
            by_way[part.slot // len(outgoing[rank]) % count].append(part)
        lanes += [_lane(f"{name}, way {way}" if count > 1 else name, lane) for way, lane in enumerate(by_way)]
    lanes.insert(ways, Lane("local", local))  # after sending, while what is sent is in a CPU's cache
    return Schedule(rank, tuple(lane for lane in lanes if lane.steps))


def _lane(name: str, parts: Sequence[_Part]) -> Lane:
    """The parts one after another; signals and waits between two chunks take the same turn, so that they can be issued as one.

    That turn is the earlier chunk's where it is sent, so that its readers need not wait for the next, and the later chunk's
    where it is received, so that nothing waits for a chunk before its turn. A credit that is given a little later, or waited
    for a little earlier, does no harm: it is needed as many turns later as the ring has slots.
    """
    sends, turns = name.startswith("send"), []
    for i, part in enumerate(parts):
        first = parts[max(0, i - 1)].turn if sends else part.turn
        last = part.turn if sends else parts[min(i + 1, len(parts) - 1)].turn
        turns += [first, *[part.turn] * (len(part.steps) - 2), last]
    return Lane(name, tuple(step for part in parts for step in part.steps), tuple(turns))


def _send(rank: int, num_ranks: int, ring: Iterable[_Chunk]) -> Iterator[_Part]:
    """Each chunk that the rank sends."""
    for turn, slot, at, message, pieces in ring:
        yield _Part(
            turn,
            slot,
            [
                # The credit: every reader's earlier copies out of this slot are done, whatever operation they belonged to.
                Wait(tuple(Flag(rank, slot, peer) for peer in _peers(rank, num_ranks)), 0),
                *(
                    Copy(
                        Place(Memory("input", rank, piece.section.payload), piece.section.src + piece.at),
                        Place(Memory("staging", rank), at + piece.slot_offset),
                        piece.nbytes,
                    )
                    for piece in pieces
                ),
                # Makes the chunk visible to its readers.
                Signal(tuple(Flag(rank, slot, reader) for reader in message.readers), 1),
            ],
        )


def _receive(rank: int, owner: int, ring: Iterable[_Chunk]) -> Iterator[_Part]:
    """Each chunk that the rank receives from `owner`."""
    for turn, slot, at, message, pieces in ring:
        if rank not in message.readers:
            continue
        flag = (Flag(owner, slot, rank),)
        yield _Part(
            turn,
            slot,
            [
                Wait(flag, 1),  # the owner's chunk is in the slot
                *(
                    Copy(
                        Place(Memory("staging", owner), at + piece.slot_offset),
                        Place(Memory("output", rank, piece.section.payload), piece.section.dst + piece.at),
                        piece.nbytes,
                    )
                    for piece in pieces
                ),
                Signal(flag, 0),  # the credit: this reader's copies are done
            ],
        )


def _ring(messages: Sequence[Message], staging: Staging, bank: int) -> Iterator[_Chunk]:
    """Chunks in the order in which they take slots: the first chunk of every message, then the second, ..."""
    messages = [m for m in messages if m.readers and m.nbytes]
    half, total = staging.slots // 2, sum(m.nbytes for m in messages)
    # A slot for each message, and the others of the half by size: then a call that fits there does, however uneven it is.
    targets = [1 + max(0, half - len(messages)) * m.nbytes // total for m in messages]
    chunked = [list(_chunks(m, _chunk_bytes(m.nbytes, t, staging))) for m, t in zip(messages, targets, strict=True)]
    turn, first = 0, bank * half
    for c in range(max((len(chunks) for chunks in chunked), default=0)):
        for message, chunks in zip(messages, chunked, strict=True):
            if c < len(chunks):
                slot = (first + turn) % staging.slots
                yield _Chunk(turn, slot, slot * staging.slot_bytes, message, chunks[c])
                turn += 1


def _side_by_side(messages: Sequence[Message], staging: Staging, bank: int) -> list[_Chunk]:
    """Chunks that fill their slots, each message's in slots that follow each other."""
    chunks = [(message, pieces) for message in messages if message.readers for pieces in _chunks(message, staging.slot_bytes)]
    first = bank * staging.slots // 2
    return [_Chunk(i, first + i, (first + i) * staging.slot_bytes, *chunk) for i, chunk in enumerate(chunks)]


def _chunk_bytes(nbytes: int, target: int, staging: Staging) -> int:
    """Bytes in a chunk: a message is cut into `target` chunks, fewer if they would be tiny, more if a slot holds no more."""
    return min(staging.slot_bytes, max(MIN_CHUNK_BYTES, _align(-(-nbytes // target))))


def _chunks(message: Message, chunk_bytes: int) -> Iterator[list[_Piece]]:
    """Cut a message, its sections laid one after another, into chunks of `chunk_bytes`; a section may span several."""
    pieces: list[_Piece] = []
    used = 0
    for section in message.sections:
        at = 0
        while at < section.nbytes:
            if used >= chunk_bytes:
                yield pieces
                pieces, used = [], 0
            nbytes = min(section.nbytes - at, chunk_bytes - used)
            pieces.append(_Piece(section, at, used, nbytes))
            at += nbytes
            used = _align(used + nbytes)
    if pieces:
        yield pieces


def _peers(rank: int, num_ranks: int) -> tuple[int, ...]:
    """All other ranks, beginning with the next one, so that not all turn to the same rank at once."""
    return tuple((rank + i) % num_ranks for i in range(1, num_ranks))


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _validate(rank: int, rows: Sequence[int], max_rows: int, bank: int) -> None:
    if not 0 <= rank < len(rows):
        raise ValueError(f"rank: got {rank}, expected 0 to {len(rows) - 1}")
    if bank not in (0, 1):
        raise ValueError(f"bank: got {bank}, expected 0 or 1")
    for r, count in enumerate(rows):
        if not 0 <= count <= max_rows:
            raise ValueError(f"rows: rank {r} has {count}, expected 0 to max_rows = {max_rows}")
