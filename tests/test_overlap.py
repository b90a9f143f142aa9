"""ExpertParallel in parts, and beside a shared expert: the same results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.test_nn import Case, compare, inputs, open_buffer, run_rank
from thunderep.nn import ExpertParallel
from thunderep.testing.processes import RankError


@pytest.mark.parametrize("overlap", [2, 3])
@pytest.mark.parametrize(("ranks", "tokens"), [("one_rank", (7,)), ("four_ranks", (13, 0, 5, 1))])
def test_overlap_trains_as_one_process_would(request, ranks, tokens, overlap):
    case = Case(tokens, 5, 2, torch.float32, steps=2, overlap=overlap)
    compare(request.getfixturevalue(ranks)().run(run_rank, case), case)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "topk", "hidden", "tokens", "parts"),
    [
        (2, 128, 8, 2048, 4096, 2),  # Qwen3-30B-A3B: 256 rows an expert and part
        (2, 128, 8, 2048, 2048, 1),
        (8, 128, 8, 2048, 2048, 2),
        (8, 128, 8, 2048, 1024, 1),  # rows enough, and too few bytes
        (2, 128, 4, 2880, 4096, 1),  # gpt-oss-120b: bytes enough, and 128 rows an expert and part
        (2, 128, 8, 4096, 4096, 2),  # GLM-4.5-Air
        (2, 128, 8, 4096, 1024, 1),
    ],
)
def test_two_parts_where_experts_have_rows_enough(num_ranks, num_experts, topk, hidden, tokens, parts):
    buffer = SimpleNamespace(num_ranks=num_ranks, num_experts=num_experts, topk=topk)
    layer: Any = SimpleNamespace(overlap=None, buffer=buffer)
    for cuda in (True, False):
        x: Any = SimpleNamespace(is_cuda=cuda, shape=(tokens, hidden), element_size=lambda: 2)
        assert ExpertParallel._parts(layer, x, tokens) == (parts if cuda else 1)


def overlapped_bits(case):
    """Whether overlap changes no bit of a rank where arithmetic is exact: small integers, weights that are powers of two."""
    with open_buffer(case) as buffer:
        whole, cut = (
            ExpertParallel(buffer, case.intermediate, activation=lambda h: h[:, ::2] * h[:, 1::2], overlap=overlap)
            for overlap in (1, case.overlap)
        )
        with torch.no_grad():
            for parameter, other in zip(whole.parameters(), cut.parameters(), strict=True):
                parameter.copy_(torch.randint(-1, 2, parameter.shape))
                other.copy_(parameter)
        x, idx, weights, _ = (t.to(buffer.device) for t in inputs(case, dist.get_rank(), 0))
        x, weights = (x * 2).round(), torch.exp2(-(weights * 4).round())
        results = [layer(x, idx, weights, max_tokens=max(case.tokens)) for layer in (whole, cut)]
        return bool(results[0].count_nonzero()) or not len(x), torch.equal(*results)


@pytest.mark.parametrize("overlap", [2, 3])
def test_overlap_changes_no_bit(four_ranks, overlap):
    case = Case((13, 0, 5, 1), 5, 2, torch.float32, overlap=overlap)
    assert four_ranks().run(overlapped_bits, case) == [(True, True)] * 4


def with_shared_expert(overlap, tokens):
    """Whether a shared expert's output is added and its parameters get gradients, on a rank of two."""
    case = Case(tokens, 5, 2, torch.float32)
    with open_buffer(case) as buffer:
        shared = torch.nn.Linear(case.hidden, case.hidden)
        layer = ExpertParallel(buffer, case.intermediate, overlap=overlap, shared=shared)
        alone = ExpertParallel(buffer, case.intermediate)
        alone.load_state_dict({name: value for name, value in layer.state_dict().items() if "shared" not in name})
        x, idx, weights, grad = inputs(case, dist.get_rank(), 0)
        y = layer(x, idx, weights, max_tokens=max(tokens))
        y.backward(grad)
        expected = alone(x, idx, weights, max_tokens=max(tokens)) + shared(x)
        return torch.allclose(y, expected, atol=1e-6) and shared.weight.grad is not None


@pytest.mark.parametrize("tokens", [(6, 4), (0, 0)])
@pytest.mark.parametrize("overlap", [None, 2])
def test_a_shared_expert_is_added(two_ranks, overlap, tokens):
    assert two_ranks.run(with_shared_expert, overlap, tokens) == [True, True]


def cut_wrongly(what):
    """A call that does not fit, in two parts."""
    case = Case((8,), 2, 1, torch.float32)
    with open_buffer(case) as buffer:
        tokens = 2 * buffer.max_tokens if what == "more than the Buffer holds" else 6
        x, idx, weights = torch.zeros(tokens, case.hidden), torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)
        layer = ExpertParallel(buffer, 4, overlap=2)
        if what == "more than max_tokens":
            layer(x, idx, weights, 5)
        elif what == "other ids":
            layer(x, idx[:5], weights)
        elif what == "no such expert":
            idx[5] = 99
            layer(x, idx, weights)
        else:
            layer(x, idx, weights)
        raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("more than max_tokens", "x: got 6 tokens, more than max_tokens = 5 of this call"),
        ("more than the Buffer holds", "more than the Buffer's max_tokens"),
        ("other ids", "topk_idx: got shape .5, 1., expected .6, 1."),
        ("no such expert", "topk_idx: got ids from 0 to 99"),
    ],
)
def test_no_part_of_a_call_that_does_not_fit_is_dropped(one_rank, what, message):
    with pytest.raises(RankError, match=message):
        one_rank().run(cut_wrongly, what)
