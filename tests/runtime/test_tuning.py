"""Thresholds: where they come from, that no file can do harm, and which calls they leave to kernels."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from thunderep.runtime import cuda, tuning
from thunderep.runtime.transport import COLLECTIVES, DTYPES, KINDS, OUTWARD, Call
from thunderep.runtime.tuning import BUILT_IN, ENVIRONMENT, Thresholds, built_in, load, save, thresholds

HIDDEN = 64
GPUS = ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"]
FOUND = Thresholds(dispatch=123_456, combine=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    tuning._say_untuned.cache_clear()
    return tmp_path / "cache"


def test_what_was_measured_is_used_on_that_machine_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert thresholds(GPUS, 8) == BUILT_IN
    path = save(GPUS, FOUND, [{"bytes": 1}])
    assert path.parent == cache / "thunderep"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing else is left"
    assert thresholds(GPUS, 8) == thresholds(GPUS[::-1], 8) == FOUND
    assert load(GPUS[:1]) is load(GPUS + GPUS[:1]) is load(["NVIDIA H200"] * 2) is None
    monkeypatch.setattr(tuning, "__version__", "9.9")
    assert load(GPUS) is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(cuda, "versions", lambda: (12040, 13000))
    assert load(GPUS) is None


@pytest.mark.parametrize(
    ("num_ranks", "topk", "dispatch"), [(2, 8, 4 << 20), (4, 8, 16 << 20), (4, 4, sys.maxsize), (8, 8, sys.maxsize)]
)
def test_kernels_move_larger_dispatches_where_fewer_rows_are_needed(num_ranks: int, topk: int, dispatch: int) -> None:
    found = thresholds(GPUS[:1] * num_ranks, topk)
    assert found.dispatch == dispatch
    assert found.combine == (sys.maxsize if dispatch == sys.maxsize else BUILT_IN.combine)


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    save(GPUS, FOUND, [])
    monkeypatch.setenv(ENVIRONMENT, "4096,0")
    assert thresholds(GPUS, 8) == Thresholds(4096, 0)
    for wrong in ("", "4096", "a,b", "1,2,3"):
        monkeypatch.setenv(ENVIRONMENT, wrong)
        with pytest.raises(ValueError, match=f"{ENVIRONMENT}: got '{wrong}', expected bytes"):
            thresholds(GPUS, 8)


@pytest.mark.parametrize(
    "change",
    [
        "", "{", "[]", "3", "\x00\x01", "machine", "thresholds",
        {"thresholds": {"dispatch": 1}}, {"thresholds": {"dispatch": 1, "combine": -1}},
        {"thresholds": {"dispatch": 1, "combine": True}}, {"thresholds": {"dispatch": "1", "combine": 2}},
        {"thresholds": {"dispatch": 1, "combine": 2, "permute": 3}}, {"thresholds": [1, 2]},
        {"machine": {"gpus": ["another"], "driver": "", "thunderep": "0"}},
    ],
    ids=repr,
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_a_warning(
    change: str | dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    path = save(GPUS, FOUND, [])
    content = json.loads(path.read_text())
    if isinstance(change, dict):
        path.write_text(json.dumps(content | change))
    elif change in content:
        del content[change]
        path.write_text(json.dumps(content))
    else:
        path.write_text(change)
    assert thresholds(GPUS, 8) == BUILT_IN
    assert [(record.name, record.levelname) for record in caplog.records] == [("thunderep.runtime.tuning", "WARNING")]
    assert "not used" in caplog.text or "not read" in caplog.text
    save(GPUS, FOUND, [])
    assert thresholds(GPUS, 8) == FOUND, "tuning again repairs it"


def test_a_file_that_is_not_text_or_not_readable_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    path = save(GPUS, FOUND, [])
    path.write_bytes(b"\xff\xfe\xfd")
    assert load(GPUS) is None
    path.unlink()
    path.mkdir()
    assert load(GPUS) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(GPUS, FOUND, [])
    with pytest.raises(TypeError):
        save(GPUS, Thresholds(1, 1), [{"not": object()}])
    monkeypatch.setattr(os, "replace", lambda src, dst: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(GPUS, Thresholds(1, 1), [])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert load(GPUS) == FOUND


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_a_valid_variable_the_cache_is_in_the_home_folder(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save(GPUS, FOUND, []).parent == tmp_path / ".cache" / "thunderep"


def test_built_in_thresholds_are_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "thunderep"):
        assert thresholds(GPUS, 8) == thresholds(GPUS, 8) == BUILT_IN
    assert [record.getMessage() for record in caplog.records] == [
        "auto goes by built-in thresholds; `thunderep tune` measures those of this machine"
    ]


def call(kind: str, rows: int, tokens: int = 0, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call(KINDS.index(kind), tokens, rows, DTYPES.index(dtype), HIDDEN)


@pytest.mark.parametrize(
    ("kind", "most"), [(kind, 1024 if outward else 4096) for kind, outward in zip(KINDS, OUTWARD, strict=True)]
)
def test_bytes_of_rows_alone_decide_who_moves_a_call(kind: str, most: int) -> None:
    limits = Thresholds(dispatch=1024, combine=4096)
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        rows = most // (HIDDEN * dtype.itemsize)
        assert all(limits.take(call(kind, rows, tokens, dtype)) for tokens in (0, rows))
        assert not any(limits.take(call(kind, rows + 1, tokens, dtype)) for tokens in (0, rows))


def test_beside_other_work_kernels_move_less() -> None:
    limits, rows = Thresholds(dispatch=4096, combine=512, beside=1024), 2048 // (HIDDEN * 2)
    for kind, outward in zip(KINDS, OUTWARD, strict=True):
        assert limits.take(call(kind, rows)) == outward
        assert not limits.take(call(kind, rows)._replace(async_op=True))
        assert limits.take(call(kind, rows // 4)._replace(async_op=True))
        assert limits._replace(beside=None).take(call(kind, rows)._replace(async_op=True)) == outward


def test_dense_rows_are_all_needed() -> None:
    """Where kernels move every dispatch, since few of its rows are needed, they still leave large dense calls to engines."""
    limits = built_in(num_ranks=8, topk=4)
    rows = (BUILT_IN.dispatch // (HIDDEN * 2)) + 1
    for kind in KINDS:
        assert limits.take(call(kind, rows)) == (kind not in COLLECTIVES)


def test_kernels_take_larger_dispatches_where_some_rows_are_not_needed() -> None:
    rows = 4 * BUILT_IN.dispatch // (HIDDEN * 2)
    for num_ranks in (2, 4):
        limits = built_in(num_ranks, topk=8)
        for kind, outward in zip(KINDS, OUTWARD, strict=True):
            outward_rows = outward and kind not in COLLECTIVES
            assert limits.take(call(kind, rows)) == (outward_rows and num_ranks == 4)
            assert not limits.take(call(kind, rows + 1))
            assert not limits.take(call(kind, rows)._replace(async_op=True))
