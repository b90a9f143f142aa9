"""The oracle: what the operators mean, in plain torch, for all ranks at once. It imports none of the runtime.

Slow and obvious on purpose. Unspecified rows are zero here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Received = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def dispatch(
    xs: Sequence[torch.Tensor],
    topk_idxs: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    num_experts: int,
    max_tokens: int,
    x_scales: Sequence[torch.Tensor] | None = None,
) -> list[Received]:
    """What `thunderep::dispatch` returns on every rank.

    Args:
        xs: Each rank's [T, H].
        topk_idxs: Each rank's [T, K].
        topk_weights: Each rank's [T, K].
        num_experts: E.
        max_tokens: M.
        x_scales: Each rank's [T, S], or None.
    """
    num_ranks, topk = len(xs), topk_idxs[0].shape[1]
    results = []
    for me in range(num_ranks):
        recv_x = xs[0].new_zeros(num_ranks * max_tokens, xs[0].shape[1])
        recv_idx = topk_idxs[0].new_full((num_ranks * max_tokens, topk), -1)
        recv_weights = topk_weights[0].new_zeros(num_ranks * max_tokens, topk)
        recv_scales = topk_weights[0].new_zeros(num_ranks * max_tokens, x_scales[0].shape[1] if x_scales else 0)
        for source in range(num_ranks):
            for i in range(len(xs[source])):
                row = source * max_tokens + i
                for k in range(topk):
                    expert = int(topk_idxs[source][i, k])
                    if expert >= 0 and _owner(expert, num_experts, num_ranks) == me:
                        recv_idx[row, k] = expert - _first(me, num_experts, num_ranks)
                        recv_weights[row, k] = topk_weights[source][i, k]
                        recv_x[row] = xs[source][i]
                        if x_scales:
                            recv_scales[row] = x_scales[source][i]
        in_rank = torch.zeros(len(xs[me]), num_ranks, dtype=torch.bool)
        for i in range(len(xs[me])):
            for expert in topk_idxs[me][i].tolist():
                if expert >= 0:
                    in_rank[i, _owner(expert, num_experts, num_ranks)] = True
        results.append((recv_x, recv_idx, recv_weights, recv_scales, in_rank))
    return results


def combine(ys: Sequence[torch.Tensor], in_ranks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `thunderep::combine` returns on every rank.

    Args:
        ys: Each rank's [R, H].
        in_ranks: Each rank's is_token_in_rank, [T, N].
    """
    num_ranks, max_tokens = len(ys), len(ys[0]) // len(ys)
    results = []
    for me, in_rank in enumerate(in_ranks):
        total = torch.zeros(len(in_rank), ys[0].shape[1], dtype=torch.float32)
        for i in range(len(in_rank)):
            for rank in range(num_ranks):
                if in_rank[i, rank]:
                    total[i] += ys[rank][me * max_tokens + i].float()
        results.append(total.to(ys[0].dtype))
    return results


def permute(
    x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int, capacity: int = -1, alignment: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `thunderep::permute` returns.

    Args:
        x: [R, H].
        topk_idx: [R, K], local ids.
        num_local_experts: L.
        capacity: Rows of expert_x; -1: just enough.
        alignment: What each group's size is a multiple of.
    """
    row_id_map = torch.full(topk_idx.shape, -1, dtype=torch.int32)
    offsets = torch.zeros(num_local_experts, dtype=torch.int32)
    origins: list[int | None] = []
    for expert in range(num_local_experts):
        for r in range(topk_idx.shape[0]):
            for k in range(topk_idx.shape[1]):
                if topk_idx[r, k] == expert:
                    row_id_map[r, k] = len(origins)
                    origins.append(r)
        while len(origins) % alignment:
            origins.append(None)
        offsets[expert] = len(origins)
    bits = x.contiguous().view(torch.uint8)
    expert_x = bits.new_zeros(len(origins) if capacity == -1 else capacity, bits.shape[1])
    for row, origin in enumerate(origins):
        if origin is not None:
            expert_x[row] = bits[origin]
    return expert_x.view(x.dtype), offsets, row_id_map


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `thunderep::quantize_fp8` returns.

    Args:
        x: [T, H].
    """
    tokens, hidden = x.shape
    x_fp8 = torch.full((tokens, hidden), torch.nan, dtype=torch.float32).to(torch.float8_e4m3fn)
    x_scales = torch.zeros(tokens, -(-hidden // 128), dtype=torch.float32)
    for i in range(tokens):
        for group in range(x_scales.shape[1]):
            columns = slice(group * 128, (group + 1) * 128)
            value = x[i, columns].float()
            finite = value.isfinite()
            largest = torch.cat((value[finite].abs(), value.new_zeros(1))).max()
            x_scales[i, group] = torch.maximum(largest / 448, torch.tensor(2.0**-126, dtype=torch.float32))
            nearest = (value / x_scales[i, group]).to(torch.float8_e4m3fn)
            x_fp8[i, columns].view(torch.uint8)[finite] = nearest.view(torch.uint8)[finite]
    return x_fp8, x_scales


def dequantize_fp8(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """What e4m3 rows and their scales stand for, float32 [T, H].

    Args:
        x_fp8: [T, H].
        x_scales: [T, S].
    """
    return x_fp8.float() * x_scales.repeat_interleave(128, dim=1)[:, : x_fp8.shape[1]]


def unpermute(expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """What `thunderep::unpermute` returns.

    Args:
        expert_y: [C, H].
        row_id_map: [R, K].
        topk_weights: [R, K].
    """
    sum_type = torch.float64 if expert_y.dtype == torch.float64 else torch.float32
    total = torch.zeros(row_id_map.shape[0], expert_y.shape[1], dtype=sum_type)
    for r in range(row_id_map.shape[0]):
        for k in range(row_id_map.shape[1]):
            if row_id_map[r, k] >= 0:
                product = topk_weights[r, k].to(sum_type) * expert_y[row_id_map[r, k]].to(sum_type)
                total[r] += product
    return total.to(expert_y.dtype)


def _first(rank: int, num_experts: int, num_ranks: int) -> int:
    """The first expert of a rank: ranks in order own contiguous blocks, the first E % N of them one expert more."""
    return sum(num_experts // num_ranks + (r < num_experts % num_ranks) for r in range(rank))


def _owner(expert: int, num_experts: int, num_ranks: int) -> int:
    return next(r for r in reversed(range(num_ranks)) if _first(r, num_experts, num_ranks) <= expert)
