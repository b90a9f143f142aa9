"""Rank processes say how they ended."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from thunderep.testing.processes import RankError, Ranks


def test_a_rank_that_exits_is_named_with_its_status() -> None:
    with Ranks(2) as ranks, pytest.raises(RankError, match=r"rank 1: .* with exit status 3") as raised:
        ranks.start(os.getpid, ranks=[0])
        ranks.start(os._exit, 3, ranks=[1])
        ranks.collect()
    assert [type(error) for error in raised.value.errors] == [type(None), EOFError]


def test_a_rank_that_is_killed_is_named_with_the_signal() -> None:
    with Ranks(1) as ranks:
        ranks.signal(0, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 0: .* killed by SIGKILL"):
            ranks.collect()


def wait_or_raise() -> None:
    """Rank 0 waits for what does not come, since rank 1 has failed."""
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    time.sleep(60)


def test_what_another_rank_raised_is_told_with_the_one_that_did_not_answer() -> None:
    with Ranks(2) as ranks, pytest.raises(TimeoutError, match="rank 0 of 2 did not answer.*; rank 1: ValueError: out of luck"):
        ranks.run(wait_or_raise, timeout=3)


def test_leaving_by_an_error_waits_for_nobody() -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Ranks(2) as ranks:
        ranks.start(time.sleep, 60)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
