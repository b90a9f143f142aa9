"""The vLLM plugin: against vLLM's own manager where vLLM can be imported, and its setting everywhere.

To have vLLM for these tests, install its wheel without dependencies (`pip install --no-deps vllm`) and what its import then
asks for, and set VLLM_TARGET_DEVICE=cpu. They need no GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.integrations import vllm_ranks
from tests.integrations.moe import Case
from thunderep.integrations import vllm as plugin
from thunderep.testing.processes import Ranks


@pytest.mark.parametrize(
    ("setting", "transport"), [("", None), ("0", None), ("1", "auto"), ("dma", "dma"), ("direct", "direct")]
)
def test_the_setting(setting: str, transport: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SETTING, setting)
    assert plugin.transport() == transport


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SETTING, "yes")
    with pytest.raises(ValueError, match="THUNDEREP_VLLM: got 'yes', expected 0, 1 or one of auto"):
        plugin.register()


def test_vllm_finds_the_plugin_and_off_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.SETTING, raising=False)
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "thunderep" not in entry_points.names:
        pytest.skip("installed before there was a plugin, or not installed")
    entry_points["thunderep"].load()()  # vLLM need not be there


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with Ranks(2) as ranks:
        names = ["CpuCommunicator", "ThunderEPManager", "AgRsAll2AllManager"]
        assert ranks.run(vllm_ranks.start, timeout=300) == [names] * 2
        yield ranks
        assert ranks.run(vllm_ranks.stop) == [None] * 2


FP8 = torch.float8_e4m3fn
CASES = {
    "even": Case((5, 5)),
    "uneven": Case((5, 13)),
    "no tokens on one rank": Case((0, 4)),
    "no tokens anywhere": Case((0, 0)),
    "block-scaled": Case((5, 3), dtype=FP8, extra=((3, torch.float32),)),
    "block-scaled, even": Case((6, 6), dtype=FP8, extra=((3, torch.float32),)),
    "packed": Case((5, 3), dtype=torch.uint8, extra=((3, torch.uint8),)),
    "with LoRA": Case((5, 3), extra=((0, torch.int32),)),
    "block-scaled, with LoRA": Case((5, 5), dtype=FP8, extra=((3, torch.float32), (0, torch.int32))),
    "as many as there may be": Case((64, 1)),
    "experts cut columns": Case((5, 13), cut=8),
    "fewer experts than other layers": Case((5, 5), num_experts=4),
}


@pytest.mark.parametrize("name", CASES)
def test_gives_what_vllm_gives(name: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.dispatch_and_combine, CASES[name]) == [None] * 2


def test_a_dispatch_that_no_layer_announced_gathers_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.dispatch_and_combine, CASES["uneven"], False) == [None] * 2


@pytest.mark.parametrize(
    "name", ["even", "experts cut columns", "fewer experts than other layers", "uneven", "no tokens on one rank"]
)
def test_serves_what_vllm_has_around_experts(name: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.layer, CASES[name]) == [None] * 2


@pytest.mark.parametrize("name", ["even", "uneven", "no tokens on one rank", "block-scaled"])
def test_gathers_router_logits(name: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.router_logits, CASES[name]) == [None] * 2


def test_micro_batches_take_turns(two_ranks: Ranks) -> None:
    cases = [Case((5, 5), seed=1), Case((2, 7), seed=2)]
    assert two_ranks.run(vllm_ranks.micro_batches, cases) == [None] * 2


def test_micro_batches_are_allowed(two_ranks: Ranks) -> None:
    assert two_ranks.run(vllm_ranks.micro_batches_are_allowed) == [True] * 2


def test_the_back_end_that_vllm_chooses_stays(two_ranks: Ranks) -> None:
    chosen = two_ranks.run(vllm_ranks.chosen_back_end)
    if None in chosen:
        pytest.skip("this version of vLLM has no experts that move rows by themselves")
    assert chosen == ["passthrough"] * 2
