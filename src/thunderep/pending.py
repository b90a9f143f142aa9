"""Pending: the operations of one Buffer that were started and are waited for later, told by their handles."""

from __future__ import annotations

from typing import Any

import torch

from thunderep.background import Background, Inline, Operation, SideStream, Started, Worker


class Pending:
    """What a Buffer runs beside its callers.

    Args:
        name: The Buffer's name.
        device: Where its tensors live.
        transport: What moves its rows.
    """

    def __init__(self, name: str, device: torch.device, transport: str) -> None:
        self._name, self._device, self._transport = name, device, transport
        self._background: Background | None = None  # a thread or a stream, once there is something to run
        self._started: dict[int, Started[Any]] = {}  # by their handle's address

    def submit(self, operation: Operation, *tensors: torch.Tensor | None) -> Started[Any]:
        """Start `operation(*tensors)` beside the caller, after all that were started before, on the tensors as they are now."""
        if self._background is None:
            if self._device.type == "cuda":
                self._background = SideStream(self._device)
            else:
                self._background = Inline() if self._transport == "collective" else Worker(self._name)
        return self._background.submit(operation, *tensors)

    def start(self, handle: torch.Tensor, operation: Operation, *tensors: torch.Tensor | None) -> None:
        """As `submit`, for `finish` with the same handle."""
        self._started[handle.data_ptr()] = self.submit(operation, *tensors)

    def finish(self, handle: torch.Tensor) -> Any:
        """Wait for what was started with this handle; what it returned."""
        started = self._started.pop(handle.data_ptr(), None)
        if started is None:
            raise RuntimeError(f"handle: no operation of Buffer {self._name!r} is under way with it; wait once for each start")
        return started.result()

    def forget(self, handle: torch.Tensor) -> None:
        """Nobody will call `finish` with this handle."""
        self._started.pop(handle.data_ptr(), None)

    def is_done(self, handle: torch.Tensor) -> bool:
        """Whether `finish` would not wait."""
        started = self._started.get(handle.data_ptr())
        return started is None or started.done()

    def join(self) -> None:
        """Have the caller go on after all that were started, unless it is one of them."""
        if self._background is not None:
            self._background.join()

    def close(self) -> None:
        """Start no more, and forget what nobody has waited for."""
        if self._background is not None:
            self._background.close()
        self._started.clear()
