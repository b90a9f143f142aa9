"""Which idea of the design gives how much: NCCL's ring, then one idea after the other. Everything here is simulated.

1. One hop: who needs a row reads it where its owner put it in host memory, and no rank passes on what is another's.
2. Copy engines move it instead of SMs: both directions of a link then carry more, but each signal costs more.
3. Only the rows that a rank's experts need travel to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunderep.forecast.predict import Forecast, Kind, Shape, combine_schedules, dispatch_schedules, forecast, sum_us
from thunderep.runtime.machines import MachineModel, Protocol
from thunderep.runtime.simulate import Executor, simulate

MACHINES = ("rtx4090-8-one-socket", "rtx4090-8-two-sockets")


@dataclass(frozen=True, slots=True)
class Ablation:
    """One operation at one size, in simulated microseconds.

    Attributes:
        machine: Name of the machine.
        ranks: N.
        kind: "dispatch" or "combine".
        tokens: T, rows a rank.
        ring: NCCL's ring, by the faster of its protocols.
        one_hop: The plans of `dma`, executed as NCCL's kernels copy and signal, by the faster of its protocols.
        engines: `dma`.
        needed: `dma`, if only the rows that a peer needs went to it.
    """

    machine: str
    ranks: int
    kind: Kind
    tokens: int
    ring: float
    one_hop: float
    engines: float
    needed: float

    @property
    def gains(self) -> tuple[float, float, float]:
        """What each idea divides the time by, given those before it."""
        return self.ring / self.one_hop, self.one_hop / self.engines, self.engines / self.needed

    @property
    def derived(self) -> dict[str, float]:
        """What follows from the other figures."""
        return dict(zip(("one_hop_gain", "engines_gain", "needed_gain"), self.gains, strict=True))


def ablate(machine: MachineModel, kind: Kind, shape: Shape, tokens: int) -> Ablation:
    """Simulate one operation of all the machine's GPUs, four times."""
    whole: Forecast = forecast(machine, kind, shape, tokens)
    one_hop = min(_by_sms_us(machine, kind, shape, tokens, protocol) for protocol in machine.nccl.protocols.values())
    return Ablation(machine.name, len(machine.gpus), kind, tokens, whole.nccl, one_hop, whole.ours, whole.needed)


def _by_sms_us(machine: MachineModel, kind: Kind, shape: Shape, tokens: int, protocol: Protocol) -> float:
    """The plans of `dma`, executed by SMs. The sum of a combine is part of the kernel, and so is no launch of its own."""
    if kind == "dispatch":
        widths = [round(width * protocol.overhead) for width in shape.dispatch_bytes]
        return simulate(dispatch_schedules(machine, tokens, widths), machine, Executor.nccl(protocol)).us
    widths = [round(width * protocol.overhead) for width in shape.combine_bytes]
    schedules = combine_schedules(machine, tokens, widths)
    return simulate(schedules, machine, Executor.nccl(protocol)).us + sum_us(machine, tokens, shape)
