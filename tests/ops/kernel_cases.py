"""What the Triton kernels must do; `test_kernels` runs it in Triton's interpreter, and on a CUDA device where there is one.

The interpreter is chosen before Triton is imported, so these run in a process of their own.
"""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.ops.test_permute import DTYPES, STRIDES, choices
from tests.ops.test_unpermute import placement
from thunderep import reference
from thunderep.ops import permute, unpermute
from thunderep.ops.kernels.localize import in_rank, localize
from thunderep.ops.kernels.permute import place
from thunderep.ops.kernels.rank_sum import rank_sum
from thunderep.placement import local_experts
from thunderep.testing.inputs import random_rows, same_bits, strided

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def rounded(total, dtype):
    """A float32 or float64 tensor in `dtype`. The interpreter truncates to bf16, which hardware rounds to nearest even."""
    if INTERPRETED and dtype == torch.bfloat16:
        total = (total.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return total.to(dtype)


@given(
    rows=st.integers(0, 5),
    topk=st.integers(1, 3),
    num_local_experts=st.integers(0, 4),
    hidden=st.one_of(st.integers(1, 70), st.sampled_from((2048, 2049, 4100))),
    dtype=st.sampled_from(DTYPES),
    strides=st.sampled_from(STRIDES),
    alignment=st.integers(1, 4),
    spare=st.integers(-1, 3),
    seed=st.integers(0, 2**31),
)
def test_permute(rows, topk, num_local_experts, hidden, dtype, strides, alignment, spare, seed):
    generator = torch.Generator().manual_seed(seed)
    x = random_rows((rows, hidden), dtype, generator)
    idx = choices(rows, topk, num_local_experts, generator)
    expected = reference.permute(x, idx, num_local_experts, -1, alignment)
    capacity = -1
    if spare >= 0:
        capacity = len(expected[0]) + spare
        expected = reference.permute(x, idx, num_local_experts, capacity, alignment)
    # Ids of no local expert count as -1 on a device.
    idx = torch.where(idx < 0, torch.tensor([-1, -7, num_local_experts])[torch.randint(3, idx.shape, generator=generator)], idx)
    got = permute._permute_cuda(strided(x.to(DEVICE), strides), idx.to(DEVICE), num_local_experts, capacity, alignment)
    assert all(same_bits(a, b) for a, b in zip(*map(grouped, (got, expected)), strict=True))


def grouped(output):
    """What `permute` returned, without the rows past the last group, which are not written on a device."""
    expert_x, offsets, row_id_map = (t.cpu() for t in output)
    return expert_x[: offsets[-1] if len(offsets) else 0], offsets, row_id_map


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "num_local_experts"), [(3, 300), (128, 130), (129, 130), (400, 3), (1500, 16)])
def test_placement_of_many(rows, num_local_experts, idx_dtype):
    """More choices than a tile, and than one launch takes; more experts than a program counts."""
    idx = choices(rows, 8, num_local_experts, torch.Generator().manual_seed(rows)).to(idx_dtype)
    for alignment in (1, 4):
        _, *expected = permute._permute_cpu(torch.ones(rows, 1), idx, num_local_experts, -1, alignment)
        offsets, filled, row_id_map = (t.cpu() for t in place(idx.to(DEVICE), num_local_experts, 2**31 - 1, alignment))
        assert all(same_bits(a, b) for a, b in zip((offsets, row_id_map), expected, strict=True))
        counts = torch.bincount(idx[idx >= 0], minlength=num_local_experts)
        starts = functional.pad(offsets, (1, 0))[:-1]
        assert torch.equal(filled, (starts + counts).int())


@pytest.mark.parametrize("capacity", range(9))
def test_permute_drops_what_capacity_does_not_hold(capacity):
    x, idx = torch.arange(1.0, 5.0).view(4, 1).to(DEVICE), torch.tensor([[1, 0], [1, -1], [0, 1], [2, 1]], device=DEVICE)
    whole, offsets, row_id_map = grouped(permute._permute_cuda(x, idx, 3, 9, 2))
    expert_x, got_offsets, got_map = grouped(permute._permute_cuda(x, idx, 3, capacity, 2))
    assert torch.equal(expert_x, whole[:capacity])
    assert torch.equal(got_offsets, offsets.clamp(max=capacity))
    assert torch.equal(got_map, torch.where(row_id_map < capacity, row_id_map, -1))


