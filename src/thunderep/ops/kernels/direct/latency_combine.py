"""Combine of few tokens in one launch: every word carries its own signal (`words`), nothing waits for a fence.

Only chosen rows are published, each to the peer whose token it is, 12 bytes a word; who sums knows from `in_rank` which
ones to poll. As an operation may have no row to poll from a peer, the last block exchanges a flag with each: that keeps
the rule of `dispatch` by which the two banks are reused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thunderep.ops.kernels.direct.signal import begin, end, post, wait_all
from thunderep.ops.kernels.direct.words import get4, put


@triton.jit
def _low(bits: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """The first element in 32 bits, as float32."""
    if TYPE.primitive_bitwidth == 32:
        low = bits.to(tl.float32, bitcast=True)
    else:
        low = (bits & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low


@triton.jit
def _high(bits: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """The second element in 32 bits, as float32."""
    return (bits >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _pair(low: tl.tensor, high: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """The inverse of `_low` and `_high`; rounds."""
    if TYPE.primitive_bitwidth == 32:
        bits = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        bits = first | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return bits


@triton.jit(do_not_specialize=["tokens", "max_tokens"])
def latency_combine(
    words: tl.tensor, flags: tl.tensor, header: tl.tensor, ticket: tl.tensor, tokens: int,
    y: tl.tensor, recv_idx: tl.tensor, in_rank: tl.tensor, out: tl.tensor, max_tokens: int,
    RANK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, W: tl.constexpr, TYPE: tl.constexpr,
    COLUMNS: tl.constexpr, KP: tl.constexpr, SHARE: tl.constexpr, FLAGS: tl.constexpr,
) -> None:  # fmt: skip
    """One combine; tensors are as `combine` has them, rows as 32-bit words.

    Args:
        words: Where words live, as pairs of 64 bits: [2 banks, N owners, SHARE words].
        flags: [2 banks, N owners, N readers, FLAGS], 64 bits each.
        header: This rank's, see `window`; its first word stops the kernel.
        ticket: See `signal`.
        tokens: T.
        y: [N * M, W].
        recv_idx: [N * M, K].
        in_rank: [T, N] one byte each.
        out: [T, W].
        max_tokens: M.
        RANK: This rank.
        N: Ranks.
        K: Choices a token.
        W: 32-bit words in a row.
        TYPE: Type of an element.
        COLUMNS: Words of a row that a block handles at a time; four a thread.
        KP: K or more, a power of two; one choice a thread.
        SHARE: Words that a rank may publish.
        FLAGS: Flags of a pair; the first is used.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0) - 1
    sequence = begin(ticket, header)
    bank = words + (sequence & 1) * (2 * N * SHARE)
    BODY: tl.constexpr = (W + 2) // 3
    PARTS: tl.constexpr = (BODY + COLUMNS - 1) // COLUMNS
    jobs = max_tokens * PARTS
    halt = header.to(tl.int64)
    k = tl.arange(0, KP)
    columns = tl.arange(0, COLUMNS)

    if block == blocks:
        pairs = flags + (sequence & 1) * (N * N * FLAGS)
        for d in tl.static_range(1, N):
            post(pairs + (RANK * N + (RANK + d) % N) * FLAGS, sequence, block * 0)
        # Says only that the peers' previous operations have ended; the rows need nothing of it.
        wait_all(pairs + RANK * FLAGS, N * FLAGS * 8, N, RANK, sequence, header)
    else:
        # A block publishes the parts that the same block of each peer sums: in whatever order blocks run, none waits for ever.
        for job in range(block, jobs, blocks):
            token = job // PARTS
            j = (job % PARTS) * COLUMNS + columns
            for d in range(N - 1):
                row = (RANK + 1 + d) % N * max_tokens + token
                at = row * W + 3 * j
                # All loads are issued before the first is used.
                a = tl.load(y + at, mask=3 * j < W, other=0)
                b = tl.load(y + at + 1, mask=3 * j + 1 < W, other=0)
                c = tl.load(y + at + 2, mask=3 * j + 2 < W, other=0)
                ids = tl.load(recv_idx + row * K + k, mask=k < K, other=-1)
                if tl.max((ids >= 0).to(tl.int32), axis=0) > 0:
                    target = bank + 2 * (RANK * SHARE + (d * max_tokens + token) * BODY + j)
                    put(tl.where(j < BODY, target.to(tl.int64), 0), a, b, c, sequence)

        for job in range(block, jobs, blocks):
            token = job // PARTS
            j = (job % PARTS) * COLUMNS + columns
            if token < tokens:
                low0 = tl.zeros((COLUMNS,), tl.float32)
                high0, low1, high1, low2, high2 = low0, low0, low0, low0, low0
                for source in tl.static_range(N):  # rank order, whoever is asked first
                    if tl.load(in_rank + token * N + source) != 0:
                        if source == RANK:
                            at = (RANK * max_tokens + token) * W + 3 * j
                            a = tl.load(y + at, mask=3 * j < W, other=0)
                            b = tl.load(y + at + 1, mask=3 * j + 1 < W, other=0)
                            c = tl.load(y + at + 2, mask=3 * j + 2 < W, other=0)
                        else:
                            d = (RANK + N - 1 - source) % N
                            place = bank + 2 * (source * SHARE + (d * max_tokens + token) * BODY + j)
                            a, b, c = get4(tl.where(j < BODY, place.to(tl.int64), 0), sequence, halt)
                        low0 += _low(a, TYPE)
                        low1 += _low(b, TYPE)
                        low2 += _low(c, TYPE)
                        if TYPE.primitive_bitwidth < 32:
                            high0 += _high(a, TYPE)
                            high1 += _high(b, TYPE)
                            high2 += _high(c, TYPE)
                at = token * W + 3 * j
                tl.store(out + at, _pair(low0, high0, TYPE), mask=3 * j < W)
                tl.store(out + at + 1, _pair(low1, high1, TYPE), mask=3 * j + 1 < W)
                tl.store(out + at + 2, _pair(low2, high2, TYPE), mask=3 * j + 2 < W)
    end(ticket, header)
