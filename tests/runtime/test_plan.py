"""Properties of the planners, for any ranks, rows and staging; `test_check` explores what happens when the schedules run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from itertools import chain, groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.plans import Call, Planner, calls, chunks, copies_of, delivered, lanes, merged
from thunderep.runtime.chunks import (
    ALIGNMENT,
    HOST_GRAIN,
    MIN_SLOT_BYTES,
    Staging,
    chunk_count,
    combine_messages,
    gpu_grain,
)
from thunderep.runtime.plan import LOCAL, most_lanes, plan_combine, plan_combine_in_place, plan_dispatch
from thunderep.runtime.schedule import Copy, Flag, Lane, Wait


@given(calls())
def test_every_byte_is_delivered_once(call: Call) -> None:
    assert merged(delivered(call.schedules())) == merged(call.expected())


@given(calls())
def test_a_chunk_stays_in_its_slot(call: Call) -> None:
    size = call.staging.slot_bytes
    for schedule in call.schedules():
        for lane in lanes(schedule, "send") + lanes(schedule, "receive"):
            for chunk in chunks(lane):
                (slot,) = {flag.slot for flag in (*chunk.wait.flags, *chunk.signal.flags)}
                assert 0 <= slot < call.staging.slots
                assert chunk.copies
                for copy in chunk.copies:
                    at = copy.dst if lane.name == "send" else copy.src
                    assert slot * size <= at.offset < at.offset + copy.nbytes <= (slot + 1) * size
                    assert at.offset % ALIGNMENT == 0


@given(calls())
def test_both_sides_of_every_flag_agree(call: Call) -> None:
    """A reader takes chunks in the order in which they are sent, gives each credit back, and every credit is waited for."""
    schedules = call.schedules()
    peers = {r: {p for p in range(len(schedules)) if p != r} for r in range(len(schedules))}
    for schedule in schedules:
        sending = list(chain.from_iterable(map(chunks, lanes(schedule, "send"))))
        for chunk in sending:
            owner_slot = schedule.rank, chunk.signal.flags[0].slot
            assert chunk.wait.value == 0
            assert {(f.owner, f.slot, f.reader) for f in chunk.wait.flags} == {(*owner_slot, p) for p in peers[schedule.rank]}
            assert chunk.signal.value == 1
            assert set(chunk.signal.flags) <= set(chunk.wait.flags)
        for reader in peers[schedule.rank]:
            received = chain.from_iterable(map(chunks, lanes(schedules[reader], "receive")))
            receiving = [chunk for chunk in received if chunk.wait.flags[0].owner == schedule.rank]
            assert all((c.wait.value, c.signal.value, c.wait.flags) == (1, 0, c.signal.flags) for c in receiving)
            signalled = [flag for chunk in sending for flag in chunk.signal.flags if flag.reader == reader]
            assert [flag for chunk in receiving for flag in chunk.wait.flags] == signalled


@given(calls())
def test_a_call_that_fits_in_half_the_ring_uses_no_slot_twice(call: Call) -> None:
    half = call.staging.slots // 2
    for schedule in call.schedules():
        slots = [chunk.signal.flags[0].slot for lane in lanes(schedule, "send") for chunk in chunks(lane)]
        assert slots == [(call.bank * half + i) % call.staging.slots for i in range(len(slots))]
        if sum(math.ceil(m.nbytes / call.staging.slot_bytes) for m in call.messages(schedule.rank)) <= half:
            assert len(slots) <= half


@st.composite
def uneven_combines(draw: st.DrawFn) -> Call:
    """Messages that fill at most half a ring of large slots, some of them most of it."""
    staging = Staging(2 * draw(st.integers(8, 16)), draw(st.sampled_from([2**19, 2**21])))
    left, rows = staging.slots // 2, [0]
    for _ in range(draw(st.integers(1, 4))):
        rows.append(draw(st.integers(0, left)))
        left -= rows[-1]
    return Call(plan_combine, tuple(rows), (staging.slot_bytes,), max(rows), staging, draw(st.integers(0, 1)))


@given(uneven_combines())
def test_an_uneven_call_that_fits_in_half_the_ring_uses_no_slot_twice(call: Call) -> None:
    (send, *_) = [*lanes(call.schedules()[0], "send"), Lane("send", ())]
    slots = [chunk.signal.flags[0].slot for chunk in chunks(send)]
    assert len(set(slots)) == len(slots) <= call.staging.slots // 2


@given(st.one_of(calls(), uneven_combines()))
def test_what_a_combine_in_place_receives_from_a_rank_lies_in_one_piece(call: Call) -> None:
    """Of each payload: then its first address says where all of it is."""
    ranks = range(len(call.rows))
    shape = (call.rows, call.row_bytes, call.max_rows, call.staging, call.bank)
    schedules = [plan_combine_in_place(rank, *shape) for rank in ranks]
    messages = [combine_messages(owner, call.rows, call.row_bytes, call.max_rows) for owner in ranks]
    slots = [sum(math.ceil(m.nbytes / call.staging.slot_bytes) for m in sent) for sent in messages]
    if any(needed > call.staging.slots // 2 for needed in slots):
        assert schedules == [None] * len(ranks)
        return
    for rank, schedule in zip(ranks, schedules, strict=True):
        assert schedule is not None
        received = [c for lane in lanes(schedule, "receive") for c in copies_of(lane.steps)]
        shifts: dict[tuple[int, int], set[int]] = {}
        for copy in received:
            key = (copy.src.memory.rank, copy.dst.memory.payload)
            shifts.setdefault(key, set()).add(copy.dst.offset - copy.src.offset)
        assert all(len(offsets) == 1 for offsets in shifts.values())
        sizes = dict.fromkeys(shifts, 0)
        for copy in received:
            sizes[copy.src.memory.rank, copy.dst.memory.payload] += copy.nbytes
        mine = [(p, call.rows[rank] * width) for p, width in enumerate(call.row_bytes) if call.rows[rank] * width]
        assert sizes == {(owner, payload): nbytes for owner in ranks if owner != rank for payload, nbytes in mine}


@given(calls())
def test_chunks_are_no_more_than_they_are_worth(call: Call) -> None:
    """But for rounding to whole units of alignment, and for what does not fit a slot."""
    for schedule in call.schedules():
        count = sum(len(chunks(lane)) for lane in lanes(schedule, "send"))
        most = (
            max(chunk_count(m.nbytes, call.grain), m.nbytes / call.staging.slot_bytes) for m in call.messages(schedule.rank)
        )
        assert count <= sum(map(math.ceil, most))


@pytest.mark.parametrize(("mib", "count"), [(0.25, 1), (1, 1), (2, 2), (4, 3), (8, 4), (16, 6)])
def test_copy_engines_send_so_many_chunks(mib: float, count: int) -> None:
    """The fastest, or within 2% of it, of those tried on an H200."""
    schedule = plan_dispatch(0, [1, 1], [int(mib * 2**20)], 1, Staging.of(2, 256 << 20), 0, gpu_grain(55))
    assert len(chunks(lanes(schedule, "send")[0])) == count


@given(calls())
def test_only_lanes_with_work_are_planned(call: Call) -> None:
    for schedule in call.schedules():
        names = [lane.name for lane in schedule.lanes]
        assert len(names) == len(set(names))
        assert all(lane.steps for lane in schedule.lanes)
        assert all(step.nbytes > 0 for lane in schedule.lanes for step in lane.steps if isinstance(step, Copy))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_lanes_are_as_many_as_said(num_ranks: int) -> None:
    """Hardware queues are few: CUDA takes 8."""
    staging = Staging.of(num_ranks, 64 << 20)
    schedules = [p(0, [4096] * num_ranks, [4096, 64], 4096, staging, 0, gpu_grain(55)) for p in (plan_dispatch, plan_combine)]
    flagged = max(len([lane for lane in schedule.lanes if lane.name != LOCAL]) for schedule in schedules)
    assert flagged == (most_lanes(num_ranks) if num_ranks > 1 else 0)
    assert most_lanes(num_ranks) < 6


@st.composite
def streaming(draw: st.DrawFn) -> list[Call]:
    """Two operations in a row, either up to twice as large as the staging."""
    num_ranks, max_rows = draw(st.integers(2, 8)), draw(st.integers(1, 40))
    staging = Staging(Staging.slots_for(num_ranks), draw(st.integers(1, 8)) * ALIGNMENT)
    rows = draw(st.lists(st.integers(0, max_rows), min_size=num_ranks, max_size=num_ranks))
    widest = 2 * staging.nbytes // max_rows
    row_bytes = draw(st.integers(1, widest)), draw(st.integers(0, 9))
    return [
        Call(planner, tuple(rows), row_bytes, max_rows, staging, draw(st.integers(0, 1)))
        for planner in draw(st.permutations([plan_dispatch, plan_combine]))
    ]


@settings(max_examples=25)
@given(streaming())
def test_one_queue_a_rank_runs_all_in_the_order_of_issue(calls: list[Call]) -> None:
    queues = [
        deque(step for call in calls for _, step in call.schedules()[rank].issue_order() if not isinstance(step, Copy))
        for rank in range(len(calls[0].rows))
    ]
    flags: dict[Flag, int] = defaultdict(int)
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and not (isinstance(queue[0], Wait) and any(flags[flag] != queue[0].value for flag in queue[0].flags)):
                step = queue.popleft()
                flags.update(dict.fromkeys(step.flags, step.value))
                moved = True
    assert not any(queues)


@settings(max_examples=25)
@given(streaming())
def test_signals_and_waits_between_two_chunks_are_issued_together(calls: list[Call]) -> None:
    for call in calls:
        for schedule in call.schedules():
            order = schedule.issue_order()
            assert [[step for i, step in order if i == lane] for lane in range(len(schedule.lanes))] == [
                list(lane.steps) for lane in schedule.lanes
            ]
            runs = [lane for (lane, copies), _ in groupby(order, lambda s: (s[0], isinstance(s[1], Copy))) if not copies]
            chunks_of = [sum(isinstance(step, Wait) for step in lane.steps) for lane in schedule.lanes]
            assert Counter(runs) == {lane: chunks + 1 for lane, chunks in enumerate(chunks_of) if chunks}


@pytest.mark.parametrize("planner", [plan_dispatch, plan_combine])
def test_one_rank_touches_no_staging(planner: Planner) -> None:
    schedule = planner(0, [5], [64, 3], 8, Staging.of(1, 1 << 20), 0, HOST_GRAIN)
    assert [lane.name for lane in schedule.lanes] == (["local"] if planner is plan_dispatch else [])


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([plan_dispatch, plan_combine]),
    st.lists(st.integers(2**21, 2**23), min_size=2, max_size=4),
    st.integers(0, 1),
)
def test_sizes_beyond_32_bits_are_exact_and_the_plan_stays_small(planner: Planner, rows: list[int], bank: int) -> None:
    call = Call(planner, tuple(rows), (2 * 7168, 8, 7), 2**23, Staging(16, 2**30), bank)
    schedules = call.schedules()
    assert merged(delivered(schedules)) == merged(call.expected())
    assert (
        max(max(copy.src.offset, copy.dst.offset) + copy.nbytes for copy in call.expected()) > 2 * 2**32
    )  # elements of 2 bytes
    assert sum(len(lane.steps) for s in schedules for lane in s.lanes) < 8000


def test_a_message_of_one_byte_and_one_of_a_slot_and_a_byte() -> None:
    staging = Staging(4, 512)
    lengths = {
        nbytes: [
            c.nbytes
            for lane in lanes(plan_dispatch(0, [1, 0], [nbytes], 1, staging, 0, HOST_GRAIN), "send")
            for c in copies_of(lane.steps)
        ]
        for nbytes in (1, 512, 513, 1024)
    }
    assert lengths == {1: [1], 512: [512], 513: [512, 1], 1024: [512, 512]}


def test_payloads_share_a_chunk_and_each_begins_aligned() -> None:
    schedule = plan_dispatch(1, [4, 3], [100, 7, 0, 1], 4, Staging(4, 4096), 1, HOST_GRAIN)
    (chunk,) = chunks(schedule.lanes[0])
    assert [(c.src.memory.payload, c.dst.offset - 2 * 4096, c.nbytes) for c in chunk.copies] == [
        (0, 0, 300),
        (1, 512, 21),
        (3, 768, 3),
    ]


def test_chunks_of_a_combine_go_to_all_peers_in_turn() -> None:
    schedule = plan_combine(0, [1, 4, 4], [512], 4, Staging(4, 512), 0, HOST_GRAIN)
    readers = [chunk.signal.flags[0].reader for chunk in chunks(schedule.lanes[0])]
    assert readers == [1, 2, 1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_the_largest_ring_for_some_bytes(num_ranks: int) -> None:
    slots = Staging.slots_for(num_ranks)
    assert slots % 2 == 0
    assert slots // 2 >= max(8, 2 * (num_ranks - 1))
    assert slots // 2 % max(1, num_ranks - 1) == 0
    for nbytes in (slots * MIN_SLOT_BYTES, slots * MIN_SLOT_BYTES + 1, 10**7 + 1, 2**40):
        staging = Staging.of(num_ranks, nbytes)
        assert staging.slots == slots
        assert staging.slot_bytes % ALIGNMENT == 0
        assert staging.nbytes <= nbytes < staging.nbytes + slots * ALIGNMENT
    for nbytes in (slots * MIN_SLOT_BYTES - 1, 0, -1):
        with pytest.raises(ValueError, match=rf"staging_bytes: got {nbytes}; {num_ranks} ranks need at least {slots * 4096}"):
            Staging.of(num_ranks, nbytes)


@pytest.mark.parametrize("planner", [plan_dispatch, plan_combine])
def test_arguments_out_of_range_raise(planner: Planner) -> None:
    staging = Staging(4, 4096)
    with pytest.raises(ValueError, match="rank: got 2, expected 0 to 1"):
        planner(2, [1, 1], [4], 1, staging, 0, HOST_GRAIN)
    with pytest.raises(ValueError, match="rank: got -1"):
        planner(-1, [1, 1], [4], 1, staging, 0, HOST_GRAIN)
    with pytest.raises(ValueError, match="bank: got 2, expected 0 or 1"):
        planner(0, [1, 1], [4], 1, staging, 2, HOST_GRAIN)
    with pytest.raises(ValueError, match="rows: rank 1 has 2, expected 0 to max_rows = 1"):
        planner(0, [1, 2], [4], 1, staging, 0, HOST_GRAIN)
    with pytest.raises(ValueError, match="rows: rank 0 has -1"):
        planner(0, [-1, 1], [4], 1, staging, 0, HOST_GRAIN)
