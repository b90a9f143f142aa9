"""One rank's side of the GPU tests of compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import thunderep
from tests.gpu.programs import EXPERTS, everyone, make


def differences(transport: str, mode: str, halves: bool) -> list[str]:
    """A layer compiled whole, forward and backward, in `mode`: what differs from eager, over several calls with new data."""
    problems = []
    torch._dynamo.reset()  # what was compiled for other Buffers counts towards how often this may be
    with make(transport) as buffer:

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            d = _finished(thunderep.dispatch(x, idx, weights, EXPERTS, buffer, async_op=halves))  # type: ignore[call-overload]
            present = (d.recv_topk_idx >= 0).any(dim=1, keepdim=True)
            scale = d.recv_topk_weights.sum(dim=1, keepdim=True).to(x.dtype)
            y = torch.where(present, d.recv_x * scale, 0)
            return _finished(thunderep.combine(y, d, buffer, async_op=halves))  # type: ignore[call-overload, no-any-return]

        step: Callable[..., torch.Tensor] = torch.compile(layer, fullgraph=True, mode=None if mode == "default" else mode)
        for seed in range(6):
            mine = everyone(seed, 8)[buffer.rank]
            results = []
            for function in (layer, step):
                x, weights = mine.x.cuda().requires_grad_(), mine.topk_weights.cuda().requires_grad_()
                out = function(x, mine.topk_idx.cuda(), weights)
                out.float().square().sum().backward()
                assert x.grad is not None
                assert weights.grad is not None
                results.append([t.detach().clone() for t in (out, x.grad, weights.grad)])
            for name, eager, other in zip(("output", "x.grad", "topk_weights.grad"), *results, strict=True):
                if not torch.allclose(eager.float(), other.float(), rtol=2e-2, atol=2e-2):
                    problems.append(f"call {seed}: {name} differs by {(eager.float() - other.float()).abs().max():.3g}")
    return problems


def _finished(result: Any) -> Any:
    return result.wait() if isinstance(result, thunderep.Work) else result
