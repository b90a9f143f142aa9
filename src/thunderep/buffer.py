"""Buffer: owns everything that a group of ranks needs to exchange tokens; made by all ranks together."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Hashable
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from thunderep.pending import Pending
from thunderep.placement import local_experts
from thunderep.runtime.choice import MAX_RANKS, choose, gpu_facts
from thunderep.runtime.connect import Wish, connect
from thunderep.runtime.rendezvous import Rendezvous, compare, host_id
from thunderep.runtime.staging import Shape
from thunderep.runtime.traffic import Stats
from thunderep.runtime.transport import DTYPES, Call, Transport
from thunderep.turn import StreamOrder, Turn
from thunderep.version import __version__
from thunderep.workspace import Workspace

TransportName = Literal["auto", "dma", "direct", "shm", "collective"]

_AGREED = (
    "num_experts", "hidden", "topk", "max_tokens", "dtype", "device", "transport", "staging_bytes", "timeout", "name",
)  # fmt: skip

_log = logging.getLogger(__name__)

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
            also across hosts. "auto": "shm" for CPU tensors, and for CUDA tensors either "direct" or "dma" in each call, by
            its size; "collective" where ranks are on several hosts, where NCCL reaches every GPU from every other without
            host memory, and where some rank cannot use pinned memory as it must.
        staging_bytes: Staging per rank in bytes; None: what double-buffering max_tokens takes, at most 256 MiB. "auto" on
            CUDA divides it between kernels and copy engines.
        timeout: Seconds that a peer may be silent, and that each phase of construction may take.
        name: What the operators call this Buffer, the same on all ranks and unique among the open ones; None: derived
            from the package's version and the group.

    Attributes:
        transport: What moves rows, the same on all ranks: "shm", "dma", "direct", "collective", or "auto" for CUDA tensors of
            which kernels move small calls and copy engines large ones.

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
        given: object = group
        if given != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(given, dist.ProcessGroup):
            raise ValueError(f"group: got {given!r}, expected a ProcessGroup or None")
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise RuntimeError("group: this process is not a rank of it")
        meeting = Rendezvous(group, timeout if isinstance(timeout, int | float) and timeout > 0 else 300.0)
        self.group = group
        self.rank, self.num_ranks = meeting.rank, meeting.num_ranks
        self.num_experts, self.hidden, self.topk, self.max_tokens = num_experts, hidden, topk, max_tokens
        self.dtype = dtype
        self.timeout = timeout
        # The version, as compiled graphs hold the name: PyTorch's cache must not give one that another version traced.
        self.name = name if name is not None else f"thunderep-{__version__}.{meeting.label}"
        self._pid = os.getpid()
        self._turn = threading.Lock()
        answer: dict[str, Any] = {"pid": self._pid, "host": host_id()}
        try:
            self.device = _device(device)
            self._validate(transport, staging_bytes)
            self._allocate()
        except (ValueError, RuntimeError, MemoryError) as error:
            answer["error"] = (type(error).__name__, str(error) or type(error).__name__)
        else:
            answer |= {
                field: getattr(self, field)
                for field in _AGREED
                if field not in ("dtype", "device", "staging_bytes", "transport")
            }
            answer |= {"dtype": str(dtype), "device": self.device.type, "staging_bytes": staging_bytes, "transport": transport}
            if self.device.type == "cuda":
                answer["gpu"] = gpu_facts(self.device, group)
        answers = meeting.exchange("configuration", answer)
        compare(answers, _AGREED)
        wish = Wish(choose(transport, answers), self._shape, self.device, staging_bytes, timeout)
        self.transport, self._transport = connect(wish, group, meeting, answers)
        self._pending = Pending(self.name, self.device, self.transport)
        # From here on whatever fails, or whoever forgets to close, leaves nothing behind.
        self._finalizer = weakref.finalize(self, _close, self._transport, self._pending, self._pid)
        self._order = StreamOrder(self.device) if self.transport in ("dma", "direct", "auto") else None
        self.kernels: Any = None  # launches of `ops.direct`, once there are any
        self.calls: dict[Hashable, Call] = {}  # by the signature of arguments that were validated
        self._closed = False
        _buffers[self.name] = self
        _log.info("%r made, on %s, asked for transport %r", self, self.device, transport)

    @property
    def local_experts(self) -> range:
        """The global ids of the experts that this rank owns."""
        return local_experts(self.num_experts, self.rank, self.num_ranks)

    @property
    def open_name(self) -> str:
        """The name by which operators find it. Raises RuntimeError once it is closed: another may have the name by then."""
        if self._closed:
            raise RuntimeError(f"Buffer {self.name!r} is closed")
        return self.name

    def check(self) -> None:
        """Raise what went wrong since the last operation, if anything did: a peer that failed, ids out of range on a GPU."""
        self._usable().check()
        if self._bad.value:
            self._bad.value = 0
            raise ValueError(f"topk_idx: an earlier operation got ids outside -1 to {self.num_experts - 1}; they counted as -1")

    def stats(self) -> Stats:
        """What this rank has done over this Buffer so far: operations, bytes, and whom it waited for."""
        return self._usable().stats()

    def close(self) -> None:
        """Release everything.

        Idempotent; waits for no peer. Operations that other threads have under way raise RuntimeError; over "collective" once
        the backend lets them go on.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if _buffers.get(self.name) is self:
            del _buffers[self.name]
        # On a GPU nothing may be issued meanwhile; who issues waits for nobody.
        with self._turn if self._order is not None else contextlib.nullcontext():
            self._finalizer()

    @property
    def pending(self) -> Pending:
        """The operations that were started and are waited for later."""
        self._usable()
        return self._pending

    def is_done(self, handle: torch.Tensor) -> bool:
        """Whether nothing that was started with this handle is under way, as once the Buffer is closed."""
        return self._pending.is_done(handle)

    def forget(self, handle: torch.Tensor) -> None:
        """Keep the result of what was started with this handle no longer, if nobody has waited for it."""
        self._pending.forget(handle)

    def operation(self) -> Turn:
        """The transport, for one operation in its turn: after all submitted ones, and one at a time."""
        transport = self._usable()
        elsewhere = False
        if self.device.type == "cuda":
            self.check()
            elsewhere = torch.cuda.current_device() != self.device.index
        self._pending.join()
        return Turn(transport, self._turn, torch.cuda.device(self.device) if elsewhere else None, self._order)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        """Copies of a module share its Buffer."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a Buffer belongs to its process and cannot be pickled; save a module's state_dict instead")

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
            self._shape.check("shm" if self.device.type == "cpu" else transport, staging_bytes)
        if transport != "auto" and self.num_ranks > MAX_RANKS.get(transport, self.num_ranks):
            raise ValueError(f"transport: {transport!r} takes at most {MAX_RANKS[transport]} ranks, got {self.num_ranks}")

    def _allocate(self) -> None:
        """Make what this rank alone needs."""
        starts = [local_experts(self.num_experts, rank, self.num_ranks).start for rank in range(self.num_ranks)]
        self.expert_bounds = torch.tensor([*starts, self.num_experts], device=self.device)
        row_bytes = self.hidden * self.dtype.itemsize + self.topk * 4
        self.workspace = Workspace(self.num_ranks * self.max_tokens * row_bytes, self.device)
        self.bad_ids = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        self._bad = ctypes.c_int32.from_address(self.bad_ids.data_ptr())

    @property
    def _shape(self) -> Shape:
        return Shape(self.num_ranks, self.hidden, self.topk, self.max_tokens, self.dtype.itemsize)


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
    try:
        chosen = torch.device(device)
    except (TypeError, RuntimeError):
        raise ValueError(f"device: got {device!r}, expected a CPU or CUDA device") from None
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise ValueError(f"device: got {chosen}, expected a CPU or CUDA device")
    count = torch.cuda.device_count()
    if (chosen.index or 0) >= count:
        raise ValueError(f"device: got {chosen}, expected one of this process's {count} CUDA devices, or the CPU")
    return chosen if chosen.index is not None else torch.device("cuda", torch.cuda.current_device())


def _close(transport: Transport, pending: Pending, pid: int) -> None:
    if pid == os.getpid():  # a forked child does not own what it inherited
        transport.close()
        pending.close()
