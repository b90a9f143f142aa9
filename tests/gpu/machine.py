"""Rank processes for the GPU tests: one a GPU, up to four, or two that share the only one.

RANKS=8 in the environment is for another number of them; where there are fewer GPUs, ranks share them.
"""

from __future__ import annotations

import os

import torch

from thunderep.runtime.gpu import SHARE
from thunderep.runtime.tuning import ENVIRONMENT
from thunderep.testing.processes import Ranks

GPUS = torch.cuda.device_count()
RANKS = int(os.environ.get("RANKS", max(2, min(4, GPUS))))
FEW = GPUS < RANKS
"""Ranks that share a GPU take turns on it, milliseconds each, so the tests are shorter."""


def start(dispatch: int = 4 * 144, combine: int = 2 * 144, **more: str) -> Ranks:
    """Ranks for which NCCL has no peer access, and whose `auto` goes both ways within the sizes of the tests.

    Args:
        dispatch: Bytes of rows up to which kernels dispatch; by default 4 rows of those in `programs`.
        combine: The same for combine; other than for dispatch, so that calls of one size go both ways.
        more: Further environment variables.
    """
    environment = {ENVIRONMENT: f"{dispatch},{combine}", "NCCL_P2P_DISABLE": "1", SHARE: str(int(FEW)), **more}
    return Ranks(RANKS, "nccl", environment=environment)


def cut(counts: tuple[int, ...]) -> tuple[int, ...]:
    """One number a rank, of four: some of them, or all again and again."""
    return (counts * RANKS)[:RANKS]
