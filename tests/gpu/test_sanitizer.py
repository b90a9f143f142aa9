"""The kernels under NVIDIA's compute-sanitizer, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thunderep.runtime.gpu import SHARE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_small_run_is_clean(tool: str, tmp_path: Path) -> None:
    """Accesses out of bounds and misaligned; threads of a block that race in its shared memory."""
    environment = {**os.environ, SHARE: "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1" if tool == "memcheck" else "0"}
    watch = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    command = [*watch, sys.executable, "-m", "tests.gpu.small_run"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        said, _ = process.communicate(timeout=250)
        assert process.returncode == 0, said[-4000:]
