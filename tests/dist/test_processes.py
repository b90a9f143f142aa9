"""Rank processes say how they ended."""

from __future__ import annotations

import os
import signal

import pytest

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
