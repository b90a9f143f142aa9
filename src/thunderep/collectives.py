"""Collectives of dense tensors over a Buffer's transports, for what is not routed: tensor parallelism, gathered logits, ...

They need nothing of the Buffer but its ranks, staging and transport: rows may be of any width and number. All ranks call
them in one order, as `dispatch` and `combine`, among which they may stand. Each is differentiable; sums are added in float32
in rank order and rounded once, so they are bitwise the same on every rank, in every run and over every transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import thunderep.ops  # noqa: F401  registers torch.ops.thunderep
from thunderep.buffer import Buffer


def all_gather(x: torch.Tensor, buffer: Buffer, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Give every rank the rows of all ranks.

    Args:
        x: [T, ...]: this rank's rows; bf16, fp16, fp32, fp64, fp8 (e4m3, e5m2, e8m0) or int8, uint8, int16, int32 or
            int64, any strides. Only T may differ from rank to rank.
        buffer: The Buffer.
        sizes: T of every rank, in rank order, the same list on all ranks; None: all have this rank's T.

    Returns:
        [sum of T, ...], x's type: rank 0's rows, then rank 1's, ..., bit for bit. The gradient of x is the
        `reduce_scatter` of the ranks' gradients, which takes bf16, fp16 and fp32.

    Raises:
        ValueError: A shape, type, device or size is wrong.
        RuntimeError: Ranks that disagree, a closed or forked Buffer; over "direct", rows too wide for the staging.
        PeerError: A peer died or stayed silent; the Buffer is broken from then on.
    """
    result: torch.Tensor = torch.ops.thunderep.all_gather(x, buffer.open_name, sizes)
    return result


def reduce_scatter(y: torch.Tensor, buffer: Buffer, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Sum the ranks' tensors, and give every rank its own rows of the sum.

    Args:
        y: [sum of T, ...] bf16, fp16 or fp32: rank 0's rows, then rank 1's, ..., as `all_gather` returns them; of one shape on
            all ranks.
        buffer: The Buffer.
        sizes: T of every rank, in rank order, the same list on all ranks; None: an N-th of the rows each.

    Returns:
        [T, ...] of y's type. The gradient of y is the `all_gather` of the ranks' gradients.

    Raises:
        ValueError, RuntimeError, PeerError: As `all_gather`.
    """
    result: torch.Tensor = torch.ops.thunderep.reduce_scatter(y, buffer.open_name, sizes)
    return result


def all_reduce(x: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """Sum the ranks' tensors.

    Args:
        x: bf16, fp16 or fp32, of any shape, the same on all ranks.
        buffer: The Buffer.

    Returns:
        The sum, of x's shape and type. The gradient of x is the `all_reduce` of the ranks' gradients.

    Raises:
        ValueError, RuntimeError, PeerError: As `all_gather`.
    """
    result: torch.Tensor = torch.ops.thunderep.all_reduce(x, buffer.open_name)
    return result
