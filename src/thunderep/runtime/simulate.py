"""Times a set of schedules on a described machine: a discrete-event simulation of what `dma` executes.

The model, all of it:

* An operation begins on all ranks at once and ends when every lane has. Flags are 0 at first.
* Flags that follow each other in a lane are one batch (as in `dma`), which costs `flag_us`; its waits and signals take
  effect in order. The other rank of a flag sees a signal `flag_latency_us` later, the one that signals at once.
* A copy has a latency, `copy_us`; then it queues, first come, first served, for its GPU's engine. Its latency does not
  keep the engine from another lane's copy.
* Copies under way share what they cross by max-min fairness (progressive filling): all get faster alike until something
  they cross is full, which settles those that cross it; then the others go on. A copy crosses one direction of its GPU's
  link and the link as a whole (both directions have a ceiling together), the same two of a shared bridge, the memory of the
  socket that the staging is on, and from another socket the link between the two.
* A rank's staging is in its own socket's memory. GPU memory is never the limit, but for copies within a GPU.

`Executor` says who executes: copy engines, or the SMs of an NCCL kernel, whose copies do not queue for engines. A copy from
staging to staging is one of theirs: it comes down the link and goes up at the same time.

A machine that is k times as fast in everything takes 1/k of the time. One that is faster in one thing is not always faster:
copies may then queue in another order, as in any list schedule. With the machines and schedules here that costs a few percent.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thunderep.runtime.machines import MachineModel, Protocol
from thunderep.runtime.schedule import Copy, Flag, Lane, Schedule, Wait

_BYTES_PER_US = 1e3  # of one GB/s

Resource = tuple[str | int, ...]
"""What copies share. ("up", "gpu 0"), ("down", "gpu 0"), ("link", "gpu 0"): the directions of rank 0's link and both together;
the same of "bridge NAME"; ("memory", socket); ("sockets", from, to); ("device", rank)."""


@dataclass(frozen=True, slots=True)
class Executor:
    """Who executes a schedule, and what that costs in microseconds; see `CopyEngines` for the meaning.

    Attributes:
        engines: Copy engines a GPU; None, SMs copy and nothing queues.
    """

    engines: int | None
    launch_us: float
    copy_us: float
    flag_us: float
    flag_latency_us: float

    @classmethod
    def dma(cls, machine: MachineModel) -> Executor:
        """The machine's copy engines."""
        costs = machine.copy_engines
        return cls(costs.count, costs.launch_us, costs.copy_us, costs.flag_us, costs.flag_latency_us)

    @classmethod
    def nccl(cls, protocol: Protocol) -> Executor:
        """An NCCL kernel: signals and copies cost nothing but a hop's latency and their bytes."""
        return cls(None, protocol.launch_us, 0.0, 0.0, protocol.hop_us)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulation says.

    Attributes:
        us: Simulated time in microseconds, launch included.
        nbytes: What crossed each resource.
    """

    us: float
    nbytes: dict[Resource, int]


@dataclass(slots=True, eq=False)
class _Transfer:
    process: _Process
    queue: deque[_Transfer] | None  # of the engine
    crosses: Counter[Resource]
    left: float
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class _Process:
    """A lane under way; `requests` yields a delay in microseconds, a copy, or a flag and the value to wait for."""

    rank: int
    name: str
    requests: Iterator[float | Copy | tuple[Flag, int]]
    waits_for: tuple[Flag, int] | None = None


_Sight = tuple[int, Flag, int]
"""A rank sees that a flag has a value."""


def simulate(schedules: Sequence[Schedule], machine: MachineModel, executor: Executor) -> Simulation:
    """Run one operation: the schedules of ranks 0 to N - 1 on the machine's first N GPUs.

    Raises:
        ValueError: There are more schedules than GPUs.
        RuntimeError: The schedules deadlock; the message names what each lane waits for.
    """
    if len(schedules) > len(machine.gpus):
        raise ValueError(f"schedules: got {len(schedules)}, expected at most {len(machine.gpus)}, the GPUs of {machine.name}")
    return _Run(machine, executor).run(schedules)


def max_min_rates(crossings: Sequence[Counter[Resource]], capacity: dict[Resource, float]) -> list[float]:
    """The max-min fair rate of each flow.

    Args:
        crossings: For each flow, how often it crosses each resource; at least one.
        capacity: Of each resource, in the unit of the result.
    """
    rates = [0.0] * len(crossings)
    spare = {resource: capacity[resource] for crosses in crossings for resource in crosses}
    rising = set(range(len(crossings)))
    while rising:
        load: Counter[Resource] = Counter()
        for flow in rising:
            load.update(crossings[flow])
        step, full = min((spare[resource] / count, resource) for resource, count in load.items())
        for flow in rising:
            rates[flow] += step
        for resource, count in load.items():
            spare[resource] -= step * count
        rising -= {flow for flow in rising if full in crossings[flow]}
    return rates


class _Run:
    def __init__(self, machine: MachineModel, executor: Executor) -> None:
        self.machine, self.executor = machine, executor
        self.now = self.end = 0.0
        self.flags: dict[tuple[int, Flag], int] = {}  # as each rank sees them
        self.waiting: dict[tuple[int, Flag], list[tuple[_Process, int]]] = defaultdict(list)
        self.events: list[tuple[float, int, _Process | _Sight]] = []
        self.order = itertools.count()
        self.transfers: list[_Transfer] = []
        self.queues: dict[tuple[int, int], deque[_Transfer]] = defaultdict(deque)  # by rank and engine
        self.nbytes: Counter[Resource] = Counter()
        self.capacity = capacities(machine, executor)
        self.stale = False  # whether the rates are those of other transfers

    def run(self, schedules: Sequence[Schedule]) -> Simulation:
        processes = [_Process(s.rank, lane.name, self._requests(s.rank, lane)) for s in schedules for lane in s.lanes]
        for process in processes:
            self._resume(process)
        while self.events or self.transfers:
            if self.stale:
                self._share()
            ends = [t.left / t.rate for t in self.transfers]
            step = min([*ends, *(event[0] - self.now for event in self.events[:1])])
            self.now += step
            for transfer in self.transfers:
                transfer.left -= step * transfer.rate
            # What ends within a picosecond ends now: rounding must not split what is simultaneous.
            ended = [t for t, end in zip(self.transfers, ends, strict=True) if end <= step + 1e-6]
            for transfer in ended:
                self._end(transfer)
            while self.events and self.events[0][0] <= self.now + 1e-6:
                self._happen(heapq.heappop(self.events)[2])
        stuck = [f"rank {p.rank}, {p.name}: {p.waits_for[0]} to be {p.waits_for[1]}" for p in processes if p.waits_for]
        if stuck:
            raise RuntimeError(f"deadlock after {self.now:.1f} us; lanes wait for flags: {'; '.join(stuck)}")
        return Simulation(self.end + self.executor.launch_us, dict(self.nbytes))

    def _requests(self, rank: int, lane: Lane) -> Iterator[float | Copy | tuple[Flag, int]]:
        for is_copy, steps in itertools.groupby(lane.steps, lambda step: isinstance(step, Copy)):
            if not is_copy:
                yield self.executor.flag_us
            for step in steps:
                if isinstance(step, Copy):
                    yield self.executor.copy_us
                    yield step
                elif isinstance(step, Wait):
                    yield from ((flag, step.value) for flag in step.flags)
                else:
                    for flag in step.flags:
                        other = flag.reader if rank == flag.owner else flag.owner
                        self._see(rank, flag, step.value)
                        self._at(self.now + self.executor.flag_latency_us, (other, flag, step.value))

    def _at(self, time: float, what: _Process | _Sight) -> None:
        heapq.heappush(self.events, (time, next(self.order), what))

    def _happen(self, what: _Process | _Sight) -> None:
        if isinstance(what, _Process):
            self._resume(what)
        else:
            self._see(*what)

    def _see(self, rank: int, flag: Flag, value: int) -> None:
        self.flags[rank, flag] = value
        for process, awaited in self.waiting.pop((rank, flag), []):
            self._wait(process, flag, awaited)

    def _resume(self, process: _Process) -> None:
        request = next(process.requests, None)
        if request is None:
            self.end = self.now
        if isinstance(request, Copy):
            self._start(process, request)
        elif isinstance(request, tuple):
            self._wait(process, *request)
        elif request is not None:
            self._at(self.now + request, process)

    def _wait(self, process: _Process, flag: Flag, value: int) -> None:
        if self.flags.get((process.rank, flag), 0) == value:
            process.waits_for = None
            self._resume(process)
        else:
            process.waits_for = flag, value
            self.waiting[process.rank, flag].append((process, value))

    def _start(self, process: _Process, copy: Copy) -> None:
        crosses = _crosses(self.machine, process.rank, copy)
        for resource, count in crosses.items():
            self.nbytes[resource] += count * copy.nbytes
        queue = None
        if self.executor.engines:
            direction = 0 if copy.dst.memory.kind == "staging" else 1 if copy.src.memory.kind == "staging" else 2
            queue = self.queues[process.rank, direction % self.executor.engines]
        transfer = _Transfer(process, queue, crosses, copy.nbytes)
        if queue is not None:
            queue.append(transfer)
        if queue is None or queue[0] is transfer:
            self._begin(transfer)

    def _begin(self, transfer: _Transfer) -> None:
        self.transfers.append(transfer)
        self.stale = True

    def _end(self, transfer: _Transfer) -> None:
        self.transfers.remove(transfer)
        self.stale = True
        if transfer.queue:
            transfer.queue.popleft()
            if transfer.queue:
                self._begin(transfer.queue[0])
        self._resume(transfer.process)

    def _share(self) -> None:
        rates = max_min_rates([transfer.crosses for transfer in self.transfers], self.capacity)
        for transfer, rate in zip(self.transfers, rates, strict=True):
            transfer.rate = rate
        self.stale = False


def capacities(machine: MachineModel, executor: Executor) -> dict[Resource, float]:
    """What every resource carries, in bytes a microsecond."""
    gbps: dict[Resource, float] = {}
    shared = {f"bridge {name}": bridge for name, bridge in machine.bridges.items()}
    for rank, gpu in enumerate(machine.gpus):
        gbps["device", rank] = machine.device_gbps
        gbps["memory", gpu.socket] = machine.memory_gbps
        shared[f"gpu {rank}"] = machine.links[gpu.link]
    for name, link in shared.items():
        gbps["up", name] = gbps["down", name] = link.one_way_gbps
        gbps["link", name] = link.both_ways_gbps if executor.engines else link.sm_both_ways_gbps
    for a, b in itertools.permutations({gpu.socket for gpu in machine.gpus}, 2):
        gbps["sockets", a, b] = machine.socket_link_gbps
    return {resource: value * _BYTES_PER_US for resource, value in gbps.items()}


def _crosses(machine: MachineModel, rank: int, copy: Copy) -> Counter[Resource]:
    """How often a copy of this rank crosses each resource."""
    gpu = machine.gpus[rank]
    crosses: Counter[Resource] = Counter()
    for place, direction in ((copy.src, "down"), (copy.dst, "up")):
        if place.memory.kind != "staging":
            continue
        socket = machine.gpus[place.memory.rank].socket
        for link in [f"gpu {rank}"] + ([f"bridge {gpu.bridge}"] if gpu.bridge else []):
            crosses.update([(direction, link), ("link", link)])
        crosses["memory", socket] += 1
        if socket != gpu.socket:
            crosses[("sockets", socket, gpu.socket) if direction == "down" else ("sockets", gpu.socket, socket)] += 1
    return crosses or Counter([("device", rank)])
