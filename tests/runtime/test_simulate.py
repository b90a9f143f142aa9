"""What holds of every simulation, for any machine and any of the planners' schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderep.forecast.calibration import exchange_plans
from thunderep.runtime.chunks import Staging, gpu_grain
from thunderep.runtime.machines import CopyEngines, Gpu, Link, MachineModel, Nccl, Protocol
from thunderep.runtime.plan import plan_combine, plan_dispatch
from thunderep.runtime.ring import plan_ring
from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Schedule, Signal, Step, Wait
from thunderep.runtime.simulate import Executor, Resource, capacities, max_min_rates, simulate

FAST = 1e6  # GB/s; so much that it is never the limit
LL = Protocol(launch_us=10, hop_us=2, overhead=2)


def machine(num_ranks: int, link: Link, *, engines: int = 3, memory_gbps: float = FAST) -> MachineModel:
    """GPUs alike on one socket; round figures."""
    costs = CopyEngines(engines, launch_us=10, copy_us=2, flag_us=3, flag_latency_us=4)
    gpus = tuple(Gpu("x16") for _ in range(num_ranks))
    return MachineModel(
        "test", gpus, {"x16": link}, {}, memory_gbps, FAST, FAST, costs, Nccl(1 << 20, {"LL": LL}), {"everything": "invented"}
    )


def speeds(low: float = 0.5) -> st.SearchStrategy[float]:
    return st.floats(low, 500)


@st.composite
def machines(draw: st.DrawFn) -> MachineModel:
    """Two to five GPUs, links of two kinds, some behind switches, on one or two sockets."""
    kinds = ["wide", "narrow"]
    links = {kind: Link(*draw(st.tuples(speeds(), speeds(), speeds()))) for kind in kinds}
    bridges = {name: Link(*draw(st.tuples(speeds(), speeds(), speeds()))) for name in ("left", "right")}
    gpu = st.builds(Gpu, st.sampled_from(kinds), st.integers(0, 1), st.sampled_from([None, *bridges]))
    delays = st.floats(0, 20)
    costs = draw(st.builds(CopyEngines, st.integers(1, 3), delays, delays, delays, delays))
    gpus = tuple(draw(st.lists(gpu, min_size=2, max_size=5)))
    return MachineModel(
        "test", gpus, links, bridges, draw(speeds()), draw(speeds()), FAST, costs, Nccl(1 << 20, {"LL": LL}), {}
    )


Case = tuple[list[Schedule], MachineModel, Executor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A dispatch, a combine or a ring of all GPUs of a machine."""
    described = draw(machines())
    num_ranks = len(described.gpus)
    kind = draw(st.sampled_from(["dispatch", "combine", "ring"]))
    if kind == "ring":
        nbytes = draw(st.integers(1, 5 << 20))
        return [plan_ring(r, num_ranks, nbytes, 1 << 20) for r in range(num_ranks)], described, Executor.nccl(LL)
    planner = plan_dispatch if kind == "dispatch" else plan_combine
    rows = draw(st.lists(st.integers(0, 600), min_size=num_ranks, max_size=num_ranks))
    staging = Staging(2 * draw(st.integers(1, 8)), draw(st.sampled_from([4096, 1 << 18, 1 << 20])))
    widths = [4096, 64] if staging.slot_bytes > 4096 else [64]
    schedules = [planner(r, rows, widths, 600, staging, 0, 2) for r in range(num_ranks)]
    return schedules, described, Executor.dma(described)


def copies(schedules: Sequence[Schedule]) -> list[tuple[int, Copy]]:
    return [(s.rank, step) for s in schedules for lane in s.lanes for step in lane.steps if isinstance(step, Copy)]


@settings(deadline=None, max_examples=150)
@given(cases())
def test_nothing_carries_more_than_it_can(case: Case) -> None:
    schedules, described, executor = case
    result = simulate(schedules, described, executor)
    capacity = capacities(described, executor)
    for resource, nbytes in result.nbytes.items():
        assert result.us - executor.launch_us >= nbytes / capacity[resource] - 1e-3, resource


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_byte_crosses_the_links_that_it_must(case: Case) -> None:
    schedules, described, executor = case
    expected: Counter[Resource] = Counter()
    for rank, copy in copies(schedules):
        gpu = described.gpus[rank]
        for place, direction in ((copy.src, "down"), (copy.dst, "up")):
            if place.memory.kind == "staging":
                home = described.gpus[place.memory.rank].socket
                expected[direction, f"gpu {rank}"] += copy.nbytes
                expected["memory", home] += copy.nbytes
                if gpu.bridge:
                    expected[direction, f"bridge {gpu.bridge}"] += copy.nbytes
                if home != gpu.socket:
                    ends = (home, gpu.socket) if direction == "down" else (gpu.socket, home)
                    expected["sockets", ends[0], ends[1]] += copy.nbytes
    nbytes = simulate(schedules, described, executor).nbytes
    assert {r: n for r, n in nbytes.items() if r[0] not in ("link", "bridge", "device")} == dict(expected)


