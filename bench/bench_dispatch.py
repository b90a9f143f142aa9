"""How long do dispatch and combine take, by tokens per rank, beside torch.distributed doing the same job?

    python -m bench.bench_dispatch --shape qwen3-30b-a3b --tokens 1 --tokens 64 --ranks 4

Every transport that works on the device and torch.distributed (gloo on CPU, NCCL on CUDA) run in the same processes and take
turns, on CUDA as captured graphs; before anything is timed, their results are compared. Tokens choose experts at random, all
alike likely. Every rank has the same number of tokens, since the baseline can do no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track

from bench.contenders import SHAPES, Inputs, Ours, Theirs, chosen, partial_results, verify
from bench.link import two_way_gbps
from bench.measure import Timings, compare
from bench.report import (
    RANKS,
    Row,
    console,
    default_ranks,
    machine_facts,
    place,
    print_tables,
    warn_if_shared,
    write_json,
    write_plot,
)
from thunderep.buffer import TransportName
from thunderep.testing.processes import Ranks

Device = Literal["cpu", "cuda"]

TRANSPORTS: dict[Device, tuple[TransportName, ...]] = {
    "cpu": ("shm", "collective"),
    "cuda": ("dma", "direct", "auto", "collective"),
}
TOKENS: dict[Device, tuple[int, ...]] = {"cpu": (1, 8, 64, 512), "cuda": (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)}
BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "nccl"}


def measure(name: str, tokens: int, device: Device, repeats: int) -> dict[str, Timings]:
    """In every rank: verify, then time all contenders at one shape and number of tokens. Timings by transport or back end."""
    shape = SHAPES[name]
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    inputs = Inputs.random(shape, tokens, dist.get_rank(), where)
    y = partial_results(inputs, shape)
    buffers = {transport: shape.buffer(transport, tokens, where) for transport in TRANSPORTS[device]}
    ours = [Ours(transport, inputs, y, shape, buffer) for transport, buffer in buffers.items()]
    for contender in ours:
        verify(contender, inputs, y, shape)
    timings = compare([*ours, Theirs(BACKENDS[device], inputs, y)], repeats, where)
    for buffer in buffers.values():
        buffer.close()
    return timings


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Repeatable; all if left out: {', '.join(SHAPES)}.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Per rank, repeatable; if left out, 1 to 512 on CPU, 1 to 4096 on CUDA.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=RANKS)] = None,
    device: Annotated[Device | None, typer.Option(help="If left out, CUDA where there is a GPU.")] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each contender.")] = 15,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the plot.")] = Path("bench/results"),
) -> None:
    """Measure dispatch and combine beside torch.distributed; print a table, write JSON and a plot."""
    shapes = chosen(shape)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = ranks or default_ranks(device)
    facts = machine_facts(device, ranks) | {"repeats": repeats}
    rival = BACKENDS[device]
    rows, gbps = [], 0.0
    points = [(name, count) for name in shapes for count in sorted(tokens or TOKENS[device])]
    with Ranks(ranks, rival) as processes:
        if device == "cuda":
            facts["two_way_gbps"] = gbps = processes.run(two_way_gbps)[0]
        for name, count in track(points, "measuring", console=Console(stderr=True), transient=True):
            timings = processes.run(measure, name, count, device, repeats, timeout=600)[0]
            link_us = (ranks - 1) * count * SHAPES[name].hidden * 2 / gbps / 1e3 if device == "cuda" else None
            rows += [
                Row(name, count, transport, rival, timings[transport], timings[rival], link_us)
                for transport in TRANSPORTS[device]
            ]
    title = f"dispatch and combine, {place(device, ranks)}"
    print_tables(console(), rows, title)
    warn_if_shared(console(), device, ranks)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"dispatch-{device}-{ranks}-ranks"
    write_json(stem.with_suffix(".json"), rows, facts)
    write_plot(stem.with_suffix(".png"), rows, title)
    console().print(f"wrote {stem}.json and {stem}.png")


if __name__ == "__main__":
    typer.run(main)
