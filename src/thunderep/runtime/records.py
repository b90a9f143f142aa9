"""Records: the latest calls of every rank, each written down where all can read it."""

from __future__ import annotations

import struct

from thunderep.runtime import arena
from thunderep.runtime.futex import fence
from thunderep.runtime.transport import Call, difference

_RECORD = struct.Struct("<12q")  # a sequence number, whether the rank has captured calls, a Call's fields, and T last
_SEQUENCE = struct.Struct("<q")
_COMPARED = _RECORD.size - 8  # T may differ


class Records:
    """One rank's view.

    A record is written again `arena.RECORDS` operations later. A rank that waits for all ranks' records in each operation is
    never so far ahead; one that does not may be, and then finds no record of the other's to compare with.

    Args:
        segment: The mapped segment.
        layout: What lies where in it.
        rank: This rank.
    """

    def __init__(self, segment: arena.Segment, layout: arena.Layout, rank: int) -> None:
        self._segment, self._layout, self._rank = segment, layout, rank
        self._peers = [r for r in range(layout.num_ranks) if r != rank]
        self._written: list[tuple[Call, bool] | None] = [None] * arena.RECORDS

    def write(self, sequence: int, call: Call, captured: bool = False) -> None:
        """Write this rank's call down; `captured`: its calls are no longer numbered as those of ranks that issue each."""
        memory, at = self._segment.bytes, self._at(self._rank, sequence)
        written = self._written[sequence % arena.RECORDS]
        if written is None or written[0] is not call or written[1] != captured:
            self._written[sequence % arena.RECORDS] = call, captured
            _SEQUENCE.pack_into(memory, at, 0)
            fence()  # whoever sees a part of the new call no longer sees the old one's number
            _RECORD.pack_into(memory, at, 0, captured, call.kind, *call[2:], call.tokens)
            fence()  # whoever sees the new number sees all of the call
        _SEQUENCE.pack_into(memory, at, sequence)

    def has(self, rank: int, sequence: int) -> bool:
        """Whether a rank's call of this number is there."""
        return bool(_SEQUENCE.unpack_from(self._segment.bytes, self._at(rank, sequence))[0] == sequence)

    def read(self, rank: int, sequence: int) -> Call:
        """A rank's call of this number, which is there."""
        return self._unpack(rank, sequence)[2]

    def last(self, rank: int) -> tuple[int, int]:
        """Sequence number and kind of the call that a rank wrote down last; zeros if none."""
        found = (_RECORD.unpack_from(self._segment.bytes, self._at(rank, i)) for i in range(arena.RECORDS))
        sequence, _, kind, *_ = max(found)
        return sequence, kind

    def captured(self, rank: int) -> bool:
        """Whether a rank has captured calls: then the number of its last one says nothing of how many have run."""
        return any(self._unpack(rank, i)[1] for i in range(arena.RECORDS))

    def disagreement(self, sequence: int) -> str | None:
        """How calls of this number differ, of those ranks that have come to it and have captured nothing; None: not at all."""
        memory, at = self._segment.bytes, self._at(self._rank, sequence)
        mine = memory[at : at + _COMPARED]
        for rank in self._peers:
            at = self._at(rank, sequence)
            if self.has(rank, sequence) and memory[at : at + _COMPARED] != mine:
                break
        else:
            return None
        calls = {}
        for rank in range(self._layout.num_ranks):
            number, captured, call = self._unpack(rank, sequence)
            fence()  # if the number is still there now, what was read is all of this call
            if number == sequence and self.has(rank, sequence) and not captured:
                calls[rank] = call
        return difference(calls)

    def _unpack(self, rank: int, sequence: int) -> tuple[int, bool, Call]:
        number, captured, kind, *rest, tokens = _RECORD.unpack_from(self._segment.bytes, self._at(rank, sequence))
        return number, bool(captured), Call(kind, tokens, *rest)

    def _at(self, rank: int, sequence: int) -> int:
        return self._layout.control(rank, arena.CONTROL_RECORDS + sequence % arena.RECORDS * arena.RECORD_BYTES)
