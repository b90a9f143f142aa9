"""What the demo prints before and after: where it runs, what came out."""

from __future__ import annotations

import math

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import thunderep
from thunderep.demo.config import DemoConfig
from thunderep.demo.machine import cpus
from thunderep.demo.result import Result, final_loss
from thunderep.demo.train import Step

_BALANCED = 1.5
"""Load counts as balanced while the busiest expert has less than this times its fair share."""


def introduce(console: Console, config: DemoConfig, parameters: int) -> None:
    """Say what is about to happen."""
    sizes = config.model
    where = f"{cpus()} CPU cores" if config.device == "cpu" else f"a {torch.cuda.get_device_name(0)} each"
    text = (
        f"A byte-level language model, {parameters / 1e6:.1f} million parameters: {sizes.layers} Mixture-of-Experts layers of"
        f" {sizes.experts} experts, top-{sizes.topk}.\n"
        f"It learns from Python's own standard library: {config.steps} steps of {config.batch * sizes.window:,} bytes.\n"
        f"{config.ranks} processes ({where}) own a share of the experts each; torch.ops.thunderep.* moves tokens to them.\n"
        "Then one process trains the same model without thunderep, for comparison."
    )
    console.print(Panel.fit(text, title=f"ThunderEP {thunderep.__version__}: demo", border_style="yellow"))


def conclude(console: Console, result: Result) -> None:
    """Print all that came out."""
    console.print(_losses(result), _agreement(result))
    verdict = "[bold green]They agree.[/]" if result.agrees else "[bold red]They do NOT agree.[/]"
    console.print(
        f"{verdict} Both compute in float32 and sum in different orders: they differ by rounding, until rounding decides where"
        " a router is all but undecided between two experts. From there on two runs drift apart slowly; this is what the last"
        " two rows allow for.\n"
    )
    _samples(console, result)
    console.print(_load(result))
    if result.config.ranks > 1:
        console.print(_exchanges(result))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, caption_justify="left", padding=(0, 1)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _losses(result: Result) -> Table:
    config, first = result.config, result.steps[0].seconds
    table = _table("Loss, nats a byte", "", "first step", "mean of last 20", "held-out text", "training")
    table.add_row(f"{config.ranks} ranks, expert-parallel", *_loss_cells(result.steps, result.outcomes[0].held_out))
    for name, loss in (
        ("  their weights, in one process", result.reference.gathered),
        ("  their weights, rows as bf16", result.outcomes[0].held_out_bf16),
        ("  their weights, rows as fp8", result.outcomes[0].held_out_fp8),
    ):
        table.add_row(name, "", "", f"{loss:.6f}", "")
    table.add_row("one process, all over again", *_loss_cells(result.reference_steps, result.reference.held_out))
    table.caption = (
        f"Training time without the first step, which {'compiled' if config.compile else 'warmed up'}: {first:.0f} s."
    )
    if config.device == "cpu" and cpus() < config.ranks:
        table.caption += f" The {config.ranks} ranks share {cpus()} cores and cannot be faster than one process."
    return table


def _loss_cells(steps: list[Step], held_out: float) -> tuple[str, ...]:
    seconds = math.fsum(step.seconds for step in steps[1:])
    return f"{steps[0].loss:.6f}", f"{final_loss(steps):.6f}", f"{held_out:.6f}", f"{seconds:.0f} s"


def _agreement(result: Result) -> Table:
    table = _table("Largest difference, ranks to one process", "", "difference", "at most", "")
    for check in result.checks:
        mark = "[green]ok[/]" if check.passed else "[bold red]too large[/]"
        table.add_row(check.name, f"{check.difference:.1e}", f"{check.tolerance:g}", mark)
    return table


def _samples(console: Console, result: Result) -> None:
    for rank, outcome in enumerate(result.outcomes[:4]):
        text = "".join(c if c.isprintable() or c == "\n" else "·" for c in outcome.sample).rstrip()
        title = f"sample, written by rank {rank}"
        console.print(Panel(escape(text), title=title, title_align="left", border_style="dim", width=min(console.width, 100)))


def _load(result: Result) -> Table:
    experts, ranks = result.config.model.experts, result.config.ranks
    table = _table("How often each expert was chosen in the last 50 steps, %", "expert", *map(str, range(experts)), "busiest")
    owners = [str(rank) for rank in range(ranks) for _ in thunderep.local_experts(experts, rank, ranks)]
    table.add_row("on rank", *owners, "", style="dim")
    for layer, shares in enumerate(result.load()):
        busiest = max(shares) * experts
        colour = "green" if busiest < _BALANCED else "yellow"
        cells = (f"{_bar(share * experts)} {100 * share:4.1f}" for share in shares)
        table.add_row(f"layer {layer}", *cells, f"[{colour}]{busiest:.2f} x fair[/]")
    table.caption = f"Balanced while the busiest has less than {_BALANCED} x its fair share."
    return table


def _bar(load: float) -> str:
    """One character: half full for an even share, full for twice that or more."""
    return "▁▂▃▄▅▆▇█"[min(7, int(4 * load))]


def _exchanges(result: Result) -> Table:
    backend = "gloo" if result.config.device == "cpu" else "NCCL"
    columns = ("tokens a rank", "received a rank", "thunderep", backend, "times as fast")
    table = _table(f"Moving tokens, thunderep beside {backend}", "", *columns)
    for row in result.outcomes[0].exchanges:
        ratio = row.baseline_seconds / row.seconds
        times = (f"{1e6 * seconds:,.0f} µs" for seconds in (row.seconds, row.baseline_seconds))
        table.add_row(row.name, str(row.tokens), f"{row.nbytes / 1024:,.1f} KiB", *times, f"{ratio:.1f}")
    table.caption = (
        f"{backend} does the same job: all-gathers of rows, ids and weights for dispatch, reduce-scatter for combine."
    )
    return table
