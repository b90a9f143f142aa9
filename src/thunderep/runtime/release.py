"""Frees a GPU from waits that cannot end.

A stream or kernel that waits for a flag cannot look around, so a thread does: it asks a few times a second whether a peer has
died, given up, closed its Buffer, or kept this rank waiting for longer than it may. If so the Buffer is broken, and the
thread lets go what waits, again and again until the Buffer is closed: a CPU's store lets a waiting stream or kernel go on
within microseconds. What it then moves is garbage; every later call raises.

The thread makes no CUDA call. It sees from shared memory whether anything is under way, eager or replayed from a graph.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from thunderep.runtime.control import Control

_LOOK_SECONDS = 0.1
_RELEASE_SECONDS = 0.001
_CLOSED_SECONDS = 1.0
"""A peer whose Buffer is closed has ended all that it began; who still waits after so long waits for what will not come."""


class Releaser:
    """The thread.

    Args:
        control: This rank's control block.
        peers: The other ranks.
        state: Gives what changes as long as operations get on; empty while none is under way.
        release: Lets go whatever waits on the device.
    """

    def __init__(self, control: Control, peers: Sequence[int], state: Callable[[], bytes], release: Callable[[], None]) -> None:
        self._control, self._peers, self._state, self._release = control, peers, state, release
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thunderep releaser", daemon=True)
        if peers:
            self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread. Nothing on the device may wait any more."""
        self._stopping.set()
        if self._peers:
            self._thread.join()

    def _run(self) -> None:
        broken, seen, since = False, b"", time.monotonic()
        while not self._stopping.wait(_RELEASE_SECONDS if broken else _LOOK_SECONDS):
            if not broken:
                state, now = self._state(), time.monotonic()
                if state != seen or not state:
                    seen, since = state, now
                verdict = self._look(now - since)
                if verdict is not None:
                    self._control.give_up(verdict)
                    broken = True
            if broken:
                self._release()

    def _look(self, seconds: float) -> RuntimeError | None:
        """Why what has not changed for so long will not, if so."""
        ranks = self._control.awaited() if seconds < _CLOSED_SECONDS else self._peers
        return self._control.verdict(ranks, "an operation on the GPU", seconds)
