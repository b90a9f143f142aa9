"""The checker: correct schedules are clean in every interleaving, and planted mistakes are found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from thunderep.runtime.check import Report, check
from thunderep.runtime.chunks import HOST_GRAIN, Staging
from thunderep.runtime.delivery import Operation, expect_combine, expect_dispatch
from thunderep.runtime.plan import plan_combine, plan_combine_in_place, plan_dispatch
from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Schedule, Signal, Step, Wait

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


@pytest.mark.parametrize("name", CLEAN)
def test_planned_schedules_are_clean(name: str) -> None:
    began = time.perf_counter()
    report = check(CLEAN[name])
    sys.stdout.write(f"{name}: {report.states} states in {time.perf_counter() - began:.2f} s\n")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", [name for name in CLEAN if name.startswith(("1 rank", "2 ranks", "3 ranks, ragged"))])
def test_single_steps_are_clean_too(name: str) -> None:
    report = check(CLEAN[name], reduce=False)
    sys.stdout.write(f"{name}, every step by itself: {report.states} states\n")
    assert report.ok, str(report)


GRAPHS: dict[str, Operation] = {
    "2 ranks": dispatch([2, 2], 0),
    "2 ranks, combine": combine([2, 1], 1),
    "2 ranks, streaming": dispatch([4, 2], 0, NARROW),
    "2 ranks, odd payloads": dispatch([3, 2], 0, RING, (101, 7)),
    "2 ranks, combine in place": combine_in_place([1, 1], 1),
    "3 ranks": dispatch([1, 1, 1], 0),
    "3 ranks, combine": combine([1, 1, 1], 0),
    "3 ranks, ragged": dispatch([2, 0, 1], 1),
}
"""Single operations, captured as a graph. A test replays one: in one bank each time, so every credit counts."""


def mistakes(graph: str, change: Callable[[Operation, Site, Step], Iterator[Operation]]) -> Iterator[tuple[str, Report]]:
    """For each step and each change of it: what was changed, and what the checker says when the graph is run twice."""
    operation = GRAPHS[graph]
    assert check([operation] * 2).ok
    for site, step in sites(operation):
        for changed in change(operation, site, step):
            yield f"{site}: {step}", check([changed] * 2)


def assert_found(found: Iterator[tuple[str, Report]], expected: set[str]) -> None:
    """All mistakes are found, and together they show as each of the `expected` kinds."""
    seen: set[str] = set()
    count = 0
    for what, report in found:
        assert report.complete, what
        assert report.problems, what
        seen |= kinds(report)
        count += 1
    sys.stdout.write(f"{count} mistakes, found as {sorted(seen)}\n")
    assert count
    assert expected <= seen


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_dropped_wait_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Wait):
            yield planted(operation, site)

    assert_found(mistakes(graph, change), {"race"})


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_wait_dropped_in_one_of_several_operations_is_found(late: int) -> None:
    operations = [dispatch([2, 2], 0), combine([2, 2], 0), dispatch([2, 2], 0)]
    for site, step in sites(operations[late]):
        if isinstance(step, Wait) and (step.value == 1 or late):  # at first the ring is free anyway
            changed = [planted(operation, site) if i == late else operation for i, operation in enumerate(operations)]
            assert check(changed).problems, f"{site}: {step}"


@pytest.mark.parametrize("graph", ["3 ranks", "3 ranks, ragged"])
def test_each_dropped_credit_of_one_reader_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Wait) and len(step.flags) > 1:
            yield from (
                planted(operation, site, replace(step, flags=tuple(f for f in step.flags if f != flag))) for flag in step.flags
            )

    assert_found(mistakes(graph, change), {"race"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_dropped_signal_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Signal) and step.value == 1:
            yield planted(operation, site)

    assert_found(mistakes(graph, change), {"deadlock"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_dropped_reset_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Signal) and step.value == 0:
            yield planted(operation, site)

    # The next time round, the reader takes the flag that it left set for a new chunk's.
    assert_found(mistakes(graph, change), {"wrong bytes"})


def test_a_dropped_reset_in_the_last_operation_leaves_its_flag_set() -> None:
    operation = dispatch([1, 1], 0)
    site = next(site for site, step in sites(operation) if isinstance(step, Signal) and step.value == 0)
    assert kinds(check([planted(operation, site)])) == {"flag left set"}


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_copy_and_its_neighbour_swapped_are_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        steps = operation.schedules[site.rank].lanes[site.lane].steps
        if site.step + 1 < len(steps) and isinstance(step, Copy) != isinstance(steps[site.step + 1], Copy):
            if isinstance(step, Signal):  # only holds back a chunk that is ready
                return
            yield planted(operation, site, steps[site.step + 1], step, span=2)

    assert_found(mistakes(graph, change), {"race"})


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("by", [1, 256, -1])
def test_each_copy_to_or_from_the_wrong_offset_is_found(graph: str, by: int) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Copy):
            yield planted(operation, site, replace(step, dst=step.dst._replace(offset=step.dst.offset + by)))
            yield planted(operation, site, replace(step, src=step.src._replace(offset=step.src.offset + by)))

    assert_found(mistakes(graph, change), {"wrong bytes", "misplaced bytes", "lost bytes"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_copy_that_is_a_byte_short_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Copy):
            yield planted(operation, site, replace(step, nbytes=step.nbytes - 1))

    assert_found(mistakes(graph, change), {"wrong bytes", "lost bytes"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_dropped_copy_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Copy):
            yield planted(operation, site)

    assert_found(mistakes(graph, change), {"wrong bytes", "lost bytes"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_doubled_copy_into_an_output_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Copy) and step.dst.memory.kind == "output":
            yield planted(operation, site, step, step)

    assert_found(mistakes(graph, change), {"doubled bytes"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_doubled_signal_is_found(graph: str) -> None:
    def change(operation: Operation, site: Site, step: Step) -> Iterator[Operation]:
        if isinstance(step, Signal):
            yield planted(operation, site, step, step)

    assert_found(mistakes(graph, change), {"lost signal"})


def test_one_buffer_instead_of_two_needs_its_credits() -> None:
    one, two = [dispatch([2, 2], 0)] * 3, [dispatch([2, 2], i % 2) for i in range(3)]
    assert check(one).ok
    assert check(list(map(without_credits, two))).ok
    assert "race" in kinds(check(list(map(without_credits, one))))


@pytest.mark.parametrize(("num_ranks", "length"), [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3)])
def test_a_graph_may_rely_on_alternation_only_if_its_length_is_even(num_ranks: int, length: int) -> None:
    graph = [dispatch([1] * num_ranks, i % 2) for i in range(length)]
    replayed = check(list(map(without_credits, graph)) * 2)
    if length % 2:
        assert "race" in kinds(replayed)
    else:
        assert replayed.ok, str(replayed)
    assert check(graph * 2).ok


def test_a_credit_that_another_one_implies_is_not_called_a_mistake() -> None:
    streamed = dispatch([5, 5], 0, NARROW)  # through slots 0, 1, 0, 1, 0, and a reader keeps that order
    second = [site for site, step in sites(streamed) if isinstance(step, Wait) and step.value == 0 and site.rank == 0][1]
    assert check([planted(streamed, second)] * 2).ok


def test_alternation_proves_nothing_about_a_rank_that_sends_no_rows() -> None:
    operations = [dispatch([2, 0], i % 2) for i in range(3)]
    assert check(operations).ok
    assert "race" in kinds(check(list(map(without_credits, operations))))


def test_sending_and_receiving_in_one_lane_deadlocks_once_it_streams() -> None:
    def one_lane(operation: Operation) -> Operation:
        return replace(
            operation,
            schedules=tuple(
                replace(s, lanes=(Lane("all", tuple(step for lane in s.lanes for step in lane.steps)),))
                for s in operation.schedules
            ),
        )

    assert check([one_lane(dispatch([2, 2], 0))]).ok
    report = check([one_lane(dispatch([6, 6], 0))])
    assert kinds(report) == {"deadlock"}
    text = str(report)
    assert "lanes left: 2" in text
    assert "rank 0, all: wait for 0 in (slot 0 of rank 0, reader 1)" in text
    assert "rank 1, all: wait for 0 in (slot 0 of rank 1, reader 0)" in text
    assert "(slot 0 of rank 0, reader 1) 1" in text
    assert len(report.problems[0].trace) == 8  # 4 chunks of each rank fill both rings


def test_a_race_comes_with_both_steps_and_a_shortest_run() -> None:
    operation = dispatch([1, 1], 0)
    wait = next(site for site, step in sites(operation) if isinstance(step, Wait) and step.value == 1)
    (problem,) = [p for p in check([planted(operation, wait)]).problems if p.kind == "race"]
    assert "at offset 0 of rank 1's staging, between" in problem.what
    assert "rank 1, send: copy 256 bytes from offset 0 of rank 1's input 0 to offset 0 of rank 1's staging" in problem.what
    assert (
        "rank 0, receive from 1: copy 256 bytes from offset 0 of rank 1's staging to offset 512 of rank 0's output 0"
        in problem.what
    )
    assert problem.trace == ()  # it is there from the start


FLAG = Flag(0, 0, 1)
STAGED = Place(Memory("staging", 0), 0)


def by_hand(*lanes: Sequence[Sequence[Step]], delivers: tuple[Copy, ...] = ()) -> Operation:
    """An operation from each rank's lanes."""
    return Operation(
        tuple(Schedule(r, tuple(Lane(str(i), tuple(s)) for i, s in enumerate(ls))) for r, ls in enumerate(lanes)), delivers
    )


