"""thunderep::unpermute on the CPU: against the oracle, and everything that a compiler or autograd may do with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thunderep
from thunderep import reference
from thunderep.testing.inputs import same_bits, strided

unpermute = torch.ops.thunderep.unpermute
STRIDES = ("contiguous", "transposed", "sliced", "offset")


def placement(rows, topk, spare, generator, drop=0.3):
    """A row_id_map that names distinct rows in random order, and how many rows expert_y then has."""
    placed = torch.rand(rows, topk, generator=generator) >= drop
    count = int(placed.sum())
    row_id_map = torch.full((rows, topk), -1, dtype=torch.int32)
    row_id_map[placed] = torch.randperm(count + spare, generator=generator)[:count].to(torch.int32)
    return row_id_map, count + spare


@settings(max_examples=4 * settings().max_examples)
@given(
    rows=st.integers(0, 9),
    topk=st.integers(1, 5),
    hidden=st.integers(1, 40),
    spare=st.integers(0, 4),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    strides=st.lists(st.sampled_from(STRIDES), min_size=3, max_size=3),
    drop=st.sampled_from((0.0, 0.3, 0.8, 1.0)),
    seed=st.integers(0, 2**31),
)
def test_matches_reference_bit_for_bit(rows, topk, hidden, spare, dtype, strides, drop, seed):
    generator = torch.Generator().manual_seed(seed)
    row_id_map, count = placement(rows, topk, spare, generator, drop)
    # Magnitudes far apart, so that another order of the sum, or one rounding less, shows.
    expert_y = (
        torch.randn(count, hidden, generator=generator) * 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    ).to(dtype)
    weights = torch.randn(rows, topk, generator=generator)
    # What nothing refers to must not be read.
    unnamed = torch.ones(count, dtype=torch.bool)
    unnamed[row_id_map[row_id_map >= 0].long()] = False
    expert_y[unnamed] = torch.nan
    weights[row_id_map < 0] = torch.nan
    inputs = [strided(t, how) for t, how in zip((expert_y, row_id_map, weights), strides, strict=True)]
    got = unpermute(*inputs)
    assert same_bits(got, reference.unpermute(expert_y, row_id_map, weights))
    assert got.is_contiguous()


def test_worked_example():
    expert_y = torch.tensor([[1.0], [10.0], [100.0]])
    row_id_map = torch.tensor([[2, 0], [-1, -1], [-1, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25], [1.0, 1.0], [1.0, 2.0]])
    assert thunderep.unpermute(expert_y, row_id_map, weights).tolist() == [[50.25], [0.0], [20.0]]


def test_sum_is_float32_in_k_order_rounded_once():
    row_id_map = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    ones = torch.ones(1, 3)
    assert unpermute(torch.tensor([[1e8], [1.0], [-1e8]]), row_id_map, ones).item() == 0.0
    assert unpermute(torch.tensor([[1e8], [-1e8], [1.0]]), row_id_map, ones).item() == 1.0
    assert unpermute(torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16), row_id_map, ones).item() == 258.0


def test_products_are_rounded_before_they_are_added():
    y = torch.tensor([[1.0 + 2**-12], [-1.0]])
    weights = torch.tensor([[1.0 + 2**-12, 1.0]])
    # The product is 1 + 2^-11 + 2^-24; float32 drops the last term, a fused multiply-add would keep it.
    assert unpermute(y.flip(0), torch.tensor([[0, 1]], dtype=torch.int32), weights.flip(1)).item() == 2**-11


def test_permute_and_unpermute_are_inverse():
    x = torch.randn(6, 5)
    p = thunderep.permute(x, torch.tensor([[0], [2], [1], [0], [2], [2]]), 3, alignment=4)
    assert torch.equal(thunderep.unpermute(p.expert_x, p.row_id_map, torch.ones(6, 1)), x)


MAP = torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), MAP, torch.ones(2, 1)), r"expert_y: got shape \[2\], expected \[C, H\]"),
        ((torch.ones(2, 3, dtype=torch.int8), MAP, torch.ones(2, 1)), "expert_y: got torch.int8, expected one of"),
        ((torch.ones(2, 3), MAP.long(), torch.ones(2, 1)), "row_id_map: got torch.int64, expected torch.int32"),
        ((torch.ones(2, 3), MAP[:, 0], torch.ones(2, 1)), r"row_id_map: got shape \[2\], expected \[R, K\]"),
        ((torch.ones(2, 3), MAP, torch.ones(2)), r"topk_weights: got shape \[2\], expected \[R, K\]"),
        ((torch.ones(2, 3), MAP, torch.ones(3, 1)), r"topk_weights: got shape \[3, 1\], expected \[2, 1\]"),
        ((torch.ones(2, 3), MAP, torch.ones(2, 2)), r"topk_weights: got shape \[2, 2\], expected \[2, 1\]"),
        ((torch.ones(2, 3), MAP, torch.ones(2, 1).double()), "topk_weights: got torch.float64, expected torch.float32"),
        ((torch.ones(2, 3).bfloat16(), MAP, torch.ones(2, 1).bfloat16()), "topk_weights: got torch.bfloat16"),
        ((torch.ones(2, 3), MAP.to("meta"), torch.ones(2, 1)), "row_id_map: got a tensor on meta, expected one on cpu"),
    ],
)
def test_errors_name_argument_value_and_expectation(arguments, message):
    with pytest.raises(ValueError, match=message):
        unpermute(*arguments)


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    row_id_map, count = placement(rows, 2, 1, generator)
    expert_y = torch.randn(count, 3, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(rows, 2, generator=generator).requires_grad_()
    torch.library.opcheck(unpermute, (expert_y, row_id_map, weights))
    grad = torch.randn(rows, 3, generator=generator).to(dtype)
    torch.library.opcheck(torch.ops.thunderep.unpermute_backward, (grad, expert_y.detach(), row_id_map, weights.detach()))


def test_compiles_once_for_all_values():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: unpermute(*arguments).sin(), fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for drop in (0.3, 0.5, 1.0):
        row_id_map = placement(5, 2, 0, generator, drop)[0]
        expert_y = torch.randn(10, 3, generator=generator, requires_grad=True)
        weights = torch.rand(5, 2, generator=generator, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = compiled(expert_y, row_id_map, weights)
        expected = unpermute(expert_y, row_id_map, weights).sin()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), (expert_y, weights)), torch.autograd.grad(expected.sum(), (expert_y, weights))
        )


@pytest.mark.parametrize("spare", [0, 3])
def test_gradient(spare):
    generator = torch.Generator().manual_seed(1)
    row_id_map, count = placement(5, 3, spare, generator)
    expert_y = torch.randn(count, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, w: unpermute(y, row_id_map, w), (expert_y, weights))


def test_gradient_reads_only_what_is_named():
    row_id_map = torch.tensor([[2, -1], [-1, -1]], dtype=torch.int32)
    expert_y = torch.tensor([[torch.nan], [torch.nan], [3.0]], requires_grad=True)
    weights = torch.tensor([[0.5, torch.nan], [torch.nan, torch.nan]], requires_grad=True)
    out = unpermute(expert_y, row_id_map, weights)
    grad_y, grad_weights = torch.autograd.grad(out, (expert_y, weights), torch.tensor([[2.0], [torch.nan]]))
    assert grad_y.tolist() == [[0.0], [0.0], [1.0]]
    assert grad_weights.tolist() == [[6.0, 0.0], [0.0, 0.0]]


def test_gradient_of_weights_is_a_float32_dot_product():
    expert_y = torch.ones(1, 4096, dtype=torch.bfloat16)
    weights = torch.ones(1, 1, requires_grad=True)
    out = unpermute(expert_y, torch.zeros(1, 1, dtype=torch.int32), weights)
    assert torch.autograd.grad(out, weights, torch.full_like(out, 1 + 2**-7))[0].item() == 4096 + 32


def test_calls_share_nothing():
    expert_y, row_id_map, weights = torch.randn(3, 2), torch.tensor([[0, 1], [-1, 2]], dtype=torch.int32), torch.rand(2, 2)
    first = unpermute(expert_y, row_id_map, weights)
    kept = first.clone()
    second = unpermute(expert_y * 2, row_id_map, weights)
    assert torch.equal(first, kept)
    pointers = [t.untyped_storage().data_ptr() for t in (expert_y, row_id_map, weights, first, second)]
    assert len(set(pointers)) == len(pointers)
