"""How much shared memory a Buffer takes, and what of it is ring and what is window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderep.runtime.chunks import MIN_SLOT_BYTES
from thunderep.runtime.staging import MAX_DEFAULT_STAGING, Shape
from thunderep.runtime.tuning import BUILT_IN, Thresholds
from thunderep.runtime.window import Region

SHAPE = Shape(num_ranks=2, hidden=64, topk=2, max_tokens=256, itemsize=2)


@given(
    shape=st.builds(
        Shape,
        st.integers(1, 31), st.integers(1, 8192), st.integers(1, 16), st.integers(1, 1 << 20), st.sampled_from([1, 2, 4]),
        st.integers(1, 1 << 20),
    ),
    limits=st.builds(Thresholds, st.integers(0, 64 << 20), st.integers(0, 64 << 20)),
    spare=st.none() | st.integers(0, 512 << 20),
)  # fmt: skip
def test_ring_and_window_share_the_staging(shape: Shape, limits: Thresholds, spare: int | None) -> None:
    least = least_staging(shape)
    layout = shape.layout("auto", None if spare is None else least + spare, limits)
    ring, share = layout.staging.nbytes, layout.window_bytes // shape.num_ranks
    routing = Region.for_routing(shape.num_ranks, min(shape.max_tokens, 8192), shape.topk, -(-shape.hidden // 128))
    assert layout.window_bytes >= routing.nbytes
    assert ring + share <= (MAX_DEFAULT_STAGING if spare is None else least + spare) + -(-routing.nbytes // shape.num_ranks)
    assert ring >= shape.num_ranks * MIN_SLOT_BYTES
    assert Region(layout.num_ranks, layout.window_bytes).slot * 8 >= shape.row_bytes, "a row fits"
    assert layout.slots(shape.num_ranks) == layout.window < layout.nbytes, "neither lies in the other"


def least_staging(shape: Shape) -> int:
    """The fewest bytes that `check` lets pass."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        try:
            shape.check("auto", middle)
        except ValueError:
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize("transport", ["direct", "auto"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 1024])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_by_default_any_small_call_is_one_launch(transport: str, tokens: int, num_ranks: int) -> None:
    shape = Shape(num_ranks, hidden=2048, topk=8, max_tokens=tokens, itemsize=2)
    layout = shape.layout(transport, None, BUILT_IN)
    assert layout.window_bytes >= Region.for_calls(num_ranks, tokens, shape.row_bytes, shape.topk, 16).nbytes


def test_by_default_calls_up_to_the_threshold_are_one_launch_and_larger_ones_fill_half_a_ring() -> None:
    shape = Shape(num_ranks=2, hidden=2048, topk=8, max_tokens=8192, itemsize=2)
    layout = shape.layout("auto", None, BUILT_IN)
    rows = BUILT_IN.dispatch // shape.row_bytes
    assert layout.window_bytes >= Region.for_calls(2, rows, shape.row_bytes, shape.topk, 16).nbytes
    assert layout.staging.nbytes >= 2 * shape.max_tokens * shape.row_bytes
    small = shape._replace(max_tokens=64).layout("auto", None, BUILT_IN)
    assert small.nbytes < 12 << 20, "a Buffer for small calls is small"


@pytest.mark.parametrize("transport", ["shm", "dma", "direct", "auto"])
def test_too_little_staging_is_named(transport: str) -> None:
    with pytest.raises(ValueError, match=r"staging_bytes: got 70000; "):
        SHAPE._replace(num_ranks=4, hidden=8192).check(transport, 70_000)
