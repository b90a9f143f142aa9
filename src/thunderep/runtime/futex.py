"""Sleeping on a word of shared memory until another process changes it; the order in which processes see writes.

Linux futexes (futex(2)) on words that several processes map. Elsewhere a waiter sleeps in short steps instead.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading
import time

_MACHINE = platform.machine().lower()
_SYSCALL = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}.get(_MACHINE, 0)
_AVAILABLE = sys.platform == "linux" and _SYSCALL > 0 and sys.maxsize > 2**32
_WAIT, _WAKE = 0, 1
_POLL_SECONDS = 0.0005


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if _AVAILABLE:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until the 32-bit word at `address` is woken, is not `expected`, or `seconds` have passed. May also return early."""
    if not _AVAILABLE:
        time.sleep(min(seconds, _POLL_SECONDS))
        return
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    result = _syscall(
        ctypes.c_long(_SYSCALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint32(expected),
        ctypes.byref(limit),
        None,
        0,
    )
    if result != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "futex wait failed")


def futex_wake(address: int) -> None:
    """Wake whoever sleeps on the word at `address`."""
    if _AVAILABLE:
        _syscall(ctypes.c_long(_SYSCALL), ctypes.c_void_p(address), ctypes.c_int(_WAKE), ctypes.c_int(2**31 - 1), None, None, 0)


if _MACHINE in ("x86_64", "amd64"):

    def fence() -> None:
        """Order earlier reads and writes of shared memory before later ones.

        On x86 loads and stores keep their order anyway.
        """

else:
    _fence_lock = threading.Lock()

    def fence() -> None:
        """Order earlier reads and writes of shared memory before later ones.

        An unlock is a release and a lock an acquire; what stands before the first pair cannot pass its unlock, what
        stands after the second cannot pass its lock, and the two keep their order.
        """
        with _fence_lock:
            pass
        with _fence_lock:
            pass
