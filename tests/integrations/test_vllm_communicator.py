"""vLLM's tensor parallelism over ThunderEP: vLLM's own groups, against plain torch. `test_vllm` says how to have vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.integrations import vllm_communicator_ranks as vllm_ranks
from thunderep.testing.processes import Ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with Ranks(2) as ranks:
        ranks.run(vllm_ranks.start, 24, timeout=300)
        yield ranks
        assert ranks.run(vllm_ranks.stop) == [None] * 2


def test_the_plugin_puts_its_class_before_vllms_once(two_ranks: Ranks) -> None:
    classes = ["ThunderEPCommunicator", "DenseCollectives", "CudaCommunicator", "DeviceCommunicatorBase", "object"]
    assert two_ranks.run(vllm_ranks.installed) == [[classes, True]] * 2


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES: list[tuple[int, ...]] = [(5, 24), (3, 7, 5), (1,), (1001,), (), (0, 24), (200, 24)]
GATHERED = [*(((3, 7, 5), dim) for dim in (0, 1, -1)), ((5, 24), -1), ((1, 77), -1), ((36,), 0), ((7,), -1), ((0, 4), 0)]
SCATTERED = [((6, 24), 0), ((5, 24), 1), ((5, 24), -1), ((3, 8, 5), 1), ((3, 7, 4), -1), ((8,), 0)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_all_reduce_is_the_sum(dtype: torch.dtype, two_ranks: Ranks) -> None:
    for shape in SHAPES:
        assert two_ranks.run(vllm_ranks.all_reduce, shape, dtype) == [None] * 2, shape


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.int32, torch.float8_e4m3fn], ids=str)
def test_all_gather_joins_along_any_dimension(dtype: torch.dtype, two_ranks: Ranks) -> None:
    for shape, dim in GATHERED:
        assert two_ranks.run(vllm_ranks.all_gather, shape, dim, dtype) == [None] * 2, (shape, dim)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_reduce_scatter_splits_the_sum(dtype: torch.dtype, two_ranks: Ranks) -> None:
    for shape, dim in SCATTERED:
        assert two_ranks.run(vllm_ranks.reduce_scatter, shape, dim, dtype) == [None] * 2, (shape, dim)


def test_tensors_may_have_any_strides(two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.strided_rows) == [None] * 2


def test_integers_are_summed_and_booleans_gathered_by_vllm(two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.other_types) == [None] * 2


def test_other_groups_stay_with_vllm(two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.other_groups) == [{"tp": True, "ep": False, "etp": False, "no model": False}] * 2


@pytest.mark.parametrize(("setting", "ours"), [("1", False), ("collective", True)])
def test_what_auto_leaves_to_torch_stays_with_vllm(setting: str, ours: bool, two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.on_two_hosts, setting) == [ours] * 2
