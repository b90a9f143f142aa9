"""Who is alive: processes by pidfd, and what is said about a peer that is not.

Nothing runs in the background: whoever waits for a peer asks here, a few times a second.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterable, Sequence


class PeerError(RuntimeError):
    """A peer died, gave up, or stayed silent for longer than the Buffer's `timeout`.

    Attributes:
        rank: The rank at fault.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class Watchdog:
    """Watches the processes of all ranks of one host.

    Args:
        pids: The process of each rank, this one's too.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()
        if hasattr(os, "pidfd_open"):
            for rank, pid in enumerate(self.pids):
                if pid != os.getpid():
                    try:
                        self._pidfds[rank] = os.pidfd_open(pid)
                    except ProcessLookupError:
                        self._dead.add(rank)
                    except OSError:  # an old kernel: `_exists` asks instead
                        break

    def dead(self, ranks: Iterable[int]) -> set[int]:
        """Those of `ranks` whose process has ended, be it reaped or not."""
        return {rank for rank in ranks if rank in self._dead or self._ended(rank)}

    def cpu_seconds(self, rank: int) -> float:
        """CPU time that the rank's process has used; 0 where that cannot be read. A peer that compiles is busy, not silent."""
        if sys.platform != "linux":
            return 0.0
        try:
            return time.clock_gettime((~self.pids[rank] << 3) | 2)  # the process's CPU clock: clock_getcpuclockid(3)
        except OSError:
            return 0.0

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _ended(self, rank: int) -> bool:
        pidfd = self._pidfds.get(rank)
        if pidfd is None:
            return not _exists(self.pids[rank])
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)  # readable once the process has ended
        return bool(poll.poll(0))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