@settings(deadline=None, max_examples=100)
@given(cases(), st.floats(1.01, 100))
def test_a_machine_that_is_k_times_as_fast_takes_a_kth_of_the_time(case: Case, k: float) -> None:
    schedules, slow, executor = case

    def faster(link: Link) -> Link:
        return Link(link.one_way_gbps * k, link.both_ways_gbps * k, link.sm_both_ways_gbps * k)

    fast = replace(
        slow,
        links={name: faster(link) for name, link in slow.links.items()},
        bridges={name: faster(bridge) for name, bridge in slow.bridges.items()},
        memory_gbps=slow.memory_gbps * k,
        socket_link_gbps=slow.socket_link_gbps * k,
        device_gbps=slow.device_gbps * k,
    )
    delays = (executor.launch_us, executor.copy_us, executor.flag_us, executor.flag_latency_us)
    quick = Executor(executor.engines, *(delay / k for delay in delays))
    # Where two things happen all but at once, rounding may decide which comes first.
    assert simulate(schedules, fast, quick).us * k == pytest.approx(simulate(schedules, slow, executor).us, rel=0.02)


@given(st.floats(1, 60), st.floats(1, 60), st.floats(0, 9), st.floats(1, 4), st.integers(1, 1 << 22))
def test_where_no_copies_queue_for_an_engine_better_is_never_slower(
    one: float, both: float, delay: float, factor: float, nbytes: int
) -> None:
    slow = machine(2, Link(one, both, both))
    costs = replace(slow.copy_engines, copy_us=delay, flag_us=delay, flag_latency_us=delay)
    slow = replace(slow, copy_engines=costs)
    less = delay / factor
    better = [
        replace(slow, links={"x16": Link(one * factor, both, both)}),
        replace(slow, links={"x16": Link(one, both * factor, both * factor)}),
        replace(slow, copy_engines=replace(costs, copy_us=less)),
        replace(slow, copy_engines=replace(costs, flag_us=less)),
        replace(slow, copy_engines=replace(costs, flag_latency_us=less)),
    ]
    plans: list[tuple[list[Schedule], Callable[[MachineModel], Executor]]] = [
        (next(exchange_plans(nbytes)), Executor.dma),
        ([plan_ring(rank, 2, nbytes, 1 << 20) for rank in (0, 1)], lambda _: Executor.nccl(LL)),
    ]
    for schedules, executor in plans:
        time = simulate(schedules, slow, executor(slow)).us
        for fast in better:
            assert simulate(schedules, fast, executor(fast)).us <= time * (1 + 1e-9)


def test_two_ranks_by_hand() -> None:
    described = machine(2, Link(10, 20, 10))
    copy = 100_000 / 10e3  # microseconds, at 10 GB/s
    times = {
        "exchange": (next(exchange_plans(100_000)), Executor.dma(described), 10 + 2 + copy + 3 + 4 + 2 + copy),
        # A credit to wait for and one to give; rows and ids are two copies.
        "dispatch": (
            [plan_dispatch(r, [100, 100], [1000, 10], 100, Staging(16, 1 << 20), 0, gpu_grain(55)) for r in (0, 1)],
            Executor.dma(described),
            10 + 3 + (2 + copy + 2 + copy / 100) + 3 + 4 + (2 + copy + 2 + copy / 100) + 3,
        ),
        "ring": ([plan_ring(r, 2, 100_000, 1 << 20) for r in (0, 1)], Executor.nccl(LL), 10 + copy + 2 + copy),
    }
    for name, (schedules, executor, expected) in times.items():
        assert simulate(schedules, described, executor).us == pytest.approx(expected), name


def test_a_ring_of_three_by_hand() -> None:
    """A hop on the way goes both ways at once, which the two-way ceiling halves."""
    described = machine(3, Link(10, 20, 10))
    schedules = [plan_ring(r, 3, 100_000, 1 << 20) for r in range(3)]
    assert simulate(schedules, described, Executor.nccl(LL)).us == pytest.approx(10 + 10 + 2 + 20 + 2 + 10)


