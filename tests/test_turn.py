"""One operation at a time over a Buffer's transport, whatever goes wrong while it takes its turn."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import pytest

from thunderep.turn import Turn


class Broken:
    """Stands for a GPU whose driver reports an earlier error."""

    def join(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Device:
    """Stands for `torch.cuda.device`."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1


def test_a_turn_that_fails_to_begin_leaves_it_to_others() -> None:
    lock, device = threading.Lock(), Device()
    turn: Any = Turn(None, lock, device, Broken())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="illegal memory"), turn:
        raise AssertionError("it has not begun")
    assert not lock.locked()
    assert device.depth == 0
