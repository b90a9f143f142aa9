"""`thunderep tune` on GPUs: it times both ways, and a Buffer then goes by what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import observability
from tests.gpu.machine import FEW, GPUS, RANKS
from thunderep.runtime.gpu import SHARE
from thunderep.runtime.tuning import ENVIRONMENT
from thunderep.testing.processes import Ranks
from thunderep.tune import KINDS, measure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_every_size_is_timed_both_ways_and_alike_on_all_ranks() -> None:
    with Ranks(RANKS, environment={SHARE: str(int(FEW))}) as ranks:  # gloo, as `tune` has it
        first, *others = ranks.run(measure, (4, 64), timeout=280)
    assert all(other == first for other in others)
    assert [(row.nbytes, row.kind) for row in first] == [(tokens * 4096, kind) for tokens in (4, 64) for kind in KINDS]
    assert all(min(row.direct, row.dma) > 0 for row in first)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_buffer_goes_by_what_was_measured(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "NCCL_P2P_DISABLE": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    command = [sys.executable, "-m", "thunderep", "tune"]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "thunderep").iterdir()
    found = json.loads(path.read_text())["thresholds"]
    with Ranks(GPUS, "nccl", environment=environment) as ranks:
        said = ranks.run(observability.logged_thresholds)
    assert all(f"up to {found['dispatch']} bytes" in text and f"{found['combine']} in a combine" in text for text in said)
