"""ExpertParallel on real ranks, against the same experts in one process."""

import contextlib
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import thunderep
from thunderep import reference
from thunderep.nn import ExpertParallel
from thunderep.testing.inputs import random_tokens
from thunderep.testing.processes import RankError, Ranks

Steps = list[tuple[torch.Tensor | None, ...]]


@dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...]  # of each rank
    num_experts: int
    topk: int
    dtype: torch.dtype
    steps: int = 1
    hidden: int = 12  # PyTorch's own grouped product takes neither this nor 7
    intermediate: int = 7
    overlap: int | None = None
    dispatch_dtype: torch.dtype | None = None


def experts(case):
    generator = torch.Generator().manual_seed(7)
    gate_up = torch.randn(case.num_experts, case.hidden, 2 * case.intermediate, generator=generator) * case.hidden**-0.5
    down = torch.randn(case.num_experts, case.intermediate, case.hidden, generator=generator) * case.intermediate**-0.5
    return gate_up.to(case.dtype), down.to(case.dtype)


def inputs(case, rank, step):
    """A rank's x, ids, weights and the gradient of its output."""
    seed, tokens = 1000 * step + rank, case.tokens[rank]
    t = random_tokens(
        seed,
        tokens,
        hidden=case.hidden,
        num_experts=case.num_experts,
        topk=case.topk,
        dtype=case.dtype,
        drop=0.2,
        distinct=False,
    )
    grad = torch.randn(tokens, case.hidden, generator=torch.Generator().manual_seed(seed)).to(case.dtype)
    return t.x, t.topk_idx, t.topk_weights, grad


def open_buffer(case):
    return thunderep.Buffer(
        num_experts=case.num_experts,
        hidden=case.hidden,
        topk=case.topk,
        max_tokens=max(case.tokens) + 1,
        dtype=case.dtype,
        timeout=60,
    )


def run_rank(case, compiled=False, frozen=False):
    """Every step's output and gradients of x and weights; then the gradients of the experts."""
    rank = dist.get_rank()
    with open_buffer(case) as buffer:
        layer = ExpertParallel(buffer, case.intermediate, overlap=case.overlap, dispatch_dtype=case.dispatch_dtype)
        owned = slice(buffer.local_experts.start, buffer.local_experts.stop)
        with torch.no_grad():
            for parameter, value in zip((layer.gate_up, layer.down), experts(case), strict=True):
                parameter.copy_(value[owned])
        if compiled:
            torch._dynamo.reset()
            layer.compile(fullgraph=True)
        results = []
        for step in range(case.steps):
            x, idx, weights, grad = (t.to(buffer.device) for t in inputs(case, rank, step))
            x.requires_grad_(not frozen)
            weights.requires_grad_(not frozen)
            # Touching torch._dynamo imports it, which takes seconds.
            with torch._dynamo.config.patch(error_on_recompile=step > 0) if compiled else contextlib.nullcontext():
                y = layer(x, idx, weights, max_tokens=max(case.tokens))
                y.backward(grad)
            results.append(tuple(None if t is None else t.detach().cpu() for t in (y, x.grad, weights.grad)))
        return results, *(p.grad.cpu() for p in layer.parameters() if p.grad is not None)


def dense(case):
    """The same in one process and in float32: every rank's steps, and the gradients of all experts."""
    gate_up, down = (w.float().requires_grad_() for w in experts(case))
    results: list[Steps] = [[] for _ in case.tokens]
    for step in range(case.steps):
        for rank in range(len(case.tokens)):
            x, idx, weights, grad = inputs(case, rank, step)
            if case.dispatch_dtype is not None:  # what the experts get; a gradient with respect to it is one straight through
                x = reference.dequantize_fp8(*reference.quantize_fp8(x)).to(case.dtype)
            x, weights = x.float().requires_grad_(), weights.requires_grad_()
            y = torch.zeros_like(x)
            for e in range(case.num_experts):
                gate, up = (x @ gate_up[e]).chunk(2, dim=-1)
                share = (weights * (idx == e)).sum(-1, keepdim=True)
                y = y + share * ((functional.silu(gate) * up) @ down[e])
            y.backward(grad.float())
            results[rank].append((y.detach(), x.grad, weights.grad))
    return results, gate_up.grad, down.grad


