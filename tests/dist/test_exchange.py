"""dispatch and combine against the reference all-to-all, in real processes over real shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.exchange import Case, exchange
from thunderep.runtime.chunks import MIN_SLOT_BYTES, Staging
from thunderep.testing.processes import Ranks

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
]  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, transport: str = "shm") -> Case:
    """N in 1..4, ragged T, any E, K, H, type, skew, duplicates, -1, strides, up to three operations in flight, two Buffers."""
    tokens = draw(st.lists(st.integers(0, 24), min_size=1, max_size=4).map(tuple))
    num_experts = draw(st.integers(1, 12))
    staging = None
    if transport == "shm" and draw(st.booleans()):
        staging = Staging.slots_for(len(tokens)) * MIN_SLOT_BYTES
    return Case(
        tokens=tokens,
        num_experts=num_experts,
        topk=draw(st.integers(1, 4)),
        hidden=draw(st.one_of(st.integers(1, 70), st.sampled_from([128, 2880]))),
        extra_rows=draw(st.integers(0, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        idx_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        scales=draw(st.sampled_from([0, 0, 1, 3])),
        drop=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        skew=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        distinct=draw(st.booleans()),
        strides=draw(st.sampled_from(["contiguous", "transposed", "sliced", "offset"])),
        staging_bytes=staging,
        in_flight=draw(st.sampled_from([1, 1, 3])),
        two_buffers=draw(st.booleans()),
        transport=transport,
        seed=draw(st.integers(0, 1000)),
    )


def check(ranks: Ranks, case: Case) -> None:
    problems = ranks.run(exchange, case)
    assert problems == [None] * len(problems), case


@settings(max_examples=300)
@given(case=cases())
def test_shm_equals_the_reference(case: Case, four_ranks: Callable[[], Ranks], count_example: Callable[[], None]) -> None:
    check(four_ranks(), case)
    count_example()


@settings(max_examples=60)
@given(case=cases(transport="collective"))
def test_collective_equals_the_reference(
    case: Case, four_ranks: Callable[[], Ranks], count_example: Callable[[], None]
) -> None:
    check(four_ranks(), case)
    count_example()


NAMED = {
    "no tokens on one rank": Case(tokens=(5, 0, 3, 7)),
    "no tokens anywhere": Case(tokens=(0, 0, 0, 0)),
    "all choices dropped": Case(tokens=(4, 4), drop=1.0),
    "all tokens to one expert": Case(tokens=(9, 9, 9, 9), topk=1, skew=1.0),
    "experts not divisible by ranks": Case(tokens=(6, 6, 6), num_experts=7, topk=3),
    "fewer experts than ranks": Case(tokens=(6, 6, 6, 6), num_experts=2, topk=2),
    "one expert": Case(tokens=(3, 3, 3), num_experts=1, topk=1),
    "rows of three bytes": Case(tokens=(11, 2, 5), hidden=3, dtype=torch.int8),
    "odd rows of two bytes": Case(tokens=(11, 2, 5), hidden=2879),
    "the same expert twice": Case(tokens=(8, 8), num_experts=2, topk=4, distinct=False),
    "one rank": Case(tokens=(13,), topk=3),
    "a call many times the staging": Case(
        tokens=(300, 0, 170, 299), hidden=512, staging_bytes=Staging.slots_for(4) * MIN_SLOT_BYTES
    ),
    "three in flight, each larger than the staging": Case(
        tokens=(100, 64, 90), hidden=512, staging_bytes=Staging.slots_for(3) * MIN_SLOT_BYTES, in_flight=3
    ),
    "fp8 rows with a scale per 128 columns": Case(tokens=(40, 0, 25, 31), hidden=2880, dtype=torch.float8_e4m3fn, scales=23),
    "chunks of several sizes": Case(tokens=(700, 512, 1, 650), hidden=1024),
}


@pytest.mark.parametrize("transport", ["shm", "collective"])
@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name: str, transport: str, four_ranks: Callable[[], Ranks]) -> None:
    case = NAMED[name]
    if transport == "collective":
        case = Case(**{**vars(case), "transport": "collective", "staging_bytes": None})
    check(four_ranks(), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transports_agree_bitwise(dtype: torch.dtype, four_ranks: Callable[[], Ranks]) -> None:
    """Each equals the reference bit for bit, twice: so they equal each other, in every run."""
    for transport in ("shm", "collective", "shm"):
        check(four_ranks(), Case(tokens=(30, 21, 40, 8), hidden=128, topk=4, dtype=dtype, transport=transport))
