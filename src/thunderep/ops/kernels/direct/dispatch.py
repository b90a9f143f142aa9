"""Dispatch in one launch: publish rows and routing in pinned host memory, pull what local experts need.

Blocks of three kinds, in this order, so that blocks that wait never keep blocks that are waited for from starting:
writers publish chunks of rows and signal each peer; movers copy this rank's own rows on the device; readers wait for a
chunk of a peer and pull it.

A chunk is ROWS rows, then their routing (ids and weights of K choices, S scales, 32 bits each), published once for all
peers. The flag of a chunk tells each peer in its payload which rows its experts need, bit by bit, so that who waits
reads nothing else before the rows; bit 31 (`_LAST`) says that no row follows in later chunks. Rows that no peer needs are
not published. Where rows have no bytes (W = 0) only routing travels, all of it, and bit 0 stands for a whole chunk.

Two banks are used in turn. A writer overwrites bank b of operation i in operation i + 2. By then it has seen every
peer's flag of operation i + 1, and a peer posts that only after its operation i, reads included, has ended: for this
each operation signals each peer and waits for each peer at least once, also without rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thunderep.ops.kernels.direct.routing import load_ids, needed_by, out_of_range, store_routing
from thunderep.ops.kernels.direct.signal import begin, end, post, release, wait

_LAST = tl.constexpr(-(1 << 31))


@triton.jit(do_not_specialize=["rank", "tokens", "max_tokens", "start", "count", "num_experts", "writers", "movers", "readers"])
def dispatch(
    region: tl.tensor, ticket: tl.tensor, tokens: int,
    x: tl.tensor, topk_idx: tl.tensor, topk_weights: tl.tensor, x_scales: tl.tensor, in_rank: tl.tensor, bad: tl.tensor,
    recv_x: tl.tensor, recv_idx: tl.tensor, recv_weights: tl.tensor, recv_scales: tl.tensor,
    rank: int, max_tokens: int, start: int, count: int, num_experts: int,
    writers: int, movers: int, readers: int,
    N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr,
    FLAGS: tl.constexpr, FLAGS_AT: tl.constexpr, SLOTS_AT: tl.constexpr, SLOT: tl.constexpr,
) -> None:  # fmt: skip
    """One round of a dispatch: rows start..start+count-1 of every rank.

    Args:
        region: The pinned region, as 64-bit words; `*_AT`, SLOT and ROW count in them.
        ticket: See `signal`.
        tokens: T.
        x: [T, W] words of any width; W may be 0. The other tensors are as the contract has them.
        topk_idx: Ignored where K is 0; then `in_rank` is an input, and rows that are not received become zero.
        topk_weights: See `topk_idx`.
        x_scales: Ignored where S is 0.
        in_rank: [T, N] one byte each.
        bad: One int32, which becomes 1 if an id is outside -1..E-1.
        recv_x: [N * M, W] words.
        recv_idx: [N * M, K].
        recv_weights: [N * M, K].
        recv_scales: [N * M, S].
        rank: This rank.
        max_tokens: M.
        start: First row of this round.
        count: Rows of this round.
        num_experts: E.
        writers: Blocks that publish.
        movers: Blocks that copy own rows.
        readers: Blocks that pull.
        N: Ranks.
        K: Choices a token.
        S: Scales a row.
        W: Words in a row.
        ROW: 64-bit words from row to row in a slot.
        ROWS: Rows in a chunk, at most 16 where rows have bytes.
        COLUMNS: Words of a row that a block moves at a time.
        KP: K or more, a power of two.
        SP: S or more, a power of two.
        FLAGS: Chunks a slot has flags for.
        FLAGS_AT: Where flags begin: [2 banks, N owners, N readers, FLAGS].
        SLOTS_AT: Where slots begin: [2 banks, N owners].
        SLOT: Size of a slot.
    """
    block = tl.program_id(0)
    header = region + rank * 8
    sequence = begin(ticket, header)
    bank = sequence & 1
    chunks = tl.cdiv(count, ROWS)
    flags = region + FLAGS_AT + bank * (N * N * FLAGS)
    slots = region + SLOTS_AT + bank * (N * SLOT)
    META: tl.constexpr = (2 * K + S + 3) // 4 * 4  # 32-bit words of routing a row, 16-byte aligned
    CHUNK: tl.constexpr = ROWS * (ROW + META // 2)
    UNITS: tl.constexpr = 64 // x.dtype.element_ty.primitive_bitwidth
    i = tl.arange(0, ROWS)
    k = tl.arange(0, KP)[None, :]
    s = tl.arange(0, SP)[None, :]
    columns = tl.arange(0, COLUMNS)

    if block < writers:
        slot = slots + rank * SLOT
        for chunk in range(block, chunks, writers):
            token = (start + chunk * ROWS + i).to(tl.int64)
            live = (chunk * ROWS + i < count) & (token < tokens)
            place = slot + chunk * CHUNK
            rows_out = place.to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
            # Issued first, so that the ids and the first columns arrive together.
            bits = tl.load(x + token[:, None] * W + columns[None, :], mask=live[:, None] & (columns < W)[None, :], other=0)
            if K > 0:
                ids = load_ids(topk_idx, token, live, K, KP)
                weights = tl.load(topk_weights + token[:, None] * K + k, mask=live[:, None] & (k < K), other=0.0)
            else:
                ids = tl.full((ROWS, KP), -1, tl.int32)
            wanted = tl.zeros((ROWS,), tl.int32)
            for d in tl.static_range(1, N):
                wanted |= needed_by((rank + d) % N, ids, in_rank, token, live, num_experts, N, K)
            publish = wanted > 0 if W > 0 else chunk * ROWS + i < count
            for column in range(0, W, COLUMNS):
                inside = publish[:, None] & (column + columns < W)[None, :]
                tl.store(rows_out + i[:, None] * (ROW * UNITS) + (column + columns)[None, :], bits, mask=inside)
                ahead = column + COLUMNS + columns
                bits = tl.load(x + token[:, None] * W + ahead[None, :], mask=live[:, None] & (ahead < W)[None, :], other=0)
            meta = (place + ROWS * ROW).to(tl.pointer_type(tl.int32), bitcast=True) + i[:, None] * META
            if K > 0:
                known = tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)
                tl.store(meta + k, known, mask=publish[:, None] & (k < K))
                tl.store(meta + K + k, weights.to(tl.int32, bitcast=True), mask=publish[:, None] & (k < K))
            if S > 0:
                inside = publish[:, None] & (s < S)
                scales = tl.load(x_scales + token[:, None] * S + s, mask=inside & live[:, None], other=0.0)
                tl.store(meta + 2 * K + s, scales.to(tl.int32, bitcast=True), mask=inside)
            release()  # the chunk is visible to whichever peer sees its flag
            last = tl.where(start + (chunk + 1) * ROWS >= tokens, _LAST, 0)
            for d in tl.static_range(1, N):
                peer = (rank + d) % N
                rows = 1 + block * 0
                if W > 0:
                    rows = tl.sum(needed_by(peer, ids, in_rank, token, live, num_experts, N, K) << i, axis=0)
                post(flags + (rank * N + peer) * FLAGS + chunk, sequence, rows | last)
    elif block < writers + movers:
        for chunk in range(block - writers, chunks, movers):
            token = (start + chunk * ROWS + i).to(tl.int64)
            filled = chunk * ROWS + i < count
            live = filled & (token < tokens)
            row = rank * max_tokens + token
            if K > 0:
                ids = load_ids(topk_idx, token, live, K, KP)
                weights = tl.load(topk_weights + token[:, None] * K + k, mask=live[:, None] & (k < K), other=0.0)
                store_routing(
                    ids, weights, row, filled, recv_idx, recv_weights, rank, num_experts, N, K, KP
                )  # fmt: skip
                if out_of_range(ids, num_experts):
                    tl.store(bad, 1)
                for peer in tl.static_range(N):
                    went = needed_by(peer, ids, in_rank, token, live, num_experts, N, K)
                    tl.store(in_rank + token * N + peer, went.to(tl.int8), mask=live)
            else:
                ids = tl.full((ROWS, KP), -1, tl.int32)
            needed = needed_by(rank, ids, in_rank, token, live, num_experts, N, K) > 0
            stored = needed if K > 0 else filled
            for column in range(0, W, COLUMNS):
                inside = (column + columns < W)[None, :]
                at = (column + columns)[None, :]
                bits = tl.load(x + token[:, None] * W + at, mask=needed[:, None] & inside, other=0)
                tl.store(recv_x + row[:, None] * W + at, bits, mask=stored[:, None] & inside)
            if S > 0:
                inside = needed[:, None] & (s < S)
                scales = tl.load(x_scales + token[:, None] * S + s, mask=inside, other=0.0)
                tl.store(recv_scales + row[:, None] * S + s, scales, mask=inside)
    elif N > 1:
        ended = block * 0
        for job in range(block - writers - movers, chunks * (N - 1), readers):
            peer = (rank + 1 + job % (N - 1)) % N
            chunk = job // (N - 1)
            mask = block * 0
            if ((ended >> peer) & 1) == 0:
                # The peer's chunk is in its slot, and the payload says which rows are for this rank.
                mask = wait(flags + (peer * N + rank) * FLAGS + chunk, sequence, header)
            ended |= tl.where(mask < 0, 1 << peer, 0)
            filled = chunk * ROWS + i < count
            needed = ((mask >> i) & 1) > 0 if W > 0 else filled & ((mask & 1) > 0)
            stored = needed if K > 0 else filled
            row = (peer * max_tokens + start + chunk * ROWS + i).to(tl.int64)
            place = slots + peer * SLOT + chunk * CHUNK
            rows_in = place.to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
            meta = (place + ROWS * ROW).to(tl.pointer_type(tl.int32), bitcast=True) + i[:, None] * META
            # Issued before the rows, used after them: one round trip over PCIe, not two.
            if K > 0:
                ids = tl.load(meta + k, mask=needed[:, None] & (k < K), other=-1, cache_modifier=".cg")
                weights = tl.load(meta + K + k, mask=needed[:, None] & (k < K), other=0, cache_modifier=".cg")
            if S > 0:
                scales = tl.load(meta + 2 * K + s, mask=needed[:, None] & (s < S), other=0, cache_modifier=".cg")
            for column in range(0, W, COLUMNS):
                inside = (column + columns < W)[None, :]
                at = (column + columns)[None, :]
                source = rows_in + i[:, None] * (ROW * UNITS) + at
                bits = tl.load(source, mask=needed[:, None] & inside, other=0, cache_modifier=".cg")
                tl.store(recv_x + row[:, None] * W + at, bits, mask=stored[:, None] & inside)
            if K > 0:
                store_routing(
                    ids, weights.to(tl.float32, bitcast=True), row, filled, recv_idx, recv_weights,
                    rank, num_experts, N, K, KP,
                )  # fmt: skip
            if S > 0:
                inside = needed[:, None] & (s < S)
                tl.store(recv_scales + row[:, None] * S + s, scales.to(tl.float32, bitcast=True), mask=inside)
    end(ticket, header)
