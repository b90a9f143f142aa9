"""One rank's side of the checkpointing tests: a model of two layers whose forward is computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import thunderep
from thunderep.nn import ExpertParallel
from thunderep.ops.library import COMMUNICATION
from thunderep.testing.inputs import same_bits

H, E, K = 20, 6, 2
Results = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """How a step is computed.

    Attributes:
        tokens: T of each rank.
        transport: The Buffer's.
        reentrant: `torch.utils.checkpoint`'s `use_reentrant`.
        whole: Whether both layers are one checkpoint, or each is one.
        compiled: Whether under torch.compile, as one graph.
        selective: Whether the checkpoint is told to keep what was communicated.
        dispatch_dtype: What rows travel as; None: as they are.
    """

    tokens: tuple[int, ...]
    transport: str = "shm"
    reentrant: bool = False
    whole: bool = False
    compiled: bool = False
    selective: bool = False
    dispatch_dtype: torch.dtype | None = None


class Block(nn.Module):
    """A router, and experts beside the residual."""

    def __init__(self, buffer: thunderep.Buffer, case: Case) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = ExpertParallel(buffer, 9, dispatch_dtype=case.dispatch_dtype)
        self.max_tokens = max(case.tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        weights, idx = self.router(x).softmax(dim=-1).topk(K)
        result: torch.Tensor = x + self.experts(x.sin(), idx, weights, self.max_tokens)
        return result


def _model(buffer: thunderep.Buffer, case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(buffer, case), Block(buffer, case))


def _checkpointed(model: nn.Sequential, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    operators = torch.ops.thunderep
    kept = partial(create_selective_checkpoint_contexts, [operators.dispatch.default, operators.combine.default])
    options: dict[str, Any] = {"use_reentrant": case.reentrant} | ({"context_fn": kept} if case.selective else {})

    def forward(x: torch.Tensor) -> torch.Tensor:
        for part in [model] if case.whole else model:
            x = checkpoint(part, x, **options)
        return x

    return forward


def _buffer(case: Case) -> thunderep.Buffer:
    return thunderep.Buffer(
        num_experts=E, hidden=H, topk=K, max_tokens=max(case.tokens), dtype=torch.float32, device="cpu",
        transport=case.transport, timeout=60,  # type: ignore[arg-type]
    )  # fmt: skip


def differences(case: Case) -> list[str]:
    """What of two steps differs between a checkpointed model and one that keeps everything: outputs, gradients."""
    rank = dist.get_rank()
    torch._dynamo.reset()
    with _buffer(case) as buffer:
        model = _model(buffer, case)
        step = _checkpointed(model, case)
        if case.compiled:  # Inductor's partition of forward and backward, without its compiler
            step = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
        wrong = []
        for seed in range(2):
            x = torch.randn(case.tokens[rank], H, generator=torch.Generator().manual_seed(10 * seed + rank))
            expected, got = (_results(model, call, x) for call in (model, step))
            for name, a, b in zip(("output", "x", *dict(model.named_parameters())), expected, got, strict=True):
                if not (torch.allclose(a, b, rtol=1e-4, atol=1e-5) if case.compiled else same_bits(a, b)):
                    wrong.append(f"step {seed}: {name} differs by {(a - b).abs().max():.3g}")
        return wrong


def compiled_backward(case: Case) -> list[str]:
    """The operators that communicate in the compiled backward, each with whether it comes after another one."""
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(module: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [node for node in module.graph.nodes if _name(node) in COMMUNICATION]
        graphs.append([f"{_name(n)} {'after' if n.kwargs.get('after') is not None else 'first'}" for n in nodes])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    with _buffer(case) as buffer:
        step = torch.compile(_checkpointed(_model(buffer, case), case), fullgraph=True, backend=backend)
        step(torch.ones(case.tokens[dist.get_rank()], H, requires_grad=True)).sum().backward()
    return graphs[1]


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "").split(".")[0]


def _results(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Results:
    """The output, and the gradients of x and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
