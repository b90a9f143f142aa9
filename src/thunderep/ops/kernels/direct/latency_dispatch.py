"""Dispatch of few tokens in one launch: every word carries its own signal (`words`), nothing waits for a fence.

A row in pinned host memory is K words of routing (an id and its weight each), the scales, three a word, then the row
itself, 12 bytes a word. Routing of all M rows is published, so that who polls it also learns where a peer's tokens end;
scales and rows only if some peer needs them. A block publishes its parts first and then pulls the parts that the same
block of each peer publishes: in whatever order blocks run, none waits for ever.

The two banks are reused as `dispatch` says: every rank polls some routing of every peer in each operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thunderep.ops.kernels.direct.routing import first_expert, out_of_range
from thunderep.ops.kernels.direct.signal import begin, end
from thunderep.ops.kernels.direct.words import get, get4, put


@triton.jit
def _either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b


@triton.jit
def _routing(
    ids: tl.tensor, weights: tl.tensor, row: tl.tensor, recv_idx: tl.tensor, recv_weights: tl.tensor,
    rank: tl.tensor, num_experts: int, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WRITE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether one of a token's choices is an expert of `rank`; with WRITE, store local ids and weights of its row."""
    k = tl.arange(0, KP)
    first = first_expert(rank, num_experts, N)
    mine = (ids >= first) & (ids < first_expert(rank + 1, num_experts, N))
    if WRITE:
        tl.store(recv_idx + row * K + k, tl.where(mine, ids - first, -1).to(recv_idx.dtype.element_ty), mask=k < K)
        tl.store(recv_weights + row * K + k, tl.where(mine, weights, 0.0), mask=k < K)
    return tl.max(mine.to(tl.int32), axis=0) > 0


