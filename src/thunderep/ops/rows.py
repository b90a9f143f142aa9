"""What dispatch and combine share: checks of arguments, and the sum of the rows that come back to their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thunderep.background import Rest
from thunderep.buffer import Buffer
from thunderep.runtime.trace import phase
from thunderep.runtime.transport import DTYPES, KINDS, ByRank, Call, Transport

if TYPE_CHECKING:
    from thunderep.ops.direct import Kernels
    from thunderep.runtime.window import Window

IDX_DTYPES = (torch.int32, torch.int64)
_ONE_OF_IDX_DTYPES = f"one of {IDX_DTYPES}"  # made once: it takes microseconds

_MAX_CALLS = 4096
"""Signatures of calls that a Buffer remembers."""

_BLOCK_ROWS = 128
"""Rows that are summed at a time on the CPU: their float32 sums stay in its cache."""


def no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> Any:
    """The gradient of a gradient: there is none, which is better than to be without a part of it."""
    raise NotImplementedError("thunderep: dispatch and combine have no second derivatives (create_graph=True)")


def metadata(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """All that validation looks at."""
    return tuple([None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])


def remember(owner: Buffer, signature: Hashable, validate: Callable[[], Call]) -> Call:
    """What `validate` makes of arguments of this signature: looked at once, since to look takes longer than to launch."""
    call = owner.calls.get(signature)
    if call is None:
        if len(owner.calls) >= _MAX_CALLS:
            owner.calls.clear()
        call = owner.calls[signature] = validate()
    return call


def require(condition: bool, name: str, got: object, expected: object) -> None:
    """Raise ValueError with the argument's name, what came and what was expected, unless `condition`."""
    if not condition:
        shown = f"shape {list(got.shape)}" if isinstance(got, torch.Tensor) else got
        raise ValueError(f"{name}: got {shown}, expected {expected}")


def require_id_type(name: str, idx: torch.Tensor) -> None:
    """Raise ValueError unless these may be expert ids."""
    require(idx.dtype in IDX_DTYPES, name, idx.dtype, _ONE_OF_IDX_DTYPES)


def require_device(buffer: Buffer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless all tensors are where the Buffer's are."""
    for name, tensor in tensors.items():
        if tensor.device.type != buffer.device.type or (tensor.is_cuda and tensor.device.index != buffer.device.index):
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected one on the Buffer's {buffer.device}")


def kernels(owner: Buffer, transport: Transport, call: Call) -> Kernels | None:
    """What does all of this call, where kernels do; else the transport's methods are to move it."""
    window = transport.window(call)
    return None if window is None else kernels_in(owner, window)


def kernels_in(owner: Buffer, window: Window) -> Kernels:
    """The Buffer's kernels, in the one window that it has."""
    if owner.kernels is None:
        from thunderep.ops.direct import Kernels

        owner.kernels = Kernels(window, owner.num_experts, owner.bad_ids)
    return owner.kernels  # type: ignore[no-any-return]


def rows_call(
    owner: Buffer,
    kind: str,
    payloads: Sequence[torch.Tensor],
    is_token_in_rank: torch.Tensor,
    sizes: int = 0,
    async_op: bool = False,
) -> Call:
    """What ranks must agree on before `rows_sum`."""
    tokens, max_rows = is_token_in_rank.shape[0], payloads[0].shape[0] // owner.num_ranks
    dtype, width, beside = DTYPES.index(payloads[0].dtype), payloads[0].shape[1], sum(p.shape[1] for p in payloads[1:])
    return Call(KINDS.index(kind), tokens, max_rows, dtype, width, beside, sizes=sizes, async_op=async_op)


def rows_sum(
    owner: Buffer, call: Call, payloads: Sequence[torch.Tensor], recv_topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor
) -> Rest:
    """Return rows to the ranks whose tokens they are and sum them: float32, rank order, rounded once.

    Args:
        owner: The Buffer.
        call: What `rows_call` gave.
        payloads: Each [R, ...], R = N * M.
        recv_topk_idx: [R, K]: rows without a local expert need not travel.
        is_token_in_rank: [T, N] bool; rows of ranks that a token did not go to are not read.

    Returns:
        What then gives for each payload [T, ...] of its type.
    """
    with owner.operation() as transport:
        direct = kernels(owner, transport, call)
        if direct is not None:
            return Rest.of(*direct.combine(payloads, recv_topk_idx, is_token_in_rank, call))
        payloads = [payload.contiguous() for payload in payloads]
        own = [payload.unflatten(0, (owner.num_ranks, call.max_tokens))[owner.rank] for payload in payloads]

        def sums(received: Sequence[ByRank]) -> tuple[torch.Tensor, ...]:
            both = zip(own, received, strict=True)
            return tuple([sum_by_rank(mine, by_rank, is_token_in_rank, owner.rank) for mine, by_rank in both])

        with transport.combine(call, payloads, owner.workspace.like) as received:
            if not is_token_in_rank.is_cuda:  # they may lie where the peers put them
                return Rest.of(*sums(received))
        return Rest(lambda: sums(received), (*own, is_token_in_rank, *itertools.chain(*received)))


@phase("sum")
def sum_by_rank(own: torch.Tensor, by_rank: ByRank, is_token_in_rank: torch.Tensor, rank: int) -> torch.Tensor:
    """Sum in rank order, float32, what this rank (`own`, [M, C]) and the others hold for each token, and round once."""
    if isinstance(by_rank, torch.Tensor) and by_rank.is_cuda:
        from thunderep.ops.kernels.rank_sum import rank_sum

        return rank_sum(own, by_rank, is_token_in_rank, rank)
    tokens, width = is_token_in_rank.shape[0], own.shape[1]
    parts = []
    for other, went in enumerate(is_token_in_rank.unbind(1)):
        if other != rank:  # the +0 that rows become which were not asked for changes no sum that began with +0
            by_rank[other].index_fill_(0, (~went).nonzero().squeeze(1), 0)
        parts.append((own if other == rank else by_rank[other])[:tokens].split(_BLOCK_ROWS))
    result = own.new_empty(tokens, width)
    total, wide = (own.new_empty(min(_BLOCK_ROWS, tokens), width, dtype=torch.float32) for _ in range(2))
    for i, block in enumerate(result.split(_BLOCK_ROWS)):
        sum_, part = total[: len(block)].zero_(), wide[: len(block)]
        for other, blocks in enumerate(parts):
            part.copy_(blocks[i])
            if other == rank:  # the caller's rows, which stay as they are
                here = slice(i * _BLOCK_ROWS, i * _BLOCK_ROWS + len(block))
                part.index_fill_(0, (~is_token_in_rank[here, rank]).nonzero().squeeze(1), 0)
            sum_ += part
        block.copy_(sum_)
    return result
