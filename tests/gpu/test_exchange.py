"""dispatch and combine of CUDA tensors against the reference all-to-all, one process a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.dist.exchange import Case, exchange
from tests.dist.test_exchange import NAMED, cases
from thunderep.testing.processes import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[], Ranks]]:
    with Ranks(min(4, GPUS), backend="nccl") as ranks:
        yield lambda: ranks


def check(ranks: Ranks, case: Case) -> None:
    case = replace(case, tokens=case.tokens[: ranks.num_ranks], device="cuda", transport="collective", staging_bytes=None)
    problems = ranks.run(exchange, case)
    assert problems == [None] * len(problems), case


@settings(max_examples=150)
@given(case=cases(transport="collective"))
def test_collective_equals_the_reference(
    case: Case, gpu_ranks: Callable[[], Ranks], count_example: Callable[[], None]
) -> None:
    check(gpu_ranks(), case)
    count_example()


@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name: str, gpu_ranks: Callable[[], Ranks]) -> None:
    check(gpu_ranks(), NAMED[name])
