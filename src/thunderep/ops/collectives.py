"""`thunderep::all_gather`, `reduce_scatter` and `all_reduce`: dense rows, by the movements of dispatch and combine.

An all-gather is a dispatch of which every rank needs every row, a reduce-scatter a combine of rows that went everywhere. See
the contracts in `thunderep.collectives`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from thunderep.buffer import Buffer, lookup
from thunderep.ops.combine import SUM_DTYPES
from thunderep.ops.library import library
from thunderep.ops.rows import kernels, require, require_device, rows_call, rows_sum, sum_by_rank
from thunderep.runtime.transport import DTYPES, KINDS, Call

_ONE_STEP_BYTES = 256 << 10
"""Bytes up to which an all-reduce over more than two ranks is one step, in which all move everything."""

_ONE_OF_DTYPES, _ONE_OF_SUM_DTYPES = f"one of {DTYPES}", f"one of {SUM_DTYPES}"  # made once: it takes microseconds


def _validate(owner: Buffer, name: str, tensor: torch.Tensor, sums: bool) -> None:
    """Raise ValueError for what type and device alone tell."""
    require(
        tensor.dtype in (SUM_DTYPES if sums else DTYPES), name, tensor.dtype, _ONE_OF_SUM_DTYPES if sums else _ONE_OF_DTYPES
    )
    require_device(owner, {name: tensor})


def _validate_rows(owner: Buffer, name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, sums: bool) -> None:
    """As `_validate`, for a tensor of rows and every rank's number of them."""
    require(tensor.dim() > 0, name, tensor, "at least one dimension")
    _validate(owner, name, tensor, sums)
    if sizes is not None:
        fit = len(sizes) == owner.num_ranks and all(size >= 0 for size in sizes)
        require(fit, "sizes", list(sizes), f"{owner.num_ranks} numbers of rows, one a rank")


def _checksum(sizes: Sequence[int]) -> int:
    return zlib.crc32(",".join(map(str, sizes)).encode())


def pad_rows(rows: torch.Tensor, sizes: Sequence[int], max_rows: int) -> torch.Tensor:
    """[N * M, ...] of [sum(sizes), ...]: rank r's rows begin at r * M; what comes after them is unspecified."""
    if all(size == max_rows for size in sizes):
        return rows
    rest = rows.new_empty(max_rows, *rows.shape[1:])
    return torch.cat([part for own in rows.split(list(sizes)) for part in (own, rest[len(own) :])])


def unpad_rows(rows: torch.Tensor, sizes: Sequence[int], max_rows: int) -> torch.Tensor:
    """The inverse of `pad_rows`."""
    if all(size == max_rows for size in sizes):
        return rows
    return torch.cat([rows[r * max_rows : r * max_rows + size] for r, size in enumerate(sizes)])


