"""What one run of the demo is: sizes, schedule, places. Plain values, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the language model. Its vocabulary are the 256 bytes."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    topk: int = 2
    expert_hidden: int = 128
    window: int = 128
    """Bytes in a training sequence, and the positions that attention looks back on."""


@dataclass(frozen=True)
class DemoConfig:
    """One run of the demo."""

    ranks: int
    device: Literal["cpu", "cuda"]
    compile: bool
    out: Path
    steps: int = 700
    batch: int = 8
    """Sequences in a global batch, which the ranks split."""
    learning_rate: float = 2e-3
    warmup: int = 20
    clip: float = 1.0
    """Of the norm of the whole model's gradient."""
    balance: float = 0.03
    """Weight of the load-balancing loss."""
    seed: int = 0
    corpus_bytes: int = 8 << 20
    evaluation_batches: int = 8
    """How many batches of held-out text the trained model is evaluated on."""
    sample_bytes: tuple[int, int] = (200, 360)
    """A sample ends with the first blank line after so many bytes, or after so many."""
    rounds: int = 7
    """Of the measurement, 0.1 s each for each operation."""
    temperature: float = 0.6
    model: ModelConfig = field(default_factory=ModelConfig)

    def share(self, rank: int) -> slice:
        """The sequences of each global batch that `rank` trains on: as even as can be, none where there are more ranks."""
        return slice(self.batch * rank // self.ranks, self.batch * (rank + 1) // self.ranks)

    def checkpoint(self, rank: int) -> Path:
        """Where `rank` keeps the trained parameters that it holds."""
        return self.out / "model" / f"rank-{rank}.pt"

    @property
    def max_tokens(self) -> int:
        """The most tokens that a rank holds in a training step."""
        return -(-self.batch // self.ranks) * self.model.window
