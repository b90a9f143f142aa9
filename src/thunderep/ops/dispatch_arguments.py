"""What a dispatch may be called with: all that is looked at before anything moves."""

from __future__ import annotations

import torch

from thunderep.buffer import Buffer
from thunderep.ops.rows import metadata, remember, require, require_device, require_id_type
from thunderep.runtime.transport import DTYPES, KINDS, Call

ROW_DTYPES = DTYPES[:7]
_ONE_OF_ROW_DTYPES = f"one of {ROW_DTYPES}"  # made once: it takes microseconds


def validate(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    x_scales: torch.Tensor | None,
) -> None:
    """Raise ValueError for what shapes, types and devices alone tell."""
    require(x.dim() == 2 and x.shape[1] == buffer.hidden, "x", x, f"[T, {buffer.hidden}] (hidden)")
    require(x.dtype in ROW_DTYPES, "x", x.dtype, _ONE_OF_ROW_DTYPES)
    require(x.dtype.itemsize <= buffer.dtype.itemsize, "x", x.dtype, f"elements no wider than the Buffer's {buffer.dtype}")
    require(topk_idx.dim() == 2 and topk_idx.shape[1] == buffer.topk, "topk_idx", topk_idx, f"[T, {buffer.topk}] (topk)")
    require_id_type("topk_idx", topk_idx)
    require(
        topk_weights.dim() == 2 and topk_weights.shape[1] == buffer.topk,
        "topk_weights",
        topk_weights,
        f"[T, {buffer.topk}] (topk)",
    )
    require(topk_weights.dtype == torch.float32, "topk_weights", topk_weights.dtype, torch.float32)
    require(num_experts == buffer.num_experts, "num_experts", num_experts, f"the Buffer's {buffer.num_experts}")
    tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    if x_scales is not None:
        require(x_scales.dim() == 2, "x_scales", x_scales, "[T, S]")
        require(x_scales.dtype == torch.float32, "x_scales", x_scales.dtype, torch.float32)
        tensors["x_scales"] = x_scales
    require_device(buffer, tensors)


def checked(
    owner: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    max_tokens: int,
    x_scales: torch.Tensor | None,
    async_op: bool,
) -> Call:
    """What ranks must agree on. Raises for what shapes, types and devices alone tell."""

    def look() -> Call:
        validate(owner, x, topk_idx, topk_weights, num_experts, x_scales)
        tokens = x.shape[0]
        for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights), ("x_scales", x_scales)):
            require(tensor is None or tensor.shape[0] == tokens, name, tensor, f"{tokens} rows, as x has")
        return Call(
            kind=KINDS.index("dispatch"),
            tokens=tokens,
            max_tokens=_max_rows(owner, tokens, max_tokens),
            dtype=DTYPES.index(x.dtype),
            hidden=owner.hidden,
            topk=owner.topk,
            idx_dtype=DTYPES.index(topk_idx.dtype),
            scales=-1 if x_scales is None else x_scales.shape[1],
            async_op=async_op,
        )

    signature = ("dispatch", async_op, *metadata(x, topk_idx, topk_weights, x_scales), num_experts, max_tokens)
    return remember(owner, signature, look)


def _max_rows(owner: Buffer, tokens: int, max_tokens: int) -> int:
    max_rows = tokens if max_tokens == -1 else max_tokens
    if max_rows < 0:
        raise ValueError(f"max_tokens: got {max_tokens}, expected -1 or at least 0")
    if max_rows > owner.max_tokens:
        name = "x" if max_tokens == -1 else "max_tokens"
        raise RuntimeError(f"{name}: got {max_rows} tokens, more than the Buffer's max_tokens = {owner.max_tokens}")
    if tokens > max_rows:
        raise RuntimeError(f"x: got {tokens} tokens, more than max_tokens = {max_rows} of this call")
    return max_rows


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Raise for ids that no expert has, where the host sees them."""
    if len(topk_idx) and not topk_idx.is_cuda:
        low, high = topk_idx.aminmax()
        if low < -1 or high >= num_experts:
            raise ValueError(f"topk_idx: got ids from {int(low)} to {int(high)}, expected -1 to {num_experts - 1}")
