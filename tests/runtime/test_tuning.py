"""Thresholds: where they come from, and that no file can do harm."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from thunderep.runtime import cuda, tuning
from thunderep.runtime.tuning import BUILT_IN, ENVIRONMENT, Thresholds, load, save, thresholds

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
