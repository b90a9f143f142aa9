"""thunderep::grouped_mm: one product per group, against a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thunderep  # noqa: F401  registers the operators

grouped_mm = torch.ops.thunderep.grouped_mm


def case(sizes, spare, a_columns, b_columns, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([sum(sizes[: i + 1]) for i in range(len(sizes))], dtype=torch.int32)
    a = torch.randn(sum(sizes) + spare, a_columns, generator=generator).to(dtype)
    b = torch.randn(len(sizes), a_columns, b_columns, generator=generator).to(dtype)
    return a, b, offsets


@given(
    sizes=st.lists(st.integers(0, 5), max_size=5),
    spare=st.integers(0, 3),
    a_columns=st.integers(1, 9),
    b_columns=st.integers(1, 9),
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    seed=st.integers(0, 2**31),
)
def test_matches_a_loop(sizes, spare, a_columns, b_columns, dtype, seed):
    a, b, offsets = case(sizes, spare, a_columns, b_columns, seed, dtype)
    start = sum(sizes)
    a[start:] = torch.nan  # rows past the last group are not read
    groups = torch.split(a, [*sizes, spare])[:-1]
    rows = [group @ matrix for group, matrix in zip(groups, b, strict=True)]
    torch.testing.assert_close(grouped_mm(a, b, offsets), torch.cat([*rows, a.new_zeros(spare, b_columns)]))
    other = torch.randn(len(a), b_columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    matrices = [group.mT @ part for group, part in zip(groups, torch.split(other, [*sizes, spare])[:-1], strict=True)]
    expected = torch.stack(matrices) if matrices else a.new_zeros(0, a_columns, b_columns)
    torch.testing.assert_close(grouped_mm(a.mT, other, offsets), expected)


@pytest.mark.parametrize("sizes", [(2, 0, 3), ()])
def test_opcheck_and_gradients(sizes):
    a, b, offsets = case(sizes, 1, 3, 4, 0)
    a.requires_grad_()
    b.requires_grad_()
    torch.library.opcheck(grouped_mm, (a, b, offsets))
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b, offsets), (a, b))
    if sizes:
        assert torch.autograd.gradgradcheck(lambda a, b: grouped_mm(a, b, offsets), (a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_once_for_all_values(dtype):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: grouped_mm(*arguments).sin(), fullgraph=True)
    for sizes in ((2, 0, 3), (5, 0, 0), (0, 1, 1)):
        a, b, offsets = case(sizes, 5 - sum(sizes), 3, 4, 0, dtype)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(compiled(a, b, offsets), grouped_mm(a, b, offsets).sin())


def test_calls_share_nothing():
    a, b, offsets = case((2, 3), 0, 3, 4, 0)
    first = grouped_mm(a, b, offsets)
    kept = first.clone()
    second = grouped_mm(a * 2, b, offsets)
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.ones(2), torch.ones(1, 2, 2), torch.ones(1, dtype=torch.int32)),
            r"a: got shape \[2\], expected two dimensions",
        ),
        ((torch.ones(2, 2), torch.ones(2), torch.ones(1, dtype=torch.int32)), r"b: got shape \[2\], expected two dimensions"),
        ((torch.ones(2, 2), torch.ones(1, 2, 2).half(), torch.ones(1, dtype=torch.int32)), "b: got torch.float16, expected"),
        (
            (torch.ones(2, 2), torch.ones(2, 2, 2), torch.ones(1, dtype=torch.int32)),
            r"b: got shape \[2, 2, 2\], expected 1 matr",
        ),
        (
            (torch.ones(2, 2), torch.ones(1, 3, 2), torch.ones(1, dtype=torch.int32)),
            r"b: got shape \[1, 3, 2\], expected 2 rows",
        ),
        ((torch.ones(2, 2), torch.ones(3, 2), torch.ones(1, dtype=torch.int32)), r"b: got shape \[3, 2\], expected 2 rows"),
        (
            (torch.ones(2, 2, device="meta"), torch.ones(1, 2, 2, device="meta"), torch.ones(1, dtype=torch.int32)),
            "offsets: got a tensor on cpu, expected one on meta",
        ),
        ((torch.ones(2, 2), torch.ones(1, 2, 2), torch.ones(1)), "offsets: got torch.float32, expected torch.int32"),
    ],
)
def test_errors_name_argument_value_and_expectation(arguments, message):
    with pytest.raises(ValueError, match=message):
        grouped_mm(*arguments)
