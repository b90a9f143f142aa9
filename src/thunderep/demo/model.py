"""A byte-level decoder whose feed-forward layers are mixtures of experts.

The experts are one module, called with what the router chose. In one process they are `DenseExperts`; across ranks
`thunderep.nn.ExpertParallel` takes their place (`worker`). Everything else is the same code.

Shape legend: B sequences; S positions; H hidden; A heads; D = H / A; V = 256 bytes; E experts; K experts per token.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from thunderep.demo.config import ModelConfig
from thunderep.demo.dense import DenseExperts

VOCABULARY = 256


class KeyValues:
    """The keys and values that one layer has seen, at most a window of them: two tensors [B, A, S, D]."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def extend(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new positions' keys and values and return all that is in the window."""
        joined = new if self.tensors is None else [torch.cat(pair, dim=2) for pair in zip(self.tensors, new, strict=True)]
        keys, values = (tensor[:, :, -self.window :] for tensor in joined)
        self.tensors = keys, values
        return self.tensors

    def clear(self) -> None:
        """Forget the sequences: what comes next has no rows."""
        if self.tensors is not None:
            keys, values = self.tensors
            self.tensors = keys[:0], values[:0]


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, past: KeyValues | None) -> torch.Tensor:
        """[B, S, H] to [B, S, H]. With a `past`, S must be 1 once it holds anything."""
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        if past is not None:
            k, v = past.extend(k, v)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=s > 1)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(b, s, h))
        return out


class MixtureOfExperts(nn.Module):
    """A router and its experts: softmax, the K best, their weights normalised to a sum of 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.topk = config.experts, config.topk
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts: nn.Module = DenseExperts(config.experts, config.hidden, config.expert_hidden)

    def forward(self, x: torch.Tensor, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route and compute.

        Args:
            x: [B, S, H].
            max_tokens: At least every rank's B * S.

        Returns:
            [B, S, H]; the load-balancing loss, summed over sequences; how many choices each expert got, [E].
        """
        b, s, h = x.shape
        probabilities = self.router(x).softmax(dim=-1)
        weights, idx = probabilities.topk(self.topk, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = self.experts(x.reshape(b * s, h), idx.view(b * s, self.topk), weights.view(b * s, self.topk), max_tokens)
        chosen = functional.one_hot(idx, self.num_experts).to(x.dtype).sum(dim=(1, 2))
        # E * sum over e of (share of choices) * (mean probability): 1 when even. Within each sequence, as in DeepSeek-V3 (arXiv
        # 2412.19437), so that it does not depend on which rank has which sequences.
        balance = self.num_experts * (chosen / (s * self.topk) * probabilities.mean(dim=1)).sum()
        return y.view(b, s, h), balance, chosen.sum(dim=0)


class Block(nn.Module):
    """Attention and a mixture of experts, each on normalised input and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = MixtureOfExperts(config)

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor, max_tokens: int, past: KeyValues | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, S, H] to [B, S, H], with the mixture's loss and load."""
        x = x + self.attention(self.attention_norm(x), rotation, past)
        y, balance, load = self.moe(self.moe_norm(x), max_tokens)
        return x + y, balance, load


class Model(nn.Module):
    """The decoder.

    Args:
        config: Sizes.
        seed: Of the initialisation, which is the same on every device.
    """

    rotation: torch.Tensor

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05, generator=generator)
        self.register_buffer("rotation", self._rotations(torch.arange(config.window)), persistent=False)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, max_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What training needs.

        Args:
            tokens: int64 [B, window].
            targets: int64 [B, window]: the next byte of each.
            max_tokens: At least every rank's B * window.

        Returns:
            Cross-entropy, summed over tokens, in nats; load-balancing loss, summed over sequences and layers; choices that
            each expert of each layer got, float32 [layers, E].
        """
        logits, balance, load = self._decode(tokens, self.rotation, max_tokens, None)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), balance, load

    def next_bytes(self, tokens: torch.Tensor, start: int, max_tokens: int, past: list[KeyValues]) -> torch.Tensor:
        """Logits of the byte after each sequence.

        Args:
            tokens: int64 [B, S], the positions from `start` on; B may be 0.
            start: How many positions `past` has seen.
            max_tokens: At least every rank's B * S.
            past: One entry a layer; extended.

        Returns:
            [B, V].
        """
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return self._decode(tokens, self._rotations(positions), max_tokens, past)[0][:, -1]

    def _decode(
        self, tokens: torch.Tensor, rotation: torch.Tensor, max_tokens: int, past: list[KeyValues] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        balances, loads = [], []
        for layer, block in enumerate(self.blocks):
            x, balance, load = block(x, rotation, max_tokens, past[layer] if past else None)
            balances.append(balance)
            loads.append(load)
        return self.head(self.norm(x)), torch.stack(balances).sum(), torch.stack(loads)

    def _rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines of each position's angles, [2, S, D / 2]."""
        dim = self.config.hidden // self.config.heads
        frequency = 1000.0 ** -(torch.arange(0, dim, 2, device=positions.device) / dim)
        angle = positions[:, None] * frequency
        return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels by its position's angle; x is [B, A, S, D]."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
