"""The `thunderep` command."""

from __future__ import annotations

import signal
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

try:
    import matplotlib as _matplotlib  # noqa: F401
    import typer
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as error:  # an extra, which not every installation has
    sys.exit(f"thunderep: {error.name} is not installed; pip install 'thunderep[demo]'")

from thunderep.demo.app import run
from thunderep.demo.config import DemoConfig
from thunderep.demo.launch import RankError
from thunderep.demo.machine import choose_device, compile_obstacle

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


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: the terminal restored, no process left
    app(prog_name="thunderep")