def lane(name: str, *steps: Step) -> Lane:
    return Lane(name, steps)


def up(nbytes: int) -> Copy:
    return Copy(Place(Memory("input", 0), 0), Place(Memory("staging", 0), 0), nbytes)


def down(nbytes: int) -> Copy:
    return Copy(Place(Memory("staging", 0), 0), Place(Memory("output", 0), 0), nbytes)


@pytest.mark.parametrize(
    ("lanes", "engines", "expected"),
    [
        ((lane("a", up(10_000)), lane("b", up(10_000))), 3, 2 + 10 + 10),  # one engine a direction: in turn
        ((lane("a", up(10_000)), lane("b", down(10_000))), 3, 2 + 10_000 / 750),  # both directions share 1.5 GB/s
        ((lane("a", up(10_000)), lane("b", down(10_000))), 1, 2 + 10 + 10),  # one engine for everything
        ((lane("a", up(10_000), up(10_000)),), 3, 2 + 10 + 2 + 10),  # a lane's next copy pays its latency again
    ],
)
def test_engines_and_ceilings_by_hand(lanes: tuple[Lane, ...], engines: int, expected: float) -> None:
    described = machine(1, Link(1, 1.5, 1.5), engines=engines)
    assert simulate([Schedule(0, lanes)], described, Executor.dma(described)).us == pytest.approx(10 + expected)


def test_host_memory_is_shared_by_all() -> None:
    described = machine(4, Link(10, 20, 20), memory_gbps=10)
    schedules = [Schedule(rank, (lane("send", up(10_000)),)) for rank in range(4)]
    assert simulate(schedules, described, Executor.dma(described)).us == pytest.approx(10 + 2 + 40_000 / 10e3)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8), st.data())
def test_max_min_fairness(paths: list[list[int]], data: st.DataObject) -> None:
    """Nobody exceeds a capacity, and everybody crosses something full that gives nobody else more."""
    crossings: list[Counter[Resource]] = [Counter((number,) for number in path) for path in paths]
    used = {resource for crosses in crossings for resource in crosses}
    capacity = {resource: data.draw(st.floats(0.1, 100)) for resource in sorted(used)}
    rates = max_min_rates(crossings, capacity)
    load: Counter[Resource] = Counter()
    for crosses, rate in zip(crossings, rates, strict=True):
        for resource, count in crosses.items():
            load[resource] += count * rate  # type: ignore[assignment]
    assert all(load[resource] <= capacity[resource] * (1 + 1e-9) for resource in used)
    for crosses, rate in zip(crossings, rates, strict=True):
        assert any(
            load[resource] >= capacity[resource] * (1 - 1e-9)
            and rate >= max(r for c, r in zip(crossings, rates, strict=True) if resource in c) * (1 - 1e-9)
            for resource in crosses
        )


@pytest.mark.parametrize("planner", [plan_dispatch, plan_combine])
def test_a_call_that_streams_round_a_small_ring(planner: Callable[..., Schedule]) -> None:
    """A rank that gives a slot back sees so itself at once, and does not take the old chunk for the next one."""
    described = machine(3, Link(10, 20, 20))
    schedules = [planner(r, [100] * 3, [1024], 100, Staging(2, 4096), 0, 2) for r in range(3)]
    result = simulate(schedules, described, Executor.dma(described))
    assert result.nbytes["down", "gpu 0"] == 2 * 100 * 1024
    assert (
        result.us > 24 * (3 + 4 + 2 + 3 + 4 + 2) / 2
    )  # 25 chunks in two slots: a chunk waits for the credit of its slot's last


def test_a_deadlock_is_reported_with_who_waits_for_what() -> None:
    flags = [Flag(0, 0, 1), Flag(1, 0, 0)]
    schedules = [Schedule(rank, (lane("exchange", Wait((flags[1 - rank],), 1), Signal((flags[rank],), 1)),)) for rank in (0, 1)]
    described = machine(2, Link(1, 2, 2))
    with pytest.raises(RuntimeError, match=r"deadlock after 3\.0 us.*rank 0, exchange: Flag\(owner=1.*rank 1, exchange"):
        simulate(schedules, described, Executor.dma(described))


def test_more_ranks_than_gpus() -> None:
    described = machine(2, Link(1, 2, 2))
    with pytest.raises(ValueError, match="schedules: got 3, expected at most 2"):
        simulate([Schedule(rank, ()) for rank in range(3)], described, Executor.dma(described))
