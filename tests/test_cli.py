"""The `thunderep` command as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thunderep.cli import app

TINY = ("--ranks", "2", "--no-compile")


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command, in a session of its own, as a terminal has it."""
    return subprocess.Popen(
        [sys.executable, "-m", "thunderep", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "120"},
    )


def start_training(out: Path) -> subprocess.Popen[str]:
    """A demo that never ends, in the midst of training."""
    process = start("demo", *TINY, "--steps", "1000000", "--out", str(out))
    assert process.stdout is not None
    while "step 1/" not in (line := process.stdout.readline()):
        assert line, "the demo ended too early"
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=180)
    return process.returncode, output


def members(session: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def assert_nothing_left(session: int) -> None:
    deadline = time.monotonic() + 5
    while left := members(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_demo_trains_and_agrees(tmp_path: Path) -> None:
    status, output = finish(start("demo", *TINY, "--steps", "2", "--out", str(tmp_path / "out")))
    assert status == 0, output
    assert "They agree" in output
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = start_training(tmp_path)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what Ctrl-C does
    else:
        process.send_signal(number)
    status, output = finish(process)
    assert status == 130
    assert "Stopped" in output
    assert "Traceback" not in output
    assert_nothing_left(process.pid)


def test_killed_rank_ends_the_demo(tmp_path: Path) -> None:
    process = start_training(tmp_path)
    ranks = [pid for pid in members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[-1], signal.SIGKILL)
    status, output = finish(process)
    assert status == 1
    assert re.search(r"rank \d was killed by SIGKILL", output)
    assert_nothing_left(process.pid)


def test_disagreement_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for agrees in (True, False):
        monkeypatch.setattr("thunderep.cli.run", lambda *_, agrees=agrees: type("Result", (), {"agrees": agrees}))
        assert CliRunner().invoke(app, ["demo", *TINY]).exit_code == int(not agrees)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ranks", "0"), "--ranks"),
        (("--ranks", "65"), "--ranks"),
        (("--steps", "0"), "--steps"),
        (("--steps", "many"), "--steps"),
        (("--device", "tpu"), "--device"),
        (("--device", "cuda", "--ranks", "64"), "each rank takes one"),
        (("--sideways",), "--sideways"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], word: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert (result.exit_code, word in result.output) == (2, True), result.output


def test_compile_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--compile"])
    assert (result.exit_code, "no compiler (no-such-compiler)" in result.output) == (2, True), result.output


def test_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", *TINY, "--out", str(tmp_path / "file" / "out")])
    assert (result.exit_code, "file/out" in result.output) == (1, True), result.output
