"""How far the simulator is from what was measured: every point of `measured.json`, which says where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import NamedTuple

from thunderep.forecast.predict import nccl_us
from thunderep.runtime import machines
from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Schedule, Signal, Step, Wait
from thunderep.runtime.simulate import Executor, simulate

_MIN_CHUNK_BYTES = 256 << 10
_CHUNKS = (2, 4, 8)


class Point(NamedTuple):
    """A measured time and the simulated one, in microseconds; `fitted`, whether parameters were fitted to it."""

    series: str
    executor: str
    tokens: int
    measured: float
    simulated: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative; above 0 where the simulation is slower than what was measured."""
        return self.simulated / self.measured - 1


def points() -> Iterator[Point]:
    """Simulate every measured point."""
    content = json.loads((resources.files(__package__) / "measured.json").read_text())
    for series in content["series"]:
        machine = machines.load(series["machine"])
        for tokens, us in series["us"].items():
            if series["executor"] == "nccl":
                simulated = nccl_us(machine, int(tokens), series["row_bytes"])
            else:
                plans = exchange_plans(int(tokens) * sum(series["row_bytes"]))
                simulated = min(simulate(plan, machine, Executor.dma(machine)).us for plan in plans)
            yield Point(series["name"], series["executor"], int(tokens), us, simulated, series["fitted"])


def exchange_plans(nbytes: int) -> Iterator[list[Schedule]]:
    """The plans that were measured with copy engines: two ranks exchange `nbytes` bytes, in one piece or in a pipeline."""
    yield [Schedule(rank, (Lane("exchange", (*_send(rank, 0, nbytes), *_receive(rank, 0, nbytes))),)) for rank in (0, 1)]
    for chunks in _CHUNKS:
        if nbytes // chunks >= _MIN_CHUNK_BYTES:
            yield [Schedule(rank, tuple(_pipeline(rank, chunks, nbytes // chunks))) for rank in (0, 1)]


def _pipeline(rank: int, chunks: int, nbytes: int) -> Iterator[Lane]:
    """One lane that sends all chunks, two that receive every other one."""
    yield Lane("send", tuple(step for chunk in range(chunks) for step in _send(rank, chunk, nbytes)))
    for way in (0, 1):
        yield Lane(f"receive, way {way}", tuple(s for chunk in range(way, chunks, 2) for s in _receive(rank, chunk, nbytes)))


def _send(rank: int, chunk: int, nbytes: int) -> Sequence[Step]:
    at = chunk * nbytes
    copy = Copy(Place(Memory("input", rank), at), Place(Memory("staging", rank), at), nbytes)
    return copy, Signal((Flag(rank, chunk, 1 - rank),), 1)


def _receive(rank: int, chunk: int, nbytes: int) -> Sequence[Step]:
    """The flag is set back before the copy: double-buffering keeps the slot as it is."""
    at, flags = chunk * nbytes, (Flag(1 - rank, chunk, rank),)
    return (
        Wait(flags, 1),
        Signal(flags, 0),
        Copy(Place(Memory("staging", 1 - rank), at), Place(Memory("output", rank), at), nbytes),
    )
