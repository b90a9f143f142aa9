"""The thread that frees a GPU: it finds every reason why a wait cannot end, and none where there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from thunderep.runtime import arena
from thunderep.runtime.announce import Announcer
from thunderep.runtime.chunks import MIN_SLOT_BYTES, Staging
from thunderep.runtime.control import Control
from thunderep.runtime.release import Releaser
from thunderep.runtime.transport import KINDS, Call
from thunderep.runtime.watchdog import PeerError, Watchdog

CALL = Call(KINDS.index("dispatch"), 1, 1, 0, 1)


class Pair:
    """Rank 0 here, with a releaser; rank 1 another process, whose control block a second view here writes."""

    def __init__(self, timeout: float) -> None:
        self.peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        layout = arena.Layout(2, Staging.of(2, Staging.slots_for(2) * MIN_SLOT_BYTES))
        self.owner = arena.Owner(layout.nbytes, "memfd")
        pids = [self.peer.pid, self.peer.pid]
        self.mine = Control(self.owner.segment, layout, 0, Watchdog(pids), timeout)
        self.theirs = Control(arena.attach(self.owner.handle), layout, 1, Watchdog(pids), timeout)
        self.state = b""
        self.left = False
        self.released = threading.Event()
        self.releaser = Releaser(self.mine, [1], lambda: self.state, self.released.set)

    def both_post(self) -> None:
        """Both ranks begin an operation."""
        self.mine.post(CALL)
        self.theirs.post(CALL)

    def leave(self) -> None:
        """The peer closes its Buffer."""
        self.left = True
        self.theirs.close()

    def verdict(self) -> PeerError:
        """What `check` raises once the device has been let go."""
        assert self.released.wait(5)
        with pytest.raises(PeerError) as caught:
            self.mine.check()
        return caught.value


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(getattr(request, "param", 60.0))
    yield pair
    pair.releaser.close()
    pair.peer.kill()
    pair.peer.wait()
    pair.mine.close()
    if not pair.left:
        pair.theirs.close()
    pair.owner.release()


def test_a_dead_peer_is_found_while_an_operation_waits(pair: Pair) -> None:
    pair.both_post()
    pair.state = b"waiting"
    killed = time.monotonic()
    pair.peer.kill()
    error = pair.verdict()
    assert error.rank == 1
    assert "died" in str(error)
    assert time.monotonic() - killed < 2


def test_a_dead_peer_is_found_when_nothing_waits_too(pair: Pair) -> None:
    pair.peer.kill()
    assert "died" in str(pair.verdict())


def test_a_peer_that_closed_after_its_part_is_no_error(pair: Pair) -> None:
    pair.both_post()
    pair.leave()
    pair.peer.kill()
    assert not pair.released.wait(1.5)
    pair.mine.check()


def test_a_wait_for_a_closed_peer_ends(pair: Pair) -> None:
    pair.both_post()
    pair.leave()
    pair.state = b"a replayed graph waits"
    assert "closed its Buffer" in str(pair.verdict())


@pytest.mark.parametrize("pair", [0.5], indirect=True)
def test_a_silent_peer_is_found_after_the_timeout(pair: Pair) -> None:
    pair.both_post()
    pair.state = b"waiting"
    error = pair.verdict()
    assert error.rank == 1
    assert "silent" in str(error)


@pytest.mark.parametrize("pair", [0.5], indirect=True)
def test_what_gets_on_is_not_silent(pair: Pair) -> None:
    pair.both_post()
    for step in range(20):
        pair.state = bytes([step])
        assert not pair.released.wait(0.1)
    pair.mine.check()


@pytest.mark.parametrize("pair", [0.5], indirect=True)
def test_nothing_under_way_is_not_silent(pair: Pair) -> None:
    pair.both_post()
    assert not pair.released.wait(1.5)
    pair.mine.check()


def test_a_peer_that_makes_another_call_is_found_by_both(pair: Pair) -> None:
    pair.mine.post(CALL)
    pair.mine.compare()
    pair.theirs.post(CALL._replace(tokens=0))
    pair.theirs.compare()  # tokens may differ
    for ahead in range(3):
        pair.mine.post(CALL._replace(max_tokens=5 + ahead))
    pair.state = b"waiting"
    pair.theirs.post(CALL._replace(max_tokens=4))
    with pytest.raises(RuntimeError, match="disagree on max_tokens: rank 0 has 5, rank 1 has 4 ") as caught:
        pair.theirs.compare()
    assert pair.released.wait(5)
    for control in (pair.mine, pair.theirs):
        with pytest.raises(RuntimeError) as told:
            control.check()
        assert str(told.value) == str(caught.value)


@pytest.mark.parametrize("who", [0, 1])
def test_captured_calls_are_compared_with_none(who: int, pair: Pair) -> None:
    pair.mine.post(CALL, captured=who == 0)
    pair.theirs.post(CALL._replace(max_tokens=7), captured=who == 1)
    pair.theirs.compare()
    pair.mine.compare()


def test_a_peer_that_closed_is_no_error_where_calls_are_replayed(pair: Pair) -> None:
    """It captured two calls and replayed them while this rank issued two more: numbers do not tell who did how many."""
    for _ in range(2):
        pair.mine.post(CALL)
        pair.theirs.post(CALL, captured=True)
    for _ in range(2):
        pair.mine.post(CALL)
    pair.leave()
    time.sleep(0.4)
    assert not pair.released.is_set()
    pair.mine.check()


def test_who_fails_to_issue_what_it_announced_holds_up_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    announcer = Announcer(pair.mine, 2)
    announcer.announce(CALL)
    announcer.failed(MemoryError("no room for the results"))
    with pytest.raises(PeerError, match="interrupted by MemoryError"):
        pair.mine.check()
    assert pair.theirs.verdict([0], "an operation", 0.0) is not None
