"""Dispatch and combine for frameworks that expect an all-gather: the rows of all ranks one after another, global expert ids.

Such a framework's experts skip ids of other ranks' experts. So only tokens that chose an expert of this rank need to come
here, and only their results need to go back, which `dispatch` and `combine` know how to do. What they cannot carry (router
logits, packed rows, experts that are not placed in blocks) is gathered whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from thunderep.api import DispatchOutput, combine, dispatch
from thunderep.buffer import Buffer
from thunderep.collectives import all_gather, reduce_scatter
from thunderep.ops.collectives import pad_rows, unpad_rows
from thunderep.ops.dispatch_arguments import ROW_DTYPES
from thunderep.ops.rows import IDX_DTYPES


class Gathered(NamedTuple):
    """What `Exchange.dispatch` returns. R is the sum of all ranks' T; rank 0's rows come first, then rank 1's, ..."""

    x: torch.Tensor
    """[R, H]: the tokens that chose an expert of this rank. Other rows are theirs too, or unspecified."""
    topk_weights: torch.Tensor
    """[R, K]; they may be 0 where the id is of another rank's expert."""
    topk_idx: torch.Tensor
    """[R, K]: global ids. Those of other ranks' experts may be replaced by each other; none becomes -1."""
    extra: list[torch.Tensor]
    """As x."""
    routing: DispatchOutput | None
    """What `Exchange.combine` needs."""


class Exchange:
    """Dispatch and combine of one group of ranks, each of whose numbers of tokens all ranks know.

    Args:
        buffer: The ranks, and what moves rows between them.
        blocks: Whether experts are placed as `thunderep.local_experts` has it: then only what is needed moves.
    """

    def __init__(self, buffer: Buffer, blocks: bool) -> None:
        self.buffer = buffer
        # Where a rank owns all experts, no id stands for another rank's.
        self._blocks = blocks and buffer.num_ranks > 1 and buffer.num_experts > 1

    def warm_up(self, x: torch.Tensor, topk_idx: torch.Tensor, most_tokens: int, extra: Sequence[torch.Tensor] = ()) -> None:
        """Exchange 1, 4, 16, ... up to so many tokens a rank, so that no kernel is compiled later. Collective.

        Args:
            x: [T, H], of which only H, type and device matter; so with topk_idx, [T, K].
            topk_idx: Likewise.
            most_tokens: The largest T that will ever be.
            extra: As `dispatch` has it; likewise.
        """
        if not self._routable(x, topk_idx.float(), topk_idx, extra):
            return
        buffer, tokens = self.buffer, 1
        while tokens <= most_tokens:
            rows, idx, *scales = (t.new_zeros(tokens, t.shape[1]) for t in (x, topk_idx, *extra))
            weights = torch.zeros_like(idx, dtype=torch.float32)
            d = dispatch(rows, idx, weights, buffer.num_experts, buffer, x_scales=scales[0] if scales else None)
            combine(d.recv_x.to(buffer.dtype), d, buffer)
            tokens *= 4

    def dispatch(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: Sequence[int],
        extra: Sequence[torch.Tensor] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """Bring every token to where its experts are. Collective.

        Args:
            x: [T, H].
            topk_weights: [T, K].
            topk_idx: [T, K] global expert ids.
            sizes: T of every rank.
            extra: Tensors of [T, ...] that travel with the rows, such as their scales.
            meanwhile: Called while the tokens are under way, if they travel by `thunderep.dispatch`.

        Raises:
            ValueError, RuntimeError, PeerError: As `thunderep.dispatch`.
        """
        if not self._routable(x, topk_weights, topk_idx, extra):
            rows, weights, idx, *others = self.gather([x, topk_weights, topk_idx, *extra], sizes)
            return Gathered(rows, weights, idx, others, None)
        buffer, most = self.buffer, max(sizes)
        arguments = x, topk_idx, topk_weights, buffer.num_experts, buffer, most, extra[0] if extra else None
        if meanwhile is None:
            d = dispatch(*arguments)
        else:
            work = dispatch(*arguments, async_op=True)
            meanwhile()
            d = work.wait()
        rows, idx, weights, scales = (unpad_rows(tensor, sizes, most) for tensor in d[:4])
        # -1 becomes the expert before this rank's first, or, for rank 0, the last of all: another rank's.
        idx = (idx + buffer.local_experts.start).remainder(buffer.num_experts)
        return Gathered(rows, weights, idx, [scales] if extra else [], d)

    def gather(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """All ranks' rows of each tensor, [T, ...]. Collective; `combine` then takes no routing."""
        # As frameworks have it, sizes mean nothing where all are alike: a scale for all rows is one row.
        uneven = list(sizes) if any(size != sizes[0] for size in sizes) else None
        return [all_gather(tensor, self.buffer, uneven) for tensor in tensors]

    def combine(self, y: torch.Tensor, sizes: Sequence[int], routing: DispatchOutput | None) -> torch.Tensor:
        """Sum the ranks' results for this rank's tokens. Collective.

        Args:
            y: [R, W] bf16, fp16 or fp32: this rank's experts' weighted results for each row that `dispatch` returned, or for
                what `gather` did. W may be less than H: some experts cut columns that only pad.
            sizes: As `dispatch` had them.
            routing: What `dispatch` returned; None after `gather`. With it, rows without a choice of this rank's experts
                are not read.

        Returns:
            [T, W], y's type.

        Raises:
            ValueError, RuntimeError, PeerError: As `thunderep.combine`.
        """
        if routing is None:
            return reduce_scatter(y, self.buffer, list(sizes))
        return _cut(combine(self._padded(y, sizes), routing, self.buffer), y.shape[1])

    def start_combine(
        self, y: torch.Tensor, sizes: Sequence[int], routing: DispatchOutput | None
    ) -> Callable[[], torch.Tensor]:
        """Begin to `combine`; what comes back gives the result, on the stream that calls it."""
        if routing is None:
            result = reduce_scatter(y, self.buffer, list(sizes))
            return lambda: result
        work, width = combine(self._padded(y, sizes), routing, self.buffer, async_op=True), y.shape[1]
        return lambda: _cut(work.wait(), width)

    def _padded(self, y: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """[N * M, H] of [R, W], as `thunderep.combine` takes it."""
        rows, missing = pad_rows(y, sizes, max(sizes)), self.buffer.hidden - y.shape[1]
        return functional.pad(rows, (0, missing)) if missing > 0 else rows

    def _routable(self, x: torch.Tensor, weights: torch.Tensor, idx: torch.Tensor, extra: Sequence[torch.Tensor]) -> bool:
        """Whether `dispatch` carries these; the same on all ranks, which have tensors of one kind."""
        buffer = self.buffer
        return (
            self._blocks
            and x.dim() == 2 and x.shape[1] == buffer.hidden
            and x.dtype in ROW_DTYPES and x.dtype != torch.uint8  # packed, so results are wider
            and x.dtype.itemsize <= buffer.dtype.itemsize
            and weights.dtype == torch.float32 and idx.dtype in IDX_DTYPES and idx.shape[1] == buffer.topk
            and (not extra or (len(extra) == 1 and extra[0].dim() == 2 and extra[0].dtype == torch.float32))
        )  # fmt: skip


def _cut(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows[:, :width].contiguous()
