"""From which size on are copy engines faster than kernels? Measures both on this machine's GPUs: `thunderep tune`.

Dispatch and combine over `direct` and over `dma` take turns, captured in CUDA graphs and replayed, so that the host's time is
no part of it. A threshold is where changing from one to the other costs the least over all measured sizes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from thunderep import api
from thunderep.buffer import Buffer
from thunderep.runtime import cuda, tuning
from thunderep.runtime.tuning import Thresholds
from thunderep.testing.processes import Ranks

HIDDEN, TOPK, NUM_EXPERTS = 2048, 8, 128  # Qwen3-30B-A3B's; in bfloat16 a row is 4 KiB
TOKENS = (16, 64, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
KINDS = ("dispatch", "combine")
NEVER = 1 << 62
"""The threshold where copy engines were not faster at any size."""

_CALLS = 10  # in a graph
_SAMPLES = 7
_SAMPLE_SECONDS = 0.04
_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of operation at one size: `nbytes` of rows a rank; microseconds over each transport, the slowest rank's."""

    kind: str
    nbytes: int
    direct: float
    dma: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found, what from, and where it is kept."""

    thresholds: Thresholds
    measured: list[Measured]
    path: Path


def tune() -> Tuned:
    """Measure with a process for each GPU that this one sees, and keep what `auto` is to use from then on.

    Raises:
        RuntimeError: There are fewer than two GPUs, or the measurement failed.
        OSError: The file cannot be written.
    """
    try:
        gpus = [device.name for device in cuda.devices()]
    except cuda.CudaError as error:
        raise RuntimeError(f"no GPU was found: {error}") from error
    if len(gpus) < 2:
        raise RuntimeError(f"there is only one GPU, {gpus[0]}; nothing travels")
    with Ranks(len(gpus)) as ranks:
        measured: list[Measured] = ranks.run(measure, TOKENS, timeout=_TIMEOUT)[0]
    found = thresholds(measured, len(gpus))
    return Tuned(found, measured, tuning.save(gpus, found, [asdict(row) for row in measured]))


def thresholds(measured: Sequence[Measured], num_ranks: int) -> Thresholds:
    """Where kernels and copy engines change places; as built in for what is not measured: dense calls and beside other work."""
    dispatch, combine = (threshold([row for row in measured if row.kind == kind]) for kind in KINDS)
    return tuning.built_in(num_ranks, TOPK)._replace(dispatch=dispatch, combine=combine)


def threshold(measured: Sequence[Measured]) -> int:
    """The bytes up to which kernels are to move calls, so that the sum of log(time / the faster way's) is the least.

    Between two measured sizes it is their geometric mean; 0: copy engines move all; `NEVER`: kernels do.
    """
    rows = sorted(measured, key=lambda row: row.nbytes)
    gains = [math.log(row.dma / row.direct) for row in rows]  # of kernels
    best = max(range(len(rows) + 1), key=lambda count: sum(gains[:count]))
    if best in (0, len(rows)):
        return NEVER if best else 0
    return math.isqrt(rows[best - 1].nbytes * rows[best].nbytes)


def measure(tokens: Sequence[int]) -> list[Measured]:
    """One rank's part: time all sizes. All ranks return the same."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    shape = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "topk": TOPK, "max_tokens": max(tokens), "device": "cuda"}
    rows: list[Measured] = []
    with Buffer(**shape, transport="direct") as direct, Buffer(**shape, transport="dma") as dma:  # type: ignore[arg-type]
        for count in tokens:
            ways = [_graphs(buffer, count) for buffer in (direct, dma)]
            for number, kind in enumerate(KINDS):
                times = _times([graphs[number] for graphs in ways])
                rows.append(Measured(kind, count * HIDDEN * 2, *times))
            direct.check()
            dma.check()
    return rows


def _graphs(buffer: Buffer, tokens: int) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
    """`_CALLS` dispatches, and as many combines, of random tokens."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    idx = torch.rand(tokens, NUM_EXPERTS, device="cuda").topk(TOPK).indices
    weights = torch.rand(tokens, TOPK, device="cuda")
    dispatched = api.dispatch(x, idx, weights, NUM_EXPERTS, buffer)
    y = torch.randn_like(dispatched.recv_x)
    api.combine(y, dispatched, buffer)
    torch.cuda.synchronize()  # everything is compiled, and no other work runs while capturing
    return (
        _captured(lambda: api.dispatch(x, idx, weights, NUM_EXPERTS, buffer)),
        _captured(lambda: api.combine(y, dispatched, buffer)),
    )


def _captured(operation: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            operation()
    return graph


def _times(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Microseconds a call of each graph: medians of samples taken in turns."""
    replays = [max(2, min(200, math.ceil(_SAMPLE_SECONDS / _CALLS / (_sample(graph, 3) * 1e-6)))) for graph in graphs]
    samples = [[_sample(*each) for each in zip(graphs, replays, strict=True)] for _ in range(_SAMPLES)]
    return [round(statistics.median(taken), 2) for taken in zip(*samples, strict=True)]


def _sample(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Mean microseconds a call over so many replays in a row; the slowest rank's, so the same on all."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    graph.replay()  # ranks leave a barrier at different times; this brings them into step
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    mean = torch.tensor(begin.elapsed_time(end) * 1e3 / replays / _CALLS, dtype=torch.float64)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)
