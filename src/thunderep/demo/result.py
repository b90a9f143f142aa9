"""What a run of the demo came to, and whether the two ways of training agree.

Both compute the same sums in float32, in different orders, so they differ by rounding, about 1e-7 of a value, as long as every
token takes the same experts. Sooner or later a router is all but undecided between two experts, and rounding decides. From
then on the two train on slightly different routes and drift apart, as far as any two runs do that differ in the last bit of
their first weights (measured: up to 0.08 nats at a step, 0.01 in the mean of the last). A gradient that is lost, doubled or
scaled shows at once in the first steps, and wrong arithmetic in the trained model shows when one process evaluates the very
same weights: both are checked tightly.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from thunderep.demo.config import DemoConfig
from thunderep.demo.train import Step
from thunderep.demo.worker import Outcome, Reference

HELD_OUT = ("held_out", "held_out_bf16", "held_out_fp8")
EARLY_STEPS = 20
LAST_STEPS = 20
EARLY_TOLERANCE = 1e-4
DRIFT_TOLERANCE = 0.2


@dataclass(frozen=True)
class Check:
    """A difference between the ranks and the one process."""

    name: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether it is small enough; a NaN is not."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Result:
    """One run of the demo."""

    config: DemoConfig
    steps: list[Step]
    """Of the expert-parallel run."""
    outcomes: list[Outcome]
    """One a rank."""
    reference_steps: list[Step]
    """Of the run in one process."""
    reference: Reference

    @property
    def loss_differences(self) -> list[float]:
        """At each step, in nats."""
        return [abs(a.loss - b.loss) for a, b in zip(self.steps, self.reference_steps, strict=True)]

    @property
    def checks(self) -> list[Check]:
        """All that must be small."""
        pairs = list(zip(self.steps, self.reference_steps, strict=True))[:EARLY_STEPS]
        gradient = max(abs(a.gradient_norm / b.gradient_norm - 1) for a, b in pairs)
        last = abs(final_loss(self.steps) - final_loss(self.reference_steps))
        gathered = abs(self.outcomes[0].held_out - self.reference.gathered)
        return [
            Check(f"loss, first {len(pairs)} steps", max(self.loss_differences[:EARLY_STEPS]), EARLY_TOLERANCE),
            Check(f"norm of the gradient, first {len(pairs)} steps, relative", gradient, 1e-3),
            Check("held-out loss, the same trained weights", gathered, EARLY_TOLERANCE),
            Check("replicated parameters, from rank to rank", float(not all(o.replicas_equal for o in self.outcomes)), 0.0),
            Check("loss, any step", max(self.loss_differences), DRIFT_TOLERANCE),
            Check(f"loss, mean of the last {LAST_STEPS} steps", last, 0.05),
        ]

    @property
    def agrees(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def load(self, count: int = 50) -> list[list[float]]:
        """For each layer the share of choices that each expert got over the last `count` steps."""
        layers = zip(*(step.load for step in self.steps[-count:]), strict=True)
        return [[statistics.fmean(shares) for shares in zip(*layer, strict=True)] for layer in layers]

    def as_json(self) -> dict[str, Any]:
        """All figures, as plain values."""
        return {
            "config": {**asdict(self.config), "out": str(self.config.out)},
            "agrees": self.agrees,
            "checks": [asdict(check) for check in self.checks],
            "ranks": _series(self.steps) | {name: getattr(self.outcomes[0], name) for name in HELD_OUT},
            "one_process": _series(self.reference_steps) | asdict(self.reference),
            "load": self.load(),
            "samples": [outcome.sample for outcome in self.outcomes],
            "exchanges": [asdict(exchange) for exchange in self.outcomes[0].exchanges],
        }


def final_loss(steps: list[Step]) -> float:
    """The mean loss of the last steps: one batch alone is noisy."""
    return statistics.fmean(step.loss for step in steps[-LAST_STEPS:])


def _series(steps: list[Step]) -> dict[str, list[float]]:
    return {field: [getattr(step, field) for step in steps] for field in ("loss", "gradient_norm", "seconds")}
