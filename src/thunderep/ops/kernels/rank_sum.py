"""The sum of partial results in rank order, float32, rounded once: what the copy engines cannot do after a combine.

One launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunderep.ops.kernels.device import on_its_device

MAX_BLOCK = 2048
"""Elements of a row that a program sums at a time."""


@triton.jit
def _rank_sum(
    own: tl.tensor,
    by_rank: tl.tensor,
    in_rank: tl.tensor,
    out: tl.tensor,
    columns: int,
    stride: tl.int64,
    RANK: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(N):
        readable = tl.where(tl.load(in_rank + token * N + rank) != 0, columns, 0)
        at = token * columns + column
        if rank == RANK:
            part = tl.load(own + at, mask=column < readable, other=0.0)
        else:
            part = tl.load(by_rank + rank * stride + at, mask=column < readable, other=0.0)
        # Where the token did not go this adds +0, which changes no sum that began with +0.
        total += part.to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


@on_its_device
def rank_sum(own: torch.Tensor, by_rank: torch.Tensor, is_token_in_rank: torch.Tensor, rank: int) -> torch.Tensor:
    """Sum what all ranks hold for this rank's tokens; launched on the current stream.

    Args:
        own: [M, C]: this rank's own partial results.
        by_rank: [N, M, C], contiguous: the other ranks'.
        is_token_in_rank: [T, N] bool; what it does not name is not read.
        rank: This rank.

    Returns:
        [T, C], own's type.
    """
    tokens, num_ranks = is_token_in_rank.shape
    columns = own.shape[1]
    out = own.new_empty(tokens, columns)
    if out.numel():
        block = min(triton.next_power_of_2(columns), MAX_BLOCK)
        with torch.cuda.device_of(out):
            _rank_sum[(tokens, triton.cdiv(columns, block))](
                own, by_rank, is_token_in_rank.contiguous(), out, columns, by_rank.shape[1] * columns,
                RANK=rank, N=num_ranks, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return out
