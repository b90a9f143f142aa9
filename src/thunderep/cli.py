"""The `thunderep` command."""

from __future__ import annotations

import io
import json
import signal
import sys
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

try:
    import matplotlib as _matplotlib  # noqa: F401
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ModuleNotFoundError as error:  # an extra, which not every installation has
    sys.exit(f"thunderep: {error.name} is not installed; pip install 'thunderep[demo]'")

from thunderep import tune as tuning
from thunderep.demo.app import run
from thunderep.demo.config import DemoConfig
from thunderep.demo.launch import RankError
from thunderep.demo.machine import choose_device, compile_obstacle
from thunderep.forecast import calibration, report
from thunderep.forecast.ablation import MACHINES as ABLATED
from thunderep.forecast.loss import MACHINES as LOSING
from thunderep.forecast.predict import Forecast, Shape
from thunderep.runtime import diagnosis, machines, topology

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Device(str, Enum):
    """Where the demo runs."""

    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def _thunderep() -> None:
    """Expert-parallel dispatch and combine for machines whose GPUs cannot reach each other's memory."""


@app.command()
def demo(
    ranks: Annotated[int | None, typer.Option(min=1, max=64, help="Processes; by default one a GPU, or 4 on the CPU.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = DemoConfig.steps,
    device: Annotated[Device | None, typer.Option(help="By default cuda on a machine with several GPUs.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Use torch.compile; by default where it can work.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture, the figures and the logs.")] = Path("demo-output"),
) -> None:
    """Train a small Mixture-of-Experts language model across processes, and compare with one process."""
    console = Console(highlight=False)
    try:
        chosen, count = choose_device(device.value if device else None, ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    obstacle = compile_obstacle(chosen) if compile is not False else None
    if compile and obstacle:
        raise typer.BadParameter(f"--compile: {obstacle}")
    if obstacle:
        console.print(f"[yellow]Without torch.compile: {escape(obstacle)}.[/]")
    config = DemoConfig(count, chosen, compile is not False and obstacle is None, out, steps=steps)
    try:
        agrees = run(config, console).agrees
    except KeyboardInterrupt:
        console.print("[red]Stopped; all processes have ended.[/]")
        raise typer.Exit(130) from None
    except RankError as error:
        console.print(f"[red]The demo failed: {escape(str(error))}[/]\nAll other processes have been ended.", soft_wrap=True)
        raise typer.Exit(1) from None
    except OSError as error:
        console.print(f"[red]The demo failed: {escape(str(error))}[/]", soft_wrap=True)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if agrees else 1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="All facts and findings as JSON, for programs.")] = False,
) -> None:
    """Look at this machine: what it has, what will not work or be slow, and what to do. Status 1 if there is a problem."""
    try:
        machine = topology.read()
    except ModuleNotFoundError as error:
        typer.echo(f"thunderep: {error.name} is not installed; pip install 'thunderep[doctor]'", err=True)
        raise typer.Exit(1) from None
    findings = diagnosis.diagnose(machine)
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        report = {"problems": problems, "findings": [asdict(finding) for finding in findings], "machine": asdict(machine)}
        typer.echo(json.dumps(report, indent=2))
    else:
        table = Table("", "what", "found", "what to do", box=None, header_style="bold", padding=(0, 1))
        colors = {"ok": "green", "note": "yellow", "problem": "red"}
        for finding in findings:
            cells = (finding.subject, finding.found, finding.advice)
            table.add_row(f"[{colors[finding.level]}]{finding.level}[/]", *map(escape, cells))
        console = Console(highlight=False)
        console.print(table)
        console.print(f"[red]Problems: {problems}.[/]" if problems else "[green]No problem.[/]")
    raise typer.Exit(1 if problems else 0)


@app.command()
def tune() -> None:
    """Measure from which size on copy engines beat kernels on this machine's GPUs, and have `auto` go by it: a minute."""
    console = Console(highlight=False)
    try:
        with console.status("measuring, with a process for each GPU"):
            tuned = tuning.tune()
    except (OSError, RuntimeError, TimeoutError) as error:
        console.print(f"[red]Not tuned: {escape(str(error))}[/]", soft_wrap=True)
        raise typer.Exit(1) from None
    table = Table(
        "KiB of rows a rank", "", "direct, us", "dma, us", "auto takes", box=None, header_style="bold", padding=(0, 1)
    )
    for row in tuned.measured:
        way = "direct" if row.nbytes <= getattr(tuned.thresholds, row.kind) else "dma"
        table.add_row(f"{row.nbytes >> 10:,}", row.kind, f"{row.direct:,.1f}", f"{row.dma:,.1f}", way)
    console.print(table, f"Kept in {escape(str(tuned.path))}")


@app.command()
def simulate(
    machine: Annotated[list[str] | None, typer.Option(help="A name or a .json file; repeatable; by default several.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Per rank; repeatable; by default 1 to 4096.")] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Elements in a row; by default Qwen3-30B-A3B's.")] = 2048,
    topk: Annotated[int, typer.Option(min=1, help="Experts a token; by default Qwen3-30B-A3B's.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write all figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to write a plot as PNG.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only show how far simulated times are from measured ones.")] = False,
    ablation: Annotated[bool, typer.Option("--ablation", help="Show what each idea gives, on 2, 4, 8 GPUs.")] = False,
    lost: Annotated[
        float | None,
        typer.Option(
            min=1, help="Show tokens/s lost to communication, if a GPU alone does so many, by number and slots of GPUs."
        ),
    ] = None,
) -> None:
    """Say what dispatch and combine would take on a described machine, and what NCCL would: simulated, not measured."""
    console = Console(highlight=False)
    if check:
        console.print(*report.calibration_tables(list(calibration.points())))
        return
    if plot and (ablation or lost):
        raise typer.BadParameter("--plot: there is none of --ablation and --lost")
    usual = ABLATED if ablation else LOSING if lost else machines.names()
    try:
        chosen = [machines.load(name) for name in machine or usual]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    shape, counts = Shape(hidden, topk), sorted(set(tokens or (1, 16, 64, 256, 1024, 4096)))
    made = report.ablations if ablation else partial(report.losses, rate=lost) if lost else report.forecasts
    tables, rows = made(chosen, shape, counts)
    for table in tables:
        console.print(table)
    try:
        if json_file:
            report.write_json(json_file, chosen, shape, rows)
        if plot:
            report.write_plot(plot, shape, [row for row in rows if isinstance(row, Forecast)])
    except OSError as error:
        console.print(f"[red]Not written: {escape(str(error))}[/]", soft_wrap=True)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):  # one that cannot hold a character gets another, instead of an end in the middle
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: the terminal restored, no process left
    app(prog_name="thunderep")
