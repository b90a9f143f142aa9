"""What a rank has moved: counted as operations begin, by what its host knows then, at well under a microsecond each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from thunderep.runtime.transport import DTYPES, KINDS, OUTWARD, Call

_DISPATCH = KINDS.index("dispatch")  # with it alone ids travel
_ITEM_BYTES = [dtype.itemsize for dtype in DTYPES]
_MOST_NEW = 1000


class Stats(NamedTuple):
    """What one rank's Buffer has done so far.

    Bytes are those of rows, and of the ids, weights and scales beside them. Where hosts learn how many tokens their peers
    have, on the CPU, they are exact. On CUDA each peer is taken to have `max_tokens` of the call, which is what `dma` moves and
    more than `direct` does. Replays of captured graphs pass no host and count nothing; capturing counts once.

    Attributes:
        operations: How many of each kind: "dispatch", "combine", their gradients "dispatch_backward", "combine_backward", and
            "all_gather", "reduce_scatter", "all_reduce"; one of two steps counts as those.
        bytes_sent: What this rank put down for its peers; a dispatched row counts once, however many of them read it.
        bytes_received: What its peers put down for it.
        waited: Over `shm`: by rank, the seconds for which this rank slept until that one did its part; while it waited for
            several, for each of them. None for other transports: their waits are not the host's.
    """

    operations: dict[str, int]
    bytes_sent: int
    bytes_received: int
    waited: tuple[float, ...] | None

    @property
    def slowest_peer(self) -> int | None:
        """The rank that this one waited for the longest; None if for none, or not known."""
        return self.waited.index(max(self.waited)) if self.waited and any(self.waited) else None


class Traffic:
    """Counts one rank's operations.

    Args:
        num_ranks: N.
    """

    def __init__(self, num_ranks: int) -> None:
        self._peers = num_ranks - 1
        self._lock = threading.Lock()  # who asks may be another thread than those that operate
        self._new: dict[tuple[Call, int], int] = {}  # how often, not yet in the sums below
        self._operations = [0] * len(KINDS)
        self._own_rows = self._sent = self._received = self._returned = 0  # bytes

    def add(self, call: Call, peers_rows: int) -> None:
        """Count an operation in which all peers together have so many rows."""
        key = call, peers_rows
        with self._lock:
            self._new[key] = self._new.get(key, 0) + 1
            if len(self._new) > _MOST_NEW:
                self._sum_up()

    def _sum_up(self) -> None:
        for (call, peers_rows), count in self._new.items():
            kind, tokens, _, dtype, hidden, topk, idx_dtype, scales, *_ = call
            row = hidden * _ITEM_BYTES[dtype]
            if topk:
                row += topk * (4 + _ITEM_BYTES[idx_dtype] if kind == _DISPATCH else 4)
            if scales > 0:
                row += 4 * scales
            self._operations[kind] += count
            if OUTWARD[kind]:
                self._own_rows += count * tokens * row
                self._received += count * peers_rows * row
            else:
                self._sent += count * peers_rows * row
                self._returned += count * tokens * row
        self._new.clear()

    def stats(self, waited: Sequence[float] | None = None) -> Stats:
        """What has been counted, and what the caller knows of waits."""
        with self._lock:
            self._sum_up()
        operations = dict(zip(KINDS, self._operations, strict=True))
        sent = self._sent + (self._own_rows if self._peers else 0)
        received = self._received + self._peers * self._returned
        return Stats(operations, sent, received, None if waited is None else tuple(waited))
