"""Rank processes for the GPU tests: one a GPU, or two that share the only one."""

from __future__ import annotations

import torch

from thunderep.runtime.gpu import SHARE
from thunderep.runtime.tuning import ENVIRONMENT
from thunderep.testing.processes import Ranks

GPUS = torch.cuda.device_count()
FEW = GPUS < 2
"""Ranks that share a GPU take turns on it, milliseconds each, so the tests are shorter."""

_ROW = 144  # bytes of a row of most tests


def start() -> Ranks:
    """Ranks for which NCCL has no peer access, and whose `auto` goes both ways within the sizes of the tests."""
    environment = {ENVIRONMENT: f"{4 * _ROW},{2 * _ROW}", "NCCL_P2P_DISABLE": "1"}
    return Ranks(2, environment={SHARE: "1", **environment}) if FEW else Ranks(min(4, GPUS), "nccl", environment=environment)
