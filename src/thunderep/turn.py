"""Turn: one operation at a time over a Buffer's transport, on the host and on its GPU."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from thunderep.runtime import cuda
from thunderep.runtime.transport import Transport


class StreamOrder:
    """Puts the operations of a Buffer into one order on its GPU, from whatever streams they are issued.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._at = (-1, 0)  # the last operation's stream, and the capture that it was part of

    def join(self) -> None:
        """Have the current stream go on after the last operation; this one is the last from now on.

        What was captured has not run, and what runs is no part of a capture: they are not ordered.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        capture = cuda.current_capture(stream)
        if (stream, capture) == self._at:
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and stream != self._at[0] and capture == self._at[1]:
            current.wait_stream(self._last)
        self._last, self._at = current, (stream, capture)


class Turn:
    """The transport for one operation: while it lasts no other thread has one, and the Buffer's GPU is the current one.

    Args:
        transport: What `with` gives.
        lock: Who holds it has the turn.
        device: The GPU where it is not the current one already.
        order: The order on the GPU, if there is one.
    """

    __slots__ = ("_device", "_lock", "_order", "_transport")

    def __init__(
        self, transport: Transport, lock: threading.Lock, device: torch.cuda.device | None, order: StreamOrder | None
    ) -> None:
        self._transport, self._lock, self._device, self._order = transport, lock, device, order

    def __enter__(self) -> Transport:
        self._lock.acquire()
        try:
            if self._device is not None:
                self._device.__enter__()
            if self._order is not None:
                self._order.join()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self._transport

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._device is not None:
                self._device.__exit__(kind, error, trace)
        finally:
            self._lock.release()
