"""How long does the host take to issue an eager dispatch and an eager combine, beside NCCL's?

    python -m bench.bench_host --tokens 64

What the device then takes is not waited for, but for a pause between bursts. On one GPU two ranks share it.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from bench.bench_dispatch import TRANSPORTS
from bench.contenders import SHAPES, Inputs, Ours, Theirs, partial_results
from bench.measure import Contender
from bench.report import console, default_ranks, machine_facts, warn_if_shared
from thunderep.testing.processes import Ranks

_BURST = 10
"""Calls in a row: few enough that none waits for room in the device's queue."""


def issue(contender: Contender, bursts: int) -> tuple[float, float]:
    """Median microseconds that the host takes for a dispatch and for a combine."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(bursts):
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(_BURST):
            begun = time.perf_counter()
            dispatched = contender.dispatch()
            between = time.perf_counter()
            contender.combine(dispatched)
            times[0].append(between - begun)
            times[1].append(time.perf_counter() - between)
    dispatch, combine = (statistics.median(taken) * 1e6 for taken in times)
    return dispatch, combine


@torch.inference_mode()
def measure(name: str, tokens: int, bursts: int) -> dict[str, tuple[float, float]]:
    """In every rank: each contender's host times, in microseconds."""
    shape, device = SHAPES[name], torch.device("cuda", torch.cuda.current_device())
    inputs = Inputs.random(shape, tokens, dist.get_rank(), device)
    y = partial_results(inputs, shape)
    found = {"nccl": issue(Theirs("nccl", inputs, y), bursts)}
    for transport in TRANSPORTS["cuda"]:
        with shape.buffer(transport, tokens, device) as buffer:
            found[transport] = issue(Ours(transport, inputs, y, shape, buffer), bursts)
    return found


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-30b-a3b",
    tokens: Annotated[int, typer.Option(min=1, help="Per rank.")] = 64,
    bursts: Annotated[int, typer.Option(min=2, help=f"Of {_BURST} calls.")] = 50,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("bench/results"),
) -> None:
    """Measure what eager calls cost the host, in inference mode."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"got {shape}; expected {', '.join(SHAPES)}", param_hint="--shape")
    ranks = default_ranks("cuda")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU: on a CPU an operation is the host's time")
    with Ranks(ranks, "nccl") as processes:
        found = processes.run(measure, shape, tokens, bursts, timeout=300)[0]
    table = Table("over", "dispatch, us", "of NCCL's", "combine, us", "of NCCL's")
    dispatch, combine = found["nccl"]
    for name, (ours, theirs) in found.items():
        table.add_row(name, f"{ours:.1f}", f"{ours / dispatch:.2f}", f"{theirs:.1f}", f"{theirs / combine:.2f}")
    console().print(table)
    warn_if_shared(console(), "cuda", ranks)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"host-{ranks}-ranks.json"
    facts = machine_facts("cuda", ranks) | {"shape": shape, "tokens": tokens}
    path.write_text(json.dumps({"facts": facts, "unit": "microseconds", "over": found}, indent=1) + "\n")
    console().print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
