"""Buffer: owns everything that a group of ranks needs to exchange tokens; made by all ranks together."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from thunderep.background import Background, Inline, SideStream, Started, Worker
from thunderep.placement import local_experts
from thunderep.runtime import arena, window
from thunderep.runtime.collective import CollectiveTransport
from thunderep.runtime.control import Control
from thunderep.runtime.host import HostTransport
from thunderep.runtime.plan import ALIGNMENT, GPU_WAYS, MAX_DEFAULT_STAGING, MIN_SLOT_BYTES, Staging
from thunderep.runtime.rendezvous import Rendezvous, compare, host_id, share_segment
from thunderep.runtime.transport import DTYPES, Call, Transport
from thunderep.runtime.watchdog import Watchdog

TransportName = Literal["auto", "dma", "direct", "shm", "collective"]

_MIN_WINDOW = 512 << 10
"""Bytes a rank with which small calls travel as words that carry their own signals; less if staging_bytes says so."""
_MAX_RANKS = {"dma": arena.MAX_LANES - GPU_WAYS, "direct": window.MAX_RANKS}
_AGREED = (
    "num_experts", "hidden", "topk", "max_tokens", "dtype", "device", "transport", "staging_bytes", "timeout", "name",
)  # fmt: skip

_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()


class Buffer:
    """Staging, signals and peers of one expert-parallel group.

    Constructing is collective: every rank of the group makes its Buffer with the same arguments, and either all ranks
    get one or all raise the same report. Everything that is ever allocated is allocated here; calls larger than the
    staging stream through it.

    Args:
        group: The expert-parallel ranks; None: the default group.
        num_experts: E, experts in all. Rank r owns the contiguous block `thunderep.local_experts(E, r, N)`.
        hidden: H, elements in a row.
        topk: K, experts per token.
        max_tokens: Tokens per rank that a call may have at most.
        dtype: Widest payload element.
        device: Where the tensors live; None: the current CUDA device where there is one, else the CPU.
        transport: "shm": shared memory, for CPU tensors of one host. "dma" and "direct": copy engines, or kernels, through
            pinned shared memory, for CUDA tensors of one host. "collective": torch.distributed, for CPU or CUDA tensors,
            also across hosts. "auto": shm where it works, else collective.
        staging_bytes: Staging per rank in bytes; None: what double-buffering max_tokens takes, at most 256 MiB.
        timeout: Seconds that a peer may be silent, and that each phase of construction may take.
        name: What the operators call this Buffer, the same on all ranks and unique among the open ones; None: derived
            from the group.

    Raises:
        ValueError: A wrong argument, the same on every rank.
        RuntimeError: Ranks disagree, did not arrive in time, or could not share memory; each rank's answer is listed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        topk: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        transport: TransportName = "auto",
        staging_bytes: int | None = None,
        timeout: float = 300.0,
        name: str | None = None,
    ) -> None:
        self._closed = True  # until everything is there
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
        group = group if group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise RuntimeError("group: this process is not a rank of it")
        meeting = Rendezvous(group, timeout if isinstance(timeout, int | float) and timeout > 0 else 300.0)
        self.group = group
        self.rank, self.num_ranks = meeting.rank, meeting.num_ranks
        self.num_experts, self.hidden, self.topk, self.max_tokens = num_experts, hidden, topk, max_tokens
        self.dtype = dtype
        self.timeout = timeout
        self.name = name if name is not None else f"thunderep.{meeting.label}"
        self._pid = os.getpid()
        self._background: Background | None = None
        self._started: dict[int, Started[Any]] = {}  # by their handle's address
        self._turn = threading.Lock()
        answer: dict[str, Any] = {"pid": self._pid, "host": host_id()}
        try:
            self.device = _device(device)
            self._validate(transport, staging_bytes)
        except (ValueError, RuntimeError) as error:
            answer["error"] = (type(error).__name__, str(error))
        else:
            answer |= {
                field: getattr(self, field)
                for field in _AGREED
                if field not in ("dtype", "device", "staging_bytes", "transport")
            }
            answer |= {"dtype": str(dtype), "device": self.device.type, "staging_bytes": staging_bytes, "transport": transport}
        answers = meeting.exchange("configuration", answer)
        compare(answers, _AGREED)
        self.transport = _choose(transport, self.device, [a["host"] for a in answers])
        self._transport = self._connect(meeting, staging_bytes, answers)
        starts = [local_experts(num_experts, rank, self.num_ranks).start for rank in range(self.num_ranks)]
        self.expert_bounds = torch.tensor([*starts, num_experts], device=self.device)
        workspace = self.num_ranks * max_tokens * (hidden * dtype.itemsize + topk * 4) + ALIGNMENT
        self._workspace = torch.empty(workspace, dtype=torch.uint8) if self.device.type == "cpu" else None
        self.bad_ids = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._bad = self.bad_ids.numpy()
        self.kernels: Any = None  # launches of `ops.direct`, once there are any
        self.calls: dict[Hashable, Call] = {}  # by the signature of arguments that were validated
        self._closed = False
        _buffers[self.name] = self
        self._finalizer = weakref.finalize(self, _close_transport, self._transport, self._pid)

    @property
    def local_experts(self) -> range:
        """The global ids of the experts that this rank owns."""
        return local_experts(self.num_experts, self.rank, self.num_ranks)

    def check(self) -> None:
        """Raise what went wrong since the last operation, if anything did: a peer that failed, ids out of range on a GPU."""
        self._usable().check()
        if self._bad[0]:
            self._bad[0] = 0
            raise ValueError(f"topk_idx: an earlier operation got ids outside -1 to {self.num_experts - 1}; they counted as -1")

    def close(self) -> None:
        """Release everything.

        Idempotent; waits for no peer. Operations that other threads have under way raise RuntimeError.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if _buffers.get(self.name) is self:
            del _buffers[self.name]
        self._finalizer()
        if self._background is not None:
            self._background.close()
        self._started.clear()

    def submit(self, operation: Callable[..., Any], *tensors: torch.Tensor | None) -> Started[Any]:
        """Start `operation(*tensors)` beside the caller, after all that were started before, on the tensors as they are now."""
        self._usable()
        if self._background is None:
            if self.device.type == "cuda":
                self._background = SideStream(self.device)
            else:
                self._background = Inline() if self.transport == "collective" else Worker(self.name)
        return self._background.submit(operation, *tensors)

    def start(self, handle: torch.Tensor, operation: Callable[..., Any], *tensors: torch.Tensor | None) -> None:
        """As `submit`, for `finish` with the same handle."""
        self._started[handle.data_ptr()] = self.submit(operation, *tensors)

    def finish(self, handle: torch.Tensor) -> Any:
        """Wait for what was started with this handle; what it returned."""
        self._usable()
        started = self._started.pop(handle.data_ptr(), None)
        if started is None:
            raise RuntimeError(f"handle: no operation of Buffer {self.name!r} is under way with it; wait once for each start")
        return started.result()

    def is_done(self, handle: torch.Tensor) -> bool:
        """Whether `finish` would not wait."""
        started = self._started.get(handle.data_ptr())
        return started is None or started.done()

    def operation(self) -> Operation:
        """The transport, for one operation in its turn: after all submitted ones, and one at a time."""
        transport = self._usable()
        if self.device.type == "cuda":
            self.check()
        if self._background is not None:
            self._background.join()
        return Operation(transport, self._turn)

    def scratch(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the same shapes and types for use within one `operation`.

        On the CPU they share memory that stays: new memory would cost a page fault every 4 KiB, which is more than the copies.
        """
        if self._workspace is None:
            return [torch.empty_like(tensor) for tensor in like]
        parts, used = [], 0
        for tensor in like:
            part = self._workspace[used : used + tensor.nbytes]
            if len(part) < tensor.nbytes:  # rows wider than the Buffer's dtype
                part = torch.empty(tensor.nbytes, dtype=torch.uint8)
            parts.append(part.view(tensor.dtype).view(tensor.shape))
            used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return parts

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport
        return f"thunderep.Buffer({self.name!r}, rank {self.rank} of {self.num_ranks}, {state})"

    def _usable(self) -> Transport:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"Buffer {self.name!r} was made in process {self._pid} and cannot be used in its fork {os.getpid()};"
                " start processes with the 'spawn' method and make a Buffer in each"
            )
        if self._closed:
            raise RuntimeError(f"Buffer {self.name!r} is closed")
        return self._transport

    def _validate(self, transport: str, staging_bytes: int | None) -> None:
        for field in ("num_experts", "hidden", "topk", "max_tokens"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field}: got {value!r}, expected an integer of at least 1")
        if self.dtype not in DTYPES[:7]:
            raise ValueError(f"dtype: got {self.dtype}, expected one of {', '.join(str(d) for d in DTYPES[:7])}")
        if not isinstance(self.timeout, int | float) or isinstance(self.timeout, bool) or not self.timeout > 0:
            raise ValueError(f"timeout: got {self.timeout!r}, expected seconds, more than 0")
        if not isinstance(self.name, str):
            raise ValueError(f"name: got {self.name!r}, expected a string or None")
        if self.name in _buffers:
            raise ValueError(f"name: {self.name!r} is the name of an open Buffer")
        if transport not in get_args(TransportName):
            raise ValueError(f"transport: got {transport!r}, expected one of {', '.join(map(repr, get_args(TransportName)))}")
        needed = {"shm": "cpu", "dma": "cuda", "direct": "cuda"}.get(transport, self.device.type)
        if self.device.type != needed:
            raise ValueError(f"transport: {transport!r} moves {needed} tensors, but the device is {self.device}")
        if staging_bytes is not None:
            if not isinstance(staging_bytes, int) or isinstance(staging_bytes, bool):
                raise ValueError(f"staging_bytes: got {staging_bytes!r}, expected an integer or None")
            Staging.of(self.num_ranks, staging_bytes)
            least = -(-self._window(1).nbytes // self.num_ranks)
            if transport == "direct" and staging_bytes < least:
                raise ValueError(f"staging_bytes: got {staging_bytes}; 'direct' needs at least {least} for such rows")
        if self.num_ranks > _MAX_RANKS.get(transport, self.num_ranks):
            raise ValueError(f"transport: {transport!r} takes at most {_MAX_RANKS[transport]} ranks, got {self.num_ranks}")

    def _connect(self, meeting: Rendezvous, staging_bytes: int | None, answers: list[dict[str, Any]]) -> Transport:
        one_host = all(a["host"] == answers[0]["host"] for a in answers)
        watchdog = Watchdog([a["pid"] for a in answers]) if one_host else None
        if self.transport == "collective" or watchdog is None:
            return CollectiveTransport(self.group, watchdog)
        nbytes = staging_bytes if staging_bytes is not None else self._default_staging()
        if self.transport == "direct":
            needed = max(self._window(self.max_tokens).nbytes, self.num_ranks * _MIN_WINDOW)
            smallest = Staging.of(self.num_ranks, Staging.slots_for(self.num_ranks) * MIN_SLOT_BYTES)
            most = MAX_DEFAULT_STAGING if staging_bytes is None else staging_bytes
            layout = arena.Layout(self.num_ranks, smallest, min(needed, self.num_ranks * most))
        else:
            layout = arena.Layout(self.num_ranks, Staging.of(self.num_ranks, nbytes))
        try:
            segment = share_segment(meeting, layout.nbytes)
        except BaseException:
            watchdog.close()
            raise
        control = Control(segment, layout, self.rank, watchdog, self.timeout)
        if self.transport == "shm":
            return HostTransport(segment, layout, self.rank, control)
        from thunderep.runtime.gpu import connect

        try:
            return connect(meeting, segment, layout, self.rank, self.device, control)
        except BaseException:
            control.release()
            control.close()
            raise

    def _window(self, tokens: int) -> window.Region:
        """What kernels need for calls of so many tokens a rank."""
        row = self.hidden * max(self.dtype.itemsize, 2)
        return window.Region.for_calls(self.num_ranks, tokens, row, self.topk, -(-self.hidden // 128))

    def _default_staging(self) -> int:
        """Bytes of a ring of which either half holds a call of `max_tokens`, be it a dispatch or combine; at most 256 MiB."""
        row = self.hidden * self.dtype.itemsize
        scales = -(-self.hidden // 128) * 4
        dispatch = self.max_tokens * (row + self.topk * 12 + scales) + 4 * ALIGNMENT
        combine = self.max_tokens * max(row, self.hidden * 2) + 2 * ALIGNMENT
        half = Staging.slots_for(self.num_ranks) // 2
        chunks_per_peer = half // max(1, self.num_ranks - 1)
        slot = max(-(-dispatch // half), -(-combine // chunks_per_peer), MIN_SLOT_BYTES) + ALIGNMENT
        return min(2 * half * slot, MAX_DEFAULT_STAGING)


class Operation:
    """A turn of a Buffer's transport: while it lasts no other thread has one."""

    __slots__ = ("_transport", "_turn")

    def __init__(self, transport: Transport, turn: threading.Lock) -> None:
        self._transport, self._turn = transport, turn

    def __enter__(self) -> Transport:
        self._turn.acquire()
        return self._transport

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._turn.release()


def lookup(name: str) -> Buffer:
    """The open Buffer of that name in this process.

    Raises:
        RuntimeError: There is none.
    """
    buffer = _buffers.get(name)
    if buffer is None:
        raise RuntimeError(f"buffer: no open Buffer is named {name!r} in this process (closed, or never made here)")
    return buffer


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {chosen}, expected a CPU or CUDA device")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _choose(transport: str, device: torch.device, hosts: list[str]) -> str:
    one_host = all(host == hosts[0] for host in hosts)
    if transport in ("shm", "dma", "direct") and not one_host:
        raise RuntimeError(
            f"transport: {transport!r} needs all ranks on one host and in one process namespace; "
            + ", ".join(f"rank {rank} is on {host}" for rank, host in enumerate(hosts))
        )
    if transport == "auto":
        return "shm" if one_host and device.type == "cpu" else "collective"
    return transport


def _close_transport(transport: Transport, pid: int) -> None:
    if pid == os.getpid():  # a forked child does not own what it inherited
        transport.close()
