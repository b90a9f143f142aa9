"""A machine with pretended GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.pretended import Card, Driver, Install, Nvml, build
from thunderep.runtime import cuda, topology, trial


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts cards into the machine, of which CUDA shows `visible`, by default all, in another order than NVML.

    The driver's functions may be replaced.
    """
    monkeypatch.setattr(trial, "_ROUNDS", 2)
    monkeypatch.setattr(topology, "_policy_error", lambda: None)
    for name in (*topology.ENVIRONMENT, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)

    def put(*cards: Card, visible: list[Card] | None = None, **functions: Any) -> Driver:
        build(tmp_path, list(cards))
        driver = Driver(list(cards) if visible is None else visible, **functions)
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(list(reversed(cards)), driver))
        monkeypatch.setattr("torch.version.cuda", "12.8")
        return driver

    return put
