"""`auto` for CUDA tensors, as far as no GPU is needed: who decides what, how memory is shared out, and what lets a GPU go.

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
from hypothesis import given
from hypothesis import strategies as st

from thunderep.runtime import arena, cuda
from thunderep.runtime.choice import choose, gpu_facts
from thunderep.runtime.chunks import MIN_SLOT_BYTES
from thunderep.runtime.connect import Wish, connect
from thunderep.runtime.rendezvous import Rendezvous, host_id
from thunderep.runtime.schedule import Flag
from thunderep.runtime.staging import MAX_DEFAULT_STAGING, Shape
from thunderep.runtime.transport import COLLECTIVES, DTYPES, KINDS, OUTWARD, Call
from thunderep.runtime.tuning import BUILT_IN, ENVIRONMENT, Thresholds, built_in
from thunderep.runtime.window import Region
from thunderep.testing.processes import RankError, Ranks

SHAPE = Shape(num_ranks=2, hidden=64, topk=2, max_tokens=256, itemsize=2)


def call(kind: str, rows: int, tokens: int = 0, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call(KINDS.index(kind), tokens, rows, DTYPES.index(dtype), SHAPE.hidden)


@pytest.mark.parametrize(
    ("kind", "most"), [(kind, 1024 if outward else 4096) for kind, outward in zip(KINDS, OUTWARD, strict=True)]
)
def test_bytes_of_rows_alone_decide_who_moves_a_call(kind: str, most: int) -> None:
    limits = Thresholds(dispatch=1024, combine=4096)
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        rows = most // (SHAPE.hidden * dtype.itemsize)
        assert all(limits.take(call(kind, rows, tokens, dtype)) for tokens in (0, rows))
        assert not any(limits.take(call(kind, rows + 1, tokens, dtype)) for tokens in (0, rows))


def test_beside_other_work_kernels_move_less() -> None:
    limits, rows = Thresholds(dispatch=4096, combine=512, beside=1024), 2048 // (SHAPE.hidden * 2)
    for kind, outward in zip(KINDS, OUTWARD, strict=True):
        assert limits.take(call(kind, rows)) == outward
        assert not limits.take(call(kind, rows)._replace(async_op=True))
        assert limits.take(call(kind, rows // 4)._replace(async_op=True))
        assert limits._replace(beside=None).take(call(kind, rows)._replace(async_op=True)) == outward


def test_dense_rows_are_all_needed() -> None:
    """Where kernels move every dispatch, since few of its rows are needed, they still leave large dense calls to engines."""
    limits = built_in(num_ranks=8, topk=4)
    rows = (BUILT_IN.dispatch // (SHAPE.hidden * 2)) + 1
    for kind in KINDS:
        assert limits.take(call(kind, rows)) == (kind not in COLLECTIVES)


def test_kernels_take_larger_dispatches_where_some_rows_are_not_needed() -> None:
    rows = 4 * BUILT_IN.dispatch // (SHAPE.hidden * 2)
    for num_ranks in (2, 4):
        limits = built_in(num_ranks, topk=8)
        for kind, outward in zip(KINDS, OUTWARD, strict=True):
            outward_rows = outward and kind not in COLLECTIVES
            assert limits.take(call(kind, rows)) == (outward_rows and num_ranks == 4)
            assert not limits.take(call(kind, rows + 1))
            assert not limits.take(call(kind, rows)._replace(async_op=True))


@given(
    shape=st.builds(
        Shape,
        st.integers(1, 31), st.integers(1, 8192), st.integers(1, 16), st.integers(1, 1 << 20), st.sampled_from([1, 2, 4]),
        st.integers(1, 1 << 20),
    ),
    limits=st.builds(Thresholds, st.integers(0, 64 << 20), st.integers(0, 64 << 20)),
    spare=st.none() | st.integers(0, 512 << 20),
)  # fmt: skip
def test_ring_and_window_share_the_staging(shape: Shape, limits: Thresholds, spare: int | None) -> None:
    least = least_staging(shape)
    layout = shape.layout("auto", None if spare is None else least + spare, limits)
    ring, share = layout.staging.nbytes, layout.window_bytes // shape.num_ranks
    routing = Region.for_routing(shape.num_ranks, min(shape.max_tokens, 8192), shape.topk, -(-shape.hidden // 128))
    assert layout.window_bytes >= routing.nbytes
    assert ring + share <= (MAX_DEFAULT_STAGING if spare is None else least + spare) + -(-routing.nbytes // shape.num_ranks)
    assert ring >= shape.num_ranks * MIN_SLOT_BYTES
    assert Region(layout.num_ranks, layout.window_bytes).slot * 8 >= shape.row_bytes, "a row fits"
    assert layout.slots(shape.num_ranks) == layout.window < layout.nbytes, "neither lies in the other"


def least_staging(shape: Shape) -> int:
    """The fewest bytes that `check` lets pass."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        try:
            shape.check("auto", middle)
        except ValueError:
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize("transport", ["direct", "auto"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 1024])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_by_default_any_small_call_is_one_launch(transport: str, tokens: int, num_ranks: int) -> None:
    shape = Shape(num_ranks, hidden=2048, topk=8, max_tokens=tokens, itemsize=2)
    layout = shape.layout(transport, None, BUILT_IN)
    assert layout.window_bytes >= Region.for_calls(num_ranks, tokens, shape.row_bytes, shape.topk, 16).nbytes


