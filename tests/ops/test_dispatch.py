"""dispatch and combine as operators: what PyTorch relies on. One process; the exchange itself is tested in tests/dist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import thunderep
from thunderep import reference
from thunderep.testing.inputs import random_tokens, same_bits

E, K, H, T = 6, 3, 20, 9


@pytest.fixture(scope="module")
def buffer() -> Iterator[thunderep.Buffer]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with thunderep.Buffer(num_experts=E, hidden=H, topk=K, max_tokens=32, dtype=torch.float32) as buffer:
        yield buffer
    dist.destroy_process_group()


def inputs(
    tokens: int = T, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = random_tokens(3, tokens, hidden=H, num_experts=E, topk=K, dtype=dtype, drop=0.2, **options)
    return made.x, made.topk_idx, made.topk_weights


@pytest.mark.parametrize("max_tokens", [-1, T])  # a larger M leaves rows unspecified, which opcheck would compare
@pytest.mark.parametrize("scales", [False, True])
def test_opcheck_dispatch(buffer: thunderep.Buffer, max_tokens: int, scales: bool) -> None:
    x, idx, weights = inputs()
    x_scales = torch.rand(T, 2) if scales else None
    arguments = (x.requires_grad_(), idx, weights.requires_grad_(), E, buffer.name, max_tokens, x_scales)
    torch.library.opcheck(torch.ops.thunderep.dispatch.default, arguments)


def test_opcheck_combine(buffer: thunderep.Buffer) -> None:
    d = thunderep.dispatch(*inputs(), E, buffer)
    y = torch.randn(T, H, requires_grad=True)
    torch.library.opcheck(torch.ops.thunderep.combine.default, (y, d.recv_topk_idx, d.is_token_in_rank, buffer.name))


def test_opcheck_backwards(buffer: thunderep.Buffer) -> None:
    d = thunderep.dispatch(*inputs(), E, buffer)
    tail = (d.recv_topk_idx, d.is_token_in_rank, buffer.name)
    for rows in (torch.randn(T, H), torch.empty(T, 0, dtype=torch.int8)):
        torch.library.opcheck(torch.ops.thunderep.dispatch_backward.default, (rows, torch.randn(T, K), *tail))
    torch.library.opcheck(torch.ops.thunderep.combine_backward.default, (torch.randn(T, H), *tail))


def test_calls_share_no_memory(buffer: thunderep.Buffer) -> None:
    """Results of an earlier call do not change when a later one is made, and alias neither inputs nor each other."""
    first_in, second_in = inputs(), inputs()
    first = thunderep.dispatch(*first_in, E, buffer)
    kept = [t.clone() for t in first]
    first_sum = thunderep.combine(first.recv_x, first, buffer)
    sum_kept = first_sum.clone()
    x, idx, weights = (t * 0 for t in second_in)
    second = thunderep.dispatch(x, idx, weights, E, buffer)
    thunderep.combine(second.recv_x, second, buffer)
    assert all(same_bits(a, b) for a, b in zip(first, kept, strict=True))
    assert same_bits(first_sum, sum_kept)
    storages = [t.untyped_storage().data_ptr() for t in (*first, *second, *first_in, *second_in) if t.numel()]
    assert len(set(storages)) == len(storages)


def test_gradients_equal_the_reference(buffer: thunderep.Buffer) -> None:
    """Autograd through dispatch and combine, against autograd through plain indexing."""
    x, idx, weights = inputs()
    x.requires_grad_()
    weights.requires_grad_()
    d = thunderep.dispatch(x, idx, weights, E, buffer)
    scale = torch.where(d.recv_topk_idx >= 0, d.recv_topk_weights * (d.recv_topk_idx + 2), 0.0).sum(1, keepdim=True)
    out = thunderep.combine(d.recv_x * scale, d, buffer)
    factor = torch.randn(T, H)
    got = torch.autograd.grad((out * factor).sum(), (x, weights))
    plain = torch.where(idx >= 0, weights * (idx + 2), 0.0).sum(1, keepdim=True) * x
    want = torch.autograd.grad((plain * factor).sum(), (x, weights))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(got, want)


def test_rows_that_nobody_chose_get_no_gradient(buffer: thunderep.Buffer) -> None:
    x, idx, weights = inputs()
    idx[2] = -1
    x.requires_grad_()
    d = thunderep.dispatch(x, idx, weights, E, buffer, max_tokens=12)
    y = torch.randn(12, H, requires_grad=True)
    thunderep.combine(y, d, buffer).sum().backward()
    assert y.grad is not None
    chosen = (d.recv_topk_idx >= 0).any(1)
    assert torch.equal(y.grad[~chosen], torch.zeros(int((~chosen).sum()), H))
    assert torch.equal(y.grad[chosen], torch.ones(int(chosen.sum()), H))
    (grad,) = torch.autograd.grad(d.recv_x[chosen].sum(), x)
    assert torch.equal(grad[2], torch.zeros(H))


def test_integer_rows_have_no_gradient(buffer: thunderep.Buffer) -> None:
    x, idx, weights = inputs(dtype=torch.int8)
    d = thunderep.dispatch(x, idx, weights.requires_grad_(), E, buffer)
    assert not d.recv_x.requires_grad
    d.recv_topk_weights.sum().backward()
    assert weights.grad is not None


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x of three dimensions": ({"x": torch.zeros(2, 2, H)}, ValueError, "x: got shape [2, 2, 20], expected [T, 20] (hidden)"),
    "hidden": ({"x": torch.zeros(T, H + 1)}, ValueError, "x: got shape [9, 21]"),
    "type of x": ({"x": torch.zeros(T, H, dtype=torch.float64)}, ValueError, "x: got torch.float64"),
    "K": (
        {"topk_idx": torch.zeros(T, K + 1, dtype=torch.int64)},
        ValueError,
        "topk_idx: got shape [9, 4], expected [T, 3] (topk)",
    ),
    "type of ids": ({"topk_idx": torch.zeros(T, K)}, ValueError, "topk_idx: got torch.float32"),
    "rows of ids": (
        {"topk_idx": torch.zeros(T - 1, K, dtype=torch.int64)},
        ValueError,
        "topk_idx: got shape [8, 3], expected 9 rows",
    ),
    "type of weights": (
        {"topk_weights": torch.zeros(T, K, dtype=torch.bfloat16)},
        ValueError,
        "topk_weights: got torch.bfloat16",
    ),
    "rows of weights": (
        {"topk_weights": torch.zeros(T + 1, K)},
        ValueError,
        "topk_weights: got shape [10, 3], expected 9 rows",
    ),
    "type of scales": ({"x_scales": torch.zeros(T, 2, dtype=torch.float16)}, ValueError, "x_scales: got torch.float16"),
    "rows of scales": ({"x_scales": torch.zeros(T + 2, 2)}, ValueError, "x_scales: got shape [11, 2], expected 9 rows"),
    "experts": ({"num_experts": E + 1}, ValueError, "num_experts: got 7, expected the Buffer's 6"),
    "device": ({"x": torch.zeros(T, H, device="meta")}, ValueError, "x: got a tensor on meta"),
    "id too large": ({"topk_idx": torch.full((T, K), E)}, ValueError, "topk_idx: got ids from 6 to 6, expected -1 to 5"),
    "id too small": ({"topk_idx": torch.full((T, K), -2)}, ValueError, "topk_idx: got ids from -2 to -2"),
    "T over M": ({"max_tokens": T - 1}, RuntimeError, "x: got 9 tokens, more than max_tokens = 8 of this call"),
    "M over the capacity": (
        {"max_tokens": 33},
        RuntimeError,
        "max_tokens: got 33 tokens, more than the Buffer's max_tokens = 32",
    ),
    "M below 0": ({"max_tokens": -2}, ValueError, "max_tokens: got -2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_dispatch(buffer: thunderep.Buffer, name: str) -> None:
    change, kind, message = WRONG[name]
    x, idx, weights = inputs()
    arguments: dict[str, Any] = {
        "x": x,
        "topk_idx": idx,
        "topk_weights": weights,
        "num_experts": E,
        "max_tokens": None,
        "x_scales": None,
    }
    with pytest.raises(kind) as info:
        thunderep.dispatch(**(arguments | change), buffer=buffer)
    assert message in str(info.value)
    thunderep.dispatch(x, idx, weights, E, buffer)  # nothing moved, so the Buffer works on


def test_wrong_arguments_of_combine(buffer: thunderep.Buffer) -> None:
    d = thunderep.dispatch(*inputs(), E, buffer)
    with pytest.raises(ValueError, match=r"y: got shape \[9, 19\], expected \[R, 20\]"):
        thunderep.combine(torch.zeros(T, H - 1), d, buffer)
    with pytest.raises(ValueError, match=r"y: got torch.int8"):
        thunderep.combine(torch.zeros(T, H, dtype=torch.int8), d, buffer)
    with pytest.raises(ValueError, match=r"y: got 8 rows, expected 9, as recv_topk_idx has"):
        thunderep.combine(torch.zeros(T - 1, H), d, buffer)
    with pytest.raises(ValueError, match=r"is_token_in_rank: got torch.int32"):
        thunderep.combine(torch.zeros(T, H), d._replace(is_token_in_rank=d.is_token_in_rank.int()), buffer)
    with pytest.raises(RuntimeError, match="is_token_in_rank: got 10 tokens, more than the 9 rows"):
        thunderep.combine(torch.zeros(T, H), d._replace(is_token_in_rank=torch.ones(10, 1, dtype=torch.bool)), buffer)


def test_closed_buffer(buffer: thunderep.Buffer) -> None:
    other = thunderep.Buffer(num_experts=E, hidden=H, topk=K, max_tokens=32, dtype=torch.float32)
    d = thunderep.dispatch(*inputs(), E, other)
    other.close()
    other.close()
    for call in (
        lambda: thunderep.dispatch(*inputs(), E, other),
        lambda: thunderep.combine(d.recv_x, d, other),
        lambda: thunderep.dispatch(*inputs(), E, other, async_op=True),
        other.check,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_closed_buffer_is_not_the_next_one_of_its_name(buffer: thunderep.Buffer) -> None:
    arguments: dict[str, Any] = {"num_experts": E, "hidden": H, "topk": K, "max_tokens": 32, "name": "taken again"}
    arguments["dtype"] = torch.float32
    thunderep.Buffer(**arguments).close()
    first = thunderep.Buffer(**arguments)
    d = thunderep.dispatch(*inputs(), E, first)
    first.close()
    with thunderep.Buffer(**arguments):
        for use in (
            lambda: thunderep.dispatch(*inputs(), E, first),
            lambda: thunderep.combine(d.recv_x, d, first),
            lambda: thunderep.all_reduce(torch.ones(2), first),
        ):
            with pytest.raises(RuntimeError, match="'taken again' is closed"):
                use()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_sums_are_float32_whatever_the_default_is(default: torch.dtype, buffer: thunderep.Buffer) -> None:
    d = thunderep.dispatch(*inputs(), E, buffer)
    y = torch.randn(T, H)
    expected = torch.where(d.is_token_in_rank, y, 0)
    torch.set_default_dtype(default)
    try:
        assert same_bits(thunderep.combine(y, d, buffer), expected)
        (wanted,) = reference.combine([y], [d.is_token_in_rank])
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(wanted, expected)


def test_a_buffer_is_where_it_is_told_whatever_the_default_is(buffer: thunderep.Buffer) -> None:
    with torch.device("meta"):
        made = thunderep.Buffer(num_experts=E, hidden=H, topk=K, max_tokens=T, dtype=torch.float32, device="cpu")
    with made:
        made.check()
        d = thunderep.dispatch(*inputs(), E, made)
        assert torch.isfinite(thunderep.combine(d.recv_x, d, made)).all()


def test_second_derivatives_are_refused(buffer: thunderep.Buffer) -> None:
    x, idx, weights = inputs()
    x.requires_grad_()
    for async_op in (False, True):
        d: Any = thunderep.dispatch(x, idx, weights, E, buffer, async_op=async_op)
        d = d.wait() if async_op else d
        out: Any = thunderep.combine(d.recv_x.square(), d, buffer, async_op=async_op)
        out = out.wait() if async_op else out
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_combine_takes_ids_of_the_types_that_dispatch_gives(dtype: torch.dtype, buffer: thunderep.Buffer) -> None:
    d = thunderep.dispatch(*inputs(), E, buffer)
    with pytest.raises(ValueError, match=r"recv_topk_idx: got torch\.\w+, expected one of"):
        thunderep.combine(d.recv_x, d._replace(recv_topk_idx=d.recv_topk_idx.to(dtype)), buffer)


def test_reference_on_a_worked_example() -> None:
    """Two ranks, four experts, two tokens each: small enough to check by hand."""
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    idxs = [torch.tensor([[0, 3], [1, -1]]), torch.tensor([[2, 2], [-1, -1]])]
    weights = [torch.tensor([[0.5, 0.25], [1.0, 9.0]]), torch.tensor([[0.75, 0.125], [9.0, 9.0]])]
    first, second = reference.dispatch(xs, idxs, weights, 4, 2)
    assert first[1].tolist() == [[0, -1], [1, -1], [-1, -1], [-1, -1]]
    assert first[2].tolist() == [[0.5, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert first[0].tolist() == [[1.0], [2.0], [0.0], [0.0]]
    assert first[4].tolist() == [[True, True], [True, False]]
    assert second[1].tolist() == [[-1, 1], [-1, -1], [0, 0], [-1, -1]]
    assert second[2].tolist() == [[0.0, 0.25], [0.0, 0.0], [0.75, 0.125], [0.0, 0.0]]
    assert second[4].tolist() == [[False, True], [False, False]]
    sums = reference.combine([first[0] * 10, second[0] * 100], [first[4], second[4]])
    assert [s.tolist() for s in sums] == [[[110.0], [20.0]], [[300.0], [0.0]]]


def test_gradients_of_odd_sizes_fit_the_workspace(buffer: thunderep.Buffer) -> None:
    """Two payloads of 3 * 5 * 2 and 3 * 1 * 4 bytes: what comes second begins aligned."""
    with thunderep.Buffer(num_experts=2, hidden=5, topk=1, max_tokens=3, device="cpu") as small:
        x = torch.randn(3, 5).bfloat16().requires_grad_()
        weights = torch.rand(3, 1, requires_grad=True)
        d = thunderep.dispatch(x, torch.tensor([[0], [1], [0]]), weights, 2, small)
        (d.recv_x.sum() + 2 * d.recv_topk_weights.sum()).backward()
        assert x.grad is not None
        assert weights.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
        assert torch.equal(weights.grad, torch.full((3, 1), 2.0))
        wide = thunderep.combine(torch.ones(3, 5), d, small)  # float32 through a bfloat16 Buffer
        assert torch.equal(wide, torch.ones(3, 5))
