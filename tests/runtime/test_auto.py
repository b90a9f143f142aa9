"""`auto` for CUDA tensors, as far as no GPU is needed: ranks that agree, fall back together, and let a GPU go.

The driver and torch's streams are stand-ins; processes, their agreement and their shared memory are real.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thunderep.runtime import arena, cuda
from thunderep.runtime.connect import Wish, connect
from thunderep.runtime.rendezvous import Rendezvous, host_id
from thunderep.runtime.schedule import Flag
from thunderep.runtime.staging import Shape
from thunderep.runtime.transport import DTYPES, KINDS, Call
from thunderep.runtime.tuning import ENVIRONMENT
from thunderep.testing.processes import RankError, Ranks

SHAPE = Shape(num_ranks=2, hidden=64, topk=2, max_tokens=256, itemsize=2)


def call(kind: str, rows: int, tokens: int = 0, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call(KINDS.index(kind), tokens, rows, DTYPES.index(dtype), SHAPE.hidden)


def stand_in(denied: str) -> None:
    """Have this process find a GPU, whose driver does all but what is `denied`."""

    def register(address: int, nbytes: int) -> int:
        if denied == "pinning":
            raise cuda.CudaError(f"cuMemHostRegister ({nbytes} bytes) failed")
        return address

    def probe(word: int, stream: int) -> None:
        if denied == "signals":
            raise cuda.CudaError("cuStreamBatchMemOp (waiting and signalling on a stream) failed")

    cuda.register, cuda.unregister, cuda.probe = register, lambda address: None, probe
    stream: Any = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    standing: dict[str, Any] = {
        "Stream": lambda device: stream,
        "current_stream": lambda: stream,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{dist.get_rank()}"),
    }
    for name, value in standing.items():
        setattr(torch.cuda, name, value)


def connected(transport: str, denied: str = "", patience: float = 30.0) -> tuple[str, Any, list[str]]:
    """Connect this rank, whose driver denies something or nothing. Also: what was logged."""
    stand_in(denied)
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thunderep").addHandler(handler)
    group = dist.group.WORLD
    assert group is not None
    meeting = Rendezvous(group, 30.0)
    mine = {"name": "a card", "node": meeting.rank}
    said = meeting.exchange("configuration", {"host": host_id(), "pid": os.getpid(), "gpu": mine})
    try:
        name, made = connect(Wish(transport, SHAPE, torch.device("cpu"), None, patience), group, meeting, said)
    finally:
        logging.getLogger("thunderep").removeHandler(handler)
    return name, made, logged


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def kernels_take(given: list[str]) -> list[bool]:
    """Connect with other thresholds on each rank; which calls of 1, 8 and 64 rows kernels move, out and back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, given[dist.get_rank()])
        name, made, logged = connected("auto")
    assert (name, logged) == ("auto", [])
    taken = [made.window(call(kind, rows, rows)) is not None for kind in ("dispatch", "combine") for rows in (1, 8, 64)]
    made.close()
    return taken


def test_ranks_take_rank_0s_thresholds(pair: Ranks) -> None:
    row = SHAPE.row_bytes
    for differing in ([f"{8 * row},{row}", f"{row},{64 * row}"], [f"{8 * row},{row}", "0,0"]):
        assert pair.run(kernels_take, differing) == [[True, True, False, True, False, False]] * 2
    with pytest.raises(RankError) as caught:
        pair.run(kernels_take, ["many", "1,2"])
    assert [f"rank 0: {ENVIRONMENT}: got 'many'" in str(error) for error in caught.value.errors] == [True, True]


