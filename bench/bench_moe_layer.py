"""How long does a whole Mixture-of-Experts layer take, router to output, beside the same layer over torch.distributed?

    python -m bench.bench_moe_layer --shape qwen3-30b-a3b --tokens 64 --tokens 4096
    python -m bench.bench_moe_layer --shape qwen3-30b-a3b --tokens 1 --tokens 64 --layers 48 --intermediate 64  # a decode step

Ours with every option; torch.distributed (NCCL, gloo) one operation after another, and in halves that overlap; and the layer
without communication, on rows that came before: what is above that is exposed communication. On CUDA graphs are replayed. One
GPU alone plays two ranks (see `bench.loopback`), and there is no NCCL beside it, unless `--ranks` is given: then so many
processes share it.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table

import thunderep
from bench import baseline, loopback
from bench.bench_dispatch import BACKENDS, Device
from bench.contenders import SHAPES, Shape, chosen
from bench.measure import layer_times
from bench.report import RANKS, console, default_ranks, machine_facts, place, warn_if_shared
from bench.timeline import draw
from thunderep.buffer import TransportName
from thunderep.nn import ExpertParallel

Layer = Callable[[torch.Tensor], torch.Tensor]

WITHOUT = "no communication"

INTERMEDIATE = {"qwen3-30b-a3b": 768, "gpt-oss-120b": 2880, "glm-4.5-air": 1408}
TOKENS: dict[Device, tuple[int, ...]] = {"cpu": (8, 64), "cuda": (1, 16, 64, 1024, 2048, 4096)}
TRANSPORTS: dict[Device, tuple[TransportName, ...]] = {"cpu": ("shm",), "cuda": ("dma", "direct", "auto")}


class Router:
    """Chooses K experts for each token, and their weights."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._topk = shape.topk
        generator = torch.Generator().manual_seed(1)
        self._weight = torch.randn(shape.hidden, shape.num_experts, generator=generator).bfloat16().to(device)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [T, K] and weights [T, K] for x [T, H]."""
        chances, ids = torch.softmax((x @ self._weight).float(), dim=-1).topk(self._topk)
        return ids, chances / chances.sum(-1, keepdim=True)


def gathered(layer: ExpertParallel, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], parts: int) -> torch.Tensor:
    """The layer's experts over torch.distributed: all rows everywhere, then a reduce-scatter; in `parts` that overlap."""
    size = -(-len(x) // parts)
    started = [baseline.start_dispatch(*(t[i : i + size].contiguous() for t in (x, *routing))) for i in range(0, len(x), size)]
    here, combined = layer.buffer.local_experts, []
    for wait in started:
        rows = wait()
        local = (rows.topk_idx >= here.start) & (rows.topk_idx < here.stop)
        received = thunderep.DispatchOutput(
            rows.x, torch.where(local, rows.topk_idx - here.start, -1), torch.where(local, rows.topk_weights, 0), x, x
        )
        combined.append(baseline.start_combine(layer._experts(received, x, routing[1])))
    return torch.cat([wait() for wait in combined])


def layers(name: str, tokens: int, device: Device, intermediate: int, stack: list[thunderep.Buffer]) -> dict[str, Layer]:
    """Every way through the layer, by name, with one set of experts. Buffers that are made go onto `stack`."""
    shape = SHAPES[name]
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    router = Router(shape, where)
    found: dict[str, Layer] = {}
    parts = (1, 2) if tokens > 1 else (1,)
    layer: ExpertParallel | None = None
    for transport in TRANSPORTS[device]:
        buffer = shape.buffer(transport, tokens, where)
        stack.append(buffer)
        layer = ExpertParallel(buffer, intermediate) if layer is None else layer
        for overlap, fp8 in itertools.product(parts, (False, True)):
            twin = copy.copy(layer)
            twin.buffer, twin.overlap, twin.dispatch_dtype = buffer, overlap, torch.float8_e4m3fn if fp8 else None
            label = transport + (", overlapped" if overlap > 1 else "") + (", fp8" if fp8 else "")
            found[label] = lambda x, twin=twin: twin(x, *router(x))  # type: ignore[misc]
    assert layer is not None
    for cut in () if loopback.playing() else parts:
        label = f"{dist.get_backend()}, overlapped" if cut > 1 else dist.get_backend()
        found[label] = lambda x, cut=cut: gathered(layer, x, router(x), cut)  # type: ignore[misc]
    x = inputs(shape, tokens, where)
    received = thunderep.dispatch(x, *router(x), shape.num_experts, stack[0])

    def without(x: torch.Tensor) -> torch.Tensor:
        router(x)
        return layer._experts(received, x, received.recv_topk_weights)

    found[WITHOUT] = without
    return found


def inputs(shape: Shape, tokens: int, device: torch.device) -> torch.Tensor:
    """This rank's x [T, H]."""
    return torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().to(device)


def comparable(name: str, x: torch.Tensor, buffer: thunderep.Buffer) -> torch.Tensor:
    """The tokens [T] whose results are defined: where one GPU plays all ranks, those with an expert of rank 0."""
    ids, _ = Router(SHAPES[name], x.device)(x)
    experts = buffer.local_experts if loopback.playing() else range(buffer.num_experts)
    return ((ids >= experts.start) & (ids < experts.stop)).any(dim=1)


@torch.no_grad()
def measure(
    name: str, tokens: int, device: Device, intermediate: int, depth: int, repeats: int, timeline: str | None
) -> dict[str, float]:
    """In every rank: microseconds of each layer, the median; the slowest rank's."""
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    x = inputs(SHAPES[name], tokens, where)
    buffers: list[thunderep.Buffer] = []
    try:
        found = layers(name, tokens, device, intermediate, buffers)
        results = {label: layer(x) for label, layer in found.items() if label != WITHOUT}
        expected, same = next(iter(results.values())), comparable(name, x, buffers[0])
        for result in results.values():
            torch.testing.assert_close(result[same], expected[same], rtol=2**-3, atol=2**-3)  # fp8 rounds to 3 bits
        runs = {label: partial(layer, x) for label, layer in found.items()}
        if timeline is not None and dist.get_rank() == 0:
            draw(runs, Path(timeline))
        elif timeline is not None:
            draw(runs, None)
        times = layer_times(runs, repeats, where, depth)
        return {label: statistics.median(taken) * 1e6 for label, taken in times.items()}
    finally:
        for buffer in buffers:
            buffer.close()


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Repeatable; all if left out: {', '.join(SHAPES)}.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Per rank, repeatable.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=RANKS)] = None,
    device: Annotated[Device | None, typer.Option(help="If left out, CUDA where there is a GPU.")] = None,
    depth: Annotated[int, typer.Option("--layers", min=1, help="In a row, in each CUDA graph.")] = 4,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Inner size of an expert; if left out, the model's.")] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each.")] = 9,
    timeline: Annotated[bool, typer.Option("--timeline", help="On CUDA, draw who runs when, for the largest size.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the picture.")] = Path("bench/results"),
) -> None:
    """Measure a whole layer beside torch.distributed; print a table, write JSON."""
    shapes = chosen(shape)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    alone = ranks is None and device == "cuda" and torch.cuda.device_count() == 1
    ranks, backend = ranks or default_ranks(device), BACKENDS[device]
    screen, rows = console(), []
    out.mkdir(parents=True, exist_ok=True)
    with loopback.first_rank(ranks, backend, alone) as run:
        for name in shapes:
            for count in sorted(tokens or TOKENS[device]):
                last = timeline and device == "cuda" and count == max(tokens or TOKENS[device])
                picture = str(out / f"layer-{name}-{count}.png") if last else None
                inner = intermediate or INTERMEDIATE[name]
                job = (name, count, device, inner, depth, repeats, picture)
                times: dict[str, float] = run(measure, *job)
                table = Table("", title=f"{name}, {count} tokens a rank, {place(device, ranks, alone)}")
                for header in ("us", "exposed", *(() if alone else (f"times faster than {backend}",))):
                    table.add_column(header, justify="right")
                for label, us in times.items():
                    cells = [label, f"{us:,.0f}", f"{us - times[WITHOUT]:,.0f}"]
                    table.add_row(*cells, *([] if alone else [f"{times[backend] / us:.2f}"]))
                screen.print(table)
                rows.append({"shape": name, "tokens": count, "intermediate": inner, "us": times})
    if not alone:
        warn_if_shared(screen, device, ranks)
    facts = machine_facts(device, ranks) | {"one GPU plays all": alone, "repeats": repeats, "layers": depth}
    path = out / f"moe-layer-{device}-{ranks}-ranks.json"
    path.write_text(json.dumps({"facts": facts, "unit": "microseconds", "rows": rows}, indent=1) + "\n")
    screen.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
