"""What does communication cost a matrix product that runs beside it, and what does the product cost communication?

    python -m bench.bench_overlap --tokens 4096 --size 8192

Before each product some dispatches are started with async_op=True, after it they are waited for, as a layer does; over each
transport, and over NCCL. Needs GPUs. One alone plays two ranks (see `bench.loopback`), and there is no NCCL beside it, unless
`--ranks` is given: then so many processes share it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from bench import loopback
from bench.contenders import SHAPES, Inputs, Ours, Theirs
from bench.measure import StreamClock
from bench.report import console, default_ranks, machine_facts, warn_if_shared


class Overlap(NamedTuple):
    """Milliseconds, medians: alone, and side by side."""

    products: float
    communication: float
    products_beside: float
    both: float

    @property
    def slowdown(self) -> float:
        """How many times longer the products take beside communication."""
        return self.products_beside / self.products

    @property
    def over_longer(self) -> float:
        """Time until all is done over that of the longer alone."""
        return self.both / max(self.products, self.communication)


class _Runs:
    """Products and communication of one rank."""

    def __init__(self, contender: Ours | Theirs, size: int, products: int, dispatches: int) -> None:
        self._contender, self._products, self._dispatches = contender, products, dispatches
        self._factor = torch.randn(size, size, device="cuda").bfloat16()

    def sample(self, multiply: bool, communicate: bool) -> tuple[float, float]:
        """Milliseconds that the products took, and all of it."""
        torch.cuda.synchronize()
        dist.barrier()
        clock = StreamClock()
        for _ in range(self._products):
            started = [self._contender.start_dispatch() for _ in range(self._dispatches if communicate else 0)]
            clock.mark()
            if multiply:
                self._factor @ self._factor
            clock.mark()
            for wait in started:
                wait()
        clock.mark()
        laps = [1e3 * lap for lap in clock.laps()]
        return sum(laps[0::2]), sum(laps)


def measure(transport: str, name: str, tokens: int, size: int, products: int, dispatches: int, repeats: int) -> Overlap:
    """In every rank."""
    shape, rank = SHAPES[name], dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = Inputs.random(shape, tokens, rank, device)
    y = torch.empty(0, device=device)
    if transport == "nccl":
        return _measure(Theirs("nccl", inputs, y), size, products, dispatches, repeats)
    with shape.buffer(transport, tokens, device) as buffer:
        return _measure(Ours(transport, inputs, y, shape, buffer), size, products, dispatches, repeats)


def _measure(contender: Ours | Theirs, size: int, products: int, dispatches: int, repeats: int) -> Overlap:
    runs = _Runs(contender, size, products, dispatches)
    for _ in range(3):
        runs.sample(True, True)
    alone, moved, both = [], [], []
    for _ in range(repeats):
        alone.append(runs.sample(True, False))
        moved.append(runs.sample(False, True))
        both.append(runs.sample(True, True))
    middle = statistics.median
    products_alone, all_moved = middle(s[0] for s in alone), middle(s[1] for s in moved)
    return Overlap(products_alone, all_moved, middle(s[0] for s in both), middle(s[1] for s in both))


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-30b-a3b",
    tokens: Annotated[int, typer.Option(min=1, help="Per rank.")] = 4096,
    size: Annotated[int, typer.Option(min=16, help="Of the square bf16 matrices.")] = 8192,
    products: Annotated[int, typer.Option(min=1)] = 20,
    dispatches: Annotated[int, typer.Option(min=1, help="Beside each product.")] = 2,
    ranks: Annotated[int | None, typer.Option(min=2, help="Processes; if left out, one a GPU.")] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("bench/results"),
) -> None:
    """Measure matrix products beside dispatches, each alone and both at once."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"got {shape}; expected {', '.join(SHAPES)}", param_hint="--shape")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU: on a CPU there is nothing beside which to compute")
    alone = ranks is None and torch.cuda.device_count() == 1
    ranks = ranks or default_ranks("cuda")
    table = Table("over", "products slowed by", "all done / longer alone", "products", "dispatches")
    found = {}
    with loopback.first_rank(ranks, "nccl", alone) as run:
        for transport in ("dma", "direct") if alone else ("dma", "direct", "nccl"):
            overlap: Overlap = run(measure, transport, shape, tokens, size, products, dispatches, repeats)
            found[transport] = overlap._asdict() | {"slowdown": overlap.slowdown, "over_longer": overlap.over_longer}
            table.add_row(
                transport,
                f"{overlap.slowdown - 1:.1%}",
                f"{overlap.over_longer:.2f}",
                f"{overlap.products:.1f} ms",
                f"{overlap.communication:.1f} ms",
            )
    console().print(table)
    if not alone:
        warn_if_shared(console(), "cuda", ranks)
    facts = machine_facts("cuda", ranks) | {"one GPU plays all": alone, "shape": shape, "tokens": tokens}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"overlap-{ranks}-ranks.json"
    path.write_text(json.dumps({"facts": facts, "over": found}, indent=1))
    console().print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
