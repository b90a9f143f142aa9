"""swiglu: silu(gate) * up, row by row, over rows grouped by expert.

On a CUDA device groups leave room for all choices that could arrive, of which 1/N are there on N ranks. The kernel reads on the
device where the last group ends and touches no row past it; what those hold is unspecified.

Shape legend: C rows; I inner size of an expert; L experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from thunderep.ops.library import library
from thunderep.ops.rows import require

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _swiglu_cpu(gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Float32, rounded once."""
    _validate(gate_up, offsets)
    gate, up = gate_up.float().chunk(2, dim=1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _swiglu_cuda(gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out = _fake(gate_up, offsets)
    from thunderep.ops.kernels.swiglu import swiglu

    swiglu(gate_up, offsets, out)
    return out


def _swiglu_backward_cpu(grad: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    grad, share = grad.float(), torch.sigmoid(gate)
    grad_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat((grad_gate, grad * gate * share), dim=1).to(gate_up.dtype)


def _swiglu_backward_cuda(grad: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    grad_gate_up = _fake_backward(grad, gate_up, offsets)
    from thunderep.ops.kernels.swiglu import swiglu_backward

    swiglu_backward(grad, gate_up, offsets, grad_gate_up)
    return grad_gate_up


def _validate(gate_up: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise ValueError for what shapes, types and devices alone tell, real or fake."""
    require(gate_up.dim() == 2, "gate_up", gate_up, "[C, 2 I]")
    require(gate_up.shape[1] % 2 == 0, "gate_up", gate_up, "an even number of columns")
    require(gate_up.dtype in DTYPES, "gate_up", gate_up.dtype, f"one of {DTYPES}")
    require(offsets.dim() == 1, "offsets", offsets, "[L]")
    require(offsets.dtype == torch.int32, "offsets", offsets.dtype, torch.int32)
    require(offsets.device == gate_up.device, "offsets", f"a tensor on {offsets.device}", f"one on {gate_up.device}")


def _fake(gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    _validate(gate_up, offsets)
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _fake_backward(grad: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.thunderep.swiglu_backward(grad, *ctx.saved_tensors), None


library.impl("swiglu", _swiglu_cpu, "CPU")
library.impl("swiglu", _swiglu_cuda, "CUDA")
library.impl("swiglu_backward", _swiglu_backward_cpu, "CPU")
library.impl("swiglu_backward", _swiglu_backward_cuda, "CUDA")
torch.library.register_fake("thunderep::swiglu", _fake, lib=library)
torch.library.register_fake("thunderep::swiglu_backward", _fake_backward, lib=library)
torch.library.register_autograd("thunderep::swiglu", _backward, setup_context=_setup_context, lib=library)
