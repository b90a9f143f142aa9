"""One rank's side of the torch.compile tests."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import thunderep
from thunderep.testing.inputs import random_tokens

H, E, K = 16, 6, 2


def _buffer(max_tokens: int = 32) -> thunderep.Buffer:
    return thunderep.Buffer(
        num_experts=E, hidden=H, topk=K, max_tokens=max_tokens, dtype=torch.float32, device="cpu", timeout=60
    )


def _tokens(buffer: thunderep.Buffer, seed: int, tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = random_tokens(seed * 10 + buffer.rank, tokens, hidden=H, num_experts=E, topk=K, dtype=torch.float32)
    return made.x, made.topk_idx, made.topk_weights


def layer_compiles() -> list[Any]:
    """fullgraph, forward and backward; equal to eager; no recompilation when only values change."""
    torch._dynamo.reset()
    with _buffer() as buffer:

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            d = thunderep.dispatch(x * 2, idx, weights, E, buffer, max_tokens=12)
            scale = torch.where(d.recv_topk_idx >= 0, d.recv_topk_weights, 0.0).sum(1, keepdim=True)
            return thunderep.combine(torch.where(scale > 0, d.recv_x, 0.0) * scale, d, buffer) + x

        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        same = []
        for seed in range(4):
            x, idx, weights = _tokens(buffer, seed)
            results = []
            for call in (layer, compiled):
                leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
                out = call(leaf, idx, leaf_weights)
                out.square().sum().backward()
                results.append((out, leaf.grad, leaf_weights.grad))
            same.append(all(torch.allclose(a, b) for a, b in zip(*results, strict=True)))
        return [all(same), counter.frame_count]


def independent_operations_keep_their_order(backward: bool) -> list[Any]:
    """Four operations that do not depend on each other, compiled on every rank: they meet their counterparts.

    The second operation's input is ready before the first one's, and results are used in another order: what a
    compiler likes to move.
    """
    torch._dynamo.reset()
    with _buffer() as buffer:

        def program(xs: list[torch.Tensor], idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            outs = []
            for i, x in enumerate(xs):
                late = (x @ x.t() @ x).sin() if i == 0 else x
                d = thunderep.dispatch(late * (i + 1), idx, weights, E, buffer)
                keep = (d.recv_topk_idx >= 0).any(1, keepdim=True)
                outs.append(torch.where(keep, d.recv_x, 0.0))
            return torch.stack([out.sum() * (i + 2) for i, out in enumerate(reversed(outs))]).sum()

        seen: list[bool] = []
        for seed in range(2):
            _, idx, weights = _tokens(buffer, seed)
            xs = [_tokens(buffer, seed * 7 + i + 1)[0].requires_grad_(backward) for i in range(4)]
            results = []
            for call in (program, torch.compile(program, fullgraph=True)):
                total = call(xs, idx, weights)
                grads = torch.autograd.grad(total, xs) if backward else ()
                results.append((total, *grads))
            seen.append(all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*results, strict=True)))
        return seen


def graph_carries_the_order() -> list[list[str]]:
    """For each compiled graph the `after` of each operation on the Buffer, and whether unused ones are still there."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(module: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [n for n in module.graph.nodes if n.op == "call_function" and str(n.target).startswith("thunderep.")]
        graphs.append(
            [f"{str(n.target).split('.')[1]} {'after' if n.kwargs.get('after') is not None else 'first'}" for n in nodes]
        )
        return module.forward

    with _buffer() as buffer:

        def program(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            a = thunderep.dispatch(x, idx, weights, E, buffer)
            b = thunderep.dispatch(x + 1, idx, weights, E, buffer)
            thunderep.dispatch(x + 2, idx, weights, E, buffer)  # unused: other ranks may use theirs
            return (
                torch.where(a.recv_topk_idx[:, :1] >= 0, a.recv_x, 0).sum()
                + torch.where(b.recv_topk_idx[:, :1] >= 0, b.recv_x, 0).sum()
            )

        x, idx, weights = _tokens(buffer, 0)
        x.requires_grad_()
        compiled = torch.compile(program, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
        compiled(x, idx, weights).backward()
    return graphs


def ragged_dynamic() -> list[Any]:
    """T changes from call to call and from rank to rank: one dynamic graph, M fixed."""
    torch._dynamo.reset()
    with _buffer() as buffer:

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            d = thunderep.dispatch(x, idx, weights, E, buffer, max_tokens=32)
            return thunderep.combine(d.recv_x * 1.0, d, buffer)

        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        good = []
        for seed, tokens in enumerate((5, 9, 17, 28)):
            arguments = _tokens(buffer, seed, tokens + buffer.rank)
            good.append(torch.equal(compiled(*arguments), layer(*arguments)))
        return [all(good), counter.frame_count]


def halves_compile(in_flight: int) -> list[Any]:
    """Operations with async_op=True, several in flight: fullgraph, forward and backward equal to eager; starts and waits keep
    their order in the compiled code, with the product that lies between them.
    """
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with _buffer() as buffer:

        def program(xs: list[torch.Tensor], idx: torch.Tensor, weights: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
            works = [thunderep.dispatch(x, idx, weights, E, buffer, async_op=True) for x in xs]
            beside = (square @ square).sum()
            outs = []
            for work in works:
                d = work.wait()
                keep = (d.recv_topk_idx >= 0).any(1, keepdim=True)
                outs.append(thunderep.combine(torch.where(keep, d.recv_x * 3, 0.0), d, buffer, async_op=True))
            return torch.stack([out.wait().square().sum() for out in outs]).sum() + beside

        compiled = torch.compile(program, fullgraph=True)
        same, code = [], ""
        for seed in range(3):
            _, idx, weights = _tokens(buffer, seed)
            xs = [_tokens(buffer, seed * 7 + i + 1)[0].requires_grad_() for i in range(in_flight)]
            square = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
            expected = program(xs, idx, weights, square)
            grads = torch.autograd.grad(expected, xs)
            if seed:
                total = compiled(xs, idx, weights, square)
            else:
                total, (code, *_) = run_and_get_code(compiled, xs, idx, weights, square)
            same.append(torch.allclose(total, expected, rtol=1e-4))
            same += [torch.allclose(a, b) for a, b in zip(torch.autograd.grad(total, xs), grads, strict=True)]
        names = re.findall(r"= torch\.ops\.thunderep\.(\w+)\.default\(|extern_kernels\.(mm)\(", code)
        order = [call or product for call, product in names]
        waits = order.index("dispatch_wait")
        wanted = ["dispatch_start"] * in_flight + ["dispatch_wait", "combine_start"] * in_flight + ["combine_wait"] * in_flight
        return [all(same), [name for name in order if name != "mm"] == wanted and 0 < order.index("mm") < waits]


def weights_beside_fp8_rows_have_their_gradient() -> bool:
    """By hand, at once and with async_op=True, eager and compiled: that which they have beside bf16 rows."""
    torch._dynamo.reset()
    with _buffer() as buffer:

        def program(rows: torch.Tensor, scales: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            work = thunderep.dispatch(rows, idx, weights, E, buffer, 12, scales, async_op=True)
            d = thunderep.dispatch(rows, idx, weights, E, buffer, 12, scales)
            return ((d.recv_topk_idx + 2) * d.recv_topk_weights).sum() + work.wait().recv_topk_weights.square().sum()

        x, idx, weights = _tokens(buffer, 1, 5 + buffer.rank)
        fp8, scales = thunderep.quantize_fp8(x)
        grads: list[torch.Tensor] = []
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        for call, rows in ((program, x.bfloat16()), (program, fp8), (compiled, fp8)):
            leaf = weights.clone().requires_grad_()
            grads += torch.autograd.grad(call(rows, scales, idx, leaf), leaf)
        return bool(grads[0].count_nonzero()) and all(torch.allclose(grads[0], grad) for grad in grads[1:])


def experts_of_buffers_in_whole_graphs() -> list[int]:
    """A function that asks two Buffers of different sizes for their experts, in one graph each time."""
    function = torch.compile(lambda buffer, x: x + len(buffer.local_experts), fullgraph=True, backend="eager")
    found = []
    for num_experts in (8, 24, 16):
        with thunderep.Buffer(num_experts=num_experts, hidden=8, topk=2, max_tokens=4, device="cpu") as buffer:
            found.append(int(function(buffer, torch.zeros(1))))
    return found
