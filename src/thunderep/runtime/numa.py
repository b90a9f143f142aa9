"""Memory nodes: which there are, which one a GPU is attached to, and placing memory on one.

What the files mean stands in the Linux kernel's documentation (ABI/stable/sysfs-devices-node, ABI/testing/sysfs-bus-pci); the
policy in mbind(2). A shared segment keeps its policy whoever touches it first, so it is set before anything is pinned.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
_PREFERRED = 1  # another node does where that one is full
_MASK_WORDS = 16

Part = tuple[int, int, int]
"""Where memory begins, its bytes, and a rank."""


def nodes(root: Path = Path("/")) -> dict[int, list[int]]:
    """The CPUs of each node."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {int(folder.name[4:]): _cpus(_text(folder / "cpulist")) for folder in sorted(folders)}


def node_of(pci_address: str, root: Path = Path("/")) -> int | None:
    """The node that a device is attached to; None: not known."""
    try:
        node = int(_text(root / "sys/bus/pci/devices" / pci_address / "numa_node"))
    except ValueError:
        return None
    return node if node >= 0 else None


def place(parts: Iterable[Part], node_of_rank: Sequence[int | None]) -> None:
    """Have each rank's parts of a segment lie on its node, as far as they are whole pages; a warning where that is denied.

    Does nothing on a machine with one node.

    Args:
        parts: Of all ranks.
        node_of_rank: None: not known, so anywhere.
    """
    if len(nodes()) < 2:
        return
    for address, nbytes, rank in parts:
        node = node_of_rank[rank]
        error = None if node is None else _prefer(node, address, nbytes)
        if error is not None:
            _log.warning("NUMA: memory is not placed beside its GPU: %s", error)
            return


def _prefer(node: int, address: int, nbytes: int) -> str | None:
    """Have the whole pages of a mapping lie on a node; the error, if any."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not known on {platform.machine()}"
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length <= 0:
        return None
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    word, bit = divmod(node, 8 * ctypes.sizeof(ctypes.c_ulong))
    mask[word] = 1 << bit
    bits = 8 * ctypes.sizeof(mask) + 1  # the kernel counts one less
    arguments = (ctypes.c_void_p(begin), ctypes.c_ulong(length), ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(bits))
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments, ctypes.c_uint(0)) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def _cpus(ranges: str) -> list[int]:
    """The CPUs in a list such as 0-3,8."""
    found: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _text(path: Path) -> str:
    """What a file holds; nothing if it is not there or not readable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
