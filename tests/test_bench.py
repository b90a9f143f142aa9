"""The benchmark runs from its command line, and leaves a table, JSON and a plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thunderep.testing.processes import Ranks

ROOT = Path(__file__).parents[1]


def bench(*arguments: str, which: str = "dispatch") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"bench.bench_{which}", "--device", "cpu", *arguments]
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


def test_a_small_run_of_fp8(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    arguments = ("--shape", "gpt-oss-120b", "--tokens", "3", "--ranks", "2", "--repeats", "2", "--out", str(tmp_path))
    done = bench(*arguments, which="fp8")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "fp8-cpu-2-ranks.json").read_text())["rows"]}
    assert list(rows) == ["shm bf16", "shm fp8", "collective bf16", "collective fp8", "gloo"]
    expected = rows["shm bf16"]["dispatch"]["median"] / rows["shm fp8"]["dispatch"]["median"]
    assert rows["shm fp8"]["times_faster_than_bf16"]["dispatch"] == pytest.approx(expected, abs=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_gpu_plays_all_ranks(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.bench_loopback", "--shape", "gpt-oss-120b", "--tokens", "3", "--tokens", "200"]
    command += ["--ranks", str(ranks), "--repeats", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / f"loopback-{ranks}-ranks.json").read_text())["rows"]
    assert [(row["tokens"], list(row["us"])) for row in rows] == [
        (3, ["dma", "direct", "auto"]),
        (200, ["dma", "direct", "auto"]),
    ]


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


def layer_of_a_small_model() -> dict[str, float]:
    """In every rank: `bench_moe_layer` at a size that a CPU computes in no time."""
    from bench import bench_moe_layer, contenders

    contenders.SHAPES["small"] = contenders.Shape(hidden=64, num_experts=8, topk=2)
    return bench_moe_layer.measure("small", 6, "cpu", 32, 1, 2, None)


def test_every_way_through_a_layer_gives_the_same_and_is_timed() -> None:
    with Ranks(2) as ranks:
        (times, _) = ranks.run(layer_of_a_small_model)
    assert list(times) == [
        "shm", "shm, fp8", "shm, overlapped", "shm, overlapped, fp8", "gloo", "gloo, overlapped", "no communication",
    ]  # fmt: skip
    assert min(times.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU gets")
@pytest.mark.parametrize("module", ["bench_overlap", "bench_host"])
def test_benchmarks_of_gpus_say_that_they_need_one(module: str) -> None:
    command = [sys.executable, "-m", f"bench.{module}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
