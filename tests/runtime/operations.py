"""Operations of all ranks to check, and ways to plant a mistake in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from thunderep.runtime.check import Report
from thunderep.runtime.chunks import HOST_GRAIN, Staging
from thunderep.runtime.delivery import Operation, expect_combine, expect_dispatch
from thunderep.runtime.plan import plan_combine, plan_combine_in_place, plan_dispatch
from thunderep.runtime.schedule import Step, Wait

RING = Staging(4, 256)  # a bank is two slots; with rows of 256 bytes, a chunk is a row
NARROW = Staging(2, 256)
WIDE = Staging(6, 256)
FIT = (256,)


def dispatch(rows: Sequence[int], bank: int, staging: Staging = RING, row_bytes: Sequence[int] = FIT) -> Operation:
    most = max(rows) + 1
    schedules = tuple(plan_dispatch(r, rows, row_bytes, most, staging, bank, HOST_GRAIN) for r in range(len(rows)))
    return Operation(schedules, expect_dispatch(rows, row_bytes, most))


def combine(rows: Sequence[int], bank: int, staging: Staging = RING, row_bytes: Sequence[int] = FIT) -> Operation:
    most = max(rows) + 1
    schedules = tuple(plan_combine(r, rows, row_bytes, most, staging, bank, HOST_GRAIN) for r in range(len(rows)))
    return Operation(schedules, expect_combine(rows, row_bytes, most))


def combine_in_place(rows: Sequence[int], bank: int, staging: Staging = RING, row_bytes: Sequence[int] = FIT) -> Operation:
    most = max(rows) + 1
    schedules = tuple(plan_combine_in_place(r, rows, row_bytes, most, staging, bank) for r in range(len(rows)))
    return Operation(tuple(s for s in schedules if s is not None), expect_combine(rows, row_bytes, most))


class Site(NamedTuple):
    """A step of an operation."""

    rank: int
    lane: int
    step: int


def sites(operation: Operation) -> Iterator[tuple[Site, Step]]:
    for schedule in operation.schedules:
        for i, lane in enumerate(schedule.lanes):
            yield from ((Site(schedule.rank, i, j), step) for j, step in enumerate(lane.steps))


def planted(operation: Operation, site: Site, *steps: Step, span: int = 1) -> Operation:
    """The operation with `steps` instead of the `span` steps at `site`."""
    schedule = operation.schedules[site.rank]
    lane = schedule.lanes[site.lane]
    changed = replace(lane, steps=(*lane.steps[: site.step], *steps, *lane.steps[site.step + span :]))
    lanes = (*schedule.lanes[: site.lane], changed, *schedule.lanes[site.lane + 1 :])
    schedules = list(operation.schedules)
    schedules[site.rank] = replace(schedule, lanes=lanes)
    return replace(operation, schedules=tuple(schedules))


def without_credits(operation: Operation) -> Operation:
    """The operation as it would be if alternating between two buffers were enough."""
    for site, step in reversed(list(sites(operation))):
        if isinstance(step, Wait) and step.value == 0:
            operation = planted(operation, site)
    return operation


def kinds(report: Report) -> set[str]:
    return {problem.kind for problem in report.problems}


CLEAN: dict[str, list[Operation]] = {
    "1 rank": [dispatch([3], 0), combine([3], 1), dispatch([0], 0)],
    "2 ranks, 3 dispatches of 2 chunks": [dispatch([2, 2], i % 2) for i in range(3)],
    "2 ranks, 3 dispatches of 3 chunks": [dispatch([3, 3], i % 2, WIDE) for i in range(3)],
    "2 ranks, 3 combines of 2 chunks": [combine([2, 2], i % 2) for i in range(3)],
    "2 ranks, dispatch and combine in turn": [f([2, 2], i % 2) for i, f in enumerate((dispatch, combine, dispatch, combine))],
    "2 ranks, streaming 6 chunks through 4 slots": [dispatch([6, 5], i % 2) for i in range(3)],
    "2 ranks, streaming 5 chunks through 2 slots": [
        dispatch([5, 4], 0, NARROW),
        combine([4, 5], 1, NARROW),
        dispatch([3, 5], 0, NARROW),
    ],
    "2 ranks, ragged with zeros": [
        dispatch([2, 0], 0),
        combine([2, 0], 1),
        dispatch([0, 0], 0),
        dispatch([0, 2], 1),
        combine([0, 2], 0),
    ],
    "2 ranks, payloads of odd sizes": [dispatch([3, 2], i % 2, RING, (101, 7, 64)) for i in range(3)],
    "2 ranks, row sizes that change": [
        dispatch([2, 1], 0),
        dispatch([1, 3], 1, RING, (77, 3)),
        combine([2, 3], 0, RING, (150,)),
    ],
    "2 ranks, one operation in one bank again and again": [dispatch([2, 2], 0)] * 4,
    "2 ranks, three graphs in any order": [combine([1, 2], b) if b else dispatch([2, 1], b) for b in (0, 0, 1, 1, 0)],
    "2 ranks, combines in place": [combine_in_place([2, 2], i % 2) for i in range(3)],
    "2 ranks, combines in place between dispatches": [
        dispatch([2, 2], 0),
        combine_in_place([2, 1], 1, RING, (101, 7)),
        dispatch([3, 2], 0),
        combine_in_place([2, 0], 1),
    ],
    "3 ranks, combines in place, ragged": [
        combine_in_place([2, 1, 0], 0, Staging(8, 256)),
        dispatch([1, 1, 1], 1, Staging(8, 256)),
    ],
    "3 ranks, 2 dispatches of 2 chunks": [dispatch([2, 2, 2], i) for i in range(2)],
    "3 ranks, 3 dispatches of 2 chunks": [dispatch([2, 2, 2], i % 2) for i in range(3)],
    "3 ranks, dispatch, combine, dispatch": [dispatch([2, 2, 2], 0), combine([1, 1, 1], 1), dispatch([2, 2, 2], 0)],
    "3 ranks, ragged with zeros": [dispatch([2, 0, 1], 0), combine([2, 0, 1], 1), dispatch([0, 3, 0], 0)],
    "3 ranks, streaming 3 chunks through 2 slots": [dispatch([3, 3, 3], i % 2, NARROW) for i in range(2)],
    "3 ranks, streaming 4 chunks through 2 slots": [combine([2, 2, 2], i % 2, NARROW) for i in range(2)],
    "4 ranks, 2 dispatches of 1 chunk": [dispatch([1, 1, 1, 1], i) for i in range(2)],
}
