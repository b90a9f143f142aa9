"""What does communication cost a matrix product that runs beside it, and what does the product cost communication?

    python -m bench.bench_overlap --tokens 4096 --size 8192

Products on one stream, dispatches replayed as a CUDA graph on another, over each transport and, where every rank has a GPU of
its own, over NCCL. Needs GPUs; with one, two ranks share it (`THUNDEREP_SHARE_GPU=1`): then only rank 0 multiplies, and what
both ranks move loads its GPU.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import thunderep
from bench.contenders import SHAPES, Inputs, Ours, Theirs
from bench.measure import Contender
from bench.report import machine_facts
from thunderep.runtime.gpu import SHARE
from thunderep.testing.processes import Ranks


class Overlap(NamedTuple):
    """Milliseconds, medians: alone, and side by side."""

    products: float
    communication: float
    products_beside: float
    communication_beside: float
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

    def __init__(self, contender: Contender, size: int, products: int, dispatches: int, multiplies: bool) -> None:
        self._factor = torch.randn(size, size, device="cuda").bfloat16()
        self._products = products if multiplies else 0
        self._beside = torch.cuda.Stream(priority=-1)  # as NCCL and ThunderEP run what is asynchronous
        contender.dispatch()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._beside):
            for _ in range(dispatches):
                contender.dispatch()

    def sample(self, products: bool, communication: bool) -> tuple[float, float, float]:
        """Milliseconds until the products are done, communication is, and both are."""
        torch.cuda.synchronize()
        dist.barrier()
        start, computed, moved = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        self._beside.wait_event(start)
        if communication:
            with torch.cuda.stream(self._beside):
                self._graph.replay()
        moved.record(self._beside)
        if products:
            for _ in range(self._products):
                self._factor @ self._factor
        computed.record()
        torch.cuda.synchronize()
        ends = start.elapsed_time(computed), start.elapsed_time(moved)
        return (*ends, max(ends))


def measure(transport: str, name: str, tokens: int, size: int, products: int, dispatches: int, repeats: int) -> Overlap:
    """In every rank; rank 0's figures are meant where ranks share a GPU."""
    shape, rank = SHAPES[name], dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = Inputs.random(shape, tokens, rank, device)
    multiplies = rank == 0 or os.environ.get(SHARE) != "1"
    y = torch.empty(0, device=device)
    if transport == "nccl":
        return _measure(Theirs("nccl", inputs, y), size, products, dispatches, repeats, multiplies)
    with thunderep.Buffer(
        num_experts=shape.num_experts,
        hidden=shape.hidden,
        topk=shape.topk,
        max_tokens=tokens,
        device=device,
        transport=transport,  # type: ignore[arg-type]
    ) as buffer:
        return _measure(Ours(transport, inputs, y, shape, buffer), size, products, dispatches, repeats, multiplies)


def _measure(contender: Contender, size: int, products: int, dispatches: int, repeats: int, multiplies: bool) -> Overlap:
    runs = _Runs(contender, size, products, dispatches, multiplies)
    for _ in range(3):
        runs.sample(True, True)
    alone, moved, both = [], [], []
    for _ in range(repeats):
        alone.append(runs.sample(True, False))
        moved.append(runs.sample(False, True))
        both.append(runs.sample(True, True))
    middle = statistics.median
    return Overlap(middle(s[0] for s in alone), middle(s[1] for s in moved), *(middle(s[i] for s in both) for i in range(3)))


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-30b-a3b",
    tokens: Annotated[int, typer.Option(min=1, help="Per rank.")] = 4096,
    size: Annotated[int, typer.Option(min=16, help="Of the square bf16 matrices.")] = 8192,
    products: Annotated[int, typer.Option(min=1)] = 20,
    dispatches: Annotated[int, typer.Option(min=1)] = 40,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("bench/results"),
) -> None:
    """Measure matrix products beside dispatches, each alone and both at once."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"got {shape}; expected {', '.join(SHAPES)}", param_hint="--shape")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU: on a CPU there is nothing beside which to compute")
    gpus = torch.cuda.device_count()
    shared = gpus == 1
    table = Table("over", "products slowed by", "communication slowed by", "all done / longer alone", "products", "dispatches")
    found = {}
    with Ranks(2, environment={SHARE: "1"}) if shared else Ranks(gpus, "nccl") as ranks:
        for transport in ("dma", "direct") if shared else ("dma", "direct", "nccl"):
            overlap = ranks.run(measure, transport, shape, tokens, size, products, dispatches, repeats, timeout=300)[0]
            found[transport] = overlap._asdict() | {"slowdown": overlap.slowdown, "over_longer": overlap.over_longer}
            table.add_row(
                transport,
                f"{overlap.slowdown - 1:.1%}",
                f"{overlap.communication_beside / overlap.communication - 1:.1%}",
                f"{overlap.over_longer:.2f}",
                f"{overlap.products:.1f} ms",
                f"{overlap.communication:.1f} ms",
            )
    Console().print(table)
    facts = machine_facts("cuda") | {"ranks": 2 if shared else gpus, "share one GPU": shared, "shape": shape, "tokens": tokens}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"overlap-{facts['ranks']}-ranks.json"
    path.write_text(json.dumps({"facts": facts, "over": found}, indent=1))
    Console().print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
