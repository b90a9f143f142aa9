"""The shared host segment: how it is made and found, what lies where in it, and how it vanishes.

A segment has no name where that can be had: `memfd_create`, which peers open through /proc/<pid>/fd. Otherwise it is
a file of mode 0600 that is unlinked as soon as all ranks have attached. Either way the kernel frees the memory when
the last mapping is gone, however its processes ended.

Layout, for N ranks:

| part | size | written by |
| --- | --- | --- |
| token | 64 bytes: proves that an attached segment is this one | creator, once |
| control | N x 4096 bytes: status, doorbell, lanes and latest calls of one rank (`CONTROL_*`) | its rank; doorbell: anyone |
| flags | N owners x slots x N readers x 64 bytes, a cache line each (`schedule.Flag`) | owner and reader in turn |
| staging | N x `Staging.nbytes`, page-aligned | owner |
| window | `window_bytes`: what kernels move rows through (`window.Region`) | see there |
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import stat
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thunderep.runtime.chunks import Staging
from thunderep.runtime.schedule import Flag

PREFIX = "thunderep-"
TOKEN_BYTES = 64
CONTROL_BYTES = 4096
FLAG_BYTES = 64

CONTROL_STATUS = 0
"""Offset of the rank's status word; the word after it holds whom it blames (see `host`)."""
CONTROL_DOORBELL = 64
"""Offset of the word that changes whenever something that this rank may wait for has happened."""
CONTROL_PROBE = 128
"""Offset of a word to try things on."""
CONTROL_LANES = 512
"""Offset of a word for each lane of a GPU's operation: 1 while it is under way."""
CONTROL_RECORDS = 1024
"""Offset of the rank's `RECORDS` records of `RECORD_BYTES` each, used in turn (see `records`)."""
RECORDS = 16
RECORD_BYTES = 128

Kind = Literal["memfd", "file"]


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a segment."""

    num_ranks: int
    staging: Staging
    window_bytes: int = 0

    def control(self, rank: int, offset: int) -> int:
        """Where a part of a rank's control block lies, by `CONTROL_*`."""
        return TOKEN_BYTES + rank * CONTROL_BYTES + offset

    def flag(self, flag: Flag) -> int:
        """Where a flag's word lies."""
        line = (flag.owner * self.staging.slots + flag.slot) * self.num_ranks + flag.reader
        return self.control(self.num_ranks, 0) + line * FLAG_BYTES

    @property
    def flags(self) -> slice:
        """Where all flags lie."""
        return slice(self.flag(Flag(0, 0, 0)), self.flag(Flag(self.num_ranks, 0, 0)))

    def slots(self, rank: int) -> int:
        """Where a rank's staging begins."""
        return _page_align(self.flags.stop) + rank * _page_align(self.staging.nbytes)

    @property
    def window(self) -> int:
        """Where the window begins."""
        return self.slots(self.num_ranks)

    @property
    def nbytes(self) -> int:
        """Bytes in the segment."""
        return self.window + _page_align(self.window_bytes)


@dataclass(frozen=True)
class Handle:
    """What a peer needs to open a segment; plain strings and integers, so that it travels as JSON."""

    kind: Kind
    path: str
    nbytes: int
    token: str


_mapped: weakref.WeakSet[Segment] = weakref.WeakSet()


def _keep_in_child() -> None:
    """Never unmap in a forked child: there is nothing at these addresses, until the child maps something else there."""
    for segment in tuple(_mapped):
        if segment.is_open:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(segment.bytes))


os.register_at_fork(after_in_child=_keep_in_child)