@given(
    rows=st.integers(0, 5),
    topk=st.integers(1, 4),
    hidden=st.one_of(st.integers(1, 70), st.sampled_from((1024, 1025, 2100))),
    spare=st.integers(0, 3),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    strides=st.lists(st.sampled_from(STRIDES), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_unpermute(rows, topk, hidden, spare, dtype, strides, seed):
    generator = torch.Generator().manual_seed(seed)
    row_id_map, count = placement(rows, topk, spare, generator)
    scale = 10.0 ** torch.randint(-3, 3, (count, 1), generator=generator)
    expert_y = (torch.randn(count, hidden, generator=generator) * scale).to(dtype)
    weights = torch.randn(rows, topk, generator=generator)
    unnamed = torch.ones(count, dtype=torch.bool)
    unnamed[row_id_map[row_id_map >= 0].long()] = False
    expert_y[unnamed], weights[row_id_map < 0] = torch.nan, torch.nan
    inputs = [strided(t.to(DEVICE), how) for t, how in zip((expert_y, row_id_map, weights), strides, strict=True)]

    got = unpermute._unpermute_cuda(*inputs).cpu()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = reference.unpermute(expert_y.to(wide), row_id_map, weights)
    assert same_bits(total.to(dtype), unpermute._unpermute_cpu(expert_y, row_id_map, weights))
    assert same_bits(got, rounded(total, dtype))

    grad = torch.randn(rows, hidden, generator=generator).to(dtype)
    grad_y, grad_weights = (t.cpu() for t in unpermute._unpermute_backward_cuda(grad.to(DEVICE), *inputs))
    _, expected_weights = unpermute._unpermute_backward_cpu(grad, expert_y, row_id_map, weights)
    expected_y, _ = unpermute._unpermute_backward_cpu(grad.to(wide), expert_y.to(wide), row_id_map, weights)
    assert torch.equal(grad_y, rounded(expected_y, dtype))
    torch.testing.assert_close(grad_weights, expected_weights, rtol=1e-5, atol=1e-2 if hidden > 99 else 1e-3)


@given(
    rows=st.integers(0, 300),
    topk=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    idx_dtype=st.sampled_from((torch.int32, torch.int64)),
    wrong=st.sampled_from((0, -2, 9, 100)),
    seed=st.integers(0, 2**31),
)
def test_localize_and_in_rank(rows, topk, num_ranks, num_experts, idx_dtype, wrong, seed):
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-1, num_experts, (rows, topk), generator=generator)
    if rows and wrong:
        idx[rows // 2, 0] = wrong
    weights = torch.rand(rows, topk, generator=generator)
    owned = [local_experts(num_experts, rank, num_ranks) for rank in range(num_ranks)]
    bounds = torch.tensor([*(experts.start for experts in owned), num_experts], device=DEVICE)
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    went = in_rank(idx.to(idx_dtype).to(DEVICE), bounds, bad).cpu()
    assert bool(bad) == bool(((idx < -1) | (idx >= num_experts)).any())
    for rank, experts in enumerate(owned):
        mine = (idx >= experts.start) & (idx < experts.stop)
        assert torch.equal(went[:, rank], mine.any(dim=1))
        local, kept = idx.clone().to(idx_dtype).to(DEVICE), weights.clone().to(DEVICE)
        localize(local, kept, experts)
        assert torch.equal(local.cpu(), torch.where(mine, idx - experts.start, -1).to(idx_dtype))
        assert torch.equal(kept.cpu(), torch.where(mine, weights, 0))


@given(
    tokens=st.integers(0, 6),
    spare=st.integers(0, 2),
    num_ranks=st.integers(1, 4),
    hidden=st.one_of(st.integers(1, 70), st.sampled_from((2048, 2049))),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    seed=st.integers(0, 2**31),
)
def test_rank_sum(tokens, spare, num_ranks, hidden, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    by_rank = torch.randn(num_ranks, tokens + spare, hidden, generator=generator).to(dtype)
    went = torch.rand(tokens, num_ranks, generator=generator) < 0.6
    total = torch.zeros(tokens, hidden)
    for rank in range(num_ranks):
        total += torch.where(went[:, rank : rank + 1], by_rank[rank, :tokens].float(), 0)
        by_rank[rank, :tokens][~went[:, rank]] = torch.nan
    rank = seed % num_ranks
    own = by_rank[rank].clone()
    by_rank[rank] = torch.nan
    got = rank_sum(own.to(DEVICE), by_rank.to(DEVICE), went.to(DEVICE), rank).cpu()
    assert same_bits(got, rounded(total, dtype))


def test_offsets_beyond_2_to_the_31():
    """Row 2 begins at element 2^31. Only the pages that are written exist."""
    columns = 2**30
    x = torch.empty(3, columns, dtype=torch.int8, device=DEVICE)[:, :5]
    x[2] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int8)
    expert_x, _, _ = permute._permute_cuda(x, torch.tensor([[-1], [-1], [0]], device=DEVICE), 1, 1)
    assert expert_x.tolist() == [[1, 2, 3, 4, 5]]
    y = torch.empty(3, columns, dtype=torch.float16, device=DEVICE)[:, :3]
    y[2] = torch.tensor([1.0, 2.0, 3.0])
    row_id_map = torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    assert unpermute._unpermute_cuda(y, row_id_map, torch.ones(1, 1, device=DEVICE)).tolist() == [[1, 2, 3]]


@on_gpu
def test_results_beyond_2_to_the_31():
    rows, columns = 2**20, 2049
    x = torch.arange(rows * columns, device=DEVICE).to(torch.int8).view(rows, columns)
    expert_x, _, row_id_map = torch.ops.thunderep.permute(
        x, torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE), 1, rows + 1
    )
    assert torch.equal(expert_x[:rows], x)
    y = x.to(torch.float16)
    assert torch.equal(torch.ops.thunderep.unpermute(y, row_id_map, torch.ones(rows, 1, device=DEVICE)), y)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_captured_and_replayed_with_new_data(dtype):
    rows, topk, experts, hidden = 64, 4, 8, 2880
    x = torch.zeros(rows, hidden, dtype=dtype, device=DEVICE)
    idx = torch.full((rows, topk), -1, device=DEVICE)
    weights = torch.zeros(rows, topk, device=DEVICE)

    def both():
        expert_x, offsets, row_id_map = torch.ops.thunderep.permute(x, idx, experts, rows * topk + experts * 15, 16)
        return offsets, torch.ops.thunderep.unpermute(expert_x, row_id_map, weights)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    generator = torch.Generator().manual_seed(0)
    for drop in (0.3, 1.0, 0.0, 0.9):
        x.copy_(torch.randn(rows, hidden, generator=generator))
        idx.copy_(choices(rows, topk, experts, generator, drop))
        weights.copy_(torch.rand(rows, topk, generator=generator))
        graph.replay()
        expert_x, offsets, row_id_map = reference.permute(x.cpu(), idx.cpu(), experts, -1, 16)
        assert torch.equal(results[0].cpu(), offsets)
        assert same_bits(results[1].cpu(), reference.unpermute(expert_x, row_id_map, weights.cpu()))


@on_gpu
def test_gradients_match_the_cpu():
    generator = torch.Generator().manual_seed(0)
    idx = choices(32, 4, 8, generator)
    leaves = [torch.randn(32, 100, generator=generator), torch.rand(32, 4, generator=generator)]
    grads = []
    for device in ("cpu", DEVICE):
        x, weights = (t.to(device).requires_grad_() for t in leaves)
        expert_x, _, row_id_map = torch.ops.thunderep.permute(x, idx.to(device), 8)
        loss = torch.ops.thunderep.unpermute(expert_x, row_id_map, weights).square().sum()
        grads.append([grad.cpu() for grad in torch.autograd.grad(loss, (x, weights))])
    assert same_bits(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1])
