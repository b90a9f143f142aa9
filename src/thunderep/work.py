"""Operations that run beside the caller: `async_op=True`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Work(Generic[_Result]):
    """An operation under way."""

    def __init__(self) -> None:
        self._future: Future[_Result] = Future()

    @classmethod
    def of(cls, operation: Callable[[], _Result]) -> Work[_Result]:
        """Run `operation` and return its work, which has ended."""
        work = cls()
        work.run(operation)
        return work

    def run(self, operation: Callable[[], _Result]) -> None:
        """Run `operation` and keep its result, or what it raised, for `wait`."""
        try:
            result = operation()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def wait(self) -> _Result:
        """Block until the operation has ended and return its result, or raise what it raised.

        May be called any number of times.
        """
        return self._future.result()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()


class Worker:
    """One thread that runs a Buffer's submitted operations in their order.

    It starts with the first one and never keeps a process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._newest: Work[object] | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name} async", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[], _Result]) -> Work[_Result]:
        """Queue `operation` and return its work."""
        work: Work[_Result] = Work()
        self._newest = work  # type: ignore[assignment]
        self._queue.put((work, operation))  # type: ignore[arg-type]
        return work

    def wait_for_turn(self) -> None:
        """Block until all submitted operations have ended, unless the caller is one of them."""
        if self._newest is not None and threading.current_thread() is not self._thread:
            self._newest._future.exception()

    def close(self) -> None:
        """Let the thread end once its operations have: those of a closed Buffer raise at once."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, operation = item
            work.run(operation)
            del item, work, operation  # nothing keeps tensors alive until the next one comes
