"""What becomes of ids and weights once they have been gathered: local ids, this rank's weights, and who a token went to.

Two launches for what copy engines cannot do after a dispatch. They wait for nothing, and find ids out of range without the
host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

BLOCK = 1024
"""Choices that a program looks at."""

TOKENS = 128
"""Tokens that a program looks at."""


@triton.jit(do_not_specialize=["choices", "first", "end"])
def _localize(idx: tl.tensor, weights: tl.tensor, choices: int, first: int, end: int, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < choices
    expert = tl.load(idx + at, mask=inside, other=-1)
    mine = (expert >= first) & (expert < end)
    weight = tl.load(weights + at, mask=inside & mine, other=0.0)
    tl.store(idx + at, tl.where(mine, expert - first, -1), mask=inside)
    tl.store(weights + at, weight, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _in_rank(
    idx: tl.tensor,
    bounds: tl.tensor,
    result: tl.tensor,
    bad: tl.tensor,
    tokens: int,
    K: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    experts = tl.load(bounds + N)
    wrong = tl.zeros([TOKENS], tl.int32)
    for k in range(K):
        expert = tl.load(idx + token * K + k, mask=inside, other=-1)
        wrong |= ((expert < -1) | (expert >= experts)).to(tl.int32)
    for rank in tl.static_range(N):
        first, end = tl.load(bounds + rank), tl.load(bounds + rank + 1)
        went = tl.zeros([TOKENS], tl.int32)
        for k in range(K):
            expert = tl.load(idx + token * K + k, mask=inside, other=-1)
            went |= ((expert >= first) & (expert < end)).to(tl.int32)
        tl.store(result + token * N + rank, went != 0, mask=inside)
    if tl.max(wrong, 0) > 0:
        tl.store(bad, 1)


@on_its_device
def localize(idx: torch.Tensor, weights: torch.Tensor, experts: range) -> None:
    """Turn received global ids into local ones, in place: -1, and weight 0, where the expert is not one of `experts`.

    Args:
        idx: [R, K] int32 or int64, contiguous.
        weights: [R, K] float32, contiguous.
        experts: This rank's.
    """
    if idx.numel():
        with torch.cuda.device_of(idx):
            _localize[(triton.cdiv(idx.numel(), BLOCK),)](idx, weights, idx.numel(), experts.start, experts.stop, BLOCK=BLOCK)


@on_its_device
def in_rank(idx: torch.Tensor, bounds: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    """Which ranks each token goes to.

    Args:
        idx: [T, K] int32 or int64 global ids, contiguous.
        bounds: [N + 1] int64 on the device: the first expert of each rank, then E.
        bad: One int32, which the device can reach: becomes 1 if an id is outside -1..E-1.

    Returns:
        [T, N] bool.
    """
    tokens, topk = idx.shape
    num_ranks = len(bounds) - 1
    result = torch.empty(tokens, num_ranks, dtype=torch.bool, device=idx.device)
    if tokens:
        with torch.cuda.device_of(idx):
            _in_rank[(triton.cdiv(tokens, TOKENS),)](idx, bounds, result, bad, tokens, K=topk, N=num_ranks, TOKENS=TOKENS)
    return result
