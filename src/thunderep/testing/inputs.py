"""Random inputs that any rank can make for every rank: the seed says it all."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """What one rank brings to a dispatch.

    Attributes:
        x: [T, H] rows.
        topk_idx: [T, K] global expert ids, -1 for none.
        topk_weights: [T, K] float32.
        x_scales: [T, S] float32, or None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    x_scales: torch.Tensor | None = None


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random elements of any type that dispatch moves: normal floats, uniform integers."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, min(info.max + 1, 2**63 - 1), shape, generator=generator, dtype=torch.int64).to(dtype)


def random_tokens(
    seed: int,
    tokens: int,
    *,
    hidden: int,
    num_experts: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
    idx_dtype: torch.dtype = torch.int64,
    scales: int = 0,
    drop: float = 0.0,
    skew: float = 0.0,
    distinct: bool = True,
) -> Tokens:
    """One rank's tokens.

    Args:
        seed: Same seed, same tokens, in every process.
        tokens: T.
        hidden: H.
        num_experts: E.
        topk: K.
        dtype: Type of the rows.
        idx_dtype: Type of the ids.
        scales: S; 0 for none.
        drop: Share of choices that are -1.
        skew: Share of choices that go to one expert, the same for all tokens of a seed.
        distinct: Whether a token's experts differ as far as there are enough of them.
    """
    generator = torch.Generator().manual_seed(seed)
    x = random_rows((tokens, hidden), dtype, generator)
    if distinct and topk <= num_experts:
        idx = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :topk]
    else:
        idx = torch.randint(0, num_experts, (tokens, topk), generator=generator)
    favourite = torch.randint(0, num_experts, (1,), generator=generator)
    idx = torch.where(torch.rand(tokens, topk, generator=generator) < skew, favourite, idx)
    idx = torch.where(torch.rand(tokens, topk, generator=generator) < drop, -1, idx)
    weights = torch.rand(tokens, topk, generator=generator)
    x_scales = torch.rand(tokens, scales, generator=generator) if scales else None
    return Tokens(x, idx.to(idx_dtype), weights, x_scales)


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides: "contiguous", "transposed", "sliced" (every other column) or "offset"."""
    if how == "transposed":
        return tensor.t().contiguous().t()
    if how == "sliced":
        wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] * 2)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if how == "offset":
        flat = tensor.new_empty(tensor.numel() + 1)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    return tensor.contiguous()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits; NaNs with equal bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
