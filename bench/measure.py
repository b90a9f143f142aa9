"""Alternating measurement: contenders take turns, so whatever else the machine does meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

SAMPLE_SECONDS = 0.1
"""About how long a sample should last: long beside the clock's resolution and the skew between ranks."""


class Contender(Protocol):
    """One way to do the job."""

    name: str

    def dispatch(self) -> Any:
        """Send this rank's tokens to their experts."""
        ...

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Bring the partial results back and sum them."""
        ...


class Eager:
    """A contender's operations, called one after another."""

    pairs = 1

    def __init__(self, contender: Contender) -> None:
        self._contender = contender

    def step(self, mark: Callable[[], None]) -> None:
        """Dispatch, call `mark`, combine."""
        dispatched = self._contender.dispatch()
        mark()
        self._contender.combine(dispatched)


class Replayed:
    """A contender's operations, captured in two CUDA graphs: what they take on the device, without the host."""

    pairs = 20

    def __init__(self, contender: Contender) -> None:
        dispatched = contender.dispatch()
        contender.combine(dispatched)
        torch.cuda.synchronize()  # everything is compiled, and no other work runs while capturing
        self._dispatch, self._combine = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._dispatch):
            for _ in range(self.pairs):
                contender.dispatch()
        with torch.cuda.graph(self._combine):
            for _ in range(self.pairs):
                contender.combine(dispatched)

    def step(self, mark: Callable[[], None]) -> None:
        """`pairs` dispatches, `mark`, as many combines."""
        self._dispatch.replay()
        mark()
        self._combine.replay()


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


def sample(runner: Eager | Replayed, steps: int, device: torch.device) -> tuple[float, float, float]:
    """Mean seconds of a dispatch, of a combine and of both, over `steps` steps in a row; the slowest rank's."""
    dist.barrier()
    runner.step(lambda: None)  # ranks leave a barrier at different times; this brings them into step
    clock = StreamClock() if device.type == "cuda" else HostClock()
    clock.mark()
    for _ in range(steps):
        runner.step(clock.mark)
        clock.mark()
    laps = clock.laps()
    calls = steps * runner.pairs
    means = torch.tensor([sum(laps[0::2]), sum(laps[1::2]), sum(laps)], dtype=torch.float64, device=device) / calls
    dist.all_reduce(means, dist.ReduceOp.MAX)
    dispatch, combine, both = means.tolist()
    return dispatch, combine, both


def compare(contenders: Sequence[Contender], repeats: int, device: torch.device) -> dict[str, Timings]:
    """Time all contenders in turn: on CPU as they are called, on CUDA as graphs replay them.

    Args:
        contenders: What to compare.
        repeats: Samples of each.
        device: Where their tensors are.

    Returns:
        Timings by contender, the same on every rank.
    """
    runners = {c.name: Replayed(c) if device.type == "cuda" else Eager(c) for c in contenders}
    steps = {}
    for name, runner in runners.items():
        sample(runner, 2, device)  # warms up
        steps[name] = max(4, min(100, int(SAMPLE_SECONDS / runner.pairs / sample(runner, 3, device)[2])))
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(repeats):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            samples[name].append(sample(runners[name], steps[name], device))
    return {name: Timings(*map(Timing.of, zip(*taken, strict=True))) for name, taken in samples.items()}


def layer_times(
    layers: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, depth: int
) -> dict[str, list[float]]:
    """Time layers in turn: on CPU as they are called, on CUDA as graphs replay them.

    Args:
        layers: What to time.
        repeats: Samples of each.
        device: Where their tensors are.
        depth: Calls in a row in each graph.

    Returns:
        Seconds a call, a sample each, the slowest rank's.
    """
    runs = {name: layer if device.type == "cpu" else _captured(layer, depth) for name, layer in layers.items()}
    calls = 5 * (1 if device.type == "cpu" else depth)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(-2, repeats):  # the first two warm up
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            dist.barrier()
            runs[name]()
            clock = StreamClock() if device.type == "cuda" else HostClock()
            clock.mark()
            for _ in range(5):
                runs[name]()
            clock.mark()
            mean = torch.tensor(clock.laps(), dtype=torch.float64, device=device) / calls
            dist.all_reduce(mean, dist.ReduceOp.MAX)
            if turn >= 0:
                samples[name].append(mean.item())
    return samples


def _captured(layer: Callable[[], object], depth: int) -> Callable[[], object]:
    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(depth):
            layer()
    return graph.replay
