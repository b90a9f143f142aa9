"""Who is alive."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

import thunderep
from thunderep.runtime.watchdog import PeerError, Watchdog


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open")
    return bool(request.param)


def _wait_until(condition: object, seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def test_a_killed_process_is_dead_a_stopped_one_is_not(pidfd: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watchdog = Watchdog([os.getpid(), process.pid])
    try:
        assert watchdog.dead([0, 1]) == set()
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        assert watchdog.dead([1]) == set()
        process.kill()
        if not pidfd:  # signal 0 reaches a process that nobody has reaped yet
            process.wait()
        assert _wait_until(lambda: watchdog.dead([0, 1]) == {1})
        process.wait()
        assert watchdog.dead([1]) == {1}
        assert watchdog.dead([0]) == set()
    finally:
        process.kill()
        watchdog.close()
        watchdog.close()


def test_a_process_that_was_gone_before_is_dead(pidfd: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    watchdog = Watchdog([os.getpid(), process.pid])
    assert watchdog.dead([1]) == {1}
    watchdog.close()


def test_descriptors_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watchdog = Watchdog([process.pid])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watchdog.close()
    assert len(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()


def test_cpu_time_tells_work_from_sleep() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watchdog = Watchdog([busy.pid, idle.pid])
    try:
        time.sleep(0.5)
        before = [watchdog.cpu_seconds(rank) for rank in (0, 1)]
        time.sleep(0.5)
        used = [watchdog.cpu_seconds(rank) - was for rank, was in enumerate(before)]
        assert used[0] > 0.05
        assert used[1] < 0.02
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
        watchdog.close()


def test_peer_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PeerError("rank 3 died", 3)))
    assert isinstance(error, thunderep.PeerError)
    assert isinstance(error, RuntimeError)
    assert (str(error), error.rank) == ("rank 3 died", 3)
