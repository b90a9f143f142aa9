"""What dispatch and combine share: checks of arguments, and the sum of the rows that come back to their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from thunderep.buffer import Buffer
from thunderep.runtime.transport import DTYPES, KINDS, Call

_BLOCK_ROWS = 128
"""Rows that are summed at a time on the CPU: their float32 sums stay in its cache."""


def require(condition: bool, name: str, got: object, expected: object) -> None:
    """Raise ValueError with the argument's name, what came and what was expected, unless `condition`."""
    if not condition:
        shown = f"shape {list(got.shape)}" if isinstance(got, torch.Tensor) else got
        raise ValueError(f"{name}: got {shown}, expected {expected}")


def require_device(buffer: Buffer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless all tensors are where the Buffer's are."""
    for name, tensor in tensors.items():
        require(
            tensor.device.type == buffer.device.type,
            name,
            f"a tensor on {tensor.device}",
            f"one on the Buffer's {buffer.device}",
        )


def rows_sum(owner: Buffer, kind: str, payloads: Sequence[torch.Tensor], is_token_in_rank: torch.Tensor) -> list[torch.Tensor]:
    """Return rows to the ranks whose tokens they are and sum them: float32, rank order, rounded once.

    Args:
        owner: The Buffer.
        kind: Which operation this is.
        payloads: Each [R, ...], R = N * M.
        is_token_in_rank: [T, N] bool; rows of ranks that a token did not go to are not read.

    Returns:
        For each payload [T, ...] of its type.
    """
    payloads = [payload.contiguous() for payload in payloads]
    tokens, max_rows = is_token_in_rank.shape[0], payloads[0].shape[0] // owner.num_ranks
    parts = [torch.empty_like(payload) for payload in payloads]
    call = Call(
        KINDS.index(kind),
        tokens,
        max_rows,
        DTYPES.index(payloads[0].dtype),
        payloads[0].shape[1],
        sum(p.shape[1] for p in payloads[1:]),
    )
    with owner.operation() as transport:
        transport.combine(call, payloads, parts)
    results = []
    for payload, part in zip(payloads, parts, strict=True):
        sources = [payload if rank == owner.rank else part for rank in range(owner.num_ranks)]
        by_rank = [source[rank * max_rows :][:tokens] for rank, source in enumerate(sources)]
        results.append(_sum_in_rank_order(by_rank, is_token_in_rank))
    return results


def _sum_in_rank_order(by_rank: Sequence[torch.Tensor], is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """Sum [T, C] tensors of all ranks where their column of [T, N] is set, in float32, and round once."""
    tokens, width = by_rank[0].shape
    result = by_rank[0].new_empty(tokens, width)
    if result.device.type != "cpu":  # a mask costs more than picking rows, but needs no row numbers on the host
        total = result.new_zeros(tokens, width, dtype=torch.float32)
        for rank, part in enumerate(by_rank):
            total += part.masked_fill(~is_token_in_rank[:, rank : rank + 1], 0)
        return result.copy_(total)
    for start in range(0, tokens, _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        total = torch.zeros(result[rows].shape, dtype=torch.float32)
        for rank, part in enumerate(by_rank):
            chosen = is_token_in_rank[rows, rank].nonzero().squeeze(1)
            total.index_add_(0, chosen, part[rows].index_select(0, chosen).float())
        result[rows] = total
    return result
