"""all_gather, reduce_scatter and all_reduce against plain torch, in real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

import thunderep
from tests.dist import dense
from tests.dist.dense import Case
from thunderep.runtime.chunks import MIN_SLOT_BYTES, Staging
from thunderep.runtime.transport import DTYPES
from thunderep.testing.inputs import same_bits
from thunderep.testing.processes import Ranks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """N in 1..4, ragged rows of any shape and type, any strides, over either transport, also with little staging."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple))
    little = draw(st.booleans())
    return Case(
        sizes=sizes,
        row=draw(st.sampled_from([(), (1,), (16,), (37,), (3, 5), (0,), (700,)])),
        dtype=draw(st.sampled_from(DTYPES)),
        strides=draw(st.sampled_from(["contiguous", "transposed", "sliced", "offset"])),
        hidden=draw(st.sampled_from([1, 16, 100])),
        staging_bytes=Staging.slots_for(len(sizes)) * MIN_SLOT_BYTES if little else None,
        transport=draw(st.sampled_from(["shm", "shm", "collective"])),
        seed=draw(st.integers(0, 1000)),
    )


def check(ranks: Ranks, case: Case) -> None:
    problems = ranks.run(dense.collectives, case)
    assert problems == [None] * len(problems), case


@settings(max_examples=60)
@given(case=cases())
def test_equal_plain_torch(case: Case, four_ranks: Callable[[], Ranks], count_example: Callable[[], None]) -> None:
    check(four_ranks(), case)
    count_example()


NAMED = {
    "in one step": Case((31,) * 2, row=(1000,)),
    "in two steps": Case((31,) * 4, row=(3000,), dtype=torch.float16, hidden=1000),
    "in two steps, of odd sizes": Case((1,) * 3, row=(200_001,), dtype=torch.float32, hidden=2047),
    "many times the staging": Case((90, 0, 7), row=(1500,), staging_bytes=Staging.slots_for(3) * MIN_SLOT_BYTES),
    "no rows anywhere": Case((0, 0, 0)),
}


@pytest.mark.parametrize("transport", ["shm", "collective"])
@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name: str, transport: str, four_ranks: Callable[[], Ranks]) -> None:
    check(four_ranks(), Case(**{**vars(NAMED[name]), "transport": transport}))


def test_gradients(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(dense.gradients) == [[True] * 3] * 4


def test_compile_whole_and_once_in_order(four_ranks: Callable[[], Ranks]) -> None:
    assert four_ranks().run(dense.compiles) == [[True, 1]] * 4


def test_ranks_that_disagree_all_raise(four_ranks: Callable[[], Ranks]) -> None:
    on = ["hidden", "sizes", "max_tokens", "max_tokens", "kind"]
    assert four_ranks().run(dense.disagree) == [[f"ranks disagree on {field}" for field in on]] * 4


@pytest.fixture(scope="module")
def buffer() -> Iterator[thunderep.Buffer]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with thunderep.Buffer(num_experts=1, hidden=4, topk=1, max_tokens=8) as buffer:
        yield buffer
    dist.destroy_process_group()


def test_opcheck(buffer: thunderep.Buffer) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    for sizes in (None, [5]):
        torch.library.opcheck(torch.ops.thunderep.all_gather.default, (x, buffer.name, sizes))
        torch.library.opcheck(torch.ops.thunderep.reduce_scatter.default, (x, buffer.name, sizes))
    torch.library.opcheck(torch.ops.thunderep.all_reduce.default, (x, buffer.name))


def test_calls_share_no_memory(buffer: thunderep.Buffer) -> None:
    x = torch.randn(5, 3)
    calls: list[Callable[[torch.Tensor, thunderep.Buffer], torch.Tensor]] = [
        thunderep.all_gather, thunderep.reduce_scatter, thunderep.all_reduce,
    ]  # fmt: skip
    first = [call(x, buffer) for call in calls]
    second = [call(x + 1, buffer) for call in calls]
    assert all(same_bits(result, x) for result in first)
    storages = [t.untyped_storage().data_ptr() for t in (x, *first, *second)]
    assert len(set(storages)) == len(storages)


WRONG: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...], str]] = {
    "type": (thunderep.all_gather, (torch.ones(2, dtype=torch.complex64),), "x: got torch.complex64, expected one of"),
    "integers to sum": (thunderep.reduce_scatter, (torch.ones(2, dtype=torch.int32),), "y: got torch.int32"),
    "no rows": (thunderep.all_gather, (torch.tensor(1.0),), "x: got shape []"),
    "device": (thunderep.all_reduce, (torch.ones(2, device="meta"),), "x: got a tensor on meta"),
    "number of sizes": (thunderep.all_gather, (torch.ones(2), [2, 2]), "sizes: got [2, 2], expected 1 numbers of rows"),
    "negative size": (thunderep.all_gather, (torch.ones(2), [-2]), "sizes: got [-2]"),
    "other size": (thunderep.all_gather, (torch.ones(2), [3]), "x: got 2 rows, expected 3, as sizes = [3] say of rank 0"),
    "other sum": (thunderep.reduce_scatter, (torch.ones(2), [3]), "y: got 2 rows, expected 3, as sizes = [3] say"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(buffer: thunderep.Buffer, name: str) -> None:
    function, (tensor, *sizes), message = WRONG[name]
    with pytest.raises(ValueError, match="got") as info:
        function(tensor, buffer, *sizes)
    assert message in str(info.value)
