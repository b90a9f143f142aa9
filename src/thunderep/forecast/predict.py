"""What dispatch and combine would take on a described machine, beside NCCL doing the same job. Everything here is simulated.

The same job, as `bench/` has it: for dispatch NCCL all-gathers rows, ids and weights in one group; for combine it
reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from thunderep.runtime.chunks import Staging, gpu_grain
from thunderep.runtime.machines import MachineModel, Protocol
from thunderep.runtime.plan import plan_combine, plan_dispatch
from thunderep.runtime.ring import plan_ring
from thunderep.runtime.schedule import Copy, Lane, Schedule
from thunderep.runtime.simulate import Executor, simulate
from thunderep.runtime.staging import MAX_DEFAULT_STAGING

Kind = Literal["dispatch", "combine"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model matters: H of bfloat16 rows, and K experts a token."""

    hidden: int
    topk: int

    @property
    def combine_bytes(self) -> tuple[int, ...]:
        """Bytes in a row of each payload of a combine."""
        return (2 * self.hidden,)

    @property
    def nccl_dispatch_bytes(self) -> tuple[int, ...]:
        """Bytes in a row of each payload of NCCL's dispatch: the row, int64 ids, float32 weights."""
        return (2 * self.hidden, 8 * self.topk, 4 * self.topk)

    @property
    def dispatch_bytes(self) -> tuple[int, ...]:
        """The same for `dma`. Ids and weights, 4 bytes each, take no copies of their own, but their part of the link."""
        return (2 * self.hidden + 8 * self.topk,)

    @property
    def fp8_bytes(self) -> tuple[int, ...]:
        """The same with rows in fp8 and a float32 scale for each 128 elements."""
        return (self.hidden + 4 * -(-self.hidden // 128) + 8 * self.topk,)

    def needed_share(self, num_ranks: int) -> float:
        """The expected share of a rank's rows that a peer needs, if experts are chosen alike: 1 - (1 - 1/N)^K."""
        return 1 - (1 - 1 / num_ranks) ** self.topk


@dataclass(frozen=True, slots=True)
class Forecast:
    """One operation at one size, in simulated microseconds.

    Attributes:
        machine: Name of the machine.
        kind: "dispatch" or "combine".
        tokens: T, rows a rank.
        ours: `dma`.
        needed: `dma`, if only the rows that a peer needs went to it; fewer bytes, and nothing for choosing them.
        fp8: `dma`, rows dispatched in fp8; None for a combine, which sums wider types.
        nccl: NCCL's ring, by the faster of its protocols.
    """

    machine: str
    kind: Kind
    tokens: int
    ours: float
    needed: float
    fp8: float | None
    nccl: float

    @property
    def ratio(self) -> float:
        """How many times faster than NCCL `dma` is."""
        return self.nccl / self.ours

    @property
    def derived(self) -> dict[str, float]:
        """What follows from the other figures."""
        return {"ratio": self.ratio}


def forecast(machine: MachineModel, kind: Kind, shape: Shape, tokens: int) -> Forecast:
    """Simulate one operation of all the machine's GPUs."""
    num_ranks = len(machine.gpus)
    share = shape.needed_share(num_ranks)
    if kind == "dispatch":
        ours = _dma_us(machine, dispatch_schedules(machine, tokens, shape.dispatch_bytes))
        needed = _dma_us(machine, dispatch_schedules(machine, tokens, shape.dispatch_bytes, share))
        fp8 = _dma_us(machine, dispatch_schedules(machine, tokens, shape.fp8_bytes))
        return Forecast(machine.name, kind, tokens, ours, needed, fp8, nccl_us(machine, tokens, shape.nccl_dispatch_bytes))
    rows = round(share * tokens)
    ours, needed = (_combine_us(machine, count, tokens, shape) for count in (tokens, max(1, rows)))
    return Forecast(machine.name, kind, tokens, ours, needed, None, nccl_us(machine, tokens, shape.combine_bytes))


def dispatch_schedules(machine: MachineModel, tokens: int, row_bytes: Sequence[int], share: float = 1.0) -> list[Schedule]:
    """What `dma` executes for a dispatch; with a `share`, every copy out of staging has only that part of its bytes."""
    schedules = _schedules(machine, plan_dispatch, tokens, row_bytes)
    return [replace(s, lanes=tuple(_read_less(lane, share) for lane in s.lanes)) for s in schedules]


def combine_schedules(machine: MachineModel, tokens: int, row_bytes: Sequence[int]) -> list[Schedule]:
    """What `dma` executes for a combine."""
    return _schedules(machine, plan_combine, tokens, row_bytes)


def _schedules(
    machine: MachineModel, planner: Callable[..., Schedule], tokens: int, row_bytes: Sequence[int]
) -> list[Schedule]:
    num_ranks = len(machine.gpus)
    grain = gpu_grain(min(machine.links[gpu.link].one_way_gbps for gpu in machine.gpus))
    staging = Staging.of(num_ranks, MAX_DEFAULT_STAGING)
    return [planner(rank, [tokens] * num_ranks, row_bytes, tokens, staging, 0, grain) for rank in range(num_ranks)]


def nccl_us(machine: MachineModel, tokens: int, row_bytes: Sequence[int]) -> float:
    """NCCL's ring, the payloads of a group one after another in one launch, each by the protocol that is the fastest for it."""
    chosen = [
        min(_ring_us(machine, protocol, tokens * width) for protocol in machine.nccl.protocols.values()) for width in row_bytes
    ]
    return sum(us - launch for us, launch in chosen) + max(launch for _, launch in chosen)


def _ring_us(machine: MachineModel, protocol: Protocol, nbytes: int) -> tuple[float, float]:
    """Time of one payload, and what of it is the launch."""
    num_ranks = len(machine.gpus)
    sent = round(nbytes * protocol.overhead)
    schedules = [plan_ring(rank, num_ranks, sent, machine.nccl.chunk_bytes) for rank in range(num_ranks)]
    return simulate(schedules, machine, Executor.nccl(protocol)).us, protocol.launch_us


def _dma_us(machine: MachineModel, schedules: Sequence[Schedule]) -> float:
    return simulate(schedules, machine, Executor.dma(machine)).us


def _combine_us(machine: MachineModel, rows: int, tokens: int, shape: Shape) -> float:
    """The transfers, then a kernel that sums."""
    schedules = combine_schedules(machine, rows, shape.combine_bytes)
    return _dma_us(machine, schedules) + machine.copy_engines.copy_us + sum_us(machine, tokens, shape)


def sum_us(machine: MachineModel, tokens: int, shape: Shape) -> float:
    """What it takes to read N partial results a token and to write one sum, on the GPU."""
    return (len(machine.gpus) + 1) * tokens * 2 * shape.hidden / machine.device_gbps / 1e3


def _read_less(lane: Lane, share: float) -> Lane:
    steps = (
        replace(step, nbytes=round(share * step.nbytes))
        if isinstance(step, Copy) and step.src.memory.kind == "staging"
        else step
        for step in lane.steps
    )
    return replace(lane, steps=tuple(steps))