def _gather(owner: Buffer, kind: str, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """[N * M, C]: the rows [T, C] of all ranks, as `pad_rows` places them."""
    max_rows, checksum = max(sizes), _checksum(sizes)
    call = Call(KINDS.index(kind), len(rows), max_rows, DTYPES.index(rows.dtype), rows.shape[1], sizes=checksum)
    with owner.operation() as transport:
        direct = kernels(owner, transport, call)
        if direct is not None:
            return direct.spread(rows, _everywhere(owner, rows), max_rows, call)
        received = rows.new_empty(owner.num_ranks * max_rows, rows.shape[1])
        with transport.dispatch(call, [rows.contiguous()], [received]) as moved:
            moved.own()
    return received


def _scatter(owner: Buffer, kind: str, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """[T, C]: the sum of all ranks' rows for this rank, of [N * M, C] as `pad_rows` places them."""
    chosen = rows.new_zeros(len(rows), 1, dtype=torch.int32)  # an expert of this rank's, as far as a combine is concerned
    everywhere = _everywhere(owner, rows[: sizes[owner.rank]])
    return rows_sum(owner, rows_call(owner, kind, [rows], everywhere, _checksum(sizes)), [rows], chosen, everywhere).run()[0]  # type: ignore[no-any-return]


def _everywhere(owner: Buffer, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_ones(len(rows), owner.num_ranks, dtype=torch.bool)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """[T, C] of [T, ...]."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _all_gather(
    x: torch.Tensor, buffer: str, sizes: Sequence[int] | None = None, after: torch.Tensor | None = None
) -> torch.Tensor:
    owner = lookup(buffer)
    _validate_rows(owner, "x", x, sizes, sums=False)
    sizes = [len(x)] * owner.num_ranks if sizes is None else sizes
    mine = sizes[owner.rank]
    require(len(x) == mine, "x", f"{len(x)} rows", f"{mine}, as sizes = {list(sizes)} say of rank {owner.rank}")
    shape = sum(sizes), *x.shape[1:]
    if 0 in shape[1:]:
        return x.new_empty(shape)
    return unpad_rows(_gather(owner, "all_gather", _flat(x), sizes), sizes, max(sizes)).view(shape)


@torch.library.register_fake("thunderep::all_gather", lib=library)
def _(x: torch.Tensor, buffer: str, sizes: Sequence[int] | None = None, after: torch.Tensor | None = None) -> torch.Tensor:
    owner = lookup(buffer)
    _validate_rows(owner, "x", x, None, sums=False)
    return x.new_empty(x.shape[0] * owner.num_ranks if sizes is None else sum(sizes), *x.shape[1:])


def _reduce_scatter(
    y: torch.Tensor, buffer: str, sizes: Sequence[int] | None = None, after: torch.Tensor | None = None
) -> torch.Tensor:
    owner = lookup(buffer)
    _validate_rows(owner, "y", y, sizes, sums=True)
    if sizes is None:
        require(len(y) % owner.num_ranks == 0, "y", f"{len(y)} rows", f"a multiple of the {owner.num_ranks} ranks")
        sizes = [len(y) // owner.num_ranks] * owner.num_ranks
    require(len(y) == sum(sizes), "y", f"{len(y)} rows", f"{sum(sizes)}, as sizes = {list(sizes)} say")
    shape = sizes[owner.rank], *y.shape[1:]
    if 0 in shape[1:]:
        return y.new_empty(shape)
    return _scatter(owner, "reduce_scatter", pad_rows(_flat(y), sizes, max(sizes)), sizes).view(shape)


@torch.library.register_fake("thunderep::reduce_scatter", lib=library)
def _(y: torch.Tensor, buffer: str, sizes: Sequence[int] | None = None, after: torch.Tensor | None = None) -> torch.Tensor:
    owner = lookup(buffer)
    _validate_rows(owner, "y", y, None, sums=True)
    return y.new_empty(y.shape[0] // owner.num_ranks if sizes is None else sizes[owner.rank], *y.shape[1:])


def _all_reduce(x: torch.Tensor, buffer: str, after: torch.Tensor | None = None) -> torch.Tensor:
    owner = lookup(buffer)
    _validate(owner, "x", x, sums=True)
    count, width, ranks = x.numel(), max(1, min(owner.hidden, x.numel())), owner.num_ranks
    # Two steps move fewer bytes where there are more than two ranks; small tensors gain more by a step less.
    shares = 1 if ranks <= 2 or x.nbytes <= _ONE_STEP_BYTES else ranks
    rows = torch.nn.functional.pad(x.reshape(-1), (0, -count % (width * shares))).view(-1, width)
    sizes = [len(rows) // shares] * ranks
    if shares == 1:
        received = _gather(owner, "all_reduce", rows, sizes).unflatten(0, (ranks, len(rows)))
        total = sum_by_rank(rows, received, _everywhere(owner, rows), owner.rank)
    else:
        total = _gather(owner, "all_gather", _scatter(owner, "reduce_scatter", rows, sizes), sizes)
    return total.view(-1)[:count].view(x.shape)


@torch.library.register_fake("thunderep::all_reduce", lib=library)
def _(x: torch.Tensor, buffer: str, after: torch.Tensor | None = None) -> torch.Tensor:
    _validate(lookup(buffer), "x", x, sums=True)
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.buffer, ctx.sizes = inputs[1], inputs[2]


def _setup_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.buffer = inputs[1]


def _all_gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return torch.ops.thunderep.reduce_scatter(grad, ctx.buffer, ctx.sizes), None, None, None


def _reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return torch.ops.thunderep.all_gather(grad, ctx.buffer, ctx.sizes), None, None, None


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.thunderep.all_reduce(grad, ctx.buffer), None, None


torch.library.register_autograd("thunderep::all_gather", _all_gather_backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd(
    "thunderep::reduce_scatter", _reduce_scatter_backward, setup_context=_setup_context, lib=library
)
torch.library.register_autograd("thunderep::all_reduce", _all_reduce_backward, setup_context=_setup_all_reduce, lib=library)
for _key in ("CPU", "CUDA"):
    library.impl("all_gather", _all_gather, _key)
    library.impl("reduce_scatter", _reduce_scatter, _key)
    library.impl("all_reduce", _all_reduce, _key)
