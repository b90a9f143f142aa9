"""Real rank processes that stay up and run one function after another: for tests, benchmarks and `thunderep tune`.

>>> with Ranks(2) as ranks:  # doctest: +SKIP
...     ranks.run(os.getpid)
[4711, 4712]
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

_START_SECONDS = 180.0


class RankError(RuntimeError):
    """A function raised on some ranks.

    Attributes:
        errors: For each rank what it raised, or None.
    """

    def __init__(self, errors: Sequence[BaseException | None], text: str) -> None:
        super().__init__(text)
        self.errors = list(errors)


class Ranks:
    """N processes of one default process group.

    Args:
        num_ranks: N.
        backend: torch.distributed's back end. With "nccl" each rank has a GPU; where there are too few, ranks share them, which
            is slow unless CUDA's Multi-Process Service runs. NCCL before 2.30 then goes through sockets.
        threads: torch's threads in each process.
        environment: More environment variables for the processes.
    """

    def __init__(
        self, num_ranks: int, backend: str = "gloo", threads: int = 1, environment: dict[str, str] | None = None
    ) -> None:
        # A server that has imported torch forks the processes: spawning would import it anew in each.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", __name__])
        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="thunderep-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, num_ranks, backend, store, threads, environment or {}), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.collect(_START_SECONDS)

    @property
    def pids(self) -> list[int]:
        """The processes' ids, in rank order."""
        return [process.pid or 0 for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether no process has ended."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(*args)` in every process and return the results in rank order.

        Raises:
            RankError: It raised somewhere.
            TimeoutError: Some rank did not answer in time; all processes have been killed.
        """
        self.start(function, *args)
        return self.collect(timeout)

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> None:
        """Begin to call `function(*args)` in every process, or those of `ranks`."""
        request = pickle.dumps((function, args))
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self._pipes[rank].send_bytes(request)

    def collect(self, timeout: float = 120.0, ranks: Sequence[int] | None = None) -> list[Any]:
        """The results of what `start` began. Raises as `run`."""
        outcomes = self.outcomes(timeout, ranks)
        errors = [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]
        if any(errors):
            text = "\n".join(
                f"rank {rank}: {type(e).__name__}: {e}\n{''.join(getattr(e, '__notes__', []))}"
                for rank, e in zip(ranks or range(self.num_ranks), errors, strict=True)
                if e is not None
            )
            raise RankError(errors, text)
        return outcomes

    def outcomes(self, timeout: float = 120.0, ranks: Sequence[int] | None = None) -> list[Any]:
        """What each rank's function returned, or the exception that it raised. A dead process's outcome is an EOFError."""
        deadline = time.monotonic() + timeout
        results = []
        for rank in range(self.num_ranks) if ranks is None else ranks:
            try:
                if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    failed = self._failures(rank)
                    self.kill()
                    raise TimeoutError(
                        f"rank {rank} of {self.num_ranks} did not answer within {timeout:g} s; all ranks were killed{failed}"
                    )
                results.append(pickle.loads(self._pipes[rank].recv_bytes()))
            except (EOFError, ConnectionResetError):
                results.append(EOFError(f"rank {rank}'s process has ended{self._how(rank)}"))
        return results

    def _failures(self, first: int) -> str:
        """What ranks from `first` on have raised meanwhile."""
        found = ""
        for rank in range(first, self.num_ranks):
            with contextlib.suppress(EOFError, OSError):
                if self._pipes[rank].poll() and isinstance(
                    outcome := pickle.loads(self._pipes[rank].recv_bytes()), BaseException
                ):
                    found += f"; rank {rank}: {type(outcome).__name__}: {outcome}"
        return found

    def _how(self, rank: int) -> str:
        """How a process ended, if that is known."""
        self._processes[rank].join(timeout=5)
        status = self._processes[rank].exitcode
        if not status:
            return ""
        return f", killed by {signal.Signals(-status).name}" if status < 0 else f" with exit status {status}"

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank's process."""
        os.kill(self.pids[rank], number)

    def kill(self) -> None:
        """Kill all processes (SIGKILL) and wait for them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(timeout=10)
        self.kill()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.kill()  # they may be in the middle of something
        self.close()


def gpu_of(rank: int, num_ranks: int) -> int:
    """The ordinal of a rank's GPU. Where there are too few, ranks share them, and this one is told to bear that."""
    import torch

    from thunderep.runtime.gpu import SHARE
    from thunderep.runtime.topology import nccl_version

    gpus = torch.cuda.device_count()
    if num_ranks > gpus:
        os.environ.setdefault(SHARE, "1")
        if nccl_version() >= (2, 30):
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        else:  # it takes no two ranks on one GPU, unless it believes that they are on different hosts
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
    return rank % gpus


def _serve(
    pipe: Connection, rank: int, num_ranks: int, backend: str, store: str, threads: int, environment: dict[str, str]
) -> None:
    """One rank: join the group, then answer requests until the parent hangs up."""
    _die_with_parent()
    faulthandler.enable()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each lane: see `runtime.cuda.hardware_queues`
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which then closes
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    device = None
    if backend != "gloo":
        device = torch.device("cuda", gpu_of(rank, num_ranks))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, device_id=device)
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        if not request:
            break
        pipe.send_bytes(_answer(request))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the group's other members may be gone already; nothing here needs them


def _answer(request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        return pickle.dumps(function(*args))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            error.__notes__ = [trace]
            answer = pickle.dumps(error)
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{trace}"))
        return answer


def _die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends, as it does with the tests: no run leaves ranks behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
