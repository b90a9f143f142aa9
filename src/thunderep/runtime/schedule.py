"""Schedules as data: what each rank copies, when, and after which flag.

One operation of one rank is a `Schedule`: lanes that run side by side, each a list of steps that run in order. An
operation begins when the rank's previous one has ended, and ends when all its lanes have. Nothing here touches
memory: `plan` makes schedules, `host` executes them on CPU memory and `dma` on copy engines, `check` explores their
interleavings, and `simulate` says how long they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Memory(NamedTuple):
    """A memory that a copy reads or writes: a payload of a rank's input or output, or a rank's staging."""

    kind: Literal["input", "output", "staging"]
    rank: int
    payload: int = 0


class Place(NamedTuple):
    """A byte offset in a memory."""

    memory: Memory
    offset: int


class Flag(NamedTuple):
    """The binary semaphore of one slot in `owner`'s ring towards one reader."""

    owner: int
    slot: int
    reader: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `nbytes` bytes from `src` to `dst`."""

    src: Place
    dst: Place
    nbytes: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Set every flag to `value`, after all earlier steps of the lane are visible to whoever waits for it."""

    flags: tuple[Flag, ...]
    value: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Let no later step of the lane start before every flag is `value`."""

    flags: tuple[Flag, ...]
    value: int


Step = Copy | Signal | Wait


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps that run in order.

    Attributes:
        turns: For each step when it is to be issued, see `Schedule.issue_order`; empty: all steps at once.
    """

    name: str
    steps: tuple[Step, ...]
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does for one operation: lanes that run side by side."""

    rank: int
    lanes: tuple[Lane, ...]

    def issue_order(self) -> list[tuple[int, Step]]:
        """All steps with their lanes' numbers, in an order in which a single queue could run them on every rank.

        Hardware gives lanes queues that they may have to share: what waits at the head of one holds up all behind it. In
        this order nothing that a wait depends on, on any rank, is ever behind that wait.
        """
        turns = [(turn, i) for i, lane in enumerate(self.lanes) for turn in lane.turns or (0,) * len(lane.steps)]
        steps = [(i, step) for i, lane in enumerate(self.lanes) for step in lane.steps]
        return [step for _, step in sorted(zip(turns, steps, strict=True), key=lambda pair: pair[0])]
