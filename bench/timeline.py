"""A picture of who runs when on a GPU: kernels and copies of each stream, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def draw(runs: Mapping[str, Callable[[], object]], path: Path | None) -> None:
    """Run each once, profiled; with a path, write this rank's picture there. All ranks must call it."""
    lanes = {}
    for name, run in runs.items():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            run()
            torch.cuda.synchronize()
        lanes[name] = _spans(profiled)
    if path is not None:
        _picture(lanes, path)


def _spans(profiled: profile) -> dict[int, list[tuple[float, float, str]]]:
    """By stream: start and length in microseconds, and what it was."""
    spans: dict[int, list[tuple[float, float, str]]] = {}
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    begin = min((event.time_range.start for event in events), default=0)
    for event in events:
        span = (event.time_range.start - begin, event.time_range.elapsed_us(), event.name)
        spans.setdefault(event.device_resource_id, []).append(span)
    return spans


def _picture(lanes: Mapping[str, dict[int, list[tuple[float, float, str]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(lanes), 1, figsize=(12, 1.6 * len(lanes)), squeeze=False, layout="constrained")
    for axis, (name, streams) in zip(axes[:, 0], lanes.items(), strict=True):
        for row, spans in enumerate(streams.values()):
            for start, length, what in spans:
                axis.broken_barh([(start, length)], (row - 0.4, 0.8), color=_colour(what))
        axis.set_yticks([])
        axis.set_title(f"{name}: one row a stream", fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("microseconds; blue: copies, orange: kernels that communicate, grey: others")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _colour(what: str) -> str:
    if what.startswith(("Memcpy", "Memset")):
        return "tab:blue"
    ours = what in ("dispatch", "combine", "latency_dispatch", "latency_combine")
    return "tab:orange" if ours or "nccl" in what.lower() else "tab:grey"
