"""Gathered dispatch and combine, as frameworks with an all-gather back end expect them, in real processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.integrations.moe import Case, exchange, warmed_up
from thunderep.testing.processes import Ranks

KINDS: list[tuple[torch.dtype, tuple[tuple[int, torch.dtype], ...]]] = [
    (torch.bfloat16, ()),
    (torch.float8_e4m3fn, ((3, torch.float32),)),
    (torch.uint8, ((3, torch.uint8),)),
    (torch.bfloat16, ((0, torch.int32),)),
    (torch.float8_e4m3fn, ((3, torch.float32), (0, torch.int32))),
]
"""Types of rows, and of what travels with them: plain, block-scaled, packed, LoRA's mapping of tokens, both."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype, extra = draw(st.sampled_from(KINDS))
    hidden = draw(st.sampled_from([1, 24, 130]))
    return Case(
        sizes=draw(st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), st.just((6,) * 4))),
        num_experts=draw(st.integers(1, 9)),
        topk=draw(st.integers(1, 3)),
        hidden=hidden,
        dtype=dtype,
        weights_dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        extra=extra,
        drop=draw(st.sampled_from([0.0, 0.0, 0.4])),
        cut=draw(st.sampled_from([0, 0, hidden // 3])),
        blocks=draw(st.booleans()),
        transport=draw(st.sampled_from(["shm", "shm", "collective"])),
        seed=draw(st.integers(0, 100)),
    )


@settings(max_examples=30)
@example(case=Case((3, 5), cut=8))
@given(case=cases())
def test_experts_get_and_return_what_an_all_gather_has(
    case: Case, four_ranks: Callable[[], Ranks], count_example: Callable[[], None]
) -> None:
    problems = four_ranks().run(exchange, case)
    assert problems == [None] * 4, case
    count_example()


def test_warming_up_exchanges_what_will_be_exchanged(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(warmed_up, 20) == [[True, True]] * 4
