"""What a benchmark leaves behind: a table, JSON with the machine's facts, a plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import Timings
from thunderep.runtime.topology import nccl_version


@dataclass(frozen=True)
class Row:
    """One contender beside torch.distributed at one size.

    Attributes:
        shape: Name of the model shape.
        tokens: Tokens per rank.
        name: The transport.
        rival: The torch.distributed backend.
        ours: The transport's timings.
        theirs: The rival's.
    """

    shape: str
    tokens: int
    name: str
    rival: str
    ours: Timings
    theirs: Timings
    link_us: float | None = None

    def ratios(self) -> list[float]:
        """How many times faster than the rival, by medians: dispatch, combine, both."""
        return [theirs.median / ours.median for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """All of it with the ratios, for JSON."""
        times = {who: {op: t._asdict() for op, t in getattr(self, who)._asdict().items()} for who in ("ours", "theirs")}
        ratios = dict(zip(Timings._fields, (round(ratio, 2) for ratio in self.ratios()), strict=True))
        return asdict(self) | times | {"ratio": ratios}


RANKS = "Processes; if left out, 4 on CPU, one a GPU on CUDA. Where there are fewer GPUs than ranks, they are shared."


def default_ranks(device: str) -> int:
    """Ranks that a benchmark runs unless it is told how many; on one GPU two share it."""
    return max(2, torch.cuda.device_count()) if device == "cuda" else 4


def machine_facts(device: str, ranks: int) -> dict[str, object]:
    """What the figures depend on."""
    facts: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": ranks,
    }
    if device == "cuda":
        facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, nccl_version()))
        facts["environment"] = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    return facts


_WIDE = 160


def console() -> Console:
    """Standard output. In a file, whose width nobody limits, tables keep theirs."""
    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_WIDE if free else None)


def place(device: str, ranks: int, alone: bool = False) -> str:
    """Ranks and hardware in a few words; `alone`: one GPU plays them all."""
    if alone:
        return f"{torch.cuda.get_device_name()} plays {ranks} ranks"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        return f"{ranks} ranks{f' that share {gpus}' if ranks > gpus else ','} {torch.cuda.get_device_name()}"
    return f"{ranks} ranks, {_cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def warn_if_shared(screen: Console, device: str, ranks: int) -> None:
    """Say what NCCL's figures are worth where ranks share GPUs."""
    if device == "cuda" and ranks > torch.cuda.device_count():
        screen.print(
            "[bold]Ranks share GPUs:[/bold] NCCL goes from one to another through the GPU's own memory (2.30 or newer) or"
            " through sockets, never through host memory, so nothing beside it here holds for several GPUs. Without CUDA's"
            " Multi-Process Service ranks also take turns."
        )


def print_tables(screen: Console, rows: Sequence[Row], title: str) -> None:
    """Show medians in microseconds, a table a shape; beside ours, how many times faster than the rival it is."""
    screen.print(f"[bold]{title}[/bold]\nmedians in microseconds; in brackets, how many times faster than {rows[0].rival}")
    for shape in dict.fromkeys(row.shape for row in rows):
        table = Table(title=shape, title_justify="left", min_width=72)
        table.add_column("tokens", justify="right")
        table.add_column("")
        for operation in Timings._fields:
            table.add_column(operation, justify="right")
        if any(row.link_us for row in rows):
            for operation in Timings._fields[:2]:
                table.add_column(f"{operation} / link", justify="right")
        picked = [row for row in rows if row.shape == shape]
        for tokens in dict.fromkeys(row.tokens for row in picked):
            same = [row for row in picked if row.tokens == tokens]
            table.add_section()
            table.add_row(str(tokens), same[0].rival, *(f"{timing.median:,.0f}" for timing in same[0].theirs))
            for row in same:
                cells = [f"{t.median:,.0f} [bold]({ratio:.2f})[/bold]" for t, ratio in zip(row.ours, row.ratios(), strict=True)]
                if row.link_us:
                    cells += [f"{timing.median / row.link_us:.2f}" for timing in row.ours[:2]]
                table.add_row("", row.name, *cells)
        screen.print(table)


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, object]) -> None:
    """Write everything that was measured, and where."""
    content = {"facts": facts, "unit": "microseconds", "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw time and ratio by tokens per rank, one column a shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    figure, axes = pyplot.subplots(2, len(shapes), figsize=(4.5 * len(shapes), 6.5), sharex=True, sharey="row", squeeze=False)
    for column, shape in enumerate(shapes):
        times, ratios = axes[0][column], axes[1][column]
        for name in names:
            picked = [row for row in rows if row.shape == shape and row.name == name]
            tokens = [row.tokens for row in picked]
            times.plot(tokens, [row.ours.both.median / 1e3 for row in picked], marker="o", label=f"thunderep, {name}")
            ratios.plot(tokens, [row.ratios()[-1] for row in picked], marker="o", label=f"thunderep, {name}")
        theirs = [row.theirs.both.median / 1e3 for row in picked]
        times.plot(tokens, theirs, marker="s", color="black", linestyle="--", label=f"torch.distributed, {picked[0].rival}")
        times.set(title=shape, xscale="log", yscale="log")
        times.yaxis.set_major_formatter("{x:g}")
        times.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        times.yaxis.set_minor_formatter("{x:g}")
        ratios.axhline(1, color="black", linestyle="--")
        ratios.set(xlabel="tokens per rank", xticks=tokens, xticklabels=[str(value) for value in tokens])
        ratios.minorticks_off()
    axes[0][0].set_ylabel("dispatch + combine, milliseconds")
    axes[1][0].set_ylabel("times faster than torch.distributed")
    axes[1][0].set_ylim(bottom=0)
    axes[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
