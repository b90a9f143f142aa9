"""Turn: one operation at a time over a Buffer's transport."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from thunderep.runtime.transport import Transport


class Turn:
    """The transport for one operation: while it lasts no other thread has one, and the Buffer's GPU is the current one.

    Args:
        transport: What `with` gives.
        lock: Who holds it has the turn.
        device: The GPU where it is not the current one already.
    """

    __slots__ = ("_device", "_lock", "_transport")

    def __init__(self, transport: Transport, lock: threading.Lock, device: torch.cuda.device | None) -> None:
        self._transport, self._lock, self._device = transport, lock, device

    def __enter__(self) -> Transport:
        self._lock.acquire()
        if self._device is not None:
            self._device.__enter__()
        return self._transport

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, trace)
        self._lock.release()
