"""permute: group the rows that a rank received by local expert.

A choice is one of the R * K entries of `topk_idx`, numbered r * K + k. A stable sort by expert tells where each goes: PyTorch's
on the CPU, a counting sort of our own (`thunderep.ops.kernels.permute`) on a CUDA device, where it takes one launch or two.

Shape legend: R rows; H hidden; K choices per row; L local experts; C `capacity`, rows of expert_x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn import functional

from thunderep.ops.library import library
from thunderep.ops.rows import require

_MAX_ROWS = 2**31 - 1
"""What `offsets` and `row_id_map`, int32, can count."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _permute_cpu(
    x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int, capacity: int = -1, alignment: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raises ValueError for ids outside -1..L-1 and for a capacity that is too small, besides what `validate` finds."""
    validate(x, topk_idx, num_local_experts, capacity, alignment)
    gather, offsets, row_id_map = place_cpu(topk_idx, num_local_experts, capacity, alignment)
    return gather(x), offsets, row_id_map


def _permute_cuda(
    x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int, capacity: int = -1, alignment: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Synchronises once if `capacity` is -1, to learn the size, and not at all otherwise, so that it can be captured.

    What the CPU reports as an error cannot be known here without synchronising: ids outside -1..L-1 count as -1; choices beyond
    `capacity` are dropped, which means -1 in `row_id_map` and offsets that end at `capacity`. Rows past the last group are not
    written.
    """
    validate(x, topk_idx, num_local_experts, capacity, alignment)
    size, offsets, filled, row_id_map = place_cuda(topk_idx, num_local_experts, capacity, alignment)
    from thunderep.ops.kernels.permute import scatter_rows

    expert_x = x.new_empty((size, x.shape[1]))
    scatter_rows(_bits(x), row_id_map, filled, offsets, _bits(expert_x))
    return expert_x, offsets, row_id_map


