"""vLLM gives the same tokens with ThunderEP and without, where it and ThunderEP are installed.

Published shapes, cut to a few layers, with dummy weights. With one GPU two ranks share it, and what vLLM leaves to NCCL goes
through sockets.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.machine import FEW, RANKS
from thunderep.runtime.gpu import SHARE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(
        "thunderep" not in importlib.metadata.entry_points(group="vllm.general_plugins").names,
        reason="vLLM finds plugins only among installed packages",
    ),
]
JOB: dict[str, Any] = {
    "ranks": RANKS,
    "repeats": 1,
    "attention": "TRITON_ATTN",
    "experts": "triton",
    "batched_tokens": 2048,
    "sequences": 32,
    "phases": {"prefill": (9, 300, 1), "decode": (32, 17, 40)},
}
MOST = 0.9
"""Share of sequences that are the same where sums are rounded otherwise: a token here and there may be another one."""
QWEN, GPT, GLM = "qwen3-30b-a3b", "gpt-oss-20b", "glm-4.5-air"
CASES = [(model, eager, "1", False) for model in (QWEN, GPT, GLM) for eager in (True, False)]
CASES += [(QWEN, True, "dma", False), (QWEN, True, "direct", False), (QWEN, False, "1", True), (GLM, False, "1", True)]
_stock: dict[tuple[str, bool], list[list[int]]] = {}


@pytest.mark.parametrize(("model", "eager", "setting", "micro_batches"), CASES)
def test_tokens_are_those_of_vllm(
    model: str, eager: bool, setting: str, micro_batches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.bench_vllm import write_model

    monkeypatch.setenv(SHARE, str(int(FEW)))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    job = JOB | {"eager": eager, "micro_batches": False, "model": write_model(model, 3, tmp_path / model)}
    if (model, eager) not in _stock:
        _stock[model, eager] = tokens(job, "0")
    # Sums of two do not depend on who adds them; of more, NCCL's ring rounds at every hop. Half a batch is computed by other
    # kernels, which round otherwise.
    least = 1.0 if RANKS == 2 and not micro_batches else MOST
    assert share_of_same(tokens(job | {"micro_batches": micro_batches}, setting), _stock[model, eager]) >= least


def share_of_same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Of sequences."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def tokens(job: dict[str, Any], setting: str) -> list[list[int]]:
    """Of all sequences, by rank, phase and repetition."""
    from bench.bench_vllm import launch

    return [given for rank in launch(job, setting, 140) for runs in rank.values() for run in runs for given in run["tokens"]]
