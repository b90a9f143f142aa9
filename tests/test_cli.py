"""The `thunderep` command as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from thunderep.cli import app
from thunderep.runtime.diagnosis import Finding
from thunderep.runtime.topology import Machine

TINY = ("--ranks", "2", "--no-compile")


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command, in a session of its own, as a terminal has it: Ctrl-C counts, also where these tests ignore it (`nohup`)."""
    return subprocess.Popen(
        [sys.executable, "-m", "thunderep", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "120"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def start_training(out: Path) -> subprocess.Popen[str]:
    """A demo that never ends, in the midst of training."""
    process = start("demo", *TINY, "--steps", "1000000", "--out", str(out))
    assert process.stdout is not None
    while "step 1/" not in (line := process.stdout.readline()):
        assert line, "the demo ended too early"
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
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


def test_output_that_cannot_hold_a_character_gets_another() -> None:
    code = "from thunderep import cli; cli.app = lambda **_: print('caf\\u00e9'); cli.main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "caf?\n"), done.stderr


def test_doctor_shows_a_table() -> None:
    status, output = finish(start("doctor"))
    assert status == int("Problems:" in output)
    for word in ("what to do", "GPUs", "versions", "NUMA", "memory", "shared memory", "system"):
        assert word in output


def test_doctors_json_is_complete() -> None:
    status, output = finish(start("doctor", "--json"))
    report = json.loads(output)
    assert set(report["machine"]) == {field.name for field in fields(Machine)}
    assert all(set(finding) == {field.name for field in fields(Finding)} for finding in report["findings"])
    assert report["problems"] == sum(finding["level"] == "problem" for finding in report["findings"])
    assert status == int(report["problems"] > 0)


def test_doctors_status_says_whether_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, status in (("ok", 0), ("note", 0), ("problem", 1)):
        monkeypatch.setattr(
            "thunderep.runtime.diagnosis.diagnose", lambda _, level=level: [Finding(level, "link", "x4 [of 16]", "reseat")]
        )
        result = CliRunner().invoke(app, ["doctor"])
        assert (result.exit_code, "x4 [of 16]" in result.output) == (status, True), result.output


@pytest.mark.parametrize("name", ["psutil", "pynvml"])
def test_doctor_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output) == (1, f"thunderep: {name} is not installed; pip install 'thunderep[doctor]'\n")


def test_the_command_needs_none_of_doctors_packages() -> None:
    code = "import sys; sys.modules['psutil'] = sys.modules['pynvml'] = None; import thunderep.cli"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_simulate_says_everywhere_that_it_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    savefig = Figure.savefig

    def save(figure: Figure, path: Path) -> None:
        figures.append(figure)
        savefig(figure, path)

    monkeypatch.setattr(Figure, "savefig", save)
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    sizes = (
        "--machine",
        "h200-2",
        "--machine",
        "rtx5090-4",
        "--tokens",
        "512",
        "--tokens",
        "64",
        "--hidden",
        "1024",
        "--topk",
        "4",
    )
    result = CliRunner().invoke(app, ["simulate", *sizes, *files])
    assert result.exit_code == 0, result.output
    for title in ("2 x H200, peer access off (simulated, not measured)", "4 x RTX 5090 (simulated, not measured)"):
        assert title in result.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["simulated"] is True
    assert content["shape"] == {"hidden": 1024, "topk": 4}
    assert [machine["name"] for machine in content["machines"]] == ["2 x H200, peer access off", "4 x RTX 5090"]
    assert all(machine["sources"] for machine in content["machines"])
    assert len(content["rows"]) == 2 * 2 * 2
    for row in content["rows"]:
        assert row["simulated"] is True
        assert row["ratio"] == pytest.approx(row["nccl"] / row["ours"])
        assert f"{row['ours']:,.0f}" in result.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    titles = [figures[0].get_suptitle(), *(axes.get_title() for axes in figures[0].axes)]
    assert all("simulated" in title for title in titles)
    assert all(axes.get_ylim()[0] == 0 < axes.dataLim.ymax < axes.get_ylim()[1] for axes in figures[0].axes)


@pytest.mark.parametrize(
    ("option", "derived"), [(("--ablation",), "needed_gain"), (("--lost", "3000"), "nccl_lost")], ids=["ablation", "lost"]
)
def test_other_reports_of_simulate(option: tuple[str, ...], derived: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("simulate", "--machine", "h200-4", "--tokens", "8", *option)
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "(simulated, not measured)" in result.output
    content = json.loads(path.read_text())
    assert content["simulated"] is True
    assert {row["ranks"] for row in content["rows"]} == {2, 4}
    assert all(row["simulated"] is True and row[derived] > 0 for row in content["rows"])
    refused = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "out.png")])
    assert (refused.exit_code, "--plot" in refused.output) == (2, True), refused.output


def test_simulate_shows_its_error_at_every_measured_point() -> None:
    result = CliRunner().invoke(app, ["simulate", "--check"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert result.output.count("copy engines: all-gather, the best plan") == 10
    assert result.output.count("nccl: ") == 72 + 2
    assert "simulated beside measured" in result.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--machine", "no-such-machine"), "rtx4090-8-one-socket"),
        (("--tokens", "0"), "--tokens"),
        (("--hidden", "0"), "--hidden"),
        (("--topk", "-1"), "--topk"),
    ],
)
def test_bad_options_of_simulate_are_named(arguments: tuple[str, ...], word: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert (result.exit_code, word in result.output) == (2, True), result.output


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_simulate_that_cannot_write(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        app, ["simulate", "--machine", "h200-2", "--tokens", "1", option, str(tmp_path / "file" / "out.png")]
    )
    assert (result.exit_code, "file/out" in result.output) == (1, True), result.output