@pytest.mark.parametrize("reduce", [True, False])
def test_a_wait_that_can_be_undone_may_pass_or_not(reduce: bool) -> None:
    fleeting = by_hand([[Signal((FLAG,), 1), Signal((FLAG,), 0)]], [[Wait((FLAG,), 1)]])
    report = check([fleeting], reduce=reduce)
    assert kinds(report) == {"deadlock"}
    assert report.states == 5


@pytest.mark.parametrize("reduce", [True, False])
def test_flags_that_two_lanes_signal_lose_one(reduce: bool) -> None:
    signal, take = Signal((FLAG,), 1), (Wait((FLAG,), 1), Signal((FLAG,), 0))
    assert kinds(check([by_hand([[signal], [signal]], [[*take, *take]])], reduce=reduce)) == {"lost signal"}


def test_copies_of_one_lane_do_not_race_with_each_other() -> None:
    there, back = Copy(Place(Memory("input", 0), 0), STAGED, 8), Copy(STAGED, Place(Memory("output", 0), 0), 8)
    whole = Copy(there.src, back.dst, 8)
    assert check([by_hand([[there, back]], delivers=(whole,))]).ok
    assert kinds(check([by_hand([[there], [back]], delivers=(whole,))])) == {"race"}
    assert kinds(check([by_hand([[back, there]], delivers=(whole,))])) == {"wrong bytes"}


