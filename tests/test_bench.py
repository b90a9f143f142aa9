"""The benchmark runs from its command line, and leaves a table, JSON and a plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.bench_dispatch", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_a_small_run(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    done = bench(
        "--shape", "gpt-oss-120b", "--tokens", "3", "--tokens", "1", "--ranks", "2", "--repeats", "2", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "gpt-oss-120b" in done.stdout
    result = json.loads((tmp_path / "dispatch-cpu-2-ranks.json").read_text())
    assert [(row["tokens"], row["name"], row["rival"]) for row in result["rows"]] == [
        (1, "shm", "gloo"), (1, "collective", "gloo"), (3, "shm", "gloo"), (3, "collective", "gloo"),
    ]  # fmt: skip
    for row in result["rows"]:
        expected = row["theirs"]["both"]["median"] / row["ours"]["both"]["median"]
        assert row["ratio"]["both"] == pytest.approx(expected, abs=0.01)
    assert result["facts"]["ranks"] == 2
    assert (tmp_path / "dispatch-cpu-2-ranks.png").stat().st_size > 0


@pytest.mark.gpu
def test_a_small_run_on_gpus(tmp_path: Path) -> None:
    done = bench("--device", "cuda", "--shape", "gpt-oss-120b", "--tokens", "3", "--repeats", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("dispatch-cuda-*.json")
    assert [row["name"] for row in json.loads(written.read_text())["rows"]] == ["dma", "direct", "auto", "collective"]


def test_an_unknown_shape_is_named() -> None:
    pytest.importorskip("typer")
    done = bench("--shape", "gpt-2")
    assert done.returncode == 2
    assert "gpt-2" in done.stderr
