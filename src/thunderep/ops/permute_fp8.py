"""permute_fp8: group received fp8 rows by local expert and dequantise them, in one pass.

The order, the padding and `row_id_map` are `permute`'s. A row of the result is fp8 * scale in float32, rounded once.

Shape legend: R rows; H hidden; S = ceil(H / 128) scales a row; K choices per row; L local experts; C `capacity`, rows of
expert_x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from thunderep.ops import permute
from thunderep.ops.library import library
from thunderep.ops.quantize import GROUP, WIDE_DTYPES, groups_of, register_without_gradient
from thunderep.ops.rows import require

_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _permute_fp8_cpu(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    topk_idx: torch.Tensor,
    num_local_experts: int,
    capacity: int = -1,
    alignment: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> _Outputs:
    _validate(x, x_scales, topk_idx, num_local_experts, capacity, alignment, dtype)
    gather, offsets, row_id_map = permute.place_cpu(topk_idx, num_local_experts, capacity, alignment)
    codes, scales = gather(x.view(torch.uint8)), gather(x_scales)
    # Looking the 256 numbers up takes a third of the time that PyTorch takes to convert them.
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    wide = numbers.index_select(0, codes.view(-1).to(torch.int32)).view(codes.shape)
    wide *= scales.unsqueeze(2).expand(-1, -1, GROUP).flatten(1)[:, : x.shape[1]]
    return wide.to(dtype), offsets, row_id_map


def _permute_fp8_cuda(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    topk_idx: torch.Tensor,
    num_local_experts: int,
    capacity: int = -1,
    alignment: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> _Outputs:
    _validate(x, x_scales, topk_idx, num_local_experts, capacity, alignment, dtype)
    size, offsets, filled, row_id_map = permute.place_cuda(topk_idx, num_local_experts, capacity, alignment)
    from thunderep.ops.kernels.quantize import scatter_dequantized

    expert_x = x.new_empty((size, x.shape[1]), dtype=dtype)
    scatter_dequantized(x.view(torch.uint8), x_scales, row_id_map, filled, offsets, expert_x)
    return expert_x, offsets, row_id_map


def _validate(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    topk_idx: torch.Tensor,
    num_local_experts: int,
    capacity: Any,
    alignment: int,
    dtype: torch.dtype,
) -> None:
    permute.validate(x, topk_idx, num_local_experts, capacity, alignment)
    require(x.dtype == torch.float8_e4m3fn, "x", x.dtype, torch.float8_e4m3fn)
    groups = groups_of(x.shape[1])
    require(x_scales.dim() == 2 and x_scales.shape[1] == groups, "x_scales", x_scales, f"[R, {groups}]: one a {GROUP} columns")
    require(not guard_or_false(x_scales.shape[0] != x.shape[0]), "x_scales", x_scales, f"{x.shape[0]} rows, as x has")
    require(x_scales.dtype == torch.float32, "x_scales", x_scales.dtype, torch.float32)
    require(x_scales.device == x.device, "x_scales", f"a tensor on {x_scales.device}", f"one on {x.device}, as x is")
    require(dtype in WIDE_DTYPES, "dtype", dtype, f"one of {WIDE_DTYPES}")


def _fake(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    topk_idx: torch.Tensor,
    num_local_experts: int,
    capacity: Any = -1,
    alignment: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> _Outputs:
    _validate(x, x_scales, topk_idx, num_local_experts, capacity, alignment, dtype)
    expert_x, offsets, row_id_map = permute.fake(x, topk_idx, num_local_experts, capacity, alignment)
    return expert_x.new_empty(expert_x.shape, dtype=dtype), offsets, row_id_map


library.impl("permute_fp8", _permute_fp8_cpu, "CPU")
library.impl("permute_fp8", _permute_fp8_cuda, "CUDA")
torch.library.register_fake("thunderep::permute_fp8", _fake, lib=library)
register_without_gradient("thunderep::permute_fp8")
