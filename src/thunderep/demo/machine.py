"""What this machine offers, and the choices that follow from it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal

import torch

_CPU_RANKS = 4


def cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(device: Literal["cpu", "cuda"] | None, ranks: int | None) -> tuple[Literal["cpu", "cuda"], int]:
    """Fill in the device and the number of ranks where they are None.

    Several GPUs, and enough for the ranks: those; else the CPU.

    Raises:
        ValueError: More ranks than GPUs were asked for.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # NVML counts those that CUDA cannot use, too
    if device is None:
        device = "cuda" if gpus >= (ranks or 2) else "cpu"
    if device == "cpu":
        return device, ranks or _CPU_RANKS
    if gpus < (ranks or 1):
        raise ValueError(f"ranks: got {ranks or 1}, but torch {torch.__version__} sees {gpus} GPUs; each rank takes one")
    return device, ranks or gpus


def compile_obstacle(device: Literal["cpu", "cuda"]) -> str | None:
    """Why `torch.compile` cannot work here, or None."""
    if device == "cpu":
        compilers = [os.environ.get("CXX", "g++")]
    else:
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"there is no compiler ({' or '.join(compilers)})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"Python's headers are not installed (no Python.h in {sysconfig.get_path('include')})"
    return None
