"""What `thunderep simulate` shows: tables, JSON and a plot. Each of them says that it is simulated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean, median

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from thunderep.forecast.ablation import Ablation, ablate
from thunderep.forecast.calibration import Point
from thunderep.forecast.loss import LAYERS, Loss, lose
from thunderep.forecast.predict import KINDS, Forecast, Shape, forecast
from thunderep.runtime.machines import MachineModel, smaller

_TITLE = "simulated, not measured"
_STYLES = {"dispatch": "#1b3a6b", "combine": "#f2a33a"}


Report = tuple[list[Table], Sequence[Forecast | Ablation | Loss]]
"""What to print, and what it shows."""


def forecasts(machines: Sequence[MachineModel], shape: Shape, counts: Sequence[int]) -> Report:
    """Every machine's operations, by tokens per rank."""
    by_machine = [[forecast(machine, kind, shape, count) for kind in KINDS for count in counts] for machine in machines]
    tables = [forecast_table(machine, shape, rows) for machine, rows in zip(machines, by_machine, strict=True)]
    return tables, [row for rows in by_machine for row in rows]


def ablations(machines: Sequence[MachineModel], shape: Shape, counts: Sequence[int]) -> Report:
    """What each idea gives on every machine, with 2, 4, 8, ... of its GPUs."""
    tables, rows = [], []
    for machine in machines:
        parts = [part for lanes, part in smaller(machine) if lanes not in ("8", "4")]
        found = [ablate(part, kind, shape, count) for part in parts for kind in KINDS for count in counts]
        tables.append(ablation_table(machine.name, shape, found))
        rows += found
    return tables, rows


def losses(machines: Sequence[MachineModel], shape: Shape, counts: Sequence[int], rate: float) -> Report:
    """Tokens a second lost on every machine, with 2, 4, 8, ... of its GPUs and narrower slots; a table a count of tokens."""
    by_count = [
        [lose(part, slot, shape, count, rate) for machine in machines for slot, part in smaller(machine)] for count in counts
    ]
    return [loss_table(shape, rows) for rows in by_count], [row for rows in by_count for row in rows]


