"""Workspace: memory for tensors that last no longer than one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thunderep.runtime.chunks import ALIGNMENT


class Workspace:
    """Gives tensors for use within one operation of a Buffer.

    On the CPU they share memory that stays: new memory would cost a page fault every 4 KiB, which is more than the copies.

    Args:
        nbytes: What an operation takes in rows of the Buffer's dtype; padding comes on top.
        device: Where the tensors live.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu") if device.type == "cpu" else None

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of these shapes and types, until the next call."""
        if self._memory is None:
            return [torch.empty_like(tensor) for tensor in tensors]
        parts, used = [], 0
        for tensor in tensors:
            part = self._memory[used : used + tensor.nbytes]
            if len(part) < tensor.nbytes:  # rows wider than the Buffer's dtype
                part = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
            parts.append(part.view(tensor.dtype).view(tensor.shape))
            used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return parts