def test_by_default_calls_up_to_the_threshold_are_one_launch_and_larger_ones_fill_half_a_ring() -> None:
    shape = Shape(num_ranks=2, hidden=2048, topk=8, max_tokens=8192, itemsize=2)
    layout = shape.layout("auto", None, BUILT_IN)
    rows = BUILT_IN.dispatch // shape.row_bytes
    assert layout.window_bytes >= Region.for_calls(2, rows, shape.row_bytes, shape.topk, 16).nbytes
    assert layout.staging.nbytes >= 2 * shape.max_tokens * shape.row_bytes
    small = shape._replace(max_tokens=64).layout("auto", None, BUILT_IN)
    assert small.nbytes < 12 << 20, "a Buffer for small calls is small"


@pytest.mark.parametrize("transport", ["shm", "dma", "direct", "auto"])
def test_too_little_staging_is_named(transport: str) -> None:
    with pytest.raises(ValueError, match=r"staging_bytes: got 70000; "):
        SHAPE._replace(num_ranks=4, hidden=8192).check(transport, 70_000)


def answers(*reach: tuple[int, ...], hosts: str = "") -> list[dict[str, Any]]:
    """What ranks say whose GPUs reach those of the named ranks."""
    return [
        {"host": hosts[rank : rank + 1], "gpu": {"uuid": str(rank), "peers": [str(peer) for peer in peers]}}
        for rank, peers in enumerate(reach)
    ]


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        (answers((), ()), "auto"),
        (answers((1,), (0,)), "collective"),
        (answers((1, 2), (0, 2), (0,)), "auto"),
        (answers((1,), ()), "auto"),
        (answers((), (), hosts="ab"), "collective"),
        (answers(()), "auto"),
        (answers(*[()] * 31), "auto"),
        (answers(*[()] * 32), "collective"),
        ([{"host": "a"}, {"host": "a"}], "shm"),
        ([{"host": "a"}, {"host": "b"}], "collective"),
        ([{"host": "a", "gpu": {"uuid": "the same", "peers": []}}] * 2, "auto"),
    ],
    ids=[
        "host memory",
        "peer access",
        "a pair without",
        "one way",
        "two hosts",
        "one rank",
        "31",
        "32",
        "CPU",
        "CPUs",
        "one GPU",
    ],
)
def test_what_auto_becomes(said: list[dict[str, Any]], chosen: str) -> None:
    assert choose("auto", said) == chosen


@pytest.mark.parametrize("transport", ["shm", "dma", "direct"])
def test_one_host_is_asked_for(transport: str) -> None:
    with pytest.raises(RuntimeError, match=f"transport: '{transport}' needs all ranks on one host .*rank 1 is on b"):
        choose(transport, answers((), (), hosts="ab"))


@pytest.mark.parametrize(
    ("backend", "disable", "peers"),
    [("cuda:nccl", None, ["GPU-b"]), ("cuda:nccl", "0", ["GPU-b"]), ("cuda:nccl", "1", []), ("cuda:gloo", None, [])],
)
def test_peer_access_counts_where_nccl_may_use_it(
    backend: str, disable: str | None, peers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [cuda.Device(0, "H200", "GPU-a", "", 3, (1,)), cuda.Device(1, "H200", "GPU-b", "", 3, (0,))]
    monkeypatch.setattr(cuda, "devices", lambda: found)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if disable is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", disable)
    facts = gpu_facts(torch.device("cuda", 0), None)  # type: ignore[arg-type]
    assert facts == {"name": "H200", "uuid": "GPU-a", "node": None, "gbps": None, "peers": peers}


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
