"""The planners: one rank's `Schedule` of a dispatch or combine.

**Staging.** Every rank owns a ring of `slots` chunk slots in the shared segment. Who sends writes chunks into slots
of its own ring; who receives copies them out: one hop. For each slot and each reader there is one flag, a binary
semaphore: 0, the slot is free as far as that reader is concerned; 1, the slot holds a chunk that this reader has yet
to copy. The writer waits for 0 (its credit), writes and signals 1; the reader waits for 1, copies and signals 0.
Flags carry no sequence numbers and come back to 0, so a schedule may be replayed at any time and in any order that
all ranks share.

**Double-buffering and streaming.** An operation starts at the ring's first or second half (`bank`), as all ranks agree; if
operations take turns, a call that fits one half never waits for the readers of the call before. A larger call runs on round
the ring as credits come back. Sending and receiving are lanes of their own, so a full ring never deadlocks.

Shape legend: N ranks; T[r] rows of rank r; M `max_rows`, the row stride between ranks in a receive buffer; all sizes
in bytes unless they are called rows. Python integers have no width, so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from thunderep.runtime.chunks import (
    Chunk,
    Message,
    Staging,
    combine_messages,
    dispatch_messages,
    in_turn,
    peers_of,
    side_by_side,
)
from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Schedule, Signal, Step, Wait

RECEIVE_LANES = 4
"""Lanes at most that receive from several peers, who then share them: more hide nothing more, and each takes a queue."""

LOCAL = "local"
"""Name of the lane that copies what stays with its rank: it has no flags."""


class _Part(NamedTuple):
    turn: int
    steps: list[Step]  # a wait, copies, a signal


def plan_dispatch(
    rank: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int, staging: Staging, bank: int, grain: int
) -> Schedule:
    """The schedule of one rank's dispatch.

    Args:
        rank: Whose schedule.
        rows: T[r] of every rank r; any of them may be 0.
        row_bytes: Bytes in a row of each payload (rows, ids, weights, ...).
        max_rows: M; row i of rank r arrives in row r * M + i of every rank's outputs.
        staging: The ring, the same on all ranks.
        bank: Half of the ring in which to start, 0 or 1, the same on all ranks.
        grain: How finely to cut, see `chunks.in_turn`; the same on all ranks.
    """
    _validate(rank, rows, max_rows, bank)
    outgoing = [dispatch_messages(owner, rows, row_bytes, max_rows) for owner in range(len(rows))]
    local = tuple(
        Copy(Place(Memory("input", rank, s.payload), s.src), Place(Memory("output", rank, s.payload), s.dst), s.nbytes)
        for s in outgoing[rank][0].sections
    )
    return _plan(rank, outgoing, local, staging, bank, grain)


def plan_combine(
    rank: int, rows: Sequence[int], row_bytes: Sequence[int], max_rows: int, staging: Staging, bank: int, grain: int
) -> Schedule:
    """The schedule of one rank's combine; arguments as `plan_dispatch` has them.

    Inputs and outputs have N * M rows: rank s's partial result for this rank's row i arrives in row s * M + i. This
    rank's own partial results are not copied: who sums reads them where they are.
    """
    _validate(rank, rows, max_rows, bank)
    outgoing = [combine_messages(owner, rows, row_bytes, max_rows) for owner in range(len(rows))]
    return _plan(rank, outgoing, (), staging, bank, grain)


def most_lanes(num_ranks: int) -> int:
    """Lanes with flags that a schedule has at most: one sends, the others receive."""
    return 1 + min(num_ranks - 1, RECEIVE_LANES)


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
    rings = [side_by_side(messages, staging, bank) for messages in outgoing]
    if any(len(ring) > staging.slots // 2 for ring in rings):
        return None
    send = [step for part in _send(rank, len(rows), rings[rank]) for step in part.steps]
    received = [
        step for owner in peers_of(rank, len(rows)) for part in _receive(rank, owner, rings[owner]) for step in part.steps
    ]
    copies = [step for step in received if isinstance(step, Copy)]
    receive: list[Step] = []
    if copies:
        chunks = tuple(flag for step in received if isinstance(step, Wait) for flag in step.flags)
        receive = [Wait(chunks, 1), *copies, Signal(chunks, 0)]
    lanes = (Lane("send", tuple(send)), Lane("receive", tuple(receive)))
    return Schedule(rank, tuple(lane for lane in lanes if lane.steps))


def _plan(
    rank: int, outgoing: Sequence[Sequence[Message]], local: tuple[Copy, ...], staging: Staging, bank: int, grain: int
) -> Schedule:
    lanes = [
        _lane("send", list(_send(rank, len(outgoing), in_turn(outgoing[rank], staging, bank, grain)))),
        Lane(LOCAL, local),  # after sending, while what is sent is in a CPU's cache
    ]
    owners = peers_of(rank, len(outgoing))[::-1]
    for i in range(min(len(owners), RECEIVE_LANES)):
        some = owners[i::RECEIVE_LANES]
        incoming = [part for owner in some for part in _receive(rank, owner, in_turn(outgoing[owner], staging, bank, grain))]
        lanes.append(_lane(f"receive from {' and '.join(map(str, some))}", sorted(incoming, key=lambda part: part.turn)))
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


def _send(rank: int, num_ranks: int, ring: Iterable[Chunk]) -> Iterator[_Part]:
    """Each chunk that the rank sends."""
    for turn, slot, at, message, pieces in ring:
        yield _Part(
            turn,
            [
                # The credit: every reader's earlier copies out of this slot are done, whatever operation they belonged to.
                Wait(tuple(Flag(rank, slot, peer) for peer in peers_of(rank, num_ranks)), 0),
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


def _receive(rank: int, owner: int, ring: Iterable[Chunk]) -> Iterator[_Part]:
    """Each chunk that the rank receives from `owner`."""
    for turn, slot, at, message, pieces in ring:
        if rank not in message.readers:
            continue
        flag = (Flag(owner, slot, rank),)
        yield _Part(
            turn,
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


def _validate(rank: int, rows: Sequence[int], max_rows: int, bank: int) -> None:
    if not 0 <= rank < len(rows):
        raise ValueError(f"rank: got {rank}, expected 0 to {len(rows) - 1}")
    if bank not in (0, 1):
        raise ValueError(f"bank: got {bank}, expected 0 or 1")
    for r, count in enumerate(rows):
        if not 0 <= count <= max_rows:
            raise ValueError(f"rows: rank {r} has {count}, expected 0 to max_rows = {max_rows}")
