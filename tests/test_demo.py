"""The demo: its model, its processes, and the whole of it at a small size."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from thunderep.demo.app import run
from thunderep.demo.config import DemoConfig, ModelConfig
from thunderep.demo.data import global_batch, load_corpus
from thunderep.demo.launch import RankError, launch
from thunderep.demo.machine import choose_device, compile_obstacle
from thunderep.demo.model import KeyValues, Model
from thunderep.demo.result import HELD_OUT, Result
from thunderep.demo.train import Step
from thunderep.demo.worker import Outcome, Reference

SMALL = ModelConfig(layers=2, hidden=32, heads=2, experts=5, topk=2, expert_hidden=16, window=16)


def small(out: Path, **fields: Any) -> DemoConfig:
    defaults = {"steps": 4, "batch": 4, "evaluation_batches": 1, "rounds": 1, "sample_bytes": (6, 12), "corpus_bytes": 1 << 20}
    return DemoConfig(**{"ranks": 2, "device": "cpu", "compile": False, "out": out, "model": SMALL, **defaults, **fields})


# The whole


@pytest.mark.parametrize(
    ("ranks", "batch"),
    [(1, 4), (3, 4), (3, 2)],
    ids=["one rank", "uneven shares of sequences and experts", "a rank without tokens"],
)
def test_ranks_train_as_one_process_does(tmp_path: Path, ranks: int, batch: int) -> None:
    result = run(small(tmp_path, ranks=ranks, batch=batch), Console(file=io.StringIO()))
    assert result.agrees, result.checks
    assert max(result.loss_differences) < 1e-5
    exact, *rounded = (getattr(result.outcomes[0], name) for name in HELD_OUT)
    assert all(0 < abs(loss - exact) < 0.01 for loss in rounded)
    assert [len(outcome.exchanges) for outcome in result.outcomes] == [0 if ranks == 1 else 4] * ranks


def test_compiled_ranks_report_and_draw(tmp_path: Path) -> None:
    text = io.StringIO()
    config = small(tmp_path, compile=compile_obstacle("cpu") is None, model=replace(SMALL, layers=1, experts=4))
    result = run(config, Console(file=text, force_terminal=True, width=100))
    assert result.agrees, result.checks
    for words in ("2 ranks", "held-out", "They agree", "written by rank 1", "layer 0", "gloo", "combine"):
        assert words in text.getvalue()
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    figures = json.loads((tmp_path / "result.json").read_text())
    assert figures["agrees"] is True
    assert figures["ranks"]["loss"] == [step.loss for step in result.steps]
    assert len(figures["one_process"]["loss"]) == config.steps
    assert all(math.isclose(sum(layer), 1, rel_tol=1e-6) for layer in figures["load"])


# Data and model


def test_corpus_and_batches_are_the_same_each_time() -> None:
    text, held_out = load_corpus(1 << 20, 64)
    assert len(text) + len(held_out) == 1 << 20
    assert torch.equal(text, load_corpus(1 << 20, 64)[0])
    inputs, targets = global_batch(text, 7, 4, 16, 0)
    assert torch.equal(inputs, global_batch(text, 7, 4, 16, 0)[0])
    assert not torch.equal(inputs, global_batch(text, 8, 4, 16, 0)[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_too_little_source_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"found \d+ bytes under .*, need 65536000"):
        load_corpus(1 << 20, 65536000 // 16)


def test_cache_gives_the_logits_of_the_whole_sequence() -> None:
    model = Model(SMALL, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that positions matter
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    past = [KeyValues(SMALL.window) for _ in range(SMALL.layers)]
    model.next_bytes(tokens[:, :4], 0, 8, past)
    for position in range(4, 9):
        stepwise = model.next_bytes(tokens[:, position : position + 1], position, 2, past)
    whole = model.next_bytes(tokens, 0, 18, [KeyValues(SMALL.window) for _ in range(SMALL.layers)])
    torch.testing.assert_close(stepwise, whole, rtol=1e-3, atol=1e-3)


def test_losses_add_up_over_any_split_of_the_sequences() -> None:
    model = Model(SMALL, seed=0)
    inputs, targets = global_batch(load_corpus(1 << 20, 64)[0], 0, 4, SMALL.window, 0)
    whole = model(inputs, targets, 64)
    for cut in (0, 1, 2):
        parts = [model(inputs[part], targets[part], 64) for part in (slice(cut), slice(cut, None))]
        for total, first, second in zip(whole, *parts, strict=True):
            torch.testing.assert_close(first + second, total)


def test_shares_cover_the_batch() -> None:
    for ranks in range(1, 9):
        config = small(Path(), ranks=ranks, batch=5)
        sequences = [s for rank in range(ranks) for s in range(5)[config.share(rank)]]
        assert sequences == list(range(5))
        assert max(len(range(5)[config.share(rank)]) for rank in range(ranks)) * SMALL.window == config.max_tokens


# What counts as agreement


def made_up(loss: Callable[[int], float], gathered: float = 2.0, gradient: float = 1.0, equal: bool = True) -> Result:
    steps = [Step(i, 2.0, 1.0, [[0.5, 0.5]], 0.1) for i in range(60)]
    reference = [Step(i, loss(i), gradient, [[0.5, 0.5]], 0.1) for i in range(60)]
    outcomes = [Outcome(2.0, 2.0, 2.0, equal, "", [])]
    return Result(small(Path()), steps, outcomes, reference, Reference(2.0, gathered))


def test_agreement() -> None:
    assert made_up(lambda i: 2.0).agrees
    assert made_up(lambda i: 2.0 + 0.1 * (i == 30)).agrees
    assert not made_up(lambda i: 2.0 + 0.1 * (i == 10)).agrees
    assert not made_up(lambda i: 2.0 + 0.3 * (i == 30)).agrees
    assert not made_up(lambda i: 2.0 + 0.1 * (i > 30)).agrees
    assert not made_up(lambda i: float("nan") if i == 59 else 2.0).agrees
    assert not made_up(lambda i: 2.0, gathered=2.001).agrees
    assert not made_up(lambda i: 2.0, gradient=1.01).agrees
    assert not made_up(lambda i: 2.0, equal=False).agrees


# Processes


def echo(rank: int, arguments: str, send: Callable[[Any], None]) -> None:
    print(f"hello from {rank}")  # noqa: T201
    send(arguments * rank)


def raise_on_rank_1(rank: int, arguments: None, send: Callable[[Any], None]) -> None:
    send(os.getpid())
    if rank == 1:
        raise ValueError("a planted mistake")
    time.sleep(600)


def die_on_rank_1(rank: int, arguments: None, send: Callable[[Any], None]) -> None:
    send(os.getpid())
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("a peer is gone")


def sleep(rank: int, arguments: None, send: Callable[[Any], None]) -> None:
    send(os.getpid())
    time.sleep(600)


def test_messages_and_logs(tmp_path: Path) -> None:
    assert sorted(launch(echo, 2, "x", tmp_path)) == [(0, ""), (1, "x")]
    assert (tmp_path / "rank-1.log").read_text() == "hello from 1\n"


@pytest.mark.parametrize(
    ("job", "report"),
    [(raise_on_rank_1, "rank 1 failed: ValueError: a planted mistake"), (die_on_rank_1, "rank 1 was killed by SIGKILL")],
)
def test_a_failing_rank_ends_all_and_is_named(tmp_path: Path, job: Any, report: str) -> None:
    pids: list[int] = []
    with pytest.raises(RankError, match=report):
        pids.extend(pid for _, pid in launch(job, 2, None, tmp_path))
    assert pids
    assert not any(map(running, pids))


def test_no_process_outlives_who_listens(tmp_path: Path) -> None:
    with closing(launch(sleep, 2, None, tmp_path)) as messages:
        pids = [next(messages)[1], next(messages)[1]]
        assert all(map(running, pids))
    assert not any(map(running, pids))


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Choices


def test_device_and_ranks_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(None, None) == ("cpu", 4)
    assert choose_device(None, 3) == ("cpu", 3)
    with pytest.raises(ValueError, match=r"ranks: got 1, .* sees 0 GPUs"):
        choose_device("cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the driver is too old
    assert choose_device(None, None) == ("cpu", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None, None) == ("cuda", 2)
    assert choose_device(None, 4) == ("cpu", 4)
    assert choose_device("cpu", None) == ("cpu", 4)
    with pytest.raises(ValueError, match=r"ranks: got 3, .* sees 2 GPUs"):
        choose_device("cuda", 3)


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compile_obstacle("cpu") == "there is no compiler (no-such-compiler)"