@pytest.mark.parametrize(("second", "expected"), [(8, set()), (16, {"wrong bytes"})])
def test_a_copy_that_serves_two_deliveries_is_checked_for_both(second: int, expected: set[str]) -> None:
    given, taken = Memory("input", 0), Memory("output", 0)
    operation = by_hand(
        [[Copy(Place(given, 0), STAGED, 16), Copy(STAGED, Place(taken, 0), 16)]],
        delivers=(Copy(Place(given, 0), Place(taken, 0), 8), Copy(Place(given, second), Place(taken, 8), 8)),
    )
    assert kinds(check([operation])) == expected


def test_bytes_of_the_operation_before_are_wrong_bytes() -> None:
    there, back = Copy(Place(Memory("input", 0), 0), STAGED, 8), Copy(STAGED, Place(Memory("output", 0), 0), 8)
    whole = (Copy(there.src, back.dst, 8),)
    report = check([by_hand([[there, back]], delivers=whole), by_hand([[back]], delivers=whole)])
    assert kinds(report) == {"wrong bytes"}
    assert "needs operation 1's bytes at offset 0 of rank 0's input 0 and finds operation 0's bytes" in str(report)


@pytest.mark.parametrize(
    "copy",
    [
        Copy(Place(Memory("input", 1), 0), STAGED, 8),
        Copy(STAGED, Place(Memory("output", 1), 0), 8),
        Copy(STAGED, Place(Memory("staging", 1), 0), 8),
        Copy(Place(Memory("output", 0), 0), STAGED, 8),
        Copy(Place(Memory("input", 0), 0), Place(Memory("input", 0), 8), 8),
    ],
    ids=["peer's input", "peer's output", "relay", "out of an output", "into an input"],
)
def test_a_copy_that_reaches_what_it_must_not_is_found(copy: Copy) -> None:
    report = check([by_hand([[copy]], [])])
    assert kinds(report) == {"bad copy"}
    assert not report.ok


