"""The picture of a run: both loss curves, their difference, and how the experts were used."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import thunderep
from thunderep.demo.result import DRIFT_TOLERANCE, EARLY_STEPS, EARLY_TOLERANCE, Result

_WIDE, _THIN, _GREY = "#f2a33a", "#1b3a6b", "#7a808a"
_RANKS = ("#3d6fb4", "#e08a2e", "#4c9f70", "#b5507a", "#7d6bb3", "#5aa6b8", "#a3873d", "#8a8f98")


def draw(result: Result, path: Path) -> None:
    """Write the picture as a PNG."""
    layers = result.config.model.layers
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(12, 6.6), dpi=130, layout="constrained")
    figure.suptitle(f"A mixture of experts on {result.config.ranks} ranks and in one process", fontweight="bold")
    halves = figure.add_gridspec(1, 2, width_ratios=(1.25, 1), wspace=0.08)
    left, right = halves[0].subgridspec(2, 1, height_ratios=(2.2, 1)), halves[1].subgridspec(layers, 1)
    curves = figure.add_subplot(left[0])
    _draw_curves(curves, result)
    _draw_differences(figure.add_subplot(left[1], sharex=curves), result)
    bars: Axes | None = None
    for layer in range(layers):
        bars = figure.add_subplot(right[layer], sharex=bars, sharey=bars)
        _draw_load(bars, result, layer)
    figure.savefig(path, format="png")


def _draw_curves(axes: Axes, result: Result) -> None:
    ours, reference = ([step.loss for step in steps] for steps in (result.steps, result.reference_steps))
    # The curves coincide: a wide one shows behind a thin, dashed one.
    axes.plot(ours, color=_WIDE, linewidth=4, solid_joinstyle="round", label=f"{result.config.ranks} ranks, expert-parallel")
    axes.plot(reference, color=_THIN, linewidth=1.1, linestyle=(0, (5, 2.5)), label="one process")
    axes.set(title="Training loss", ylabel="nats a byte", ylim=(0, None))
    axes.tick_params(labelbottom=False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, result: Result) -> None:
    floor, last = 1e-8, len(result.steps) - 1
    early = min(EARLY_STEPS - 1, last)
    axes.plot([max(difference, floor) for difference in result.loss_differences], color=_THIN, linewidth=0.9)
    axes.plot([0, early, early, last], [EARLY_TOLERANCE] * 2 + [DRIFT_TOLERANCE] * 2, color=_GREY, linewidth=1, linestyle=":")
    axes.annotate("allowed", (last, DRIFT_TOLERANCE), (0, 3), textcoords="offset points", ha="right", color=_GREY, fontsize=9)
    axes.set(title="Difference of the two", xlabel="step", yscale="log", ylim=(floor / 2, 3))
    axes.set_yticks((floor, 1e-6, 1e-4, 1e-2, 1), ("0", "1e-6", "1e-4", "1e-2", "1"))
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.25)


def _draw_load(axes: Axes, result: Result, layer: int) -> None:
    """Bars of each expert's share, in the colour of the rank that owns it."""
    shares, ranks = result.load()[layer], result.config.ranks
    for rank in range(ranks):
        mine = thunderep.local_experts(len(shares), rank, ranks)
        if mine:
            axes.bar(mine, [100 * shares[e] for e in mine], color=_RANKS[rank % len(_RANKS)], width=0.72, label=f"rank {rank}")
    axes.axhline(100 / len(shares), color=_GREY, linewidth=1, linestyle="--")
    axes.set(title=f"Layer {layer}: how often each expert was chosen", ylabel="% of choices", xticks=range(len(shares)))
    axes.set_ylim(0, 100 * 1.35 * max(max(load) for load in result.load()))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if layer == 0:
        axes.legend(frameon=False, ncols=min(ranks, 4), loc="upper center", fontsize=9)
    if layer == result.config.model.layers - 1:
        axes.set_xlabel("expert")
