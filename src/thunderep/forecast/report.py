"""What `thunderep simulate` shows: tables, JSON and a plot. Each of them says that it is simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from thunderep.forecast.calibration import Point
from thunderep.forecast.predict import Forecast, Shape
from thunderep.runtime.machines import MachineModel

_TITLE = "simulated, not measured"
_STYLES = {"dispatch": "#1b3a6b", "combine": "#f2a33a"}


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


def write_json(path: Path, machines: Sequence[MachineModel], shape: Shape, rows: Sequence[Forecast]) -> None:
    """Write all rows and what they rest on."""
    content = {
        "simulated": True,
        "unit": "microseconds",
        "shape": asdict(shape),
        "machines": [asdict(machine) for machine in machines],
        "rows": [{"simulated": True, **asdict(row), "ratio": row.ratio} for row in rows],
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