def test_a_direct_copy_from_the_wrong_place_is_found() -> None:
    into = Place(Memory("output", 0), 0)
    operation = by_hand(
        [[Copy(Place(Memory("input", 0), 4), into, 8)]], delivers=(Copy(Place(Memory("input", 0), 0), into, 8),)
    )
    assert kinds(check([operation])) == {"wrong bytes"}


def test_too_many_states_are_not_ok() -> None:
    report = check(CLEAN["3 ranks, 3 dispatches of 2 chunks"], max_states=1000)
    assert not report.ok
    assert not report.problems
    assert "not all" in str(report)


def test_what_cannot_be_checked_raises() -> None:
    with pytest.raises(ValueError, match="got none"):
        check([])
    with pytest.raises(ValueError, match=r"operation 1 has schedules of ranks \[0, 1, 2\]"):
        check([dispatch([1, 1], 0), dispatch([1, 1, 1], 0)])
    with pytest.raises(ValueError, match="expected value 0 or 1"):
        check([by_hand([[Wait((FLAG,), 2)]])])
    whole = Copy(Place(Memory("input", 0), 0), Place(Memory("output", 0), 0), 8)
    with pytest.raises(ValueError, match="overlap"):
        check([by_hand([[whole]], delivers=(whole, whole))])


@st.composite
def mistaken(draw: st.DrawFn) -> list[Operation]:
    """Two or three small operations, in any banks, in which up to two steps have been dropped, doubled or swapped."""
    num_ranks = draw(st.sampled_from([2, 2, 2, 3]))
    operations = []
    for _ in range(draw(st.integers(2, 3)) if num_ranks == 2 else 1):
        planner = draw(st.sampled_from([dispatch, combine]))
        rows = draw(st.lists(st.integers(0, 3 if num_ranks == 2 else 1), min_size=num_ranks, max_size=num_ranks))
        operation = planner(rows, draw(st.integers(0, 1)), draw(st.sampled_from([RING, NARROW])))
        operations.append(draw(st.sampled_from([operation, operation, without_credits(operation)])))
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(operations) - 1))
        places = list(sites(operations[i]))
        if not places:
            continue
        site, step = draw(st.sampled_from(places))
        after = operations[i].schedules[site.rank].lanes[site.lane].steps[site.step + 1 : site.step + 2]
        steps = draw(st.sampled_from([(), (step, step), (*after, step)]))
        operations[i] = planted(operations[i], site, *steps, span=2 if after and steps == (*after, step) else 1)
    return operations


@settings(max_examples=150, deadline=None)
@given(mistaken())
def test_the_reduction_misses_nothing(operations: list[Operation]) -> None:
    full = check(operations, reduce=False, max_states=20_000)
    assume(full.complete or full.problems)
    reduced = check(operations)
    assert reduced.complete
    assert bool(reduced.problems) == bool(full.problems), f"{full}\n{reduced}"
    assert reduced.states <= full.states


@st.composite
def handshakes(draw: st.DrawFn) -> Operation:
    """Two or three ranks of one or two lanes of random signals and waits of three flags."""
    flags = [Flag(0, slot, 1) for slot in range(3)]
    step = st.builds(
        lambda make, flag, value: make((flag,), value),
        st.sampled_from([Signal, Wait]),
        st.sampled_from(flags),
        st.integers(0, 1),
    )
    lanes = st.lists(st.lists(step, max_size=3), min_size=1, max_size=2)
    return by_hand(*draw(st.lists(lanes, min_size=2, max_size=3)))


@settings(max_examples=300, deadline=None)
@given(handshakes())
def test_the_reduction_misses_nothing_in_random_handshakes(operation: Operation) -> None:
    full, reduced = check([operation], reduce=False), check([operation])
    assert kinds(reduced) == kinds(full)
    assert reduced.states <= full.states
