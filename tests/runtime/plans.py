"""Calls to plan, and what their schedules add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st

from thunderep.runtime.chunks import (
    ALIGNMENT,
    HOST_GRAIN,
    Message,
    Staging,
    combine_messages,
    dispatch_messages,
    gpu_grain,
)
from thunderep.runtime.delivery import expect_combine, expect_dispatch
from thunderep.runtime.plan import plan_combine, plan_dispatch
from thunderep.runtime.schedule import Copy, Flag, Lane, Place, Schedule, Signal, Step, Wait

Planner = Callable[[int, Sequence[int], Sequence[int], int, Staging, int, int], Schedule]


@dataclass(frozen=True)
class Call:
    """One operation of all ranks."""

    planner: Planner
    rows: tuple[int, ...]
    row_bytes: tuple[int, ...]
    max_rows: int
    staging: Staging
    bank: int
    grain: int = HOST_GRAIN

    def schedules(self) -> list[Schedule]:
        shape = self.rows, self.row_bytes, self.max_rows, self.staging, self.bank, self.grain
        return [self.planner(r, *shape) for r in range(len(self.rows))]

    def messages(self, owner: int) -> tuple[Message, ...]:
        make = dispatch_messages if self.planner is plan_dispatch else combine_messages
        return make(owner, self.rows, self.row_bytes, self.max_rows)

    def expected(self) -> tuple[Copy, ...]:
        expect = expect_dispatch if self.planner is plan_dispatch else expect_combine
        return expect(self.rows, self.row_bytes, self.max_rows)


def rings() -> st.SearchStrategy[Staging]:
    """From two slots of 256 bytes to dozens of slots of 2 MiB."""
    slot_bytes = st.one_of(st.integers(1, 8), st.integers(1, 8192)).map(lambda n: n * ALIGNMENT)
    return st.builds(Staging, st.integers(1, 20).map(lambda half: 2 * half), slot_bytes)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Rows from none to some, of no payload to four, of a byte to a megabyte; at most some hundred chunks."""
    num_ranks = draw(st.integers(1, 8))
    staging = draw(rings())
    max_rows = draw(st.integers(0, 40))
    rows = draw(st.lists(st.integers(0, max_rows), min_size=num_ranks, max_size=num_ranks))
    widest = max(1, 40 * staging.slot_bytes // (max_rows or 1))
    row_bytes = draw(st.lists(st.one_of(st.integers(0, min(9, widest)), st.integers(0, widest)), max_size=4))
    planner = draw(st.sampled_from([plan_dispatch, plan_combine]))
    grain = draw(st.sampled_from([ALIGNMENT, HOST_GRAIN, gpu_grain(55)]))
    return Call(planner, tuple(rows), tuple(row_bytes), max_rows, staging, draw(st.integers(0, 1)), grain)


@dataclass(frozen=True)
class Chunk:
    """What a lane does between a wait and its signal."""

    wait: Wait
    copies: tuple[Copy, ...]
    signal: Signal


def chunks(lane: Lane) -> list[Chunk]:
    """A lane that is nothing but `Wait`, copies and `Signal`, again and again."""
    found: list[Chunk] = []
    wait: Wait | None = None
    copies: list[Copy] = []
    for step in lane.steps:
        if isinstance(step, Wait):
            assert wait is None
            wait, copies = step, []
        elif isinstance(step, Copy):
            copies.append(step)
        else:
            assert wait is not None
            found.append(Chunk(wait, tuple(copies), step))
            wait = None
    assert wait is None
    return found


def lanes(schedule: Schedule, prefix: str) -> list[Lane]:
    return [lane for lane in schedule.lanes if lane.name.startswith(prefix)]


def copies_of(steps: Iterable[Step]) -> list[Copy]:
    return [step for step in steps if isinstance(step, Copy)]


def sent(schedules: Sequence[Schedule]) -> dict[Flag, list[Chunk]]:
    """For each flag, the chunks that its owner signals with it, in order."""
    found: dict[Flag, list[Chunk]] = {}
    for schedule in schedules:
        for chunk in chain.from_iterable(map(chunks, lanes(schedule, "send"))):
            for flag in chunk.signal.flags:
                found.setdefault(flag, []).append(chunk)
    return found


def delivered(schedules: Sequence[Schedule]) -> Iterator[Copy]:
    """What the copies add up to, if the n-th wait for a flag sees its n-th signal."""
    unread = sent(schedules)
    for schedule in schedules:
        yield from copies_of(chain.from_iterable(lane.steps for lane in lanes(schedule, "local")))
        for received in chain.from_iterable(map(chunks, lanes(schedule, "receive"))):
            written = unread[received.wait.flags[0]].pop(0)
            for copy in received.copies:
                found = list(through(written.copies, copy))
                assert sum(c.nbytes for c in found) == copy.nbytes
                yield from found
    assert not any(unread.values())


def through(written: Iterable[Copy], read: Copy) -> Iterator[Copy]:
    """The copies from input to output that `read`, of bytes that `written` left in staging, comes to."""
    for copy in written:
        low = max(copy.dst.offset, read.src.offset)
        high = min(copy.dst.offset + copy.nbytes, read.src.offset + read.nbytes)
        if copy.dst.memory == read.src.memory and low < high:
            yield Copy(shifted(copy.src, low - copy.dst.offset), shifted(read.dst, low - read.src.offset), high - low)


def shifted(place: Place, by: int) -> Place:
    return Place(place.memory, place.offset + by)


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """Copies in the order of their destinations, with what is contiguous at both ends put together."""
    result: list[Copy] = []
    for copy in sorted(copies, key=lambda c: (c.dst, c.src, c.nbytes)):
        last = result[-1] if result else copy
        if result and (shifted(last.src, last.nbytes), shifted(last.dst, last.nbytes)) == (copy.src, copy.dst):
            result[-1] = Copy(last.src, last.dst, last.nbytes + copy.nbytes)
        elif copy.nbytes:
            result.append(copy)
    return result