def wide_rows() -> list[bool]:
    """Of rows as long as all that kernels have room for, and of more columns than that: whether kernels move one."""
    _, made, _ = connected("auto")
    region, size = made._window.region, DTYPES[0].itemsize
    one = call("all_gather", 1, 1)
    taken = [made.window(one._replace(hidden=columns)) is not None for columns in (region.slot * 8 // size, region.slot * 8)]
    made.close()
    return taken


def test_copy_engines_move_rows_that_are_too_wide_for_kernels(pair: Ranks) -> None:
    assert pair.run(wide_rows) == [[True, False]] * 2


def one_way_only() -> list[list[bool]]:
    """Who takes a call of any size over `dma` and over `direct`: kernels? Nothing is announced by asking."""
    taken = []
    for transport in ("dma", "direct"):
        _, made, _ = connected(transport)
        taken.append([made.window(call(kind, rows, rows)) is not None for kind in KINDS for rows in (0, 1, 1 << 40)])
        stats = made.stats()
        assert set(stats.operations.values()) == {0}
        assert stats.waited is None
        made.close()
    return taken


def test_dma_and_direct_take_every_call(pair: Ranks) -> None:
    assert pair.run(one_way_only) == [[[False] * 3 * len(KINDS), [True] * 3 * len(KINDS)]] * 2


def fallen_back(rank: int, denied: str) -> tuple[str, str, list[str]]:
    """What becomes of `auto` where a rank's driver denies something; whether other transports raise is asserted here."""
    here = denied if dist.get_rank() == rank else ""
    name, made, logged = connected("auto", here)
    made.close()
    for transport in ("dma", "direct"):
        with pytest.raises(RuntimeError, match=rf"rank {rank}: cu\w+ \("):
            connected(transport, here)
    return name, type(made).__name__, logged


@pytest.mark.parametrize(("denied", "call"), [("pinning", "cuMemHostRegister"), ("signals", "cuStreamBatchMemOp")])
@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_cannot_all_fall_back_together_and_say_why(rank: int, denied: str, call: str, pair: Ranks) -> None:
    for name, kind, logged in pair.run(fallen_back, rank, denied):
        assert (name, kind) == ("collective", "CollectiveTransport")
        (text,) = logged
        assert text.startswith("'auto' falls back to 'collective': ")
        assert f"rank {rank}: {call} (" in text
        assert f"rank {1 - rank}: ok" in text


_kept: dict[str, Any] = {}


def keep() -> None:
    """Connect, and stay so."""
    _kept["auto"] = connected("auto")[1]


def wait_for_the_dead(under_way: str) -> tuple[float, bool, bool, str]:
    """With an operation of either kind under way: when this rank was let go, whether kernels and copies were, and why."""
    made = _kept["auto"]
    layout, words = made._engines._layout, made._segment.words
    if under_way == "copies":
        words[layout.control(0, arena.CONTROL_LANES) // 4] = 1
    else:
        words[layout.window // 4 + 1] = 1  # begun, not ended
    made._control.post(call("dispatch", 1))
    end = time.monotonic() + 10
    while not words[layout.window // 4] and time.monotonic() < end:
        time.sleep(0.01)
    at = time.monotonic()
    time.sleep(0.05)
    copies = all(words[layout.flag(Flag(1, slot, 0)) // 4] for slot in range(layout.staging.slots))
    stopped = bool(words[layout.window // 4])
    try:
        made.check()
    except RuntimeError as error:
        return at, stopped, copies, f"{type(error).__name__}: {error}"
    return at, stopped, copies, "no error"


@pytest.mark.parametrize("under_way", ["copies", "kernels"])
def test_a_dead_peer_lets_go_both_copies_and_kernels(under_way: str) -> None:
    with Ranks(2) as ranks:
        ranks.run(keep)
        ranks.start(wait_for_the_dead, under_way, ranks=[0])
        time.sleep(0.5)
        killed = time.monotonic()
        ranks.signal(1, signal.SIGKILL)
        ((at, stopped, copies, text),) = ranks.collect(20, ranks=[0])
    assert 0 < at - killed < 2
    assert (stopped, copies) == (True, True)
    assert "PeerError: rank 1 died" in text


def impatient(under_way: str) -> str:
    """With an operation of either kind that gets nowhere: what the Buffer says after its patience."""
    _, made, _ = connected("auto", patience=0.4)
    layout, words = made._engines._layout, made._segment.words
    made._control.post(call("dispatch", 1))
    if under_way:
        at = layout.control(dist.get_rank(), arena.CONTROL_LANES) if under_way == "copies" else layout.window + 4
        words[(at + (64 * dist.get_rank() if under_way == "kernels" else 0)) // 4] = 1
    time.sleep(1.2)
    try:
        made.check()
    except RuntimeError as error:
        return str(error)
    finally:
        made.close()
    return "no error"


def test_an_operation_of_either_kind_that_gets_nowhere_is_noticed(pair: Ranks) -> None:
    assert pair.run(impatient, "") == ["no error"] * 2
    for under_way in ("copies", "kernels"):
        assert all("silent" in text or "gave up" in text for text in pair.run(impatient, under_way))
