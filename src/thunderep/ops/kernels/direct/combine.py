"""Combine in one launch: publish the partial results that were chosen, sum what arrives.

Writers come first in block order, as in `dispatch`, whose rules for flags and banks hold here too. A slot is
divided among the peers; a chunk is ROWS rows, then their `K` gradients of weights where there are any. Who reads knows
from `in_rank` which rows were published for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thunderep.ops.kernels.direct.routing import chosen_here
from thunderep.ops.kernels.direct.signal import begin, end, post, release, wait_all


@triton.jit(do_not_specialize=["tokens", "max_tokens", "start", "count", "writers", "readers"])
def combine(
    region: tl.tensor, ticket: tl.tensor, tokens: int,
    y: tl.tensor, recv_idx: tl.tensor, in_rank: tl.tensor, out: tl.tensor, weights: tl.tensor, out_weights: tl.tensor,
    max_tokens: int, start: int, count: int, writers: int, readers: int,
    RANK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WEIGHTS: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
    FLAGS: tl.constexpr, FLAGS_AT: tl.constexpr, SLOTS_AT: tl.constexpr, SLOT: tl.constexpr, SHARE: tl.constexpr,
) -> None:  # fmt: skip
    """One round of a combine: tokens start..start+count-1 of every rank.

    Args:
        region: The pinned region, as 64-bit words; `*_AT`, SLOT, SHARE and ROW count in them.
        ticket: See `signal`.
        tokens: T.
        y: [N * M, H].
        recv_idx: [N * M, K]; rows without a local expert are not read, nor are weights of other choices.
        in_rank: [T, N] one byte each.
        out: [T, H], y's type.
        weights: [N * M, K] float32, summed alike into `out_weights` where WEIGHTS is set, else ignored.
        out_weights: [T, K] float32.
        max_tokens: M.
        start: First token of this round.
        count: Tokens of this round.
        writers: Blocks that publish.
        readers: Blocks that sum.
        RANK: This rank.
        N: Ranks.
        K: Choices a token.
        WEIGHTS: Whether there are weights.
        H: Elements in a row.
        ROW: 64-bit words from row to row in a slot.
        ROWS: Rows in a chunk.
        COLUMNS: Elements of a row that a block moves at a time.
        KP: K or more, a power of two.
        FLAGS: Chunks a slot has flags for.
        FLAGS_AT: Where flags begin: [2 banks, N owners, N readers, FLAGS].
        SLOTS_AT: Where slots begin: [2 banks, N owners].
        SLOT: Size of a slot.
        SHARE: Size of each peer's part of it.
    """
    block = tl.program_id(0)
    header = region + RANK * 8
    sequence = begin(ticket, header)
    bank = sequence & 1
    chunks = tl.cdiv(count, ROWS)
    flags = region + FLAGS_AT + bank * (N * N * FLAGS)
    slots = region + SLOTS_AT + bank * (N * SLOT)
    META: tl.constexpr = (K + 3) // 4 * 4 if WEIGHTS else 0
    CHUNK: tl.constexpr = ROWS * (ROW + META // 2)
    UNITS: tl.constexpr = 64 // y.dtype.element_ty.primitive_bitwidth
    i = tl.arange(0, ROWS)
    k = tl.arange(0, KP)[None, :]
    columns = tl.arange(0, COLUMNS)

    if block < writers:
        for job in range(block, chunks * (N - 1), writers):
            d = job % (N - 1)
            chunk = job // (N - 1)
            peer = (RANK + 1 + d) % N
            live = chunk * ROWS + i < count
            row = (peer * max_tokens + start + chunk * ROWS + i).to(tl.int64)
            place = slots + RANK * SLOT + d * SHARE + chunk * CHUNK
            rows_out = place.to(tl.pointer_type(y.dtype.element_ty), bitcast=True)
            # Issued first, so that the ids and the first columns arrive together.
            bits = tl.load(y + row[:, None] * H + columns[None, :], mask=live[:, None] & (columns < H)[None, :], other=0)
            choices = chosen_here(recv_idx, row, live, K, KP)
            publish = tl.max(choices, axis=1) > 0
            for column in range(0, H, COLUMNS):
                inside = publish[:, None] & (column + columns < H)[None, :]
                tl.store(rows_out + i[:, None] * (ROW * UNITS) + (column + columns)[None, :], bits, mask=inside)
                ahead = column + COLUMNS + columns
                bits = tl.load(y + row[:, None] * H + ahead[None, :], mask=publish[:, None] & (ahead < H)[None, :], other=0)
            if WEIGHTS:
                meta = (place + ROWS * ROW).to(tl.pointer_type(tl.float32), bitcast=True) + i[:, None] * META
                part = tl.load(weights + row[:, None] * K + k, mask=choices > 0, other=0.0)
                tl.store(meta + k, part, mask=publish[:, None] & (k < K))
            release()  # the chunk is visible to the peer when it sees the flag
            post(flags + (RANK * N + peer) * FLAGS + chunk, sequence, block * 0)
    else:
        for chunk in range(block - writers, chunks, readers):
            token = (start + chunk * ROWS + i).to(tl.int64)
            live = (chunk * ROWS + i < count) & (token < tokens)
            own = RANK * max_tokens + token
            ranks = tl.zeros((ROWS,), tl.int32)  # bit by bit, those that a token went to
            for source in tl.static_range(N):
                ranks |= (tl.load(in_rank + token * N + source, mask=live, other=0) != 0).to(tl.int32) << source
            if N > 1:  # noqa: SIM102 (decided when the kernel is compiled)
                # All peers' partial results for these tokens are in their slots. Chunk 0 is waited for without tokens
                # too: every operation hears from every peer.
                if (chunk == 0) | (start + chunk * ROWS < tokens):
                    wait_all(flags + RANK * FLAGS + chunk, N * FLAGS * 8, N, RANK, sequence, header)
            for column in range(0, H, COLUMNS):
                at = (column + columns)[None, :]
                within = (column + columns < H)[None, :]
                total = tl.zeros((ROWS, COLUMNS), tl.float32)
                for source in tl.static_range(N):  # rank order, whoever is asked first
                    went = ((ranks >> source) & 1) > 0
                    inside = went[:, None] & within
                    if source == RANK:
                        part = tl.load(y + own[:, None] * H + at, mask=inside, other=0.0)
                    else:
                        d = (RANK + N - 1 - source) % N
                        place = slots + source * SLOT + d * SHARE + chunk * CHUNK
                        rows_in = place.to(tl.pointer_type(y.dtype.element_ty), bitcast=True)
                        remote = rows_in + i[:, None] * (ROW * UNITS) + at
                        part = tl.load(remote, mask=inside, other=0.0, cache_modifier=".cg")
                    total += part.to(tl.float32)
                tl.store(out + token[:, None] * H + at, total.to(y.dtype.element_ty), mask=live[:, None] & within)
            if WEIGHTS:
                total = tl.zeros((ROWS, KP), tl.float32)
                for source in tl.static_range(N):
                    went = ((ranks >> source) & 1) > 0
                    inside = went[:, None] & (k < K)
                    if source == RANK:
                        choices = chosen_here(recv_idx, own, live, K, KP)
                        part = tl.load(weights + own[:, None] * K + k, mask=inside & (choices > 0), other=0.0)
                    else:
                        d = (RANK + N - 1 - source) % N
                        place = slots + source * SLOT + d * SHARE + chunk * CHUNK
                        meta = (place + ROWS * ROW).to(tl.pointer_type(tl.float32), bitcast=True) + i[:, None] * META
                        part = tl.load(meta + k, mask=inside, other=0.0, cache_modifier=".cg")
                    total += part
                tl.store(out_weights + token[:, None] * K + k, total, mask=live[:, None] & (k < K))
    end(ticket, header)
