"""grouped_mm: one matrix product per expert, over rows grouped by expert.

`torch.nn.functional.grouped_mm` with three limits lifted: it compiles for any floating type (PyTorch's can be traced for bf16
only), takes any sizes (PyTorch's needs rows of a multiple of 16 bytes), and on no CUDA device does the host wait to learn how
large groups of 16-bit rows are (for PyTorch's it does, except on compute capability 9 and 10). Where PyTorch's kernel can be
used as it is, `thunderep.nn` uses that.

Shape legend: L experts; C rows; A and B columns. Expert e's rows are offsets[e - 1] to offsets[e].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from thunderep.ops.library import library
from thunderep.ops.rows import require


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply group by group.

    [C, A] by [L, A, B] gives [C, B]: each group of rows times its expert's matrix. [A, C] by [C, B] gives [L, A, B]: each group
    of columns times its group of rows, which is the gradient of the matrices. Rows past the last group are zero. Offsets are
    read on the host, so on a CUDA device this synchronises and cannot be captured.
    """
    _validate(a, b, offsets)
    if b.dim() == 2:
        out = a.new_empty((offsets.numel(), a.shape[0], b.shape[1]))
        for expert, group in enumerate(_groups(offsets, a.dtype)):
            torch.mm(a[:, group], b[group], out=out[expert])
        return out
    out = a.new_zeros((a.shape[0], b.shape[2]))
    for expert, group in enumerate(_groups(offsets, a.dtype)):
        torch.mm(a[group], b[expert], out=out[group])
    return out


def _grouped_mm_cuda(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same without the host for bf16 and fp16, where rows past the last group are not written."""
    from thunderep.ops.kernels.grouped_mm import DTYPES, matrices_of_rows, rows_by_matrices

    if a.dtype not in DTYPES:
        return _grouped_mm(a, b, offsets)
    out = _fake(a, b, offsets)
    multiply = matrices_of_rows if b.dim() == 2 else rows_by_matrices
    multiply(a, b, offsets.contiguous(), out)
    return out


def _groups(offsets: torch.Tensor, dtype: torch.dtype) -> Iterator[slice]:
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"thunderep::grouped_mm reads the offsets of {dtype} rows, which a CUDA graph's capture cannot:"
            " take torch.bfloat16 or torch.float16"
        )
    start = 0
    for end in offsets.tolist():
        yield slice(start, end)
        start = end


def _validate(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise ValueError for what shapes and types alone tell, real or fake."""
    require(a.dim() == 2, "a", a, "two dimensions")
    require(b.dim() in (2, 3), "b", b, "two dimensions or three")
    require(b.dtype == a.dtype, "b", b.dtype, f"{a.dtype}, as a has")
    require(offsets.dim() == 1, "offsets", offsets, "[L]")
    require(offsets.dtype == torch.int32, "offsets", offsets.dtype, torch.int32)
    require(b.dim() == 2 or b.shape[0] == offsets.shape[0], "b", b, f"{offsets.shape[0]} matrices, as many as offsets")
    require(not guard_or_false(b.shape[-2] != a.shape[1]), "b", b, f"{a.shape[1]} rows, as a has columns")
    for name, tensor in (("b", b), ("offsets", offsets)):
        require(tensor.device == a.device, name, f"a tensor on {tensor.device}", f"one on {a.device}, as a is")


def _fake(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    _validate(a, b, offsets)
    return a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2]))


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    a, b, offsets = ctx.saved_tensors
    multiply = torch.ops.thunderep.grouped_mm
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = multiply(grad, b.mT, offsets) if b.dim() == 3 else multiply(b, grad.mT, offsets).mT
    if ctx.needs_input_grad[1]:
        grad_b = multiply(a.mT, grad, offsets)
    return grad_a, grad_b, None


torch.library.register_fake("thunderep::grouped_mm", _fake, lib=library)
torch.library.register_autograd("thunderep::grouped_mm", _backward, setup_context=_setup_context, lib=library)
library.impl("grouped_mm", _grouped_mm, "CPU")
library.impl("grouped_mm", _grouped_mm_cuda, "CUDA")
