"""Work: what `async_op=True` returns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch

from thunderep.buffer import Buffer

_Result = TypeVar("_Result")


class Work(Generic[_Result]):
    """An operation under way.

    Args:
        buffer: Its Buffer.
        handle: What the operator that started it returned.
        finish: The operator that waits for it.
    """

    _lock: AbstractContextManager[object] = nullcontext()  # in a compiled graph, which has one thread

    def __init__(self, buffer: Buffer, handle: torch.Tensor, finish: Callable[[torch.Tensor], _Result]) -> None:
        self._buffer, self._handle, self._finish = buffer, handle, finish
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        if not torch.compiler.is_compiling():
            self._lock = threading.Lock()
            weakref.finalize(self, buffer.forget, handle).atexit = False  # of works that nobody waits for

    def wait(self) -> _Result:
        """Return the operation's result, or raise what it raised; may be called any number of times.

        On the CPU this blocks until the operation has ended. On CUDA it orders the current stream after it and returns at once.
        """
        if torch.compiler.is_compiling():
            return self._first()
        with self._lock:
            if self._error is None:
                try:
                    return self._first()
                except Exception as error:
                    self._error = error
            raise self._error

    def _first(self) -> _Result:
        if not self._results:
            self._results.append(self._finish(self._handle))
        return self._results[0]

    def is_completed(self) -> bool:
        """Whether the result is there: `wait` would neither block nor have a stream wait."""
        return bool(self._results) or self._error is not None or self._buffer.is_done(self._handle)
