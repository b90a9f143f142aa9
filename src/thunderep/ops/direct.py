"""Dispatch and combine over `direct`: kernels that do all of it, routing and sums included, in one launch each.

Every method allocates its results on the current stream, launches and returns; nothing waits on the host, and everything
may be captured. All ranks call the same methods in the same order, each rank from streams that are ordered among
themselves. A call that a slot does not hold runs as several rounds of what fits, each a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from thunderep.ops import cut
from thunderep.ops.kernels.direct.combine import combine
from thunderep.ops.kernels.direct.dispatch import dispatch
from thunderep.ops.kernels.direct.latency_combine import latency_combine
from thunderep.ops.kernels.direct.latency_dispatch import latency_dispatch
from thunderep.ops.launch import Launch
from thunderep.runtime.trace import phase
from thunderep.runtime.transport import Call
from thunderep.runtime.window import FLAGS, HEADER_BYTES, Window, aligned, routing_words

LATENCY_COLUMNS, LATENCY_WARPS = 512, 4
"""Words of a row that a block handles at a time: four a thread. Small blocks start early, and many polls are in the air."""

MAX_LATENCY_BLOCKS = 256
"""A few of them fit an SM, so all poll at once."""

SUM_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_Launches = tuple[Launch, ...]


class Kernels:
    """The operations of one rank of a Buffer.

    Args:
        window: The pinned memory that they move rows through.
        num_experts: E.
        bad_ids: One int32 that the device can reach; becomes 1 when ids are out of range.
    """

    def __init__(self, window: Window, num_experts: int, bad_ids: torch.Tensor) -> None:
        self._region, self._address, self._rank = window.region, window.address, window.rank
        self._num_ranks, self._num_experts = window.region.num_ranks, num_experts
        self._header = window.address + window.rank * HEADER_BYTES
        self._announcer = window.announcer
        self._keep = window.ticket, bad_ids
        self._ticket, self._bad_ids = window.ticket.data_ptr(), bad_ids.data_ptr()
        self._dispatches = lru_cache(maxsize=1024)(self._plan_dispatch)
        self._combines = lru_cache(maxsize=1024)(self._plan_combine)

    @phase("kernels")
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        x_scales: torch.Tensor | None,
        max_rows: int,
        call: Call | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The contract's dispatch; ids out of range count as -1.

        Args:
            x: [T, H].
            topk_idx: [T, K].
            topk_weights: [T, K] float32.
            x_scales: [T, S] float32, or None.
            max_rows: M.
            call: What to announce to the peers; None: they know.

        Returns:
            recv_x, recv_topk_idx, recv_topk_weights, recv_x_scales, is_token_in_rank.
        """
        (tokens, hidden), topk, received = x.shape, topk_idx.shape[1], self._num_ranks * max_rows
        x, topk_idx, topk_weights = _packed(x), _packed(topk_idx), _packed(topk_weights)
        x_scales = None if x_scales is None else _packed(x_scales)
        scales = 0 if x_scales is None else x_scales.shape[1]
        recv_x = x.new_empty(received, hidden)
        recv_idx, recv_weights = topk_idx.new_empty(received, topk), topk_weights.new_empty(received, topk)
        recv_scales = topk_weights.new_empty(received, scales)
        in_rank = topk_idx.new_empty(tokens, self._num_ranks, dtype=torch.bool)
        addresses = (
            x.data_ptr(), topk_idx.data_ptr(), topk_weights.data_ptr(), None if x_scales is None else x_scales.data_ptr(),
            in_rank.data_ptr(), self._bad_ids,
            recv_x.data_ptr(), recv_idx.data_ptr(), recv_weights.data_ptr(), recv_scales.data_ptr(),
        )  # fmt: skip
        launches = self._dispatches(max_rows, hidden * x.element_size(), topk_idx.dtype, topk, scales, x_scales is None)
        self._issue(call, launches, tokens, addresses)
        return recv_x, recv_idx, recv_weights, recv_scales, in_rank

    @phase("routing")
    def exchange_routing(
        self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, x_scales: torch.Tensor | None, max_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """All that `dispatch` gives beside the rows; arguments as it has them."""
        rows = topk_weights.new_empty(len(topk_idx), 0)
        return self.dispatch(rows, topk_idx, topk_weights, x_scales, max_rows)[1:]

    @phase("kernels")
    def spread(
        self, rows: torch.Tensor, is_token_in_rank: torch.Tensor, max_rows: int, call: Call | None = None
    ) -> torch.Tensor:
        """[R, H]: the rows [T, H] of tokens that came to this rank, zeros elsewhere. The gradient of `combine`."""
        received = rows.new_empty(self._num_ranks * max_rows, rows.shape[1])
        rows, in_rank = _packed(rows), _packed(is_token_in_rank)
        addresses = (
            rows.data_ptr(), None, None, None, in_rank.data_ptr(), self._bad_ids, received.data_ptr(), None, None, None,
        )  # fmt: skip
        launches = self._dispatches(max_rows, rows.shape[1] * rows.element_size(), None, 0, 0, True)
        self._issue(call, launches, len(rows), addresses)
        return received

    @phase("kernels")
    def combine(
        self,
        payloads: Sequence[torch.Tensor],
        recv_topk_idx: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        call: Call | None = None,
    ) -> list[torch.Tensor]:
        """Sum rows, and beside them choices, where they came from: float32, rank order, rounded once.

        Args:
            payloads: y, [R, H]; and perhaps float32 [R, K], of which choices of other ranks' experts count as 0.
            recv_topk_idx: [R, K]; rows without a local expert are not read.
            is_token_in_rank: [T, N].
            call: As `dispatch` has it.

        Returns:
            For each payload [T, ...] of its type.
        """
        y, *weights = map(_packed, payloads)
        idx, in_rank = _packed(recv_topk_idx), _packed(is_token_in_rank)
        tokens = in_rank.shape[0]
        outputs = [payload.new_empty(tokens, payload.shape[1]) for payload in payloads]
        addresses = [y.data_ptr(), idx.data_ptr(), in_rank.data_ptr(), outputs[0].data_ptr()]
        if weights:
            addresses += [weights[0].data_ptr(), outputs[1].data_ptr()]
        max_rows = y.shape[0] // self._num_ranks
        launches = self._combines(max_rows, y.shape[1], y.dtype, idx.dtype, idx.shape[1], bool(weights))
        self._issue(call, launches, tokens, addresses)
        return outputs

    def _issue(self, call: Call | None, launches: _Launches, tokens: int, addresses: Sequence[int | None]) -> None:
        """Announce and launch: whatever else may fail, such as memory for the results, has not."""
        if call is not None and self._announcer is not None:
            self._announcer.announce(call)
        try:
            for launch in launches:
                launch(tokens, *addresses)
        except BaseException as error:
            if call is not None and self._announcer is not None:
                self._announcer.failed(error)
            raise

    def _is_small(self, words: int) -> bool:
        """Whether to move what takes `words` words for each peer as words that carry their own signals."""
        return max(1, self._num_ranks - 1) * words <= self._region.words

    def _plan_dispatch(
        self, max_rows: int, row_bytes: int, idx: torch.dtype | None, topk: int, scales: int, without_scales: bool
    ) -> _Launches:
        """The launches of a dispatch; `idx` is None where only rows move, K = 0."""
        row_words, rest = divmod(row_bytes, 4)
        routing = (None, None) if idx is None else (idx, torch.float32)
        if topk and row_bytes and not rest and self._is_small(max_rows * (topk + -(-scales // 3) + -(-row_words // 3))):
            words = None if without_scales else torch.int32
            pointers = [torch.int32, *routing, words, torch.int8, torch.int32]
            pointers += [torch.int32, *routing, torch.int32]
            return self._latency_dispatch(pointers, max_rows, row_words, topk, scales)
        word = cut.word(row_bytes)
        recv_scales = torch.float32 if topk else None
        pointers = [word, *routing, None if without_scales else torch.float32, torch.int8, torch.int32]
        pointers += [word, *routing, recv_scales]
        return self._dispatch(pointers, max_rows, row_bytes, topk, scales)

    def _latency_dispatch(
        self, pointers: list[torch.dtype | None], max_rows: int, row_words: int, topk: int, scales: int
    ) -> _Launches:
        constants = {
            "N": self._num_ranks, "K": topk, "S": scales, "W": row_words, "COLUMNS": LATENCY_COLUMNS,
            "KP": cut.spread(topk, 1, LATENCY_WARPS), "SP": cut.spread(-(-scales // 3), 1, LATENCY_WARPS),
            "SHARE": self._region.words,
        }  # fmt: skip
        before = self._address + self._region.words_at * 8, self._header, self._ticket
        after = self._rank, max_rows, self._num_experts
        blocks = _latency_blocks(max_rows, row_words)
        return _launch(latency_dispatch, blocks, before, pointers, after, constants, LATENCY_WARPS) if blocks else ()

    def _dispatch(self, pointers: list[torch.dtype | None], max_rows: int, row_bytes: int, topk: int, scales: int) -> _Launches:
        word = cut.word(row_bytes).itemsize
        peers, words, row = self._num_ranks - 1, row_bytes // word, aligned(row_bytes, 16)
        launches: _Launches = ()
        shapes, per_row = cut.DISPATCH if row_bytes else cut.ROUTING, row + routing_words(topk, scales) * 4
        for start, length, rows, shape in cut.rounds(shapes, max_rows, row_bytes, per_row, self._region.slot * 8):
            chunks = -(-length // rows)
            writers = min(shape.writers, chunks * peers)
            readers = min(cut.readers_per_peer(shape, self._num_ranks), chunks) * peers
            movers = min(shape.movers, chunks)
            constants = {
                "N": self._num_ranks, "K": topk, "S": scales, "W": words, "ROW": row // 8, "ROWS": rows,
                "COLUMNS": cut.columns(words, rows, word),
                "KP": cut.spread(topk, rows, cut.WARPS), "SP": cut.spread(scales, rows, cut.WARPS), **self._places(),
            }  # fmt: skip
            after = self._rank, max_rows, start, length, self._num_experts, writers, movers, readers
            blocks = writers + movers + readers
            launches += _launch(dispatch, blocks, (self._address, self._ticket), pointers, after, constants, cut.WARPS)
        return launches

    def _plan_combine(
        self, max_rows: int, hidden: int, dtype: torch.dtype, idx: torch.dtype, topk: int, with_weights: bool
    ) -> _Launches:
        row_bytes = hidden * dtype.itemsize
        row_words, rest = divmod(row_bytes, 4)
        if not with_weights and not rest and self._is_small(max_rows * -(-row_words // 3)):
            return self._latency_combine(max_rows, row_words, dtype, idx, topk)
        pointers = [dtype, idx, torch.int8, dtype, *[torch.float32] * (2 * with_weights)]
        without = () if with_weights else (None, None)
        row, peers = aligned(row_bytes, 16), self._num_ranks - 1
        per_row = row + (aligned(topk * 4, 16) if with_weights else 0)
        launches: _Launches = ()
        for start, length, rows, shape in cut.rounds(cut.COMBINE, max_rows, row_bytes, per_row, self._region.share * 8):
            chunks = -(-length // rows)
            writers = min(cut.writers_per_peer(shape, self._num_ranks), chunks) * peers
            readers = min(cut.summers(shape, self._num_ranks), chunks)
            constants = {
                "RANK": self._rank, "N": self._num_ranks, "K": topk, "WEIGHTS": with_weights, "H": hidden,
                "ROW": row // 8, "ROWS": rows, "COLUMNS": cut.columns(hidden, rows, dtype.itemsize),
                "KP": cut.spread(topk, rows, cut.WARPS), **self._places(), "SHARE": self._region.share,
            }  # fmt: skip
            after = *without, max_rows, start, length, writers, readers
            blocks = writers + readers
            launches += _launch(combine, blocks, (self._address, self._ticket), pointers, after, constants, cut.WARPS)
        return launches

    def _latency_combine(self, max_rows: int, row_words: int, dtype: torch.dtype, idx: torch.dtype, topk: int) -> _Launches:
        pointers = [torch.int32, idx, torch.int8, torch.int32]
        constants = {
            "RANK": self._rank, "N": self._num_ranks, "K": topk, "W": row_words, "TYPE": SUM_TYPES[dtype],
            "COLUMNS": LATENCY_COLUMNS, "KP": cut.spread(topk, 1, LATENCY_WARPS), "SHARE": self._region.words, "FLAGS": FLAGS,
        }  # fmt: skip
        words, flags = self._address + self._region.words_at * 8, self._address + self._region.flags_at * 8
        before = words, flags, self._header, self._ticket
        blocks = _latency_blocks(max_rows, row_words)
        if not blocks:
            return ()
        return _launch(latency_combine, blocks + 1, before, pointers, (max_rows,), constants, LATENCY_WARPS)

    def _places(self) -> dict[str, int]:
        """Where flags and slots lie."""
        region = self._region
        return {"FLAGS": FLAGS, "FLAGS_AT": region.flags_at, "SLOTS_AT": region.slots_at, "SLOT": region.slot}


def _latency_blocks(max_rows: int, row_words: int) -> int:
    return min(MAX_LATENCY_BLOCKS, max_rows * -(-row_words // (3 * LATENCY_COLUMNS)))


def _launch(
    kernel: Any,
    blocks: int,
    before: tuple[int, ...],
    pointers: Sequence[torch.dtype | None],
    after: tuple[int | None, ...],
    constants: dict[str, Any],
    num_warps: int,
) -> _Launches:
    return (Launch(kernel, blocks, before=before, pointers=pointers, after=after, constants=constants, num_warps=num_warps),)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and aligned for the widest loads."""
    if not tensor.is_contiguous():  # to ask takes a third of the time that the same tensor once more takes
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
