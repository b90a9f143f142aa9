"""The shared segment: how it is found, what is said when there is no room, and that nothing of it outlives its processes."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import stat
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from thunderep.runtime import arena
from thunderep.runtime.arena import Handle, Kind, Layout, Owner, attach
from thunderep.runtime.chunks import Staging
from thunderep.runtime.schedule import Flag

KINDS: tuple[Kind, ...] = ("memfd", "file")
NBYTES = 1 << 20


def named() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(arena.PREFIX)}


def _peer(handle: Handle, pipe: Connection) -> None:
    segment = attach(handle)
    segment.words[1000] = 42
    pipe.send("attached")
    pipe.recv()
    pipe.send(segment.words[2000])
    segment.close()


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_share_it(kind: Kind) -> None:
    before = named()
    owner = Owner(NBYTES, kind)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=_peer, args=(owner.handle, theirs), daemon=True)
    peer.start()
    assert ours.recv() == "attached"
    owner.release()
    owner.release()
    assert named() == before, "no name once all have attached"
    assert owner.segment.words[1000] == 42
    owner.segment.words[2000] = 7
    ours.send("go")
    assert ours.recv() == 7
    peer.join()
    owner.segment.close()
    owner.segment.close()


def test_a_named_segment_is_private_while_it_has_a_name() -> None:
    owner = Owner(NBYTES, "file")
    found = os.stat(owner.handle.path)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= NBYTES, "reserved, so that no write can meet a full file system"
    owner.release()
    owner.segment.close()
    assert not os.path.exists(owner.handle.path)


@pytest.mark.parametrize("kind", KINDS)
def test_another_segment_is_refused(kind: Kind) -> None:
    owner = Owner(NBYTES, kind)
    try:
        with pytest.raises(RuntimeError, match="expected 999"):
            attach(Handle(kind, owner.handle.path, 999, owner.handle.token))
        with pytest.raises(RuntimeError, match="another Buffer"):
            attach(Handle(kind, owner.handle.path, NBYTES, "0" * arena.TOKEN_BYTES))
        with pytest.raises(OSError, match="No such file"):
            attach(Handle(kind, owner.handle.path + "0", NBYTES, owner.handle.token))
    finally:
        owner.release()
        owner.segment.close()


def _create_and_wait(pipe: Connection) -> None:
    owner = Owner(NBYTES, "file")
    pipe.send(owner.handle.path)
    pipe.recv()


def test_a_name_left_by_a_killed_creator_is_swept() -> None:
    """Killed between making the name and removing it: the next segment removes it; one in use is left alone."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    creator = context.Process(target=_create_and_wait, args=(theirs,), daemon=True)
    creator.start()
    path = ours.recv()
    owner = Owner(NBYTES, "file")
    assert os.path.exists(path), "its creator lives"
    owner.release()
    owner.segment.close()
    os.kill(creator.pid or 0, signal.SIGKILL)
    creator.join()
    assert os.path.exists(path)
    owner = Owner(NBYTES, "file")
    assert not os.path.exists(path)
    owner.release()
    owner.segment.close()


def test_a_small_shared_memory_is_an_error_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with 64 MiB of /dev/shm (here said by statvfs, for want of one): needed and free bytes, and no file."""

    class Small:
        f_bavail, f_frsize = (64 << 20) // 4096, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    before = named()
    with pytest.raises(RuntimeError, match=rf"{1 << 30} bytes needed, {64 << 20} bytes free"):
        Owner(1 << 30, "file")
    assert named() == before


def test_short_memory_is_an_error_before_a_page_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    free = arena.available_memory()
    assert free is not None
    assert free > 1 << 20
    needed = free * 2 // 4096 * 4096
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match=f"shared memory: {needed} bytes needed"):
        Owner(needed, "memfd")
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_full_file_system_is_an_error_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = named()
    with pytest.raises(RuntimeError, match="1048576 bytes could not be reserved"):
        Owner(NBYTES, "file")
    assert named() == before


def test_without_memfd_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match="memfd_create"):
        Owner(NBYTES, "memfd")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_layout_overlaps_nowhere(num_ranks: int) -> None:
    staging = Staging.of(num_ranks, 1 << 22)
    layout = Layout(num_ranks, staging)
    extents = [(0, arena.TOKEN_BYTES)]
    extents += [(layout.control(rank, 0), arena.CONTROL_BYTES) for rank in range(num_ranks)]
    extents += [
        (layout.flag(Flag(owner, slot, reader)), arena.FLAG_BYTES)
        for owner in range(num_ranks)
        for slot in range(staging.slots)
        for reader in range(num_ranks)
    ]
    extents += [(layout.slots(rank), staging.nbytes) for rank in range(num_ranks)]
    extents.sort()
    assert all(start + size <= following for (start, size), (following, _) in pairwise(extents))
    assert extents[-1][0] + extents[-1][1] <= layout.nbytes
    assert all(layout.slots(rank) % 4096 == 0 for rank in range(num_ranks))
    assert arena.CONTROL_RECORDS + arena.RECORDS * arena.RECORD_BYTES <= arena.CONTROL_BYTES


def test_a_forked_child_does_not_keep_the_memory() -> None:
    owner = Owner(NBYTES, "memfd")
    owner.release()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"kept" if "memfd:thunderep" in Path("/proc/self/maps").read_text() else b"gone")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"gone"
    os.close(read)
    os.close(write)
    owner.segment.close()


def test_a_forked_child_may_drop_the_segment() -> None:
    """Where it lay in the parent, the child may have mapped something else by then."""
    owner = Owner(NBYTES, "memfd")
    owner.release()
    child = os.fork()
    if child == 0:
        others = [mmap.mmap(-1, NBYTES) for _ in range(3)]
        del owner
        gc.collect()
        os._exit(sum(other[0] for other in others))
    assert os.waitpid(child, 0)[1] == 0
    owner.segment.close()