@triton.jit(do_not_specialize=["rank", "tokens", "max_tokens", "num_experts"])
def latency_dispatch(
    words: tl.tensor, header: tl.tensor, ticket: tl.tensor, tokens: int,
    x: tl.tensor, topk_idx: tl.tensor, topk_weights: tl.tensor, x_scales: tl.tensor, in_rank: tl.tensor, bad: tl.tensor,
    recv_x: tl.tensor, recv_idx: tl.tensor, recv_weights: tl.tensor, recv_scales: tl.tensor,
    rank: int, max_tokens: int, num_experts: int,
    N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    COLUMNS: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, SHARE: tl.constexpr,
) -> None:  # fmt: skip
    """One dispatch; tensors are as `dispatch` has them, rows and scales as 32-bit words.

    Args:
        words: Where words live, as pairs of 64 bits: [2 banks, N owners, SHARE words].
        header: This rank's, see `window`; its first word stops the kernel.
        ticket: See `signal`.
        tokens: T.
        x: [T, W].
        topk_idx: [T, K].
        topk_weights: [T, K].
        x_scales: [T, S], ignored where S is 0.
        in_rank: [T, N] one byte each.
        bad: One int32, which becomes 1 if an id is outside -1..E-1.
        recv_x: [N * M, W].
        recv_idx: [N * M, K].
        recv_weights: [N * M, K].
        recv_scales: [N * M, S].
        rank: This rank.
        max_tokens: M.
        num_experts: E.
        N: Ranks.
        K: Choices a token.
        S: Scales a row.
        W: 32-bit words in a row.
        COLUMNS: Words of a row that a block handles at a time; four a thread.
        KP: K or more, a power of two; one choice a thread.
        SP: A third of S or more, a power of two; one word a thread.
        SHARE: Words that a rank may publish.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    sequence = begin(ticket, header)
    bank = words + (sequence & 1) * (2 * N * SHARE)
    SCALES: tl.constexpr = (S + 2) // 3
    BODY: tl.constexpr = (W + 2) // 3
    STRIDE: tl.constexpr = K + SCALES + BODY
    PARTS: tl.constexpr = (BODY + COLUMNS - 1) // COLUMNS
    jobs = max_tokens * PARTS
    halt = header.to(tl.int64)
    k = tl.arange(0, KP)
    s = tl.arange(0, SP)
    columns = tl.arange(0, COLUMNS)

    for job in range(block, jobs, blocks):
        part = job % PARTS
        token = job // PARTS
        live = tokens > token
        own = rank * max_tokens + token
        place = bank + 2 * (rank * SHARE + token * STRIDE)
        j = part * COLUMNS + columns
        at = token * W + 3 * j
        # All loads are issued before the first is used.
        a = tl.load(x + at, mask=(3 * j < W) & live, other=0)
        b = tl.load(x + at + 1, mask=(3 * j + 1 < W) & live, other=0)
        c = tl.load(x + at + 2, mask=(3 * j + 2 < W) & live, other=0)
        ids = tl.load(topk_idx + token * K + k, mask=(k < K) & live, other=-1)
        weights = tl.load(topk_weights + token * K + k, mask=(k < K) & live, other=0.0)
        bits = tl.zeros((KP,), tl.int32)
        for peer in tl.static_range(N):
            chosen = (ids >= first_expert(peer, num_experts, N)) & (ids < first_expert(peer + 1, num_experts, N))
            bits |= chosen.to(tl.int32) << peer
        ranks = tl.reduce(bits, 0, _either)  # bit by bit, those that the token goes to
        publish = (ranks & ~(1 << rank)) != 0
        needed = ((ranks >> rank) & 1) != 0
        if N > 1:
            if part == 0:
                known = tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)
                put(tl.where(k < K, (place + 2 * k).to(tl.int64), 0), known, weights.to(tl.int32, bitcast=True), 0, sequence)
            if publish:
                put(tl.where(j < BODY, (place + 2 * (K + SCALES + j)).to(tl.int64), 0), a, b, c, sequence)
        if needed:
            at = own * W + 3 * j
            tl.store(recv_x + at, a, mask=3 * j < W)
            tl.store(recv_x + at + 1, b, mask=3 * j + 1 < W)
            tl.store(recv_x + at + 2, c, mask=3 * j + 2 < W)
        if part == 0:
            _routing(ids, weights, own, recv_idx, recv_weights, rank, num_experts, N, K, KP, True)
            if out_of_range(ids, num_experts):
                tl.store(bad, 1)
            if live:
                for peer in tl.static_range(N):
                    tl.store(in_rank + token * N + peer, ((ranks >> peer) & 1).to(tl.int8))
            if S > 0:
                source = token * S + 3 * s
                s0 = tl.load(x_scales + source, mask=(3 * s < S) & live, other=0)
                s1 = tl.load(x_scales + source + 1, mask=(3 * s + 1 < S) & live, other=0)
                s2 = tl.load(x_scales + source + 2, mask=(3 * s + 2 < S) & live, other=0)
                if N > 1:
                    put(tl.where((s < SCALES) & publish, (place + 2 * (K + s)).to(tl.int64), 0), s0, s1, s2, sequence)
                target = own * S + 3 * s
                tl.store(recv_scales + target, s0, mask=(3 * s < S) & needed)
                tl.store(recv_scales + target + 1, s1, mask=(3 * s + 1 < S) & needed)
                tl.store(recv_scales + target + 2, s2, mask=(3 * s + 2 < S) & needed)

    for job in range(block, jobs, blocks):
        part = job % PARTS
        token = job // PARTS
        for d in range(N - 1):
            peer = (rank + 1 + d) % N
            row = peer * max_tokens + token
            place = bank + 2 * (peer * SHARE + token * STRIDE)
            j = part * COLUMNS + columns
            ids, bits, _ = get(tl.where(k < K, (place + 2 * k).to(tl.int64), 0), sequence, halt)
            ids = tl.where(k < K, ids, -1)
            weights = bits.to(tl.float32, bitcast=True)
            if _routing(ids, weights, row, recv_idx, recv_weights, rank, num_experts, N, K, KP, False):
                word = tl.where(j < BODY, (place + 2 * (K + SCALES + j)).to(tl.int64), 0)
                a, b, c = get4(word, sequence, halt)
                at = row * W + 3 * j
                tl.store(recv_x + at, a, mask=3 * j < W)
                tl.store(recv_x + at + 1, b, mask=3 * j + 1 < W)
                tl.store(recv_x + at + 2, c, mask=3 * j + 2 < W)
                if S > 0 and part == 0:
                    s0, s1, s2 = get(tl.where(s < SCALES, (place + 2 * (K + s)).to(tl.int64), 0), sequence, halt)
                    target = row * S + 3 * s
                    tl.store(recv_scales + target, s0, mask=3 * s < S)
                    tl.store(recv_scales + target + 1, s1, mask=3 * s + 1 < S)
                    tl.store(recv_scales + target + 2, s2, mask=3 * s + 2 < S)
            if part == 0:
                _routing(ids, weights, row, recv_idx, recv_weights, rank, num_experts, N, K, KP, True)
    end(ticket, header)