def forecast_table(machine: MachineModel, shape: Shape, rows: Sequence[Forecast]) -> Table:
    """One machine's operations by tokens per rank."""
    table = Table(
        title=f"{machine.name} ({_TITLE})\nH {shape.hidden}, K {shape.topk}; microseconds",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    for column in ("tokens", "", "dma", "NCCL", "NCCL / dma", "dma, needed rows only", "dma, fp8"):
        table.add_column(column, justify="right")
    for row in rows:
        fp8 = "" if row.fp8 is None else f"{row.fp8:,.0f}"
        table.add_row(
            str(row.tokens), row.kind, f"{row.ours:,.0f}", f"{row.nccl:,.0f}", f"{row.ratio:.2f}", f"{row.needed:,.0f}", fp8
        )
    return table


def calibration_tables(points: Sequence[Point]) -> list[Table]:
    """Every measured point beside the simulated one, then the errors of each executor."""
    table = Table(title="simulated beside measured, microseconds", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("series", "tokens", "measured", "simulated", "error"):
        table.add_column(column, justify="left" if column == "series" else "right")
    for point in points:
        cells = (f"{point.measured:,g}", f"{point.simulated:,.1f}", f"{point.error:+.1%}")
        table.add_row(f"{point.executor}: {point.series}", str(point.tokens), *cells)
    summary = Table(title="relative errors of the simulation", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("executor", "points", "median", "worst"):
        summary.add_column(column, justify="left" if column == "executor" else "right")
    for executor, fitted in sorted({(point.executor, point.fitted) for point in points}):
        errors = [abs(point.error) for point in points if (point.executor, point.fitted) == (executor, fitted)]
        name = f"{executor}: {'parameters were fitted to these' if fitted else 'other points'}"
        summary.add_row(name, str(len(errors)), f"{median(errors):.1%}", f"{max(errors):.1%}")
    return [table, summary]


def ablation_table(machine: str, shape: Shape, rows: Sequence[Ablation]) -> Table:
    """What each idea gives, by number of GPUs and tokens per rank, and the geometric mean over sizes."""
    table = Table(
        title=f"{machine} ({_TITLE})\nH {shape.hidden}, K {shape.topk}; microseconds, and what each idea divides them by",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    for column in ("GPUs", "", "tokens", "NCCL", "one hop", "", "copy engines", "", "needed rows", "", "all"):
        table.add_column(column, justify="right")
    for (ranks, kind), group in itertools.groupby(rows, lambda row: (row.ranks, row.kind)):
        several = list(group)
        for row in several:
            cells = [f"{row.ring:,.0f}"]
            for us, gain in zip((row.one_hop, row.engines, row.needed), row.gains, strict=True):
                cells += [f"{us:,.0f}", f"{gain:.2f}"]
            table.add_row(str(ranks), kind, str(row.tokens), *cells, f"{row.ring / row.needed:.2f}")
        one_hop, engines, needed = (geometric_mean(gains) for gains in zip(*(row.gains for row in several), strict=True))
        cells = ["", "", f"{one_hop:.2f}", "", f"{engines:.2f}", "", f"{needed:.2f}", f"{one_hop * engines * needed:.2f}"]
        table.add_row(str(ranks), kind, "mean", *cells, end_section=True, style="bold")
    return table


def loss_table(shape: Shape, rows: Sequence[Loss]) -> Table:
    """Tokens a second lost to communication, by machine."""
    rate, tokens = rows[0].rate, rows[0].tokens
    table = Table(
        title=f"tokens a second lost to communication ({_TITLE})\n"
        f"H {shape.hidden}, K {shape.topk}, {LAYERS} layers, {tokens} tokens a rank; a GPU alone: {rate:,.0f} tokens/s, given",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    for column in ("machine", "GPUs", "slots", "without loss", "lost: NCCL", "dma", "dma, needed rows"):
        table.add_column(column, justify="left" if column == "machine" else "right")
    for row in rows:
        lost = (f"{row.lost(us):,.0f}" for us in (row.nccl, row.ours, row.needed))
        table.add_row(row.machine, str(row.ranks), f"x{row.slot}".replace("xmixed", "mixed"), f"{row.ranks * rate:,.0f}", *lost)
    return table


def write_json(path: Path, machines: Sequence[MachineModel], shape: Shape, rows: Sequence[Forecast | Ablation | Loss]) -> None:
    """Write all rows and what they rest on."""
    content = {
        "simulated": True,
        "unit": "microseconds",
        "shape": asdict(shape),
        "machines": [asdict(machine) for machine in machines],
        "rows": [{"simulated": True, **asdict(row), **row.derived} for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_plot(path: Path, shape: Shape, rows: Sequence[Forecast]) -> None:
    """Draw how many times faster than NCCL `dma` is, by tokens per rank, a panel a machine."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    columns = min(3, len(machines))
    lines = -(-len(machines) // columns)
    figure = Figure(figsize=(4.6 * columns, 0.8 + 2.7 * lines), dpi=120, layout="constrained")
    figure.suptitle(f"dma beside NCCL: {_TITLE} (H {shape.hidden}, K {shape.topk})", fontweight="bold")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    counts = sorted({row.tokens for row in rows})
    for machine, axes in zip(machines, panels, strict=False):
        for kind, color in _STYLES.items():
            picked = [row for row in rows if (row.machine, row.kind) == (machine, kind)]
            axes.plot([row.tokens for row in picked], [row.ratio for row in picked], marker="o", color=color, label=kind)
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        axes.set_title(f"{machine} (simulated)", fontsize=10)
        axes.set(xscale="log", xlabel="tokens per rank", ylabel="NCCL's time / dma's")
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.tick_params(labelbottom=True)
        axes.legend()
    figure.axes[0].set_ylim(bottom=0)  # shared by all, so not before all is drawn
    for axes in list(panels):
        axes.axis("off")
    figure.savefig(path)
