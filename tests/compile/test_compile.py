"""Under torch.compile, in real processes: whole graphs, no needless recompilation, and one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile import programs
from thunderep.testing.processes import Ranks


def test_a_layer_compiles_whole_and_once(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(programs.layer_compiles) == [[True, 1]] * 4


@pytest.mark.parametrize("backward", [False, True])
def test_independent_operations_keep_their_order(backward: bool, four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(programs.independent_operations_keep_their_order, backward) == [[True, True]] * 4


def test_the_graph_carries_the_order(four_ranks: Callable[[], Ranks]) -> None:
    """Each operation depends on the one before it on the same Buffer, in the backward too; unused ones stay."""
    forward, backward = four_ranks().run(programs.graph_carries_the_order)[0]
    assert forward == ["dispatch first", "dispatch after", "dispatch after"]
    assert backward == ["dispatch_backward after"] * 2


def test_one_dynamic_graph_for_ragged_tokens(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(programs.ragged_dynamic) == [[True, 1]] * 4


@pytest.mark.parametrize("in_flight", [1, 3])
def test_start_and_wait_compile_and_keep_their_distance(in_flight: int, four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(programs.halves_compile, in_flight, timeout=280) == [[True, True]] * 4


def test_weights_beside_fp8_rows_have_their_gradient(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(programs.weights_beside_fp8_rows_have_their_gradient) == [True] * 4


def test_buffers_of_any_size_tell_their_experts_in_a_whole_graph(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(programs.experts_of_buffers_in_whole_graphs) == [[2, 6, 4]] * 4
