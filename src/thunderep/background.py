"""Where operations run that were started and are waited for later: inline, on a thread, or on a stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from thunderep.runtime import cuda

_Result = TypeVar("_Result", covariant=True)
_Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of an operation once data has been moved: kernels that would have to wait for SMs beside other work.

    Attributes:
        run: Makes the result; called once, by whoever waits.
        reads: The tensors that it uses, or returns.
    """

    run: Callable[[], Any]
    reads: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, *result: torch.Tensor) -> Rest:
        """Nothing is left but to return these."""
        return cls(lambda: result, result)


Operation = Callable[..., Rest]


class Started(Protocol[_Result]):
    """An operation under way."""

    def result(self) -> _Result:
        """What it returns or raises; whoever asks goes on after it."""
        ...

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...


class Background(Protocol):
    """Runs a Buffer's started operations in their order."""

    def submit(self, operation: Operation, *tensors: torch.Tensor | None) -> Started[Any]:
        """Start `operation(*tensors)`, with the tensors as they are now, whatever the caller does with them next.

        What is left of it runs beside the caller too, but on a GPU when the caller waits, on the caller's stream.
        """
        ...

    def join(self) -> None:
        """Have the caller go on after all that were started, unless it is one of them."""
        ...

    def close(self) -> None:
        """Start no more."""
        ...


class Inline:
    """Runs operations at once: nobody but the caller knows the order that a process group's ranks share."""

    def submit(self, operation: Operation, *tensors: torch.Tensor | None) -> Future[Any]:
        """Run one."""
        future: Future[Any] = Future()
        _run(future, operation, tensors)
        return future

    def join(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing to end."""


class Worker:
    """One thread that runs operations on the CPU. It never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Operation, _Tensors] | None] = queue.SimpleQueue()
        self._newest: Future[Any] | None = None
        self._thread = threading.Thread(target=self._serve, name=f"{name} async", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation, *tensors: torch.Tensor | None) -> Future[Any]:
        """Queue one, on copies."""
        future: Future[Any] = Future()
        self._newest = future
        self._queue.put((future, operation, _copies(tensors)))
        return future

    def join(self) -> None:
        """Block until all have ended."""
        if self._newest is not None and threading.current_thread() is not self._thread:
            self._newest.exception()

    def close(self) -> None:
        """Let the thread end once its operations have: those of a closed Buffer raise at once."""
        self._queue.put(None)

    def _serve(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                _run(*item)
                del item  # nothing keeps tensors alive until the next one comes


class SideStream:
    """A stream beside the caller's: copy engines, or the few blocks of a kernel, work while the caller computes.

    Memory is safe in stream order. What an operation reads are copies, kept until the caller's stream is behind it. What it
    moves them to is allocated on the side stream, which begins every operation after all that callers have issued, their last
    use of earlier results included.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # blocks need not wait until a kernel of many has begun them all
        self._callers: set[torch.cuda.Stream] = set()  # of operations that no capture is part of
        self._capturing: tuple[int, set[torch.cuda.Stream]] = 0, set()  # the latest capture, and the callers in it
        self._under_way: list[OnStream] = []

    def submit(self, operation: Operation, *tensors: torch.Tensor | None) -> OnStream:
        """Issue one, on copies; it begins when the caller's stream gets here. Raises what issuing it raises."""
        kept = _copies(tensors)
        caller = torch.cuda.current_stream(self._stream.device)
        capture = cuda.current_capture(caller.cuda_stream)
        # Earlier callers may still read what this operation will be given: memory that was freed to the side stream.
        callers = self._callers_in(capture)
        callers.add(caller)
        for stream in callers:
            self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            started = OnStream(operation(*kept), kept, caller, self._stream, capture, self._under_way)
        self._under_way.append(started)
        return started

    def _callers_in(self, capture: int) -> set[torch.cuda.Stream]:
        if not capture:
            return self._callers
        if self._capturing[0] != capture:
            self._capturing = capture, set()
        return self._capturing[1]

    def join(self) -> None:
        """Order the current stream after all that nobody has waited for."""
        if self._under_way and (current := torch.cuda.current_stream(self._stream.device)) != self._stream:
            capture = cuda.current_capture(current.cuda_stream)
            for started in tuple(self._under_way):
                if started.capture in (0, capture):
                    started.order()
                elif capture:  # an earlier capture, which failed before anybody waited: this one has nothing to go on after
                    self._under_way.remove(started)

    def close(self) -> None:
        """Forget what nobody has waited for."""
        self._under_way.clear()


class OnStream:
    """An operation that was issued to a side stream, the current one."""

    def __init__(
        self,
        rest: Rest,
        kept: _Tensors,
        caller: torch.cuda.Stream,
        side: torch.cuda.Stream,
        capture: int,
        under_way: list[OnStream],
    ) -> None:
        self._rest, self._kept, self._caller, self._side, self._under_way = rest, kept, caller, side, under_way
        self.capture = capture  # that it is part of; 0: none
        self._done = torch.cuda.Event()
        self._done.record()

    def result(self) -> Any:
        """Have the current stream do what is left; the result, of use to it."""
        self.order()
        current = torch.cuda.current_stream(self._caller.device)
        if current != self._caller:
            for tensor in self._rest.reads:
                tensor.record_stream(current)
        with torch.cuda.device(self._caller.device):
            return self._rest.run()

    def done(self) -> bool:
        """Whether the data has been moved."""
        return bool(self._done.query())

    def order(self) -> None:
        """Order the current stream after it."""
        current = torch.cuda.current_stream(self._caller.device)
        capture = cuda.current_capture(current.cuda_stream)
        if capture and not self.capture:
            raise RuntimeError(
                "an operation with async_op=True that began before this CUDA graph's capture has not been waited for;"
                " call its work.wait() before the capture begins"
            )
        if capture and self.capture != capture:
            raise RuntimeError(
                "an operation with async_op=True that began in another CUDA graph's capture was not waited for in it;"
                " call its work.wait() before that capture ends"
            )
        current.wait_event(self._done)
        if self in self._under_way:
            self._under_way.remove(self)
        if current != self._caller:  # on which the copies were made: there their memory is free at once
            for tensor in self._kept:
                if tensor is not None:
                    tensor.record_stream(self._side)
        self._kept = ()


def _copies(tensors: _Tensors) -> _Tensors:
    return tuple([None if tensor is None else tensor.clone() for tensor in tensors])


def _run(future: Future[Any], operation: Operation, tensors: _Tensors) -> None:
    try:
        result = operation(*tensors).run()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
