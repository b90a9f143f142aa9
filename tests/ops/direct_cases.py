"""What the kernels of `direct` are tried on, see `direct_interpreted`. Importing this imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tests.dist import exchange as whole


@dataclass(frozen=True)
class Case(whole.Case):
    """Operations among the first `len(tokens)` processes: each round a dispatch, a combine and both of their gradients.

    Where there is plenty of room, small calls travel as words that carry their own signals; where it is small, in rounds.
    """

    dtype: torch.dtype = torch.float32
    room: Literal["small", "fits", "plenty"] = "plenty"
    rounds: int = 2


def exchange(case: Case) -> str | None:
    """Run `case` in a rank's process, which must have TRITON_INTERPRET=1; None, or what was wrong."""
    from tests.ops import direct_interpreted

    return direct_interpreted.run(case)


def let_go() -> tuple[float, bool]:
    """See `direct_interpreted.let_go`."""
    from tests.ops import direct_interpreted

    return direct_interpreted.let_go()
