"""`thunderep::combine`: partial results return to their tokens' ranks and are summed there.

See the contract in `api.combine`.
"""

from __future__ import annotations

from typing import Any

import torch

from thunderep.background import Rest
from thunderep.buffer import Buffer, lookup
from thunderep.ops.library import library
from thunderep.ops.rows import (
    kernels,
    metadata,
    remember,
    require,
    require_device,
    require_id_type,
    rows_call,
    rows_sum,
)
from thunderep.runtime.transport import DTYPES, KINDS, Call

SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ONE_OF_SUM_DTYPES = f"one of {SUM_DTYPES}"  # made once: it takes microseconds


def validate(owner: Buffer, name: str, y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor) -> None:
    """Raise ValueError for what shapes, types and devices alone tell."""
    require(y.dim() == 2 and y.shape[1] == owner.hidden, name, y, f"[R, {owner.hidden}] (hidden)")
    require(y.dtype in SUM_DTYPES, name, y.dtype, _ONE_OF_SUM_DTYPES)
    require(
        recv_topk_idx.dim() == 2 and recv_topk_idx.shape[1] == owner.topk,
        "recv_topk_idx",
        recv_topk_idx,
        f"[R, {owner.topk}] (topk)",
    )
    require_id_type("recv_topk_idx", recv_topk_idx)
    require(
        is_token_in_rank.dim() == 2 and is_token_in_rank.shape[1] == owner.num_ranks,
        "is_token_in_rank", is_token_in_rank, f"[T, {owner.num_ranks}] (ranks)",
    )  # fmt: skip
    require(is_token_in_rank.dtype == torch.bool, "is_token_in_rank", is_token_in_rank.dtype, torch.bool)
    require_device(owner, {name: y, "recv_topk_idx": recv_topk_idx, "is_token_in_rank": is_token_in_rank})


def _validate_rows(owner: Buffer, name: str, rows: int, recv_topk_idx: torch.Tensor, tokens: int) -> int:
    """Return M; raise unless the numbers of rows fit together."""
    require(rows == recv_topk_idx.shape[0], name, f"{rows} rows", f"{recv_topk_idx.shape[0]}, as recv_topk_idx has")
    require(rows % owner.num_ranks == 0, name, f"{rows} rows", f"a multiple of the {owner.num_ranks} ranks, as dispatch gave")
    max_rows = rows // owner.num_ranks
    if max_rows > owner.max_tokens:
        raise RuntimeError(f"{name}: got {max_rows} rows a rank, more than the Buffer's max_tokens = {owner.max_tokens}")
    if tokens > max_rows:
        raise RuntimeError(f"is_token_in_rank: got {tokens} tokens, more than the {max_rows} rows a rank of {name}")
    return max_rows


def checked(
    owner: Buffer, y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, async_op: bool
) -> Call:
    """What ranks must agree on. Raises for what shapes, types and devices alone tell."""

    def look() -> Call:
        validate(owner, "y", y, recv_topk_idx, is_token_in_rank)
        _validate_rows(owner, "y", y.shape[0], recv_topk_idx, is_token_in_rank.shape[0])
        return rows_call(owner, "combine", [y], is_token_in_rank, async_op=async_op)

    return remember(owner, ("combine", async_op, *metadata(y, recv_topk_idx, is_token_in_rank)), look)


def run(
    y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    """What the operator does."""
    return begin(y, recv_topk_idx, is_token_in_rank, buffer, async_op=False).run()  # type: ignore[no-any-return]


def begin(
    y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, async_op: bool = True
) -> Rest:
    """What of it moves data, and what is left."""
    owner = lookup(buffer)
    call = checked(owner, y, recv_topk_idx, is_token_in_rank, async_op)
    rest = rows_sum(owner, call, [y], recv_topk_idx, is_token_in_rank)
    return Rest(lambda: rest.run()[0], rest.reads)


@torch.library.register_fake("thunderep::combine", lib=library)
def _(
    y: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    validate(lookup(buffer), "y", y, recv_topk_idx, is_token_in_rank)
    return y.new_empty(is_token_in_rank.shape[0], y.shape[1])


def run_backward(
    grad: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of y: every rank gets the gradient rows of the tokens that came to it, and zeros elsewhere."""
    return begin_backward(grad, recv_topk_idx, is_token_in_rank, buffer, async_op=False).run()  # type: ignore[no-any-return]


def begin_backward(
    grad: torch.Tensor, recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, buffer: str, async_op: bool = True
) -> Rest:
    """What of it moves data, and what is left."""
    owner = lookup(buffer)
    require(grad.dim() == 2 and grad.shape[1] == owner.hidden, "grad", grad, f"[T, {owner.hidden}] (hidden)")
    tokens, received = grad.shape[0], recv_topk_idx.shape[0]
    max_rows = _validate_rows(owner, "recv_topk_idx", received, recv_topk_idx, tokens)
    call = Call(KINDS.index("combine_backward"), tokens, max_rows, DTYPES.index(grad.dtype), owner.hidden, async_op=async_op)
    with owner.operation() as transport:
        direct = kernels(owner, transport, call)
        if direct is not None:
            rows = direct.spread(grad, is_token_in_rank, max_rows, call)
            return Rest(lambda: rows, (rows,))
        grad, grad_y = grad.contiguous(), grad.new_empty(received, grad.shape[1])
        with transport.dispatch(call, [grad], [grad_y]) as moved:
            pass

    def rest() -> torch.Tensor:
        moved.own()
        return grad_y.masked_fill_((recv_topk_idx < 0).all(dim=1, keepdim=True), 0.0)

    return Rest(rest, (grad, grad_y, recv_topk_idx))


@torch.library.register_fake("thunderep::combine_backward", lib=library)
def _(
    grad: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    buffer: str,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return grad.new_empty(recv_topk_idx.shape[0], grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.buffer = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    return torch.ops.thunderep.combine_backward(grad, *ctx.saved_tensors, ctx.buffer), None, None, None, None


torch.library.register_autograd("thunderep::combine", _backward, setup_context=_setup_context, lib=library)
for _key in ("CPU", "CUDA"):
    library.impl("combine", run, _key)
    library.impl("combine_backward", run_backward, _key)
