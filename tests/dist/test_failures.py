"""Ranks that die, fall silent, disagree or leave: an error on all others, never a hang, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist import failures
from thunderep.runtime.arena import PREFIX
from thunderep.testing.processes import RankError, Ranks


def segments() -> set[str]:
    """Named segments on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(PREFIX)}


@pytest.mark.parametrize("round_", range(20))
def test_kill_in_mid_operation(round_: int) -> None:
    """kill -9 of one of four ranks: PeerError on all others within 2 s, and the segment is gone with the last of them."""
    victim, rng = round_ % 4, random.Random(round_)
    with Ranks(4) as ranks:
        ranks.run(failures.make)
        ranks.run(failures.once)
        others = [rank for rank in range(4) if rank != victim]
        ranks.start(failures.forever, ranks=[victim])
        ranks.start(failures.until_error, ranks=others)
        time.sleep(0.1 + rng.random() * 0.2)
        ranks.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        for kind, culprit, text, at in ranks.collect(20, ranks=others):
            assert kind == "PeerError"
            assert culprit == victim
            assert f"rank {victim}" in text
            assert all(f"rank {r}:" in text for r in range(4)), "each rank's last known operation"
            assert at - killed < 2.0
        ranks.start(failures.after_the_error, ranks=others)
        assert ranks.collect(20, ranks=others) == [["PeerError", "PeerError", "PeerError", "closed"]] * 3
        ranks.start(failures.resources, ranks=others)
        assert [held["mappings"] for held in ranks.collect(20, ranks=others)] == [0, 0, 0]
    assert not segments()


def test_everyone_killed_leaves_nothing() -> None:
    with Ranks(3) as ranks:
        ranks.run(failures.make)
        ranks.start(failures.forever)
        time.sleep(0.1)
        pids = ranks.pids
        ranks.kill()
        assert not any(
            Path(f"/proc/{pid}/maps").exists() and "thunderep" in Path(f"/proc/{pid}/maps").read_text() for pid in pids
        )
    assert not segments()
    with Ranks(3) as ranks:
        assert ranks.run(failures.make) == ["shm"] * 3
        ranks.run(failures.once)


def test_a_stopped_rank_is_not_dead(four_ranks: Callable[[], Ranks]) -> None:
    """SIGSTOP for 5 s: the others wait and nobody raises."""
    ranks = four_ranks()
    ranks.run(failures.make)
    ranks.start(failures.once, 64, 0.3)
    ranks.signal(2, signal.SIGSTOP)
    time.sleep(5)
    ranks.signal(2, signal.SIGCONT)
    assert max(ranks.collect(30)) > 4
    ranks.run(failures.once)
    ranks.run(failures.close)


def test_a_silent_rank_is_named_after_the_timeout(four_ranks: Callable[[], Ranks]) -> None:
    """A live process that makes no call is given `timeout` seconds, on its first call too, and no more."""
    ranks = four_ranks()
    for warm in (True, False):
        ranks.run(_make_with_timeout, 2.0)
        if warm:
            ranks.run(failures.once)
        began = time.monotonic()
        ranks.start(failures.until_error, ranks=[0, 1, 3])
        outcomes = ranks.collect(30, ranks=[0, 1, 3])
        assert {outcome[:2] for outcome in outcomes} == {("PeerError", 2)}
        assert any("rank 2 was silent for" in text for _, _, text, _ in outcomes)
        assert all(1.9 < at - began < 6 for *_, at in outcomes)
        ranks.run(failures.close)


def _make_collective(timeout: float) -> None:
    failures.make(timeout=timeout, transport="collective")


def test_over_collective_too_a_silent_rank_is_not_waited_for_longer_than_the_timeout() -> None:
    with Ranks(2) as ranks:
        ranks.run(_make_collective, 1.5)
        ranks.run(failures.once)
        began = time.monotonic()
        ranks.start(failures.until_error, ranks=[0])
        ((kind, _rank, text, at),) = ranks.collect(30, ranks=[0])
    assert kind == "PeerError"
    assert "while rank 0 waited in dispatch 3: silent for 1.5 s" in text
    assert 1.4 < at - began < 5


def test_a_rank_at_work_on_its_first_call_is_not_silent(four_ranks: Callable[[], Ranks]) -> None:
    """It may compile for minutes: as long as it uses its CPU, the others wait beyond `timeout`."""
    ranks = four_ranks()
    ranks.run(_make_with_timeout, 1.0)
    ranks.start(_busy_then_once, 3.0, ranks=[1])
    ranks.start(failures.once, ranks=[0, 2, 3])
    assert min(ranks.collect(30, ranks=[0, 2, 3])) > 2
    ranks.collect(30, ranks=[1])
    ranks.run(failures.close)


