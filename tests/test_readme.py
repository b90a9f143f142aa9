"""The model code in the README runs, and computes the layer that it says it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from thunderep.testing.processes import Ranks

README = Path(__file__).parents[1] / "README.md"
TOKENS, INNER = 6, 16


def run_example(code: str) -> torch.Tensor:
    """How far the README's layer is from its experts applied token by token: relative, for its output and for x's gradient."""
    names: dict[str, Any] = {}
    exec(code, names)
    buffer, moe = names["buffer"], names["moe"]
    with buffer:
        generator = torch.Generator().manual_seed(0)
        w_in = torch.randn(buffer.num_experts, buffer.hidden, INNER, generator=generator).mul(buffer.hidden**-0.5).bfloat16()
        w_out = torch.randn(buffer.num_experts, INNER, buffer.hidden, generator=generator).mul(INNER**-0.5).bfloat16()
        generator.manual_seed(1 + dist.get_rank())
        x = torch.randn(TOKENS, buffer.hidden, generator=generator).bfloat16().requires_grad_()
        topk_idx = torch.randint(buffer.num_experts, (TOKENS, buffer.topk), generator=generator)
        topk_weights = torch.rand(TOKENS, buffer.topk, generator=generator)
        here = slice(buffer.local_experts.start, buffer.local_experts.stop)
        y = moe(x, topk_idx, topk_weights, w_in[here], w_out[here])
        (grad,) = torch.autograd.grad(y.float().square().sum(), x)

    exact = x.detach().float().requires_grad_()
    hidden = functional.silu(torch.einsum("th,tkhi->tki", exact, w_in[topk_idx].float()))
    expected = torch.einsum("tki,tkih,tk->th", hidden, w_out[topk_idx].float(), topk_weights)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), exact)
    return torch.stack([relative(y.float(), expected), relative(grad.float(), expected_grad)]).detach()


def relative(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return torch.div((got - expected).norm(), expected.norm())


def test_the_model_code_runs(four_ranks: Callable[[], Ranks]) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "def moe" in block]
    code = code.replace("max_tokens=512", 'max_tokens=512, device="cpu"')
    for differences in four_ranks().run(run_example, code):
        assert differences.max() < 0.02