def compare(got, case):
    rtol, atol = (1e-4, 1e-4) if case.dtype == torch.float32 else (3e-2, 8e-2)
    results, *expert_grads = dense(case)
    for rank, (steps, *got_grads) in enumerate(got):
        for step, expected in zip(steps, results[rank], strict=True):
            for a, b in zip(step, expected, strict=True):
                torch.testing.assert_close(a.float(), b, rtol=rtol, atol=atol)
        owned = thunderep.local_experts(case.num_experts, rank, len(got))
        for a, b in zip(got_grads, expert_grads, strict=True):
            torch.testing.assert_close(a.float(), b[owned.start : owned.stop], rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_experts", "topk"), [(3, 2), (8, 2), (5, 1)])
@pytest.mark.parametrize(("ranks", "tokens"), [("one_rank", (13,)), ("four_ranks", (13, 0, 5, 9))])
def test_trains_as_one_process_would(request, ranks, tokens, num_experts, topk, dtype):
    case = Case(tokens, num_experts, topk, dtype, steps=2)
    compare(request.getfixturevalue(ranks)().run(run_rank, case), case)


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 200), (torch.bfloat16, 12)])
@pytest.mark.parametrize(("ranks", "tokens"), [("one_rank", (13,)), ("four_ranks", (13, 0, 5, 9))])
def test_trains_straight_through_fp8(request, ranks, tokens, dtype, hidden):
    case = Case(tokens, 5, 2, dtype, steps=2, hidden=hidden, dispatch_dtype=torch.float8_e4m3fn)
    compare(request.getfixturevalue(ranks)().run(run_rank, case), case)


@pytest.mark.parametrize(("overlap", "dispatch_dtype"), [(1, None), (2, torch.float8_e4m3fn)])
def test_compiles_once_and_trains(two_ranks, overlap, dispatch_dtype):
    case = Case((8, 6), 5, 2, torch.float32, steps=3, overlap=overlap, dispatch_dtype=dispatch_dtype)
    compare(two_ranks.run(run_rank, case, True, timeout=280), case)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dispatch_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("hidden", "intermediate"), [(12, 7), (64, 40)])
def test_on_a_device(hidden, intermediate, dispatch_dtype, compiled):
    case = Case((40,), 8, 2, torch.bfloat16, 2, hidden, intermediate, dispatch_dtype=dispatch_dtype)
    with Ranks(1, backend="nccl") as ranks:
        compare(ranks.run(run_rank, case, compiled, timeout=280), case)


def test_rank_without_experts_when_only_experts_train(two_ranks):
    """Nothing of rank 1 needs a gradient, yet rank 0's backward needs rank 1."""
    case = Case((4, 4), 1, 2, torch.float32)
    got = two_ranks.run(run_rank, case, False, True)
    _, gate_up, down = dense(case)
    torch.testing.assert_close(got[0][1], gate_up, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[0][2], down, rtol=1e-4, atol=1e-4)
    assert got[1][1].shape == (0, case.hidden, 2 * case.intermediate)


def initial_parameters(case):
    with open_buffer(case) as buffer:
        torch.manual_seed(3)
        layer = ExpertParallel(buffer, case.intermediate)
        return layer.gate_up.detach(), layer.down.detach(), repr(layer)


def test_initial_experts_do_not_depend_on_the_number_of_ranks(one_rank, two_ranks):
    case = Case((1,), 5, 1, torch.float32)
    ((gate_up, down, _),) = one_rank().run(initial_parameters, case)
    parts = two_ranks.run(initial_parameters, case)
    assert torch.equal(torch.cat([p[0] for p in parts]), gate_up)
    assert torch.equal(torch.cat([p[1] for p in parts]), down)
    assert 0 < gate_up.abs().max() <= case.hidden**-0.5
    assert not torch.equal(gate_up[0], gate_up[1])
    assert "experts 3 to 4 of 5" in parts[1][2]


def copied():
    """Whether a copy of a layer has its own parameters and the same Buffer."""
    with open_buffer(Case((1,), 2, 1, torch.float32)) as buffer:
        layer = ExpertParallel(buffer, 4)
        twin = copy.deepcopy(layer)
        with pytest.raises(TypeError, match="save a module's state_dict"):
            pickle.dumps(layer)
        return twin.buffer is buffer and twin.down is not layer.down and torch.equal(twin.down, layer.down)


def test_a_copy_of_a_layer_shares_its_buffer(one_rank):
    assert one_rank().run(copied) == [True]


def wrong(what):
    case = Case((1,), 2, 1, torch.float32)
    with open_buffer(case) as buffer:
        if what == "intermediate":
            ExpertParallel(buffer, 0)
        elif what == "dtype":
            ExpertParallel(buffer, 4, dtype=torch.int8)
        elif what == "dispatch_dtype":
            ExpertParallel(buffer, 4, dispatch_dtype=torch.float8_e5m2)
        else:
            idx, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
            ExpertParallel(buffer, 4)(torch.zeros(1, case.hidden, dtype=torch.bfloat16), idx, weights)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("intermediate", "intermediate: got 0"),
        ("dtype", "dtype: got torch.int8"),
        ("dispatch_dtype", "dispatch_dtype: got torch.float8_e5m2, expected torch.float8_e4m3fn or None"),
        ("x", "x: got torch.bfloat16, expected torch.float32"),
    ],
)
def test_errors(one_rank, what, message):
    with pytest.raises(RankError, match=message) as raised:
        one_rank().run(wrong, what)
    assert isinstance(raised.value.errors[0], ValueError)
