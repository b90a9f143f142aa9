"""quantize_fp8: rows of 8-bit floats with a float32 scale per 128 columns, as DeepSeek and vLLM have them.

**Arithmetic**, in float32, every step rounded to nearest even. A group is 128 columns of a row; the last may have fewer. Its
scale is its largest finite magnitude divided by 448, e4m3's largest value, and at least 2^-126, float32's smallest normal
number. An element becomes the e4m3 number nearest to element / scale; NaN and infinities become NaN and leave the others as
they would be beside a zero. Dequantised = fp8 * scale. The CPU, the Triton kernel and `thunderep.reference` agree bit for bit.

Shape legend: T rows; H hidden; S = ceil(H / 128) scales a row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from thunderep.ops.library import library
from thunderep.ops.rows import require

GROUP = 128
"""Columns that share a scale."""

WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What can be quantised."""

_MAX = 448.0
_MIN_SCALE = 2.0**-126


def groups_of(hidden: int) -> int:
    """S: scales that a row of H elements has."""
    return -(-hidden // GROUP)


def _quantize_cpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _validate(x)
    tokens, hidden = x.shape
    groups = groups_of(hidden)
    value = functional.pad(x.to(torch.float32), (0, groups * GROUP - hidden)).view(tokens, groups, GROUP)
    absmax, infinite = value.abs().amax(dim=2), None
    if not absmax.isfinite().all():
        infinite = ~value.isfinite()
        absmax = value.masked_fill(infinite, 0.0).abs_().amax(dim=2)
    scales = (absmax / _MAX).clamp_(min=_MIN_SCALE)
    codes = (value / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(torch.uint8)
    if infinite is not None:
        codes.masked_fill_(infinite, 0x7F)
    return codes.view(tokens, groups * GROUP)[:, :hidden].contiguous().view(torch.float8_e4m3fn), scales


def _quantize_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_fp8, x_scales = _fake(x)
    from thunderep.ops.kernels.quantize import quantize

    quantize(x, x_fp8.view(torch.uint8), x_scales)
    return x_fp8, x_scales


def _validate(x: torch.Tensor) -> None:
    require(x.dim() == 2, "x", x, "[T, H]")
    require(x.dtype in WIDE_DTYPES, "x", x.dtype, f"one of {WIDE_DTYPES}")


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _validate(x)
    tokens, hidden = x.shape
    return x.new_empty((tokens, hidden), dtype=torch.float8_e4m3fn), x.new_empty(
        (tokens, groups_of(hidden)), dtype=torch.float32
    )


def register_without_gradient(operator: str) -> None:
    """Have nothing that the operator returns require a gradient, whatever its inputs do."""
    torch.library.register_autograd(
        operator,
        lambda ctx, *grads: None,
        setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(*output),
        lib=library,
    )


library.impl("quantize_fp8", _quantize_cpu, "CPU")
library.impl("quantize_fp8", _quantize_cuda, "CUDA")
torch.library.register_fake("thunderep::quantize_fp8", _fake, lib=library)
register_without_gradient("thunderep::quantize_fp8")
