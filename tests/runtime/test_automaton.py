"""The checker on steps written by hand, and that to leave interleavings out misses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.runtime.operations import CLEAN, NARROW, RING, combine, dispatch, kinds, planted, sites, without_credits
from thunderep.runtime.check import check
from thunderep.runtime.delivery import Operation
from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Schedule, Signal, Step, Wait

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
