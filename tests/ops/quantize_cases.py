"""What the Triton kernels of fp8 rows must do: the bits of the CPU's operators. `test_kernels` runs it, as `kernel_cases`."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.ops.kernel_cases import DEVICE, INTERPRETED, grouped, on_gpu, rounded
from tests.ops.test_permute import STRIDES, choices
from tests.ops.test_quantize import WIDE, random_values
from thunderep import reference
from thunderep.ops import permute_fp8, quantize
from thunderep.testing.inputs import same_bits, strided

HIDDEN = st.one_of(st.integers(1, 300), st.sampled_from((2048, 2880, 4100)))
few = settings(max_examples=settings().max_examples // 2)  # the interpreter is slow


@few
@given(
    rows=st.integers(0, 6),
    hidden=HIDDEN,
    dtype=st.sampled_from(WIDE),
    strides=st.sampled_from(STRIDES),
    exponents=st.sampled_from(((-2, 2), (-160, 127), (-20, 20))),
    seed=st.integers(0, 2**31),
)
def test_quantize(rows, hidden, dtype, strides, exponents, seed):
    x = random_values(rows, hidden, dtype, exponents, seed)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter reads subnormal ones as others
        x[x.abs() < torch.finfo(dtype).tiny] = 0.0
    expected = quantize._quantize_cpu(x)
    got = quantize._quantize_cuda(strided(x.to(DEVICE), strides))
    assert all(same_bits(a.cpu(), b) for a, b in zip(got, expected, strict=True))


def test_every_bfloat16():
    """In order, with 448 beside each 127 of them: where those are smaller, the scale is 1 and all ties between codes occur."""
    x = torch.arange(517 * 127, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(517, 127)
    x = functional.pad(x, (0, 1), value=448.0)
    got = quantize._quantize_cuda(x.to(DEVICE))
    assert all(same_bits(a.cpu(), b) for a, b in zip(got, quantize._quantize_cpu(x), strict=True))


@few
@given(
    rows=st.integers(0, 5),
    topk=st.integers(1, 3),
    num_local_experts=st.integers(0, 4),
    hidden=HIDDEN,
    dtype=st.sampled_from(WIDE),
    strides=st.lists(st.sampled_from(STRIDES), min_size=2, max_size=2),
    alignment=st.integers(1, 4),
    spare=st.integers(-1, 3),
    seed=st.integers(0, 2**31),
)
def test_permute_fp8(rows, topk, num_local_experts, hidden, dtype, strides, alignment, spare, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, hidden), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(rows, quantize.groups_of(hidden), generator=generator)
    idx = choices(rows, topk, num_local_experts, generator)
    wide = reference.dequantize_fp8(codes, scales)
    expected = reference.permute(wide, idx, num_local_experts, -1, alignment)
    capacity = -1
    if spare >= 0:
        capacity = len(expected[0]) + spare
        expected = reference.permute(wide, idx, num_local_experts, capacity, alignment)
    scales[(idx < 0).all(dim=1)] = torch.nan  # nothing may read these
    codes, scales = (strided(t.to(DEVICE), how) for t, how in zip((codes, scales), strides, strict=True))
    got = permute_fp8._permute_fp8_cuda(codes, scales, idx.to(DEVICE), num_local_experts, capacity, alignment, dtype)
    expert_x, *rest = grouped(got)
    expected = grouped(expected)
    numbers = ~expected[0].isnan()
    assert torch.equal(expert_x.isnan(), ~numbers)
    assert same_bits(expert_x[numbers], rounded(expected[0][numbers], dtype))
    assert all(same_bits(a, b) for a, b in zip(rest, expected[1:], strict=True))


@on_gpu
def test_captured_and_replayed_with_new_data():
    rows, topk, experts, hidden = 64, 4, 8, 2880
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=DEVICE)
    idx = torch.full((rows, topk), -1, device=DEVICE)

    def both():
        return torch.ops.thunderep.permute_fp8(*torch.ops.thunderep.quantize_fp8(x), idx, experts, rows * topk)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    generator = torch.Generator().manual_seed(0)
    for drop in (0.3, 1.0, 0.0):
        x.copy_(torch.randn(rows, hidden, generator=generator))
        idx.copy_(choices(rows, topk, experts, generator, drop))
        graph.replay()
        wide = reference.dequantize_fp8(*reference.quantize_fp8(x.cpu())).bfloat16()
        expected = reference.permute(wide, idx.cpu(), experts, rows * topk)
        assert all(same_bits(a, b) for a, b in zip(*map(grouped, (results, expected)), strict=True))
