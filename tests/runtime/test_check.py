"""The checker: correct schedules are clean in every interleaving, and planted mistakes are found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.runtime.operations import (
    CLEAN,
    NARROW,
    RING,
    Site,
    combine,
    combine_in_place,
    dispatch,
    kinds,
    planted,
    sites,
    without_credits,
)
from thunderep.runtime.check import Report, check
from thunderep.runtime.delivery import Operation
from thunderep.runtime.schedule import Copy, Lane, Signal, Step, Wait


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
