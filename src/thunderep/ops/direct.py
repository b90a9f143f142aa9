"""Launches of the kernels of `direct`: dispatch and combine, routing and sums included, in one launch each.

Every method allocates its results on the current stream, launches and returns; nothing waits on the host, and everything
may be captured. All ranks call the same methods in the same order, each rank from streams that are ordered among
themselves. A call that a slot does not hold runs as several rounds of what fits, each a launch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from thunderep.ops.kernels.direct.combine import combine
from thunderep.ops.kernels.direct.dispatch import dispatch
from thunderep.ops.kernels.direct.latency_combine import latency_combine
from thunderep.ops.kernels.direct.latency_dispatch import latency_dispatch
from thunderep.runtime.trace import phase
from thunderep.runtime.window import FLAGS, HEADER_BYTES, MAX_CHUNK_ROWS, Window, aligned, routing_words

LATENCY_COLUMNS, LATENCY_WARPS = 512, 4
"""Words of a row that a block handles at a time: four a thread. Small blocks start early, and many polls are in the air."""

MAX_LATENCY_BLOCKS = 256
"""A few of them fit an SM, so all poll at once."""

WARPS = 16
BLOCK_WORDS = 4096
"""64-bit words that a block has in flight: 8 a thread, 32 KiB."""

SUM_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Shape(NamedTuple):
    """How a launch is cut: rows of a chunk together, and blocks of each kind.

    Attributes:
        limit: Bytes of rows of one rank up to which this shape is used.
        chunk: Bytes of a chunk that are aimed at.
        writers: Blocks that publish.
        movers: Blocks that copy own rows.
        readers: Blocks that pull, for each peer.
    """

    limit: int
    chunk: int
    writers: int
    movers: int
    readers: int


SHAPES = (
    Shape(32 << 10, 8 << 10, 4, 1, 4),
    Shape(128 << 10, 16 << 10, 4, 2, 4),
    Shape(512 << 10, 32 << 10, 4, 4, 4),
    Shape(2 << 20, 64 << 10, 4, 8, 8),
    Shape(1 << 62, 64 << 10, 8, 16, 16),
)


class Round(NamedTuple):
    """One launch's part of a call: `length` rows of every rank from `start` on, `rows` of them a chunk."""

    start: int
    length: int
    rows: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address as Triton takes it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Kernels:
    """The operations of one rank of a Buffer.

    Args:
        window: The pinned memory that they move rows through.
        num_experts: E.
        bad_ids: One int32 that the device can reach; becomes 1 when ids are out of range.
    """

    def __init__(self, window: Window, num_experts: int, bad_ids: torch.Tensor) -> None:
        self._region, self._address, self._rank, self._ticket = window.region, window.address, window.rank, window.ticket
        self._num_ranks, self._num_experts, self._bad_ids = window.region.num_ranks, num_experts, bad_ids

    @phase("kernels")
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        x_scales: torch.Tensor | None,
        max_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The contract's dispatch; ids out of range count as -1.

        Args:
            x: [T, H].
            topk_idx: [T, K].
            topk_weights: [T, K] float32.
            x_scales: [T, S] float32, or None.
            max_rows: M.

        Returns:
            recv_x, recv_topk_idx, recv_topk_weights, recv_x_scales, is_token_in_rank.
        """
        received, topk = self._num_ranks * max_rows, topk_idx.shape[1]
        scales = 0 if x_scales is None else x_scales.shape[1]
        inputs = _packed(x), _packed(topk_idx), _packed(topk_weights), None if x_scales is None else _packed(x_scales)
        outputs = (
            x.new_empty(received, x.shape[1]),
            topk_idx.new_empty(received, topk),
            topk_weights.new_empty(received, topk),
            topk_weights.new_empty(received, scales),
        )
        in_rank = topk_idx.new_empty(len(x), self._num_ranks, dtype=torch.bool)
        row_words, rest = divmod(x.shape[1] * x.element_size(), 4)
        if not rest and self._is_small(max_rows * (topk + -(-scales // 3) + -(-row_words // 3))):
            self._latency_dispatch(inputs, in_rank, outputs, max_rows)
        else:
            self._dispatch(inputs, in_rank, outputs, max_rows, topk, scales)
        return *outputs, in_rank

    @phase("kernels")
    def spread(self, rows: torch.Tensor, is_token_in_rank: torch.Tensor, max_rows: int) -> torch.Tensor:
        """[R, H]: the rows [T, H] of tokens that came to this rank, zeros elsewhere. The gradient of `combine`."""
        received = rows.new_empty(self._num_ranks * max_rows, rows.shape[1])
        inputs = _packed(rows), None, None, None
        self._dispatch(inputs, is_token_in_rank.contiguous(), (received, None, None, None), max_rows, 0, 0)
        return received

    @phase("kernels")
    def combine(
        self, payloads: Sequence[torch.Tensor], recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor
    ) -> list[torch.Tensor]:
        """Sum rows, and beside them choices, where they came from: float32, rank order, rounded once.

        Args:
            payloads: y, [R, H]; and perhaps float32 [R, K], of which choices of other ranks' experts count as 0.
            recv_topk_idx: [R, K]; rows without a local expert are not read.
            is_token_in_rank: [T, N].

        Returns:
            For each payload [T, ...] of its type.
        """
        y, *rest_payloads = map(_packed, payloads)
        idx, in_rank = _packed(recv_topk_idx), is_token_in_rank.contiguous()
        outputs = [payload.new_empty(len(in_rank), payload.shape[1]) for payload in payloads]
        row_words, rest = divmod(y.shape[1] * y.element_size(), 4)
        if not rest_payloads and not rest and self._is_small(len(y) // self._num_ranks * -(-row_words // 3)):
            self._latency_combine(y, idx, in_rank, outputs[0])
        else:
            self._combine(y, rest_payloads, idx, in_rank, outputs)
        return outputs

    def _is_small(self, words: int) -> bool:
        """Whether to move what takes `words` words for each peer as words that carry their own signals."""
        return max(1, self._num_ranks - 1) * words <= self._region.words

    def _at(self, offset: int) -> Pointer:
        return Pointer(self._address + offset * 8, torch.int64)

    def _latency_dispatch(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        in_rank: torch.Tensor,
        outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        max_rows: int,
    ) -> None:
        (x, idx, weights, scales), (recv_x, recv_idx, recv_weights, recv_scales) = inputs, outputs
        row_words, topk = x.shape[1] * x.element_size() // 4, idx.shape[1]
        blocks = self._latency_blocks(max_rows, row_words)
        if blocks:
            latency_dispatch[(blocks,)](
                self._at(self._region.words_at), self._at(self._rank * HEADER_BYTES // 8), self._ticket,
                Pointer(x.data_ptr(), torch.int32), idx, weights,
                None if scales is None else Pointer(scales.data_ptr(), torch.int32),
                Pointer(in_rank.data_ptr(), torch.int8), self._bad_ids,
                Pointer(recv_x.data_ptr(), torch.int32), recv_idx, recv_weights, Pointer(recv_scales.data_ptr(), torch.int32),
                self._rank, len(x), max_rows, self._num_experts,
                N=self._num_ranks, K=topk, S=recv_scales.shape[1], W=row_words, COLUMNS=LATENCY_COLUMNS,
                KP=_spread(topk, 1, LATENCY_WARPS), SP=_spread(-(-recv_scales.shape[1] // 3), 1, LATENCY_WARPS),
                SHARE=self._region.words, num_warps=LATENCY_WARPS,
            )  # fmt: skip

    def _latency_combine(self, y: torch.Tensor, idx: torch.Tensor, in_rank: torch.Tensor, out: torch.Tensor) -> None:
        max_rows = len(y) // self._num_ranks
        row_words, topk = y.shape[1] * y.element_size() // 4, idx.shape[1]
        blocks = self._latency_blocks(max_rows, row_words)
        if blocks:
            latency_combine[(blocks + 1,)](
                self._at(self._region.words_at), self._at(self._region.flags_at), self._at(self._rank * HEADER_BYTES // 8),
                self._ticket, Pointer(y.data_ptr(), torch.int32), idx, Pointer(in_rank.data_ptr(), torch.int8),
                Pointer(out.data_ptr(), torch.int32), len(in_rank), max_rows,
                RANK=self._rank, N=self._num_ranks, K=topk, W=row_words, TYPE=SUM_TYPES[y.dtype],
                COLUMNS=LATENCY_COLUMNS, KP=_spread(topk, 1, LATENCY_WARPS),
                SHARE=self._region.words, FLAGS=FLAGS, num_warps=LATENCY_WARPS,
            )  # fmt: skip

    @staticmethod
    def _latency_blocks(max_rows: int, row_words: int) -> int:
        return min(MAX_LATENCY_BLOCKS, max_rows * -(-row_words // (3 * LATENCY_COLUMNS)))

    def _dispatch(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        in_rank: torch.Tensor,
        outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        max_rows: int,
        topk: int,
        scales: int,
    ) -> None:
        x, recv_x = inputs[0], outputs[0]
        row_bytes = x.shape[1] * x.element_size()
        word = _word(row_bytes)
        words = row_bytes // word.itemsize
        per_row = aligned(row_bytes, 16) + routing_words(topk, scales) * 4
        peers = self._num_ranks - 1
        for start, length, rows, shape in self._rounds(max_rows, row_bytes, per_row, self._region.slot * 8):
            chunks = -(-length // rows)
            writers, readers = min(shape.writers, chunks * peers), min(shape.readers, chunks) * peers
            movers = min(shape.movers, chunks)
            dispatch[(writers + movers + readers,)](
                self._at(0), self._ticket,
                Pointer(x.data_ptr(), word), *inputs[1:], Pointer(in_rank.data_ptr(), torch.int8), self._bad_ids,
                Pointer(recv_x.data_ptr(), word), *outputs[1:],
                self._rank, len(x), max_rows, start, length, self._num_experts, writers, movers, readers,
                N=self._num_ranks, K=topk, S=scales, W=words, ROW=aligned(row_bytes, 16) // 8, ROWS=rows,
                COLUMNS=_columns(words, rows, word.itemsize), KP=_spread(topk, rows, WARPS), SP=_spread(scales, rows, WARPS),
                FLAGS=FLAGS, FLAGS_AT=self._region.flags_at, SLOTS_AT=self._region.slots_at, SLOT=self._region.slot,
                num_warps=WARPS,
            )  # fmt: skip

    def _combine(
        self,
        y: torch.Tensor,
        weights: Sequence[torch.Tensor],
        idx: torch.Tensor,
        in_rank: torch.Tensor,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        max_rows, topk = len(y) // self._num_ranks, idx.shape[1]
        row_bytes = y.shape[1] * y.element_size()
        per_row = aligned(row_bytes, 16) + (aligned(topk * 4, 16) if weights else 0)
        peers = self._num_ranks - 1
        for start, length, rows, shape in self._rounds(max_rows, row_bytes, per_row, self._region.share * 8):
            chunks = -(-length // rows)
            writers, readers = min(shape.writers, chunks) * peers, min(shape.readers, chunks)
            combine[(writers + readers,)](
                self._at(0), self._ticket, y, weights[0] if weights else None, idx,
                Pointer(in_rank.data_ptr(), torch.int8), outputs[0], outputs[1] if weights else None,
                len(in_rank), max_rows, start, length, writers, readers,
                RANK=self._rank, N=self._num_ranks, K=topk, WEIGHTS=bool(weights), H=y.shape[1],
                ROW=aligned(row_bytes, 16) // 8, ROWS=rows, COLUMNS=_columns(y.shape[1], rows, y.element_size()),
                KP=_spread(topk, rows, WARPS),
                FLAGS=FLAGS, FLAGS_AT=self._region.flags_at, SLOTS_AT=self._region.slots_at, SLOT=self._region.slot,
                SHARE=self._region.share, num_warps=WARPS,
            )  # fmt: skip

    def _rounds(self, max_rows: int, row_bytes: int, per_row: int, room: int) -> Iterator[Round]:
        """The launches of a call, the same on all ranks."""
        if per_row > room:
            raise RuntimeError(f"staging_bytes: a row takes {per_row} bytes of staging, more than the {room} for one peer")
        start = 0
        while start < max_rows:
            left = max_rows - start
            shape = next(s for s in SHAPES if left * row_bytes <= s.limit)
            rows = 1
            while rows * 2 <= min(MAX_CHUNK_ROWS, max(1, shape.chunk // row_bytes), room // per_row):
                rows *= 2
            length = min(left, min(FLAGS, room // (rows * per_row)) * rows)
            yield Round(start, length, rows, shape)
            start += length


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and aligned for the widest loads."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _word(row_bytes: int) -> torch.dtype:
    """The widest word of which rows are whole multiples."""
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.int8) if row_bytes % t.itemsize == 0)


def _columns(words: int, rows: int, itemsize: int) -> int:
    """Words of a row that a block moves at a time."""
    return min(_power_of_two(words), max(1, BLOCK_WORDS * 8 // itemsize // rows))


def _spread(columns: int, rows: int, warps: int) -> int:
    """Columns of a tile of a chunk's routing: an element a thread at most.

    Threads that hold copies of an element would each load it, and loads of one line of host memory wait for each other.
    """
    return max(_power_of_two(columns), warps * 32 // rows)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
