"""The vLLM benchmark without vLLM: what it asks for, what it makes of results, and what happens when a rank fails."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from bench import bench_vllm

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.bench_vllm", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_an_unknown_model_is_named() -> None:
    done = bench("--model", "gpt-2")
    assert done.returncode == 2
    assert "gpt-2" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_that_vllm_is_missing_is_said() -> None:
    done = bench("--model", "gpt-oss-20b")
    assert done.returncode == 2
    assert "vLLM is not installed" in done.stderr


@pytest.mark.parametrize("model", bench_vllm.MODELS)
def test_models_are_what_vllm_reads(model: str, tmp_path: Path) -> None:
    whole, cut = (
        json.loads(Path(bench_vllm.write_model(model, layers, tmp_path / str(layers)), "config.json").read_text())
        for layers in (None, 4)
    )
    assert whole == bench_vllm.MODELS[model]
    assert cut == whole | {"num_hidden_layers": 4}


def result(began: float, prefilled: float, ended: float, last: int) -> dict[str, Any]:
    return {"began": began, "prefilled": prefilled, "ended": ended, "tokens": [[1], [last]]}


def test_a_phase_lasts_until_its_slowest_rank_has_ended() -> None:
    """Two ranks, two repetitions, of 2 sequences each: 4 sequences a repetition."""
    stock = [
        {"prefill": [result(1, 3, 3, 7), result(10, 11, 14, 7)], "decode 64": [result(0, 1, 5, 7), result(0, 1, 5, 7)]},
        {"prefill": [result(2, 4, 5, 7), result(11, 12, 12, 7)], "decode 64": [result(0, 2, 4, 7), result(0, 2, 4, 7)]},
    ]
    ours = [
        {"prefill": [result(1, 2, 3, 7)] * 2, "decode 64": [result(0, 1, 2, 7)] * 2},
        {"prefill": [result(1, 2, 3, 8)] * 2, "decode 64": [result(0, 1, 2, 7)] * 2},
    ]
    prefill, decode = bench_vllm.summarise(stock, ours)
    assert prefill == {
        "phase": "prefill", "vLLM": 1024, "with ThunderEP": 2048, "ratio": 2.0, "identical": 6, "sequences": 8,
    }  # fmt: skip
    assert decode == {
        "phase": "decode 64", "vLLM": 84, "with ThunderEP": 252, "ratio": 3.0, "identical": 8, "sequences": 8,
    }  # fmt: skip


def test_a_rank_that_fails_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="failed"):
        bench_vllm.launch({"ranks": 2}, "1", timeout=60)
