"""`thunderep tune`: what it makes of measured times, and what it says. What it measures needs GPUs: `gpu/test_tune.py`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from thunderep import tune
from thunderep.cli import app
from thunderep.runtime import cuda, tuning
from thunderep.runtime.tuning import Thresholds
from thunderep.tune import NEVER, Measured, Tuned, threshold

MIB = 1 << 20


def rows(*times: tuple[int, float, float]) -> list[Measured]:
    return [Measured("dispatch", mib * MIB, direct, dma) for mib, direct, dma in times]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (rows((1, 44.5, 57.8), (4, 127, 152), (8, 280, 254), (16, 462, 455)), math.isqrt(4 * 8 * MIB**2)),
        (rows((16, 462, 455), (1, 44.5, 57.8), (8, 280, 254), (4, 127, 152)), math.isqrt(4 * 8 * MIB**2)),
        (rows((1, 10, 20), (2, 20, 19.9), (4, 30, 60), (8, 90, 60)), math.isqrt(4 * 8 * MIB**2)),
        (rows((1, 10, 20), (2, 20, 30)), NEVER),
        (rows((1, 20, 10), (2, 30, 20)), 0),
    ],
    ids=["crossing", "any order", "noise", "kernels always", "copy engines always"],
)
def test_the_threshold_is_where_copy_engines_overtake(measured: list[Measured], expected: int) -> None:
    assert threshold(measured) == expected


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=1, max_size=12), st.integers(0, 1 << 40))
def test_no_other_threshold_loses_less(times: list[tuple[float, float]], other: int) -> None:
    measured = [Measured("combine", 4096 << i, *both) for i, both in enumerate(times)]

    def loss(limit: int) -> float:
        return sum(math.log((row.direct if row.nbytes <= limit else row.dma) / min(row.direct, row.dma)) for row in measured)

    assert loss(threshold(measured)) <= loss(other) + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_is_not_measured_stays_as_it_is_built_in(num_ranks: int) -> None:
    """Of dense calls all rows are needed, and few rows that are needed stay with kernels beside other work too."""
    measured = [*rows((1, 44.5, 57.8), (8, 280, 254)), Measured("combine", MIB, 10, 20)]
    found, built_in = tune.thresholds(measured, num_ranks), tuning.built_in(num_ranks, tune.TOPK)
    assert found[:2] == (math.isqrt(8 * MIB**2), NEVER)
    assert found[2:] == built_in[2:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_gpus_it_says_so_and_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune"], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert result.exit_code == 1
    assert "Not tuned: no GPU was found: cuInit" in result.output
    assert not list(tmp_path.iterdir())


def test_one_gpu_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "devices", lambda: [cuda.Device(0, "RTX 4090", "GPU-a", "", 2, ())])
    result = CliRunner().invoke(app, ["tune"])
    assert (result.exit_code, "only one GPU, RTX 4090" in result.output) == (1, True), result.output


def test_it_shows_what_was_measured_and_what_auto_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rows((1, 44.5, 57.8), (8, 280, 254))
    monkeypatch.setattr(tune, "tune", lambda: Tuned(Thresholds(4 * MIB, 0), measured, Path("/somewhere/thresholds-1.json")))
    result = CliRunner().invoke(app, ["tune"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["1,024", "dispatch", "44.5", "57.8", "direct"] in lines
    assert ["8,192", "dispatch", "280.0", "254.0", "dma"] in lines
    assert "/somewhere/thresholds-1.json" in result.output
