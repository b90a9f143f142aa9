"""What the kernels of `direct` are tried on, see `direct_interpreted`. Importing this imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from thunderep.testing.inputs import Tokens, random_tokens


@dataclass(frozen=True)
class Case:
    """Operations among the first `len(tokens)` processes: each round a dispatch, a combine and both of their gradients.

    Where there is plenty of room, small calls travel as words that carry their own signals; where it is small, in rounds.
    """

    tokens: tuple[int, ...]
    num_experts: int = 5
    topk: int = 2
    hidden: int = 12
    extra_rows: int = 0
    dtype: torch.dtype = torch.float32
    idx_dtype: torch.dtype = torch.int64
    scales: int = 0
    drop: float = 0.0
    room: Literal["small", "fits", "plenty"] = "plenty"
    rounds: int = 2
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        return max(1, *self.tokens) + self.extra_rows

    def of(self, rank: int, operation: int) -> Tokens:
        return random_tokens(
            self.seed * 1000 + operation * 10 + rank,
            self.tokens[rank],
            hidden=self.hidden,
            num_experts=self.num_experts,
            topk=self.topk,
            dtype=self.dtype,
            idx_dtype=self.idx_dtype,
            scales=self.scales,
            drop=self.drop,
        )


def exchange(case: Case) -> str | None:
    """Run `case` in a rank's process, which must have TRITON_INTERPRET=1; None, or what was wrong."""
    from tests.ops import direct_interpreted

    return direct_interpreted.run(case)
