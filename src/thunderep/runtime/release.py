"""Frees a GPU from waits that cannot end.

A stream that waits for a flag cannot look around, so a thread does: it asks a few times a second whether a peer has
died, given up, closed its Buffer, or kept this rank waiting for longer than it may. If so the Buffer is broken, and the
thread sets the flags that this rank's streams may wait for, again and again until the Buffer is closed: a CPU's store
lets a waiting stream go on within microseconds. What those streams then copy is garbage; every later call raises.

The thread makes no CUDA call. It sees from memory whether anything is under way, eager or replayed from a graph: each
lane sets a word of its own when it begins and clears it when it ends.
"""

from __future__ import annotations

import threading
import time

from thunderep.runtime import arena
from thunderep.runtime.control import Control
from thunderep.runtime.plan import Flag
from thunderep.runtime.watchdog import PeerError

_LOOK_SECONDS = 0.1
_RELEASE_SECONDS = 0.001
_CLOSED_SECONDS = 1.0
"""A peer whose Buffer is closed has ended all that it began; who still waits after so long waits for what will not come."""


class Releaser:
    """The thread, and what it needs to know of the operations.

    Args:
        segment: The mapped segment.
        layout: What lies where in it.
        rank: This rank.
        control: This rank's control block.
    """

    def __init__(self, segment: arena.Segment, layout: arena.Layout, rank: int, control: Control) -> None:
        self._segment, self._layout, self._rank, self._control = segment, layout, rank, control
        self._peers = [peer for peer in range(layout.num_ranks) if peer != rank]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thunderep releaser", daemon=True)
        if self._peers:
            self._thread.start()

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

    def _state(self) -> bytes:
        """What changes as long as operations get on; empty while none is under way."""
        start = self._layout.control(self._rank, arena.CONTROL_LANES)
        lanes = self._segment.bytes[start : start + 4 * arena.MAX_LANES]
        return lanes + self._segment.bytes[self._layout.flags] if any(lanes) else b""

    def _look(self, seconds: float) -> PeerError | None:
        """Why what has not changed for so long will not, if so."""
        ranks = self._control.awaited() if seconds < _CLOSED_SECONDS else self._peers
        return self._control.verdict(ranks, "an operation on the GPU", seconds)

    def _release(self) -> None:
        """Set the flags as if the peers had sent and read everything."""
        words = self._segment.words
        for peer in self._peers:
            for slot in range(self._layout.staging.slots):
                words[self._layout.flag(Flag(peer, slot, self._rank)) // 4] = 1
                words[self._layout.flag(Flag(self._rank, slot, peer)) // 4] = 0
