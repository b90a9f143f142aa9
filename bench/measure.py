"""Alternating measurement: contenders take turns, so whatever else the machine does meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

SAMPLE_SECONDS = 0.1
"""About how long a sample should last: long beside the clock's resolution and the skew between ranks."""


class Contender(Protocol):
    """One way to do the job."""

    name: str

    def step(self, mark: Callable[[], None]) -> None:
        """Dispatch, call `mark`, combine."""
        ...


class Timing(NamedTuple):
    """Microseconds a call: the median, and the 10th and 90th percentile of the samples."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise samples in seconds."""
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(*(round(value * 1e6, 1) for value in (statistics.median(samples), tenths[0], tenths[-1])))


class Timings(NamedTuple):
    """Of one contender."""

    dispatch: Timing
    combine: Timing
    both: Timing


class HostClock:
    """Marks points in time on the host."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """Remember now."""
        self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds between each mark and the next."""
        return [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)]


class StreamClock:
    """Marks points in time on the current CUDA stream."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Remember when the stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def laps(self) -> list[float]:
        """Seconds between each mark and the next."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in zip(self._marks, self._marks[1:], strict=False)]


def sample(contender: Contender, calls: int, device: torch.device) -> tuple[float, float, float]:
    """Mean seconds of a dispatch, of the combine after it and of both, over `calls` pairs in a row; the slowest rank's."""
    dist.barrier()
    contender.step(lambda: None)  # ranks leave a barrier at different times; this brings them into step
    clock = StreamClock() if device.type == "cuda" else HostClock()
    clock.mark()
    for _ in range(calls):
        contender.step(clock.mark)
        clock.mark()
    laps = clock.laps()
    means = torch.tensor([sum(laps[0::2]), sum(laps[1::2]), sum(laps)], dtype=torch.float64, device=device) / calls
    dist.all_reduce(means, dist.ReduceOp.MAX)
    dispatch, combine, both = means.tolist()
    return dispatch, combine, both


def compare(contenders: Sequence[Contender], repeats: int, device: torch.device) -> dict[str, Timings]:
    """Time all contenders in turn.

    Args:
        contenders: What to compare.
        repeats: Samples of each.
        device: Where their tensors are.

    Returns:
        Timings by contender, the same on every rank.
    """
    calls = {}
    for contender in contenders:
        sample(contender, 2, device)  # warms up
        calls[contender.name] = max(4, min(100, int(SAMPLE_SECONDS / sample(contender, 3, device)[2])))
    samples: dict[str, list[tuple[float, float, float]]] = {contender.name: [] for contender in contenders}
    for turn in range(repeats):
        for i in range(len(contenders)):
            contender = contenders[(turn + i) % len(contenders)]
            samples[contender.name].append(sample(contender, calls[contender.name], device))
    return {name: Timings(*map(Timing.of, zip(*taken, strict=True))) for name, taken in samples.items()}
