"""How many tokens a second communication costs a machine, by card, number of cards and width of their slots: simulated.

A layer dispatches and combines once, and nothing overlaps. A GPU that alone would do `rate` tokens a second does
1 / (1 / rate + c) when each of its tokens waits c seconds for communication.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunderep.forecast.predict import KINDS, Shape, forecast
from thunderep.runtime.machines import MachineModel

LAYERS = 48
"""Of Qwen3-30B-A3B, whose H and K are the command's defaults."""

MACHINES = (
    "rtx4090-8-one-socket", "rtx4090-8-two-sockets", "rtx5090-8", "rtx5070ti-2", "rtx3090-4-one-at-x4", "h200-4",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loss:
    """What a machine loses at one size of call.

    Attributes:
        machine: Its name.
        ranks: N.
        slot: Lanes of every card's slot; "mixed" where they differ.
        tokens: T, rows a rank and call.
        rate: Tokens a second that each GPU would do if communication took no time; given, not simulated.
        ours: Simulated microseconds of a dispatch and a combine by `dma`.
        needed: The same, if only the rows that a peer needs went to it.
        nccl: The same by NCCL's ring.
    """

    machine: str
    ranks: int
    slot: str
    tokens: int
    rate: float
    ours: float
    needed: float
    nccl: float

    @property
    def derived(self) -> dict[str, float]:
        """What follows from the other figures: tokens a second lost."""
        return {f"{name}_lost": self.lost(getattr(self, name)) for name in ("ours", "needed", "nccl")}

    def lost(self, us: float) -> float:
        """Tokens a second that the machine loses when a layer's communication takes `us` microseconds."""
        waits = LAYERS * us * 1e-6 / self.tokens
        return self.ranks * (self.rate - 1 / (1 / self.rate + waits))


def lose(machine: MachineModel, slot: str, shape: Shape, tokens: int, rate: float) -> Loss:
    """Simulate one layer of all the machine's GPUs."""
    both = [forecast(machine, kind, shape, tokens) for kind in KINDS]
    ours, needed, nccl = (sum(getattr(f, name) for f in both) for name in ("ours", "needed", "nccl"))
    return Loss(machine.name, len(machine.gpus), slot, tokens, rate, ours, needed, nccl)
