"""What the Triton kernels between permute and unpermute must do. `test_kernels` runs it, as `kernel_cases`."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.kernel_cases import DEVICE, INTERPRETED, on_gpu
from tests.ops.test_permute import STRIDES
from thunderep.ops import grouped_mm, swiglu
from thunderep.ops.kernels import swiglu as swiglu_kernels
from thunderep.ops.kernels.grouped_mm import matrices_of_rows, rows_by_matrices
from thunderep.testing.inputs import strided


@given(
    sizes=st.lists(st.integers(0, 5), max_size=4),
    spare=st.integers(0, 9),
    inner=st.one_of(st.integers(1, 40), st.sampled_from((256, 300, 768))),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    strides=st.sampled_from(STRIDES),
    seed=st.integers(0, 2**31),
)
def test_swiglu(sizes, spare, inner, dtype, strides, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    offsets = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    gate_up, grad = ((torch.randn(rows + spare, n, generator=generator) * 3).to(dtype) for n in (2 * inner, inner))
    expected = swiglu._swiglu_cpu(gate_up.float(), offsets)[:rows]
    expected_grad = swiglu._swiglu_backward_cpu(grad.float(), gate_up.float(), offsets)[:rows]
    gate_up, grad = (strided(t.to(DEVICE), strides) for t in (gate_up, grad))
    out = torch.full((rows + spare, inner), torch.nan, dtype=dtype, device=DEVICE)
    grad_gate_up = torch.full((rows + spare, 2 * inner), torch.nan, dtype=dtype, device=DEVICE)
    swiglu_kernels.swiglu(gate_up, offsets.to(DEVICE), out)
    swiglu_kernels.swiglu_backward(grad, gate_up, offsets.to(DEVICE), grad_gate_up)
    rtol, atol = 8 * torch.finfo(dtype).eps, 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out[:rows].cpu().float(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(grad_gate_up[:rows].cpu().float(), expected_grad, rtol=rtol, atol=atol)
    assert out[rows:].isnan().all()
    assert grad_gate_up[rows:].isnan().all()


@given(
    sizes=st.lists(st.sampled_from((0, 1, 3, 16, 17, 70, 150)), max_size=4),
    spare=st.sampled_from((0, 1, 40, 600)),
    a_columns=st.sampled_from((1, 8, 33, 64, 100)),
    b_columns=st.sampled_from((1, 8, 64, 130)),
    dtype=st.sampled_from((torch.float16,) if INTERPRETED else (torch.bfloat16, torch.float16)),  # it cannot multiply bf16
    strides=st.lists(st.sampled_from(STRIDES), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_grouped_mm(sizes, spare, a_columns, b_columns, dtype, strides, seed):
    """Exact: small integers, whose sums are of few bits."""
    generator = torch.Generator().manual_seed(seed)
    rows, groups = sum(sizes), len(sizes)
    offsets = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()

    def integers(*shape):
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)

    a, b, grad = integers(rows + spare, a_columns), integers(groups, a_columns, b_columns), integers(rows + spare, b_columns)
    expected = grouped_mm._grouped_mm(a, b, offsets)[:rows]
    expected_matrices = grouped_mm._grouped_mm(a.mT, grad, offsets)
    a[rows:], grad[rows:] = torch.nan, torch.nan  # nothing may read these
    a, grad = (strided(t.to(DEVICE), how) for t, how in zip((a, grad), strides, strict=False))
    b = b.to(DEVICE) if strides[2] == "contiguous" else b.mT.contiguous().mT.to(DEVICE)
    out = torch.full((rows + spare, b_columns), torch.nan, dtype=dtype, device=DEVICE)
    matrices = torch.full((groups, a_columns, b_columns), torch.nan, dtype=dtype, device=DEVICE)
    rows_by_matrices(a, b, offsets.to(DEVICE), out)
    matrices_of_rows(a.mT, grad, offsets.to(DEVICE), matrices)
    assert torch.equal(out[:rows].cpu(), expected)
    assert torch.equal(matrices.cpu(), expected_matrices)
    assert out[rows:].isnan().all()


@on_gpu
def test_grouped_mm_is_captured_and_replayed_with_other_groups():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, shape, generator=generator).half().to(DEVICE) for shape in ((500, 96), (3, 96, 80)))
    offsets = torch.tensor([1, 1, 3], dtype=torch.int32, device=DEVICE)
    torch.ops.thunderep.grouped_mm(a, b, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.thunderep.grouped_mm(a, b, offsets)
    for ends in ((0, 0, 0), (100, 300, 500), (0, 499, 499), (7, 7, 8)):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        expected = grouped_mm._grouped_mm(a.cpu(), b.cpu(), offsets.cpu())
        assert torch.equal(out[: ends[-1]].cpu(), expected[: ends[-1]])
