"""What a side stream waits for, told by streams that write down what they are asked; without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from thunderep.background import Rest, SideStream
from thunderep.runtime import cuda


class Stream:
    """Stands for a CUDA stream."""

    def __init__(self, name: str, priority: int = 0) -> None:
        self.name, self.device, self.cuda_stream = name, torch.device("cpu"), id(self)
        self.waits: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Machine:
    """Stands for a GPU: which stream is current, and which capture it is part of."""

    def __init__(self) -> None:
        self.current = Stream("A")
        self.capture = 0

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    gpu = Machine()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: type("Event", (), {"record": lambda self: None})())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capture != 0)
    monkeypatch.setattr(cuda, "capture_id", lambda stream: gpu.capture)
    return gpu


def nothing(*tensors: torch.Tensor | None) -> Rest:
    return Rest.of()


def begun(side: SideStream, gpu: Machine, caller: Stream) -> list[str]:
    """The streams that an operation of this caller begins after."""
    before = len(side._stream.waits)  # type: ignore[attr-defined]
    with gpu.on(caller):
        side.submit(nothing)
    return sorted(side._stream.waits[before:])  # type: ignore[attr-defined]


def test_every_operation_begins_after_all_callers_so_far(gpu: Machine) -> None:
    """A may read an earlier result when B's second operation is given the memory that A has freed."""
    side, a, b = SideStream(torch.device("cpu")), Stream("A"), Stream("B")
    assert begun(side, gpu, a) == ["A"]
    assert begun(side, gpu, b) == ["A", "B"]
    assert begun(side, gpu, b) == ["A", "B"]
    gpu.capture = 7  # those of a capture wait for its own callers: the others are no part of it
    assert begun(side, gpu, b) == ["B"]
    assert begun(side, gpu, a) == ["A", "B"]
    gpu.capture = 8
    assert begun(side, gpu, a) == ["A"]
    gpu.capture = 0
    assert begun(side, gpu, a) == ["A", "B"]


def test_a_capture_that_failed_holds_up_nobody(gpu: Machine) -> None:
    side = SideStream(torch.device("cpu"))
    gpu.capture = 7
    lost = side.submit(nothing)
    gpu.capture = 0  # it raised before anybody waited
    side.join()
    gpu.capture = 8
    side.join()
    assert gpu.current.waits == []
    with pytest.raises(RuntimeError, match="another CUDA graph's capture was not waited for"):
        lost.result()


def test_what_began_before_a_capture_is_named(gpu: Machine) -> None:
    side = SideStream(torch.device("cpu"))
    early = side.submit(nothing)
    gpu.capture = 7
    with pytest.raises(RuntimeError, match="began before this CUDA graph's capture"):
        side.join()
    gpu.capture = 0
    early.result()
    gpu.capture = 7
    side.join()