class Segment:
    """One mapping of a shared segment. `close()` is idempotent."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._mmap: mmap.mmap | None = mmap.mmap(fd, nbytes)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A forked child may outlive this process and must not keep the memory alive.
            self._mmap.madvise(mmap.MADV_DONTFORK)
        self._anchor: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * nbytes).from_buffer(self._mmap)
        self.address = ctypes.addressof(self._anchor)
        self.nbytes = nbytes
        self.words = memoryview(self._mmap).cast("I")
        _mapped.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it is mapped."""
        return self._mmap is not None

    @property
    def bytes(self) -> mmap.mmap:
        """The mapping, for struct's pack and unpack."""
        if self._mmap is None:
            raise RuntimeError("the shared segment is closed")
        return self._mmap

    def close(self) -> None:
        """Unmap. Nothing may use `address` or `words` from here on."""
        if self._mmap is not None:
            self.words.release()
            self._anchor = None
            self._mmap.close()
            self._mmap = None


class Owner:
    """The creator's side of a segment until every peer has attached.

    Keeps the descriptor open, then lets go of name and descriptor.
    """

    def __init__(self, nbytes: int, kind: Kind) -> None:
        self._fd, path = _create_memfd(nbytes) if kind == "memfd" else _create_file(nbytes)
        self._path = path if kind == "file" else None
        try:
            token = secrets.token_hex(TOKEN_BYTES // 2)
            os.pwrite(self._fd, token.encode(), 0)
            self.handle = Handle(kind, path, nbytes, token)
            self.segment = Segment(self._fd, nbytes)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Close the descriptor and remove the name; mappings stay. Idempotent."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def attach(handle: Handle) -> Segment:
    """Map the segment that `handle` tells of.

    Raises:
        OSError: It cannot be opened.
        RuntimeError: What was opened is not that segment.
    """
    fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != handle.nbytes:
            raise RuntimeError(f"shared segment {handle.path}: got {found.st_size} bytes, expected {handle.nbytes}")
        if os.pread(fd, TOKEN_BYTES, 0).decode(errors="replace") != handle.token:
            raise RuntimeError(f"shared segment {handle.path} belongs to another Buffer")
        return Segment(fd, handle.nbytes)
    finally:
        os.close(fd)


def supports_memfd() -> bool:
    """Whether this system can make segments without a name that peers can open."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


def _create_memfd(nbytes: int) -> tuple[int, str]:
    if not supports_memfd():
        raise RuntimeError("this system has no memfd_create or no /proc")
    _require(nbytes, available_memory(), "memory")
    fd = os.memfd_create("thunderep", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def _create_file(nbytes: int, directory: str | None = None) -> tuple[int, str]:
    directory = directory or ("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    _sweep(directory)
    space = os.statvfs(directory)
    _require(nbytes, space.f_bavail * space.f_frsize, directory)
    path = os.path.join(directory, PREFIX + secrets.token_hex(16))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)  # reserved now, so that no later write can meet a full file system (SIGBUS)
        else:
            os.ftruncate(fd, nbytes)
    except BaseException as error:
        os.unlink(path)
        os.close(fd)
        if isinstance(error, OSError):
            raise RuntimeError(f"shared memory: {nbytes} bytes could not be reserved in {directory}: {error}") from error
        raise
    return fd, path


def _sweep(directory: str) -> None:
    """Remove the names that creators killed before all ranks had attached left behind: nobody holds their lock any more."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith(PREFIX):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    _lock(fd)
                    os.unlink(path)
            finally:
                os.close(fd)


def _lock(fd: int) -> None:
    import fcntl  # not on Windows

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _require(needed: int, free: int | None, where: str) -> None:
    if free is not None and needed > free:
        raise RuntimeError(
            f"shared memory: {needed} bytes needed, {free} bytes free ({where});"
            " lower staging_bytes or max_tokens, or make room"
        )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: what the kernel calls available, and what its control group leaves."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            cgroup = root / "sys/fs/cgroup"
            limits.append(max(0, int((cgroup / limit).read_text()) - int((cgroup / used).read_text())))
    return min(limits) if limits else None


def _page_align(nbytes: int) -> int:
    page = mmap.PAGESIZE
    return -(-nbytes // page) * page
