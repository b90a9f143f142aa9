"""thunderep::quantize_fp8 and thunderep::permute_fp8 on the CPU: against the oracle, and what PyTorch relies on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thunderep
from tests.ops.test_permute import STRIDES, choices
from thunderep import reference
from thunderep.testing.inputs import same_bits, strided

WIDE = (torch.bfloat16, torch.float16, torch.float32)


def random_values(rows, hidden, dtype, exponents, seed):
    """Rows whose groups have magnitudes of their own, from 2^low to 2^high; zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = exponents
    groups = -(-hidden // 128)
    scale = 2.0 ** torch.randint(low, high + 1, (rows, groups), generator=generator, dtype=torch.float64)
    x = torch.randn(rows, hidden, generator=generator, dtype=torch.float64) * scale.repeat_interleave(128, 1)[:, :hidden]
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan], dtype=torch.float64)
    pick = special[torch.randint(len(special), x.shape, generator=generator)]
    rare = torch.rand(rows, 1, generator=generator) * 0.1 * (torch.rand(rows, 1, generator=generator) < 0.5)
    x = torch.where(torch.rand(x.shape, generator=generator) < rare, pick, x)
    x[torch.rand(rows, generator=generator) < 0.1] = 0.0
    return x.to(dtype)


@given(
    rows=st.integers(0, 6),
    hidden=st.one_of(st.integers(1, 300), st.sampled_from((2048, 2880))),
    dtype=st.sampled_from(WIDE),
    strides=st.sampled_from(STRIDES),
    exponents=st.sampled_from(((-2, 2), (-160, 127), (-20, 20))),
    seed=st.integers(0, 2**31),
)
def test_quantize_matches_reference_and_keeps_its_bounds(rows, hidden, dtype, strides, exponents, seed):
    x = random_values(rows, hidden, dtype, exponents, seed)
    q = thunderep.quantize_fp8(strided(x, strides))
    assert all(same_bits(a, b) for a, b in zip(q, reference.quantize_fp8(x), strict=True))
    assert all(t.is_contiguous() for t in q)
    back, exact = reference.dequantize_fp8(*q).double(), x.double()
    finite = x.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    scale = q.x_scales.double().repeat_interleave(128, 1)[:, :hidden]
    bound = torch.maximum(exact.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)
    assert ((back - exact).abs() <= bound)[finite & back.isfinite()].all()
    assert not back[exact == 0].any()


def test_worked_example():
    x = torch.zeros(2, 129)
    x[0, :3] = torch.tensor([448.0, 17.0, -0.001])
    x[0, 128] = 3.0
    q = thunderep.quantize_fp8(x)
    assert q.x_scales[0].tolist() == [1.0, torch.tensor(3.0).div(448).item()]
    assert q.x_fp8[0, :3].float().tolist() == [448.0, 16.0, -(2.0**-9) * 1]  # 17 is half way between 16 and 18; 0.001 rounds up
    assert q.x_fp8[0, 128].float() == 448
    assert not q.x_fp8[1].float().any()
    assert reference.dequantize_fp8(*q)[1].tolist() == [0.0] * 129


