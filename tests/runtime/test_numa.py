"""Placing memory on NUMA nodes: the kernel's own answers where it gives them, and a denied call, which harms nobody."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from thunderep.runtime import arena, numa
from thunderep.runtime.chunks import Staging
from thunderep.runtime.staging import parts_of
from thunderep.runtime.window import Region

PAGE = mmap.PAGESIZE
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_BY_ADDRESS = 2


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: {0: [0], 1: [1]})


def policy_at(address: int) -> tuple[int, int]:
    """Mode and mask of nodes of the policy at an address."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_GET_MEMPOLICY[platform.machine()])
    result = libc.syscall(
        number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address), ctypes.c_ulong(_BY_ADDRESS)
    )
    if result:
        pytest.skip(f"get_mempolicy: {os.strerror(ctypes.get_errno())}")
    return mode.value, mask[0]


def test_whole_pages_get_the_policy_and_peers_see_it(two_nodes: None) -> None:
    owner = arena.Owner(16 * PAGE, "memfd")
    peer = arena.attach(owner.handle)
    at = owner.segment.address
    policy_at(at)  # skips where this process may not ask
    numa.place([(at + 4 * PAGE + 8, 4 * PAGE, 1), (at + 12 * PAGE, PAGE, 0), (at, 100, 1)], [None, 0])
    if policy_at(at + 5 * PAGE) == (0, 0):
        pytest.skip("this machine lets nobody place memory")
    for segment in (owner.segment, peer):
        placed = [page for page in range(16) if policy_at(segment.address + page * PAGE) == (1, 1)]
        assert placed == [5, 6, 7]
    peer.close()
    owner.release()
    owner.segment.close()


DENIED = """
import logging
from tests.runtime.seccomp import deny
from thunderep.runtime import arena, numa
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
numa.nodes = lambda: {0: [0], 1: [1]}
owner = arena.Owner(1 << 20, "memfd")
at = owner.segment.address
if not deny(numa._MBIND[numa.platform.machine()]):
    print("no seccomp")
numa.place([(at, 1 << 16, 0), (at + (1 << 16), 1 << 16, 1)], [0, 0])
owner.segment.bytes[: 1 << 20] = bytes(1 << 20)
owner.release()
owner.segment.close()
"""


def test_a_call_that_docker_denies_is_one_warning_and_no_error() -> None:
    done = subprocess.run([sys.executable, "-c", DENIED], capture_output=True, text=True, check=True, timeout=60)
    if "no seccomp" in done.stdout:
        pytest.skip("no filter of system calls here")
    assert done.stderr.strip().splitlines() == [
        "WARNING thunderep.runtime.numa NUMA: memory is not placed beside its GPU: Operation not permitted"
    ]


def test_one_node_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: {0: [0, 1]})
    numa.place([(0, 1 << 40, 0)], [0])  # an address that any call would refuse
    assert not caplog.records


def test_no_policy_is_asked_for_where_nodes_are_not_known(two_nodes: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        numa.place([(0, 1 << 40, 0), (0, 1 << 40, 1)], [None, None])
    assert not caplog.records


@pytest.mark.parametrize("number", ["0", "1", "-1", "", None])
def test_the_node_of_a_gpu(number: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    if number is not None:
        (folder / "numa_node").write_text(f"{number}\n")
    assert numa.node_of("0000:17:00.0", tmp_path) == {"0": 0, "1": 1}.get(number or "")


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_the_parts_of_ranks_are_all_of_ring_and_window_and_do_not_overlap(num_ranks: int) -> None:
    region = Region(num_ranks, num_ranks * (3 << 20))
    layout = arena.Layout(num_ranks, Staging.of(num_ranks, 1 << 20), region.nbytes)
    parts = sorted(part for rank in range(num_ranks) for part in parts_of(layout, rank))
    assert len(parts) == 5 * num_ranks
    for (begin, nbytes), (following, _) in pairwise(parts):
        assert begin + nbytes <= following
    assert sum(nbytes for _, nbytes in parts) > 0.9 * num_ranks * (4 << 20), "flags and headers are the rest"
    assert parts[-1][0] + parts[-1][1] <= layout.nbytes
    assert {layout.slots(rank) for rank in range(num_ranks)} <= {begin for begin, _ in parts}
