"""thunderep::permute on the CPU: against the oracle, and everything that a compiler or autograd may do with it."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thunderep
from thunderep import reference
from thunderep.testing.inputs import random_rows, same_bits, strided

permute = torch.ops.thunderep.permute
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
)  # fmt: skip
STRIDES = ("contiguous", "transposed", "sliced", "offset")


def choices(rows, topk, num_local_experts, generator, drop=0.3):
    idx = torch.randint(0, max(1, num_local_experts), (rows, topk), generator=generator)
    return torch.where(torch.rand(rows, topk, generator=generator) < (drop if num_local_experts else 2), -1, idx)


@settings(max_examples=4 * settings().max_examples)
@given(
    rows=st.integers(0, 9),
    topk=st.integers(1, 4),
    num_local_experts=st.integers(0, 5),
    hidden=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    idx_dtype=st.sampled_from((torch.int32, torch.int64)),
    x_strides=st.sampled_from(STRIDES),
    idx_strides=st.sampled_from(STRIDES),
    alignment=st.integers(1, 5),
    spare=st.integers(-1, 6),
    drop=st.sampled_from((0.0, 0.3, 0.8, 1.0)),
    seed=st.integers(0, 2**31),
)
def test_matches_reference(
    rows, topk, num_local_experts, hidden, dtype, idx_dtype, x_strides, idx_strides, alignment, spare, drop, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = random_rows((rows, hidden), dtype, generator)
    idx = choices(rows, topk, num_local_experts, generator, drop).to(idx_dtype)
    expected = reference.permute(x, idx, num_local_experts, -1, alignment)
    capacity = -1
    if spare >= 0:
        capacity = len(expected[0]) + spare
        expected = reference.permute(x, idx, num_local_experts, capacity, alignment)
    got = permute(strided(x, x_strides), strided(idx, idx_strides), num_local_experts, capacity, alignment)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert all(t.is_contiguous() for t in got)


def test_worked_example():
    x = torch.tensor([[10.0], [20.0], [30.0]])
    idx = torch.tensor([[1, 0], [-1, 1], [1, 1]])
    expert_x, offsets, row_id_map = thunderep.permute(x, idx, 3, capacity=9, alignment=2)
    # Expert 0: row 0, and padding. Expert 1: row 0, row 1, row 2 twice. Expert 2: nothing. Then what is left of the capacity.
    assert expert_x.flatten().tolist() == [10, 0, 10, 20, 30, 30, 0, 0, 0]
    assert offsets.tolist() == [2, 6, 6]
    assert row_id_map.tolist() == [[2, 0], [-1, 3], [4, 5]]


def test_rows_without_a_choice_are_not_read():
    x = torch.ones(4, 3)
    x[1] = x[3] = torch.nan
    p = thunderep.permute(x, torch.tensor([[0, 1], [-1, -1], [1, -1], [-1, -1]]), 2, alignment=4)
    assert not p.expert_x.isnan().any()


def test_nothing_chosen_reads_nothing():
    p = thunderep.permute(torch.full((4, 3), torch.nan), torch.full((4, 2), -1), 2, capacity=3, alignment=4)
    assert p.expert_x.tolist() == [[0.0] * 3] * 3
    assert p.offsets.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), torch.zeros(2, 1, dtype=torch.int64), 1), r"x: got shape \[2\], expected \[R, H\]"),
        ((torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), 1), r"topk_idx: got shape \[2\], expected \[R, K\]"),
        ((torch.ones(2, 3), torch.zeros(3, 1, dtype=torch.int64), 1), r"topk_idx: got shape \[3, 1\], expected 2 rows"),
        ((torch.ones(2, 3), torch.zeros(2, 1), 1), "topk_idx: got torch.float32, expected torch.int32 or torch.int64"),
        ((torch.ones(2, 3, dtype=torch.complex128), torch.zeros(2, 1, dtype=torch.int64), 1), "x: got torch.complex128"),
        ((torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), -1), "num_local_experts: got -1, expected at least 0"),
        ((torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), 1, -1, 0), "alignment: got 0, expected at least 1"),
        ((torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), 1, -2), "capacity: got -2, expected at least 0"),
        ((torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), 1, 1), "capacity: got 1, expected at least 2"),
        ((torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), 1, 3, 4), "capacity: got 3, expected at least 4"),
        ((torch.ones(2, 3), torch.tensor([[0], [2]]), 2), "topk_idx: got ids from 0 to 2, expected -1 to 1"),
        ((torch.ones(2, 3), torch.tensor([[0], [-2]]), 2), "topk_idx: got ids from -2 to 0, expected -1 to 1"),
        ((torch.ones(2, 3), torch.tensor([[0], [-1]]), 0), "topk_idx: got ids from -1 to 0, expected -1 to -1"),
    ],
)
def test_errors_name_argument_value_and_expectation(arguments, message):
    with pytest.raises(ValueError, match=message):
        permute(*arguments)


def test_more_choices_than_int32_counts():
    idx = torch.full((1, 1), -1).expand(2**16, 2**15)
    with pytest.raises(ValueError, match="topk_idx: got 2147483648 choices"):
        permute(torch.ones(1, 1).expand(2**16, 1), idx, 1)


def test_meta_tensors_are_checked_as_real_ones():
    x, idx = torch.ones(2, 3, device="meta"), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="topk_idx: got a tensor on cpu, expected one on meta"):
        permute(x, idx, 1, 2)


@pytest.mark.parametrize("capacity", [-1, 12])
@pytest.mark.parametrize("num_local_experts", [0, 3])
@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck(rows, num_local_experts, capacity):
    generator = torch.Generator().manual_seed(0)
    idx = choices(rows, 2, num_local_experts, generator)
    for x in (torch.randn(rows, 4, requires_grad=True), torch.ones(rows, 4, dtype=torch.int8)):
        torch.library.opcheck(permute, (x, idx, num_local_experts, capacity, 2))


@pytest.mark.parametrize("capacity", [-1, 20])
def test_compiles_once_for_all_values(capacity):
    def model(x, idx, weights):
        p = permute(x, idx, 3, capacity, 2)
        return torch.ops.thunderep.unpermute(p[0].sin() * 2, p[2], weights), p[1]

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for drop in (0.3, 0.0, 1.0, 0.9):
        x, weights = (torch.randn(6, n, generator=generator, requires_grad=True) for n in (5, 2))
        idx = choices(6, 2, 3, generator, drop)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out, offsets = compiled(x, idx, weights)
            grads = torch.autograd.grad(out.sum(), (x, weights))
        expected, expected_offsets = model(x, idx, weights)
        torch.testing.assert_close(out, expected)
        assert torch.equal(offsets, expected_offsets)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (x, weights)))


def test_compiles_with_dynamic_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, idx: permute(x, idx, 3, x.shape[0] * 2)[0] + 1, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for rows in (5, 8, 11):
        x, idx = torch.randn(rows, 4, generator=generator), choices(rows, 2, 3, generator)
        assert torch.equal(compiled(x, idx), permute(x, idx, 3, rows * 2)[0] + 1)


@pytest.mark.parametrize(("capacity", "alignment"), [(-1, 1), (-1, 3), (25, 4)])
def test_gradient(capacity, alignment):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    idx = torch.tensor([[0, 2], [1, 1], [-1, -1], [2, -1], [0, 0]])
    assert torch.autograd.gradcheck(lambda x: permute(x, idx, 3, capacity, alignment)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: permute(x, idx, 3, capacity, alignment)[0], x)


def test_gradient_is_the_float32_sum_rounded_once():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    expert_x = permute(x, torch.zeros(1, 3, dtype=torch.int64), 1)[0]
    (grad,) = torch.autograd.grad(expert_x, x, torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16))
    assert grad.item() == 258.0  # adding in bf16 gives 256


def test_calls_share_nothing():
    x, idx = torch.randn(4, 3), torch.tensor([[0, 1], [1, -1], [0, 0], [-1, -1]])
    first = permute(x, idx, 2)
    kept = [t.clone() for t in first]
    second = permute(x * 2, idx.flip(0), 2)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    pointers = [t.untyped_storage().data_ptr() for t in (x, idx, *first, *second)]
    assert len(set(pointers)) == len(pointers)


def test_triton_is_not_imported():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, thunderep;"
        "x = torch.ones(2, 3, requires_grad=True); p = thunderep.permute(x, torch.tensor([[0], [1]]), 2);"
        "thunderep.unpermute(p.expert_x, p.row_id_map, torch.ones(2, 1)).sum().backward(); assert x.grad.sum() == 6"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
