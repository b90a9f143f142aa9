"""Activation checkpointing over the operators, in real processes: the gradients are those of a model that keeps everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.dist.checkpointed import Case, compiled_backward, differences
from thunderep.testing.processes import Ranks

TOKENS = (7, 0, 5, 9)


@pytest.mark.parametrize("dispatch_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_gradients_have_the_same_bits(
    transport: str, reentrant: bool, whole: bool, dispatch_dtype: torch.dtype | None, four_ranks: Callable[[], Ranks]
) -> None:
    case = Case(TOKENS, transport, reentrant, whole, dispatch_dtype=dispatch_dtype)
    assert four_ranks().run(differences, case) == [[]] * 4


def test_a_checkpoint_may_keep_what_was_communicated(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(differences, Case(TOKENS, selective=True)) == [[]] * 4


@pytest.mark.parametrize(("reentrant", "dispatch_dtype"), [(False, torch.float8_e4m3fn), (True, None)])
def test_compiled_gradients_are_the_same(
    reentrant: bool, dispatch_dtype: torch.dtype | None, four_ranks: Callable[[], Ranks]
) -> None:
    case = Case(TOKENS, reentrant=reentrant, compiled=True, dispatch_dtype=dispatch_dtype)
    assert four_ranks().run(differences, case) == [[]] * 4


def test_a_compiled_backward_communicates_nothing_again(four_ranks: Callable[[], Ranks]) -> None:
    """What it did again would be in no order with the gradients, and each rank could do it at another time."""
    expected = ["combine_backward after", "dispatch_backward after"] * 2
    assert four_ranks().run(compiled_backward, Case(TOKENS)) == [expected] * 4
