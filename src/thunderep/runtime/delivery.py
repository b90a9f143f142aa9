"""What an operation owes: which input bytes belong where in whose output, and whether its schedules' copies add up to that.

Stated from the contract alone: chunks, slots and lanes do not appear here. `check` follows the bytes through staging; this
module says what they should be when they come out, and that every output byte is written exactly once. For the latter nothing
need be explored: in every run that ends, each step of each lane has run once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from thunderep.runtime.schedule import Copy, Memory, Place, Schedule

Kind = Literal[
    "race",
    "wrong bytes",
    "lost signal",
    "deadlock",
    "flag left set",
    "lost bytes",
    "doubled bytes",
    "misplaced bytes",
    "bad copy",
]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of all ranks.

    Attributes:
        schedules: Rank r's schedule at r.
        delivers: What they must amount to: copies from inputs to outputs, disjoint in their destinations.
    """

    schedules: tuple[Schedule, ...]
    delivers: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake that was found.

    Attributes:
        kind: Its kind.
        what: Where it happens, with all that takes part in it.
        trace: A shortest run that leads there, step by step; empty where every run does.
    """

    kind: Kind
    what: str
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join((f"{self.kind}: {self.what}", *self.trace))


def expect_dispatch(rows: Sequence[int], row_bytes: Sequence[int], max_rows: int) -> tuple[Copy, ...]:
    """What a dispatch delivers: row i of rank s, in every payload, to row s * M + i of every rank (itself too).

    Args:
        rows: T[r] of every rank r.
        row_bytes: Bytes in a row of each payload.
        max_rows: M.
    """
    ranks = range(len(rows))
    return tuple(
        Copy(Place(Memory("input", s, p), 0), Place(Memory("output", r, p), s * max_rows * width), rows[s] * width)
        for r in ranks
        for s in ranks
        for p, width in enumerate(row_bytes)
    )


def expect_combine(rows: Sequence[int], row_bytes: Sequence[int], max_rows: int) -> tuple[Copy, ...]:
    """What a combine delivers: row r * M + i of rank s to row s * M + i of rank r, for r other than s.

    Arguments as `expect_dispatch` has them. A rank's own partial results stay where they are.
    """
    ranks = range(len(rows))
    return tuple(
        Copy(
            Place(Memory("input", s, p), r * max_rows * width),
            Place(Memory("output", r, p), s * max_rows * width),
            rows[r] * width,
        )
        for r in ranks
        for s in ranks
        if s != r
        for p, width in enumerate(row_bytes)
    )


class Contract:
    """An operation's `delivers`, to look things up in. Raises ValueError where two of them deliver to one byte."""

    def __init__(self, delivers: Iterable[Copy]) -> None:
        self.by_output: dict[Memory, list[Copy]] = defaultdict(list)
        for delivery in sorted((d for d in delivers if d.nbytes), key=lambda d: (d.dst, d.nbytes)):
            before = self.by_output[delivery.dst.memory]
            if before and before[-1].dst.offset + before[-1].nbytes > delivery.dst.offset:
                raise ValueError(f"delivers: {describe(before[-1])} and {describe(delivery)} overlap")
            before.append(delivery)

    def sources(self, dst: Place, nbytes: int) -> Iterator[tuple[int, int, Place | None]]:
        """Cut `nbytes` bytes at `dst` where their source changes: (offset from `dst`, bytes, where they must come from)."""
        deliveries = self.by_output.get(dst.memory, [])
        at, end = dst.offset, dst.offset + nbytes
        while at < end:
            following = bisect_right(deliveries, at, key=lambda d: d.dst.offset)
            inside = at - deliveries[following - 1].dst.offset if following else 0
            if following and inside < (delivery := deliveries[following - 1]).nbytes:
                upto = min(end, at + delivery.nbytes - inside)
                src = Place(delivery.src.memory, delivery.src.offset + inside)
            else:
                upto, src = min(end, deliveries[following].dst.offset if following < len(deliveries) else end), None
            yield at - dst.offset, upto - at, src
            at = upto


def delivery_problems(name: str, operation: Operation, contract: Contract) -> Iterator[Problem]:
    """Copies that reach what they must not, direct copies from the wrong place, and output bytes not written exactly once."""
    written: dict[Memory, list[Copy]] = defaultdict(list)
    for schedule in operation.schedules:
        for lane in schedule.lanes:
            for step in lane.steps:
                if not isinstance(step, Copy):
                    continue
                where = f"{name}, rank {schedule.rank}, {lane.name}: {describe(step)}"
                if not _reaches(schedule.rank, step):
                    yield Problem(
                        "bad copy", f"{where}; only own input to own output, own input to staging, staging to own output"
                    )
                elif step.dst.memory.kind == "output":
                    written[step.dst.memory].append(step)
                    if step.src.memory.kind == "input":
                        yield from _direct_problems(where, step, contract)
    for memory in sorted(written.keys() | contract.by_output.keys()):
        yield from _coverage_problems(name, memory, written[memory], contract.by_output.get(memory, []))


def _reaches(rank: int, copy: Copy) -> bool:
    src, dst = copy.src.memory, copy.dst.memory
    from_own, to_own = (src.kind, src.rank) == ("input", rank), (dst.kind, dst.rank) == ("output", rank)
    return (from_own and (to_own or dst.kind == "staging")) or (src.kind == "staging" and to_own)


def _direct_problems(where: str, copy: Copy, contract: Contract) -> Iterator[Problem]:
    for at, nbytes, src in contract.sources(copy.dst, copy.nbytes):
        if src is not None and src != Place(copy.src.memory, copy.src.offset + at):
            yield Problem("wrong bytes", f"{where}; bytes {at} to {at + nbytes} of it should come from {describe_place(src)}")


def _coverage_problems(name: str, memory: Memory, written: Sequence[Copy], owed: Sequence[Copy]) -> Iterator[Problem]:
    cuts = sorted({edge for copy in (*written, *owed) for edge in (copy.dst.offset, copy.dst.offset + copy.nbytes)})
    for low, high in pairwise(cuts):
        count, wanted = (sum(c.dst.offset <= low < c.dst.offset + c.nbytes for c in copies) for copies in (written, owed))
        where = f"{name}, bytes {low} to {high} of {describe_memory(memory)}"
        if wanted and not count:
            yield Problem("lost bytes", f"{where} are never written")
        elif count and not wanted:
            yield Problem("misplaced bytes", f"{where} are written, but nothing belongs there")
        elif count > 1:
            yield Problem("doubled bytes", f"{where} are written {count} times")


def describe_memory(memory: Memory) -> str:
    """A memory in words."""
    return f"rank {memory.rank}'s {memory.kind}" + ("" if memory.kind == "staging" else f" {memory.payload}")


def describe_place(place: Place) -> str:
    """A place in words."""
    return f"offset {place.offset} of {describe_memory(place.memory)}"


def describe(copy: Copy) -> str:
    """A copy in words."""
    return f"copy {copy.nbytes} bytes from {describe_place(copy.src)} to {describe_place(copy.dst)}"
