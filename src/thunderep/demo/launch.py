"""Processes that do one rank's work each: start them, hear from them, and leave none behind, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

_GRACE_SECONDS = 1.5
"""How long to listen on after a first failure: what comes first is often a peer's report of it, and not the cause."""

Job = Callable[[int, Any, Callable[[Any], None]], None]
"""Called with the rank, the arguments and a function that sends any picklable object to the parent."""


class RankError(RuntimeError):
    """A rank failed; the message says which and how."""


@dataclass(frozen=True)
class _Failure:
    summary: str
    killed: bool = False


def launch(job: Job, count: int, arguments: Any, logs: Path) -> Generator[tuple[int, Any], None, None]:
    """Run `job(rank, arguments, send)` in `count` new processes and yield (rank, object) for each object sent.

    Ends when all have ended well. Closing the iterator, or any exception, kills all processes first.

    Args:
        job: A function of some module.
        count: How many processes.
        arguments: Whatever is picklable.
        logs: A folder; what rank r prints goes to "rank-<r>.log" in it.

    Raises:
        RankError: A rank raised or died.
    """
    logs.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        with _interrupts_ignored():
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                pipes[ours] = rank
                process = context.Process(target=_run, args=(job, rank, arguments, theirs, logs / _log(rank), os.getpid()))
                process.start()
                theirs.close()
                processes.append(process)
        yield from _listen(pipes, processes, logs)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def _listen(pipes: dict[Connection, int], processes: list[SpawnProcess], logs: Path) -> Iterator[tuple[int, Any]]:
    failures: dict[int, _Failure] = {}
    open_pipes = dict(pipes)
    deadline = float("inf")
    while open_pipes and time.monotonic() < deadline:
        for ready in wait(list(open_pipes), timeout=_GRACE_SECONDS if failures else None):
            assert isinstance(ready, Connection)
            rank = open_pipes[ready]
            try:
                message = ready.recv()
            except EOFError:
                del open_pipes[ready]
                message = _exit_failure(processes[rank])
            if isinstance(message, _Failure):
                failures.setdefault(rank, message)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            elif message is not None and not failures:
                yield rank, message
    if failures:
        # A process that was killed is the cause of whatever its peers report, even where their reports came first.
        rank, failure = min(failures.items(), key=lambda item: not item[1].killed)
        raise RankError(f"rank {rank} {failure.summary}\nWhat it printed: {logs / _log(rank)}")


def _exit_failure(process: SpawnProcess) -> _Failure | None:
    process.join()
    code = process.exitcode or 0
    if code < 0:
        return _Failure(f"was killed by {signal.Signals(-code).name}", killed=True)
    return _Failure(f"ended with status {code}") if code else None


def _run(job: Job, rank: int, arguments: Any, pipe: Connection, log: Path, parent: int) -> None:
    """One process: do the job, or report why not."""
    _die_with(parent)
    _print_to(log)
    status = 0
    try:
        job(rank, arguments, pipe.send)
    except BaseException as error:
        traceback.print_exc()
        status = 1
        pipe.send(_Failure(f"failed: {type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    if not status:
        # Its lock of a progress bar, torch.compile's, would be called leaked.
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(status)  # libraries' exit handlers may wait for peers that are gone


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _print_to(log: Path) -> None:
    """Send all that this process and its libraries print to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """New processes inherit that Ctrl-C is ignored: it is the parent's, which then ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _log(rank: int) -> str:
    return f"rank-{rank}.log"
