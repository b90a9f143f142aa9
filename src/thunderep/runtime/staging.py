"""How much shared memory a Buffer takes, and for what: a ring of slots for copies, a window for kernels, or both."""

from __future__ import annotations

from typing import NamedTuple

from thunderep.runtime import arena
from thunderep.runtime.chunks import ALIGNMENT, MIN_SLOT_BYTES, Staging, chunk_count
from thunderep.runtime.tuning import Thresholds
from thunderep.runtime.window import Region

MAX_DEFAULT_STAGING = 256 << 20
"""Bytes of staging that a rank takes at most when its user names no number."""

_ROUTING_TOKENS = 8192
"""Tokens a rank whose routing is one launch, where copy engines move the rows."""

_MIN_WINDOW = 512 << 10
"""Bytes a rank with which small calls travel as words that carry their own signals; less if staging_bytes says so."""


class Shape(NamedTuple):
    """What sizes depend on.

    Attributes:
        num_ranks: N.
        hidden: H.
        topk: K.
        max_tokens: Tokens per rank that a call may have at most.
        itemsize: Bytes of the widest payload element.
        grain: How finely copy engines cut, see `chunks.in_turn`; 1, into as many chunks as there are slots.
    """

    num_ranks: int
    hidden: int
    topk: int
    max_tokens: int
    itemsize: int
    grain: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of the widest row, dispatched or combined."""
        return self.hidden * max(self.itemsize, 2)

    @property
    def _least_ring(self) -> int:
        return Staging.slots_for(self.num_ranks) * MIN_SLOT_BYTES

    def check(self, transport: str, staging_bytes: int) -> None:
        """Raise ValueError if so few bytes a rank will not do. "auto" is that of CUDA tensors."""
        Staging.of(self.num_ranks, staging_bytes)
        window = self._share(self._region(1))
        least = {"direct": window, "auto": self._least_ring + window}.get(transport, 0)
        if staging_bytes < least:
            raise ValueError(f"staging_bytes: got {staging_bytes}; {transport!r} needs at least {least} for such rows")

    def layout(self, transport: str, staging_bytes: int | None, thresholds: Thresholds) -> arena.Layout:
        """What lies where in the segment.

        For "auto" ring and window share the staging: the window gets what the largest call that kernels move takes in one
        launch, and at most half where the staging does not hold all; the ring has the rest. What ids, weights and scales take
        beside the rows that copy engines move comes on top.

        Args:
            transport: "shm", "dma", "direct" or "auto".
            staging_bytes: Bytes a rank; None: what holds any call, at most `MAX_DEFAULT_STAGING`.
            thresholds: Which calls kernels move in "auto".
        """
        if transport in ("shm", "dma"):
            ring = self._ring() if staging_bytes is None else staging_bytes
            return self._layout(ring, self._routing().nbytes if transport == "dma" else 0)
        if transport == "direct":
            nbytes = MAX_DEFAULT_STAGING if staging_bytes is None else staging_bytes
            return self._layout(self._least_ring, min(self._window(self.max_tokens), self.num_ranks * nbytes))
        window = self._share(self._window(min(self.max_tokens, max(1, max(thresholds[:2]) // self.row_bytes))))
        routing = self._share(self._routing().nbytes)
        ring = self._ring()
        nbytes = min(ring + window, MAX_DEFAULT_STAGING) if staging_bytes is None else staging_bytes
        if ring + window > nbytes:
            window = max(self._share(self._region(1)), min(window, nbytes // 2))
            ring = max(self._least_ring, nbytes - window)
        return self._layout(ring, self.num_ranks * max(routing, min(window, nbytes - ring)))

    def _layout(self, ring: int, window: int) -> arena.Layout:
        return arena.Layout(self.num_ranks, Staging.of(self.num_ranks, ring), window)

    def _region(self, tokens: int) -> int:
        """Bytes of a window in which calls of so many tokens a rank are one launch."""
        scales = -(-self.hidden // 128)
        return Region.for_calls(self.num_ranks, tokens, self.row_bytes, self.topk, scales).nbytes

    def _routing(self) -> Region:
        """The window in which routing of `max_tokens` tokens a rank is one launch, or a few if they are many."""
        return Region.for_routing(self.num_ranks, min(self.max_tokens, _ROUTING_TOKENS), self.topk, -(-self.hidden // 128))

    def _window(self, tokens: int) -> int:
        return max(self._region(tokens), self.num_ranks * _MIN_WINDOW)

    def _share(self, nbytes: int) -> int:
        """A rank's share of a window, in bytes."""
        return -(-nbytes // self.num_ranks)

    def _ring(self) -> int:
        """Bytes of a ring of which either half holds a call of `max_tokens`, be it a dispatch or combine; at most 256 MiB."""
        row = self.hidden * self.itemsize
        scales = -(-self.hidden // 128) * 4
        dispatch = self.max_tokens * (row + self.topk * 12 + scales) + 4 * ALIGNMENT
        combine = self.max_tokens * self.row_bytes + 2 * ALIGNMENT
        half = Staging.slots_for(self.num_ranks) // 2
        chunks = min(half, chunk_count(dispatch, self.grain))
        chunks_per_peer = min(half // max(1, self.num_ranks - 1), chunk_count(combine, self.grain))
        slot = max(-(-dispatch // chunks), -(-combine // chunks_per_peer), MIN_SLOT_BYTES) + ALIGNMENT
        return min(Staging.slots_for(self.num_ranks) * slot, MAX_DEFAULT_STAGING)


def parts_of(layout: arena.Layout, rank: int) -> list[tuple[int, int]]:
    """Where what a rank writes for its peers lies: offsets in the segment, and how many bytes."""
    ring = (layout.slots(rank), layout.staging.nbytes)
    return [ring] + [(layout.window + at, n) for at, n in Region(layout.num_ranks, layout.window_bytes).parts(rank)]
