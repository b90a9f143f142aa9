"""Dense collectives, and gathered dispatch and combine, of CUDA tensors. Where GPUs are few, ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.dist import dense
from tests.gpu.machine import cut, start
from tests.integrations import moe
from thunderep.testing.processes import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TRANSPORTS = ["dma", "direct", "collective"]

DENSE = {
    "even": dense.Case((6, 6, 6, 6), row=(24,)),
    "uneven": dense.Case((9, 0, 4, 1), row=(3, 5), strides="offset"),
    "large": dense.Case((300, 300, 300, 300), row=(2048,), hidden=2048),
}
GATHERED = {
    "even": moe.Case((6, 6, 6, 6)),
    "uneven": moe.Case((9, 0, 4, 1)),
    "block-scaled": moe.Case((5, 3, 2, 8), dtype=torch.float8_e4m3fn, extra=((3, torch.float32),)),
    "packed": moe.Case((5, 3, 2, 8), dtype=torch.uint8, extra=((3, torch.uint8),)),
}


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[], Ranks]]:
    with start() as ranks:
        yield lambda: ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", DENSE)
def test_collectives_equal_plain_torch(name: str, transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    ranks, case = gpu_ranks(), DENSE[name]
    case = replace(case, sizes=cut(case.sizes), transport=transport, device="cuda")
    assert ranks.run(dense.collectives, case) == [None] * ranks.num_ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", GATHERED)
def test_experts_get_and_return_what_an_all_gather_has(name: str, transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    ranks, case = gpu_ranks(), GATHERED[name]
    case = replace(case, sizes=cut(case.sizes), transport=transport, device="cuda")
    assert ranks.run(moe.exchange, case) == [None] * ranks.num_ranks
