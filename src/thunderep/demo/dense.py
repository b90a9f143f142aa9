"""All experts in one process, in plain torch: what the expert-parallel ones are compared with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class DenseExperts(nn.Module):
    """E SwiGLU experts; each row goes through those that it chose, one expert after the other.

    Args:
        num_experts: E.
        hidden: H, columns of a row.
        expert_hidden: F, the experts' inner size.
    """

    def __init__(self, num_experts: int, hidden: int, expert_hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, hidden, 2 * expert_hidden))
        self.down = nn.Parameter(torch.empty(num_experts, expert_hidden, hidden))

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, max_tokens: int | None = None
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            x: [T, H].
            topk_idx: [T, K] int64.
            topk_weights: [T, K].
            max_tokens: For experts on many ranks; unused here.

        Returns:
            [T, H].
        """
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            row, choice = torch.where(topk_idx == expert)
            gate, up = (x[row] @ gate_up).chunk(2, dim=-1)
            y = y.index_add(0, row, (functional.silu(gate) * up) @ down * topk_weights[row, choice, None])
        return y
