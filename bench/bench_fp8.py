"""How long do tokens take to their experts as fp8, beside as bfloat16, by tokens per rank?

    python -m bench.bench_fp8 --shape qwen3-30b-a3b --tokens 512 --tokens 2048

All begin with the same bfloat16 rows and end with bfloat16 rows in expert order. Both types over every transport that works on
the device, and torch.distributed with bfloat16, run in the same processes and take turns, on CUDA as captured graphs.
Quantising counts as part of the dispatch, dequantising as part of the permute. What arrives is compared before anything is
timed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table

import thunderep
from bench import baseline
from bench.bench_dispatch import BACKENDS, TRANSPORTS, Device
from bench.contenders import SHAPES, Inputs, Shape, chosen
from bench.measure import Timings, compare
from bench.report import RANKS, console, default_ranks, machine_facts, place, warn_if_shared
from thunderep.testing.processes import Ranks

TOKENS: dict[Device, tuple[int, ...]] = {"cpu": (64, 512), "cuda": (16, 256, 1024, 2048, 4096)}


class Way:
    """Rows to their experts over one transport. Its `combine`, in `measure`'s words, is the permute."""

    def __init__(self, name: str, inputs: Inputs, shape: Shape, buffer: thunderep.Buffer, fp8: bool) -> None:
        self.name = name
        self._inputs, self._shape, self._buffer, self._fp8 = inputs, shape, buffer, fp8
        received = buffer.num_ranks * len(inputs.x)
        # On CUDA the exact number would have to be waited for.
        self._capacity = received * shape.topk if inputs.x.is_cuda else None

    def dispatch(self) -> thunderep.DispatchOutput:
        """Send this rank's tokens to their experts."""
        x, idx, weights = self._inputs
        rows, scales = thunderep.quantize_fp8(x) if self._fp8 else (x, None)
        return thunderep.dispatch(rows, idx, weights, self._shape.num_experts, self._buffer, x_scales=scales)

    def combine(self, d: thunderep.DispatchOutput) -> torch.Tensor:
        """Group what arrived by expert, as bfloat16."""
        local = len(self._buffer.local_experts)
        if self._fp8:
            return thunderep.permute_fp8(d.recv_x, d.recv_x_scales, d.recv_topk_idx, local, self._capacity).expert_x
        return thunderep.permute(d.recv_x, d.recv_topk_idx, local, self._capacity).expert_x


class Gathered:
    """The same by torch.distributed: all-gather, then the same permute."""

    def __init__(self, name: str, inputs: Inputs, shape: Shape) -> None:
        self.name = name
        self._inputs = inputs
        self._experts = thunderep.local_experts(shape.num_experts, dist.get_rank(), dist.get_world_size())
        received = dist.get_world_size() * len(inputs.x)
        self._capacity = received * shape.topk if inputs.x.is_cuda else None

    def dispatch(self) -> baseline.Gathered:
        """All-gather."""
        return baseline.dispatch(*self._inputs)

    def combine(self, gathered: baseline.Gathered) -> torch.Tensor:
        """Group what arrived by expert."""
        idx = gathered.topk_idx - self._experts.start
        idx = torch.where((idx >= 0) & (idx < len(self._experts)), idx, -1)
        return thunderep.permute(gathered.x, idx, len(self._experts), self._capacity).expert_x


def measure(name: str, tokens: int, device: Device, repeats: int) -> dict[str, Timings]:
    """In every rank: compare what arrives, then time all at one shape and number of tokens. Timings by name."""
    shape = SHAPES[name]
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    inputs = Inputs.random(shape, tokens, dist.get_rank(), where)
    theirs = Gathered(BACKENDS[device], inputs, shape)
    expected = theirs.combine(theirs.dispatch())
    ways, buffers = [], []
    for transport in TRANSPORTS[device]:
        buffer = shape.buffer(transport, tokens, where)
        buffers.append(buffer)
        for kind in ("bf16", "fp8"):
            way = Way(f"{transport} {kind}", inputs, shape, buffer, kind == "fp8")
            error = 2**-4 if kind == "fp8" else 0
            torch.testing.assert_close(way.combine(way.dispatch()), expected, rtol=error, atol=error / 16)
            ways.append(way)
    timings = compare([*ways, theirs], repeats, where)
    for buffer in buffers:
        buffer.close()
    return timings


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Repeatable; all if left out: {', '.join(SHAPES)}.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Per rank, repeatable.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=RANKS)] = None,
    device: Annotated[Device | None, typer.Option(help="If left out, CUDA where there is a GPU.")] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each contender.")] = 15,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("bench/results"),
) -> None:
    """Measure dispatch and permute with rows as fp8, as bfloat16 and by torch.distributed; print tables, write JSON."""
    shapes = chosen(shape)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = ranks or default_ranks(device)
    screen, rows = console(), []
    with Ranks(ranks, BACKENDS[device]) as processes:
        for name in shapes:
            title = f"{name}, {place(device, ranks)}: medians in microseconds; in brackets, times faster than bf16"
            table = Table("tokens", "", "dispatch", "permute", "both", title=title, title_justify="left")
            for count in sorted(tokens or TOKENS[device]):
                timings = processes.run(measure, name, count, device, repeats, timeout=600)[0]
                rows += [_record(name, count, who, timings) for who in timings]
                for who in timings:
                    table.add_row(str(count), who, *_cells(who, timings))
                table.add_section()
            screen.print(table)
    warn_if_shared(screen, device, ranks)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"fp8-{device}-{ranks}-ranks.json"
    facts = machine_facts(device, ranks) | {"repeats": repeats}
    path.write_text(json.dumps({"facts": facts, "unit": "microseconds", "rows": rows}, indent=1) + "\n")
    screen.print(f"wrote {path}")


def _ratios(who: str, timings: dict[str, Timings]) -> list[float | None]:
    """How many times faster than bf16 over the same transport: dispatch, permute, both. None for what has no fp8."""
    if not who.endswith(" fp8"):
        return [None] * 3
    wide = timings[who.removesuffix("fp8") + "bf16"]
    return [round(a.median / b.median, 2) for a, b in zip(wide, timings[who], strict=True)]


def _cells(who: str, timings: dict[str, Timings]) -> list[str]:
    pairs = zip(timings[who], _ratios(who, timings), strict=True)
    return [f"{timing.median:,.0f}" + (f" ({ratio:.2f})" if ratio else "") for timing, ratio in pairs]


def _record(shape: str, tokens: int, who: str, timings: dict[str, Timings]) -> dict[str, object]:
    names = ("dispatch", "permute", "both")
    times = {name: timing._asdict() for name, timing in zip(names, timings[who], strict=True)}
    ratios = dict(zip(names, _ratios(who, timings), strict=True))
    return {"shape": shape, "tokens": tokens, "name": who, **times, "times_faster_than_bf16": ratios}


if __name__ == "__main__":
    typer.run(main)
