"""What a Buffer tells of itself: counters against what was really moved, names in a profiler's trace, and the log."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import thunderep
from tests.dist import failures
from thunderep.testing.inputs import random_tokens
from thunderep.testing.processes import Ranks

TOKENS, MOST, HIDDEN, TOPK, SCALES = (5, 0, 3, 7), 9, 24, 3, 2


def exchange(transport: str) -> tuple[thunderep.Stats, thunderep.Stats]:
    """A ragged dispatch and combine, forward and backward, and an fp8 dispatch with scales; stats before and after."""
    rank = dist.get_rank()
    with thunderep.Buffer(
        num_experts=8, hidden=HIDDEN, topk=TOPK, max_tokens=MOST, device="cpu", transport=transport  # type: ignore[arg-type]
    ) as buffer:
        before = buffer.stats()
        mine = random_tokens(rank, TOKENS[rank], hidden=HIDDEN, num_experts=8, topk=TOPK)
        x = mine.x.requires_grad_()
        d = thunderep.dispatch(x, mine.topk_idx, mine.topk_weights, 8, buffer, MOST)
        thunderep.combine(d.recv_x, d, buffer).float().sum().backward()
        fp8 = random_tokens(
            rank, TOKENS[rank], hidden=HIDDEN, num_experts=8, topk=TOPK, dtype=torch.float8_e4m3fn, scales=SCALES
        )
        thunderep.dispatch(fp8.x, fp8.topk_idx.int(), fp8.topk_weights, 8, buffer, MOST, fp8.x_scales)
        return before, buffer.stats()


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_stats_count_what_was_moved(transport: str, four_ranks: Callable[[], Ranks]) -> None:
    row = HIDDEN * 2
    out = (row + TOPK * (8 + 4)) + row + (HIDDEN + TOPK * (4 + 4) + SCALES * 4)  # dispatch, combine's gradient, fp8 dispatch
    back = row + (row + TOPK * 4)  # combine, dispatch's gradient
    for rank, (before, after) in enumerate(four_ranks().run(exchange, transport)):
        others = sum(TOKENS) - TOKENS[rank]
        assert set(before.operations.values()) == {0}
        assert before[1:3] == (0, 0)
        counted = {kind: count for kind, count in after.operations.items() if count}
        assert counted == {"dispatch": 2, "combine": 1, "dispatch_backward": 1, "combine_backward": 1}
        assert after.bytes_sent == TOKENS[rank] * out + others * back
        assert after.bytes_received == others * out + 3 * TOKENS[rank] * back
        assert (after.waited is None) == (transport == "collective")


def late(rank: int, seconds: float) -> thunderep.Stats:
    """Operations to which one rank comes late each time."""
    for _ in range(2):
        failures.once(delay=seconds if dist.get_rank() == rank else 0.0)
    return failures._kept["buffer"].stats()


def test_stats_tell_the_slowest_peer(four_ranks: Callable[[], Ranks]) -> None:
    ranks = four_ranks()
    ranks.run(failures.make)
    for rank, stats in enumerate(ranks.run(late, 2, 0.4)):
        assert stats.waited is not None
        assert stats.waited[rank] == 0
        if rank != 2:
            assert stats.slowest_peer == 2
            assert 0.5 < stats.waited[2] < 5
    ranks.run(failures.close)


def traced() -> list[str]:
    """The names that a profiler sees in a dispatch and a combine."""
    failures.make()
    failures.once()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        failures.once()
    failures.close()
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("thunderep")})


def test_a_trace_names_operators_and_their_phases(four_ranks: Callable[[], Ranks]) -> None:
    phases = {"announce", "move", "localize", "sum"}
    for names in four_ranks().run(traced):
        assert {"thunderep::dispatch", "thunderep::combine", *(f"thunderep:{phase}" for phase in phases)} <= set(names)


CODE = """
import logging, sys
import torch.distributed as dist
import thunderep
if sys.argv[1] == "asked":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
buffer = thunderep.Buffer(num_experts=4, hidden=8, topk=2, max_tokens=4, device="cpu", staging_bytes=1 << 20, name="mine")
buffer._transport._control.give_up(KeyboardInterrupt())
"""


def test_the_log_is_silent_unless_asked_for() -> None:
    for asked in ("asked", "silent"):
        done = subprocess.run([sys.executable, "-c", CODE, asked], capture_output=True, text=True, timeout=60, check=True)
        lines = [line for line in done.stderr.splitlines() if "thunderep" in line]
        if asked == "silent":
            assert (lines, done.stdout) == ([], "")
        else:
            assert any("INFO thunderep.Buffer('mine', rank 0 of 1, shm) made, on cpu" in line for line in lines)
            assert any("thunderep.runtime.connect INFO shm: staging of 1048576 bytes a rank" in line for line in lines)
            assert any("thunderep.runtime.control WARNING a Buffer is broken: rank 0" in line for line in lines)


def until_logged() -> list[str]:
    """Operations until one raises; the warnings that were logged."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thunderep").addHandler(handler)
    failures.until_error(64)
    return logged


def test_a_peer_that_dies_is_logged() -> None:
    with Ranks(2) as ranks:
        ranks.run(failures.make)
        ranks.start(until_logged, ranks=[0])
        time.sleep(0.2)
        ranks.signal(1, signal.SIGKILL)
        ((text,),) = ranks.collect(20, ranks=[0])
        assert text.startswith("a Buffer is broken: rank 1 died")