def test_a_rank_that_closes_is_named(four_ranks: Callable[[], Ranks]) -> None:
    ranks = four_ranks()
    ranks.run(failures.make)
    ranks.run(failures.once)
    ranks.start(failures.close, ranks=[3])
    ranks.collect(20, ranks=[3])
    ranks.start(failures.until_error, ranks=[0, 1, 2])
    for kind, culprit, text, _ in ranks.collect(20, ranks=[0, 1, 2]):
        assert (kind, culprit) == ("PeerError", 3)
        assert "closed its Buffer" in text
    ranks.start(failures.close, ranks=[0, 1, 2])
    ranks.collect(20, ranks=[0, 1, 2])


@pytest.mark.parametrize("action", ["tokens", "max_tokens", "dtype", "idx_dtype", "scales", "kind", "async_op"])
@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_ranks_that_disagree_all_raise_and_go_on(action: str, transport: str, four_ranks: Callable[[], Ranks]) -> None:
    ranks = four_ranks()
    ranks.run(_make_over, transport)
    errors = ranks.run(failures.only_rank, 2, action)
    assert len(set(errors)) == 1
    assert errors[0] is not None
    assert errors[0].startswith("RuntimeError: ranks disagree on ")
    assert all(f"rank {rank} has" in errors[0] for rank in range(4))
    ranks.run(failures.once)
    ranks.run(failures.close)


def test_interrupt_releases_the_others() -> None:
    """Ctrl-C in one rank's operation: it raises KeyboardInterrupt, the others a PeerError that names it."""
    with Ranks(3) as ranks:
        ranks.run(_accept_interrupts)
        ranks.run(failures.make)
        ranks.start(failures.until_error, ranks=[0, 1])
        ranks.start(failures.once, 64, 60.0, ranks=[2])
        time.sleep(0.5)
        ranks.signal(0, signal.SIGINT)
        assert isinstance(ranks.outcomes(10, ranks=[0])[0], KeyboardInterrupt)
        kind, culprit, text, _ = ranks.collect(10, ranks=[1])[0]
        assert (kind, culprit) == ("PeerError", 0)
        assert "interrupted" in text
        ranks.kill()


@pytest.mark.parametrize("peer_gone", [False, True])
def test_closing_twice_never_hangs(peer_gone: bool) -> None:
    with Ranks(2) as ranks:
        ranks.run(failures.make)
        ranks.run(failures.once)
        if peer_gone:
            ranks.signal(1, signal.SIGKILL)
        ranks.start(_close_twice, ranks=[0])
        assert ranks.collect(5, ranks=[0]) == ["closed"]


SCRIPT = """
import sys, time
import torch.distributed as dist
from tests.dist import failures
from thunderep.background import Rest
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
failures.make()
failures.once()
if sys.argv[3] == "operation under way" and rank == 0:
    failures._kept["buffer"].pending.submit(lambda: Rest(failures.once, ()))  # rank 1 never comes
    time.sleep(0.2)
if sys.argv[3] == "error" and rank == 0:
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("how", ["no close", "operation under way", "error"])
def test_exit_without_close_never_hangs(how: str, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), how], stderr=subprocess.DEVNULL)
        for rank in (0, 1)
    ]
    codes = [process.wait(timeout=60) for process in processes]
    assert codes == [1 if how == "error" else 0, 0]


def test_a_buffer_that_nobody_keeps_leaves_no_thread(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(failures.forgotten) == [[]] * 4


def test_a_rank_that_fails_to_make_its_buffer_is_named(four_ranks: Callable[[], Ranks]) -> None:
    for rank, (text, seconds) in enumerate(four_ranks().run(failures.half_made, 2)):
        if rank != 2:
            assert "rank 2 closed its Buffer" in text
            assert seconds < 5


def test_a_rank_without_memory_is_named_by_all(four_ranks: Callable[[], Ranks]) -> None:
    (report,) = set(four_ranks().run(failures.short_of_memory, 2))
    assert "rank 1: ok; rank 2: MemoryError; rank 3: ok" in report


def test_a_forked_child_is_told_to_spawn() -> None:
    with Ranks(2) as ranks:
        ranks.run(failures.make)
        for text in ranks.run(_use_in_fork):
            assert "RuntimeError" in text
            assert "spawn" in text
        ranks.run(failures.once)  # and the parent's Buffer is none the worse for it


def test_error_lists_what_each_rank_raised() -> None:
    with Ranks(2) as ranks, pytest.raises(RankError) as info:
        ranks.run(failures.once)  # there is no Buffer
    assert all(isinstance(error, KeyError) for error in info.value.errors)


def _make_with_timeout(timeout: float) -> None:
    failures.make(timeout=timeout)


def _make_over(transport: str) -> None:
    failures.make(transport=transport)


def _busy_then_once(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    failures.once()


def _accept_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _close_twice() -> str:
    buffer = failures._kept["buffer"]
    buffer.close()
    buffer.close()
    return "closed"


def _use_in_fork() -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            failures.once()
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        failures._kept["buffer"].close()  # does nothing here
        failures._kept.clear()
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 10000).decode()
    os.close(read)
    os.close(write)
    return text
