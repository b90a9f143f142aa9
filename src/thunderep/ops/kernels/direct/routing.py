"""Routing inside the `direct` kernels: which choices, rows and experts are whose."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_expert(rank: tl.tensor, num_experts: int, N: tl.constexpr) -> tl.tensor:
    """The first expert that a rank owns, see `placement`."""
    return rank * (num_experts // N) + tl.minimum(rank, num_experts % N)


@triton.jit
def load_ids(topk_idx: tl.tensor, token: tl.tensor, live: tl.tensor, K: tl.constexpr, KP: tl.constexpr) -> tl.tensor:
    """[ROWS, KP] ids of tokens; -1 where there are none."""
    k = tl.arange(0, KP)[None, :]
    return tl.load(topk_idx + token[:, None] * K + k, mask=live[:, None] & (k < K), other=-1)


@triton.jit
def out_of_range(ids: tl.tensor, num_experts: int) -> tl.tensor:
    """Whether one of a tile's ids is neither an expert nor -1."""
    return tl.max(tl.ravel(((ids < -1) | (ids >= num_experts)).to(tl.int32)), axis=0) > 0


@triton.jit
def needed_by(
    rank: tl.tensor, ids: tl.tensor, in_rank: tl.tensor, token: tl.tensor, live: tl.tensor, num_experts: int,
    N: tl.constexpr, K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS] 0 or 1: a row goes to `rank`."""
    if K == 0:
        return tl.load(in_rank + token * N + rank, mask=live, other=0).to(tl.int32)
    chosen = (ids >= first_expert(rank, num_experts, N)) & (ids < first_expert(rank + 1, num_experts, N))
    return tl.max(chosen.to(tl.int32), axis=1)


@triton.jit
def store_routing(
    ids: tl.tensor, weights: tl.tensor, row: tl.tensor, filled: tl.tensor, recv_idx: tl.tensor, recv_weights: tl.tensor,
    rank: tl.tensor, num_experts: int, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
) -> None:  # fmt: skip
    """Store local ids and their weights; -1 and 0 where a choice is not this rank's."""
    first = first_expert(rank, num_experts, N)
    mine = (ids >= first) & (ids < first_expert(rank + 1, num_experts, N))
    k = tl.arange(0, KP)[None, :]
    at = row[:, None] * K + k
    inside = filled[:, None] & (k < K)
    tl.store(recv_idx + at, tl.where(mine, ids - first, -1).to(recv_idx.dtype.element_ty), mask=inside)
    tl.store(recv_weights + at, tl.where(mine, weights, 0.0), mask=inside)


@triton.jit
def chosen_here(recv_idx: tl.tensor, row: tl.tensor, live: tl.tensor, K: tl.constexpr, KP: tl.constexpr) -> tl.tensor:
    """[ROWS, KP] 0 or 1: a choice of a received row is an expert of this rank."""
    k = tl.arange(0, KP)[None, :]
    ids = tl.load(recv_idx + row[:, None] * K + k, mask=live[:, None] & (k < K), other=-1)
    return (ids >= 0).to(tl.int32)
