"""dispatch and combine of CUDA tensors against the reference all-to-all. Where GPUs are few, ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.dist.exchange import Case, exchange
from tests.dist.test_exchange import NAMED, cases
from tests.gpu.machine import FEW, RANKS, start
from thunderep.runtime.chunks import MIN_SLOT_BYTES, Staging
from thunderep.runtime.window import Region
from thunderep.testing.processes import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TRANSPORTS = ["dma", "direct", "auto", "collective"]


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[], Ranks]]:
    with start(dispatch=12 * 128, combine=6 * 128) as ranks:  # the cases have up to 27 rows of about 128 bytes
        yield lambda: ranks


def check(ranks: Ranks, case: Case, transport: str) -> None:
    tokens = case.tokens * (2 if RANKS > 4 else 1)  # the cases are for up to four ranks
    case = replace(case, tokens=tokens[:RANKS], device="cuda", transport=transport)
    if transport in ("direct", "auto") and case.seed:  # each shape is a kernel of its own, and takes seconds to compile
        case = replace(case, hidden=(39, 64)[case.hidden % 2], topk=3, scales=min(case.scales, 1) * 3)
    if transport == "collective":
        case = replace(case, staging_bytes=None)
    elif case.staging_bytes is not None:
        num_ranks = len(case.tokens)
        ring = Staging.slots_for(num_ranks) * MIN_SLOT_BYTES
        scales = max(case.scales, -(-case.hidden // 128))
        window = Region.for_calls(num_ranks, 1, case.hidden * max(2, case.dtype.itemsize), case.topk, scales)
        share = -(-window.nbytes // num_ranks)
        case = replace(case, staging_bytes={"dma": ring, "direct": max(ring, share), "auto": ring + share}[transport])
    problems = ranks.run(exchange, case)
    assert problems == [None] * len(problems), case


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=40 if FEW else 150)
@given(case=cases())
def test_equals_the_reference(
    transport: str, case: Case, gpu_ranks: Callable[[], Ranks], count_example: Callable[[], None]
) -> None:
    check(gpu_ranks(), case, transport)
    count_example()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name: str, transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    check(gpu_ranks(), NAMED[name], transport)