def test_what_is_not_a_number_changes_nothing_else():
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    clean = x.clone()
    clean[0, [3, 5, 7]] = 0.0
    x[0, [3, 5, 7]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    back, expected = (reference.dequantize_fp8(*thunderep.quantize_fp8(t)) for t in (x, clean))
    assert back[0, [3, 5, 7]].isnan().all()
    expected[0, [3, 5, 7]] = torch.nan
    assert torch.allclose(back, expected, rtol=0, atol=0, equal_nan=True)


@given(
    rows=st.integers(0, 7),
    topk=st.integers(1, 4),
    num_local_experts=st.integers(0, 5),
    hidden=st.integers(1, 300),
    dtype=st.sampled_from(WIDE),
    idx_dtype=st.sampled_from((torch.int32, torch.int64)),
    strides=st.lists(st.sampled_from(STRIDES), min_size=3, max_size=3),
    alignment=st.integers(1, 5),
    spare=st.integers(-1, 6),
    seed=st.integers(0, 2**31),
)
def test_permute_is_permute_of_what_was_dequantised(
    rows, topk, num_local_experts, hidden, dtype, idx_dtype, strides, alignment, spare, seed
):
    generator = torch.Generator().manual_seed(seed)
    x_fp8, x_scales = thunderep.quantize_fp8(torch.randn(rows, hidden, generator=generator))
    idx = choices(rows, topk, num_local_experts, generator)
    wide = reference.dequantize_fp8(x_fp8, x_scales).to(dtype)
    capacity = -1 if spare < 0 else len(reference.permute(wide, idx, num_local_experts, -1, alignment)[0]) + spare
    expected = reference.permute(wide, idx, num_local_experts, capacity, alignment)
    x_scales[(idx < 0).all(dim=1)] = torch.nan  # nothing may read these
    x_fp8, x_scales, idx = (strided(t, how) for t, how in zip((x_fp8, x_scales, idx.to(idx_dtype)), strides, strict=True))
    got = thunderep.permute_fp8(x_fp8, x_scales, idx, num_local_experts, None if capacity < 0 else capacity, alignment, dtype)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


FP8, SCALES, IDX = torch.ones(2, 130).to(torch.float8_e4m3fn), torch.ones(2, 2), torch.zeros(2, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("quantize_fp8", (torch.ones(2),), r"x: got shape \[2\], expected \[T, H\]"),
        ("quantize_fp8", (torch.ones(2, 3, dtype=torch.float64),), "x: got torch.float64, expected one of"),
        ("permute_fp8", (torch.ones(2, 130), SCALES, IDX, 1), "x: got torch.float32, expected torch.float8_e4m3fn"),
        ("permute_fp8", (FP8, SCALES[:, :1], IDX, 1), r"x_scales: got shape \[2, 1\], expected \[R, 2\]"),
        ("permute_fp8", (FP8, SCALES[:1], IDX, 1), r"x_scales: got shape \[1, 2\], expected 2 rows"),
        ("permute_fp8", (FP8, SCALES.double(), IDX, 1), "x_scales: got torch.float64, expected torch.float32"),
        ("permute_fp8", (FP8, SCALES.to("meta"), IDX, 1), "x_scales: got a tensor on meta, expected one on cpu"),
        ("permute_fp8", (FP8, SCALES, IDX, 1, -1, 1, torch.float64), "dtype: got torch.float64, expected one of"),
        ("permute_fp8", (FP8, SCALES, IDX, 1, 1), "capacity: got 1, expected at least 2"),
        ("permute_fp8", (FP8, SCALES, IDX + 1, 1), "topk_idx: got ids from 1 to 1, expected -1 to 0"),
    ],
)
def test_errors_name_argument_value_and_expectation(operator, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.thunderep, operator)(*arguments)


def test_opcheck():
    generator = torch.Generator().manual_seed(0)
    x, idx = torch.randn(5, 200, generator=generator), choices(5, 2, 3, generator)
    for some in (x, x[:0]):
        torch.library.opcheck(torch.ops.thunderep.quantize_fp8, (some,))
    # Its other checks cannot copy or compare fp8 inputs; the tests below have what they would show.
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    for capacity in (-1, 12):
        arguments = (*thunderep.quantize_fp8(x), idx, 3, capacity, 2, torch.float16)
        torch.library.opcheck(torch.ops.thunderep.permute_fp8, arguments, test_utils=checks)


def test_compiles_once_for_all_sizes_and_values():
    def model(x, idx):
        x_fp8, x_scales = thunderep.quantize_fp8(x.sin())
        p = thunderep.permute_fp8(x_fp8, x_scales, idx, 3, x.shape[0] * 2, dtype=torch.float32)
        return p.expert_x + 1, p.offsets

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    for step, rows in enumerate((5, 8, 11)):
        x, idx = torch.randn(rows, 200, generator=generator), choices(rows, 2, 3, generator)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got = compiled(x, idx)
        assert all(same_bits(a, b) for a, b in zip(got, model(x, idx), strict=True))


def test_no_gradient_passes():
    x = torch.randn(2, 3, requires_grad=True)
    q = thunderep.quantize_fp8(x)
    p = thunderep.permute_fp8(*q, torch.tensor([[0], [1]]), 2)
    assert not any(t.requires_grad for t in (*q, *p))


def test_calls_share_nothing():
    x, idx = torch.randn(4, 130), torch.tensor([[0, 1], [1, -1], [0, 0], [-1, -1]])
    q = thunderep.quantize_fp8(x)
    inputs = [t.clone() for t in (x, idx, *q)]
    first = thunderep.permute_fp8(*q, idx, 2)
    kept = [t.clone() for t in first]
    second = thunderep.permute_fp8(*thunderep.quantize_fp8(x * 2), idx.flip(0), 2)
    assert all(same_bits(a, b) for a, b in zip((x, idx, *q, *first), (*inputs, *kept), strict=True))
    pointers = [t.untyped_storage().data_ptr() for t in (x, idx, *q, *first, *second)]
    assert len(set(pointers)) == len(pointers)
