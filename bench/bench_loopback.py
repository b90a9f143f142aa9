"""How long do dispatch and combine take the GPU of one rank, while it plays all its peers itself?

    python -m bench.bench_loopback --ranks 2 --shape qwen3-30b-a3b

For machines with one GPU, see `bench.loopback` for what this leaves out. CUDA graph replays; before anything is timed, what
arrives is compared with what was sent. "/ link" is the time over that of the rows at the two-way rate of copy engines, measured
in the same run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from bench import loopback
from bench.contenders import SHAPES, Inputs, Ours, chosen
from bench.link import two_way_gbps
from bench.measure import Timings, compare
from bench.report import console, machine_facts, place

_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)


def measure(name: str, tokens: int, repeats: int) -> dict[str, Timings]:
    """Verify, then time all transports at one shape and number of tokens."""
    shape, device = SHAPES[name], torch.device("cuda", torch.cuda.current_device())
    inputs = Inputs.random(shape, tokens, 0, device)
    buffers, contenders = [], []
    for transport in ("dma", "direct", "auto"):
        buffer = shape.buffer(transport, tokens, device)
        buffers.append(buffer)
        y = torch.randn(buffer.num_ranks * tokens, shape.hidden, device=device).bfloat16()
        contenders.append(Ours(transport, inputs, y, shape, buffer))
        loopback.verify(inputs, contenders[-1].dispatch(), buffer)
    timings = compare(contenders, repeats, device)
    for buffer in buffers:
        buffer.close()
    return timings


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Repeatable; all if left out: {', '.join(SHAPES)}.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Per rank, repeatable; if left out, 1 to 4096.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks that the GPU plays.")] = 2,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each transport.")] = 9,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("bench/results"),
) -> None:
    """Measure one rank's side of dispatch and combine; print a table, write JSON."""
    shapes = chosen(shape)
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    loopback.play(ranks)
    gbps, screen, rows = two_way_gbps(), console(), []
    for name in shapes:
        table = Table(title=f"{name}, {place('cuda', ranks, alone=True)}: median us (/ link)")
        table.add_column("tokens", justify="right")
        for count in tokens or _TOKENS:
            link_us = (ranks - 1) * count * SHAPES[name].hidden * 2 / gbps / 1e3
            timings = measure(name, count, repeats)
            if len(table.columns) == 1:
                for transport in timings:
                    table.add_column(f"{transport}: dispatch", justify="right")
                    table.add_column("combine", justify="right")
            medians = [timing.median for both in timings.values() for timing in both[:2]]
            table.add_row(str(count), *(f"{us:,.1f} ({us / link_us:.2f})" for us in medians))
            rows.append(
                {"shape": name, "tokens": count, "link_us": link_us, "us": {t: v._asdict() for t, v in timings.items()}}
            )
        screen.print(table)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"loopback-{ranks}-ranks.json"
    facts = machine_facts("cuda", ranks) | {"one GPU plays all": True, "repeats": repeats, "two_way_gbps": gbps}
    path.write_text(json.dumps({"facts": facts, "unit": "microseconds", "rows": rows}, indent=1) + "\n")
    screen.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