def place_cpu(
    topk_idx: torch.Tensor, num_local_experts: int, capacity: int, alignment: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]:
    """Say where rows go: what brings [R, ...] into expert order, [C, ...], and `permute`'s offsets and row_id_map."""
    _validate_count(topk_idx, num_local_experts, alignment)
    _validate_ids(topk_idx, num_local_experts)
    offsets, choice, row = _group(topk_idx, num_local_experts, alignment)
    used = int(offsets[-1]) if num_local_experts else 0
    size = used if capacity == -1 else capacity
    require(size >= used, "capacity", size, f"at least {used}: the rows chosen, in groups of a multiple of {alignment}")
    count = int(torch.count_nonzero(row >= 0))
    choice, row = choice[:count], row[:count]
    row_id_map = torch.full((topk_idx.numel(),), -1, dtype=torch.int32).index_copy_(0, choice, row.to(torch.int32))

    def gather(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((size, x.shape[1]))
        _gather(_bits(x), choice // topk_idx.shape[1], row, used, _bits(out))
        return out

    return gather, offsets.to(torch.int32), row_id_map.view(topk_idx.shape)


def place_cuda(
    topk_idx: torch.Tensor, num_local_experts: int, capacity: int, alignment: int
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Say where rows go: C, `permute`'s offsets, where each group's padding begins, int32 [L], and row_id_map."""
    _validate_count(topk_idx, num_local_experts, alignment)
    exact = capacity == -1
    if exact and topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("capacity: got None, expected a number of rows: a CUDA graph's capture cannot find it out")
    from thunderep.ops.kernels.permute import place

    bound = _MAX_ROWS if exact else min(capacity, _MAX_ROWS)
    offsets, filled, row_id_map = place(topk_idx, num_local_experts, bound, alignment)
    if exact:
        capacity = int(offsets[-1].item()) if num_local_experts else 0
    return capacity, offsets, filled, row_id_map


def _group(topk_idx: torch.Tensor, num_local_experts: int, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort choices by expert.

    Returns:
        offsets: int64 [L], where each expert's padded group ends.
        choice: int64 [R * K], all choices, by expert, then in their own order; those of no local expert come last.
        row: int64 [R * K], the row of expert_x that each entry of `choice` goes to, ascending; -1 for no local expert.
    """
    # The sort takes time by the width of its keys.
    key_type = torch.int16 if num_local_experts < 2**15 else torch.int32
    keys = torch.where(topk_idx >= 0, topk_idx, num_local_experts).to(key_type).reshape(-1)
    expert, choice = torch.sort(keys, stable=True)
    ends = torch.searchsorted(expert, torch.arange(num_local_experts, dtype=key_type), right=True)
    starts = functional.pad(ends, (1, 0))[:-1]
    sizes = (ends - starts + alignment - 1) // alignment * alignment
    offsets = sizes.cumsum(0)
    shift = functional.pad(offsets - sizes - starts, (0, 1))
    row = torch.arange(keys.numel()) + shift.index_select(0, expert.to(torch.int32))
    return offsets, choice, torch.where(expert < num_local_experts, row, -1)


def _gather(x: torch.Tensor, source: torch.Tensor, row: torch.Tensor, used: int, out: torch.Tensor) -> None:
    """out[row[i]] = x[source[i]]; all other rows of `out` become zero. `used`: padded groups end here."""
    body = out[:used]
    # Padding takes, for a moment, a row that is read anyway: rows that nobody chose are not to be touched.
    spread = source[:1].expand(used).clone().index_copy_(0, row, source)
    torch.index_select(x, 0, spread, out=body)
    padding = torch.ones(used, dtype=torch.bool).index_fill_(0, row, False).nonzero().squeeze(1)
    body.index_fill_(0, padding, 0)
    out[used:].zero_()


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: rows are moved, whatever their type means, and not every type can be indexed."""
    return x.view(_BITS[x.dtype.itemsize])


def validate(x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int, capacity: Any, alignment: int) -> None:
    """Raise ValueError for what shapes, types and devices alone tell, real or fake. Sizes that are not known yet pass."""
    require(x.dim() == 2, "x", x, "[R, H]")
    require(x.dtype.itemsize in _BITS, "x", x.dtype, "elements of 1, 2, 4 or 8 bytes")
    require(topk_idx.dim() == 2, "topk_idx", topk_idx, "[R, K]")
    require(not guard_or_false(topk_idx.shape[0] != x.shape[0]), "topk_idx", topk_idx, f"{x.shape[0]} rows, as x has")
    require(topk_idx.dtype in (torch.int32, torch.int64), "topk_idx", topk_idx.dtype, "torch.int32 or torch.int64")
    require(topk_idx.device == x.device, "topk_idx", f"a tensor on {topk_idx.device}", f"one on {x.device}, as x is")
    require(num_local_experts >= 0, "num_local_experts", num_local_experts, "at least 0")
    require(alignment >= 1, "alignment", alignment, "at least 1")
    require(not guard_or_false(capacity < -1), "capacity", capacity, "at least 0, or -1 for as many rows as it takes")


def _validate_count(topk_idx: torch.Tensor, num_local_experts: int, alignment: int) -> None:
    rows = topk_idx.numel() + num_local_experts * (alignment - 1)
    require(rows <= _MAX_ROWS, "topk_idx", f"{topk_idx.numel()} choices, {rows} rows with padding", f"at most {_MAX_ROWS} rows")


def _validate_ids(topk_idx: torch.Tensor, num_local_experts: int) -> None:
    if topk_idx.numel():
        low, high = (int(bound) for bound in topk_idx.aminmax())
        require(
            low >= -1 and high < num_local_experts, "topk_idx", f"ids from {low} to {high}", f"-1 to {num_local_experts - 1}"
        )


def fake(
    x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int, capacity: Any = -1, alignment: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of the shapes and types that `permute` returns."""
    validate(x, topk_idx, num_local_experts, capacity, alignment)
    rows = torch.library.get_ctx().new_dynamic_size() if guard_or_false(capacity == -1) else capacity
    return (
        x.new_empty((rows, x.shape[1])),
        topk_idx.new_empty((num_local_experts,), dtype=torch.int32),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2])


def _backward(ctx: Any, grad_expert_x: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad_expert_x is None:
        return None, None, None, None, None
    return gradient(grad_expert_x, *ctx.saved_tensors), None, None, None, None


def gradient(grad_expert_x: torch.Tensor, row_id_map: torch.Tensor) -> torch.Tensor:
    """The gradient of x, [R, H]: for each row the float32 sum of its copies' gradients."""
    ones = grad_expert_x.new_ones(row_id_map.shape, dtype=torch.float32)
    result: torch.Tensor = torch.ops.thunderep.unpermute(grad_expert_x, row_id_map, ones)
    return result


library.impl("permute", _permute_cpu, "CPU")
library.impl("permute", _permute_cuda, "CUDA")
torch.library.register_fake("thunderep::permute", fake, lib=library)
torch.library.register_autograd("thunderep::permute", _backward, setup_context=_setup_context, lib=library)
