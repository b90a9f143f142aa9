"""The `dma` transport: executes schedules with copy engines and stream memory operations; no SM moves a byte.

Each lane has a stream of its own, forked from the caller's and joined to it before the call returns, so results and
inputs are safe in stream order as with any PyTorch operator, eager or captured. Flags are the planner's binary
semaphores, which come back to 0 by themselves, so a captured operation may be replayed any number of times and in any
order that all ranks share.

The host never learns how many tokens the peers have: chunks are cut for M rows of every rank; of a rank's own input
only what is there is copied, and the rest of what its peers receive is unspecified.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from thunderep.runtime import arena, cuda
from thunderep.runtime.control import Control
from thunderep.runtime.plan import Copy, Lane, Place, Wait, plan_combine, plan_dispatch
from thunderep.runtime.release import Releaser
from thunderep.runtime.rendezvous import Rendezvous, compare
from thunderep.runtime.transport import ByRank, Call, Scratch

SHARE = "THUNDEREP_SHARE_GPU"
"""Environment variable: "1" lets several ranks have one GPU, for tests; they take turns on it."""

_WAYS = 2
_Copy = tuple[int, int, int, int, int]  # indices of and offsets from two base addresses, bytes
_Instruction = cuda.Batch | _Copy


def connect(
    meeting: Rendezvous,
    segment: arena.Segment,
    layout: arena.Layout,
    rank: int,
    device: torch.device,
    control: Control,
) -> DmaTransport:
    """Pin the segment on all ranks and make each rank's transport, or raise the same report on all.

    Raises:
        RuntimeError: A rank could not pin the memory, has no stream memory operations, or two ranks share a GPU.
    """
    answer: dict[str, object] = {"gpu": str(torch.cuda.get_device_properties(device).uuid)}
    pinned = 0
    try:
        if _WAYS * layout.num_ranks > arena.MAX_LANES:
            raise cuda.CudaError(f"transport: 'dma' takes at most {arena.MAX_LANES // _WAYS} ranks, got {layout.num_ranks}")
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the device's context, and current
            pinned = cuda.register(segment.address, segment.nbytes)
            stream = torch.cuda.current_stream(device)
            cuda.probe(pinned + layout.control(rank, arena.CONTROL_PROBE), stream.cuda_stream)
            stream.synchronize()
    except cuda.CudaError as error:
        answer["error"] = ("RuntimeError", str(error))
    try:
        answers = meeting.exchange("pinning", answer)
        compare(answers, ())
        gpus = [a["gpu"] for a in answers]
        for gpu in gpus:
            if gpus.count(gpu) > 1 and os.environ.get(SHARE) != "1":
                sharing = [str(r) for r, other in enumerate(gpus) if other == gpu]
                raise RuntimeError(
                    f"device: ranks {' and '.join(sharing)} have the same GPU, {gpu}; give each its own, or set {SHARE}=1"
                )
    except BaseException:
        if pinned:
            cuda.unregister(segment.address)
        raise
    return DmaTransport(segment, pinned, layout, rank, device, control)


class DmaTransport:
    """One rank's side of the pinned shared segment. See `transport.Transport` for what its methods move.

    Args:
        segment: The mapped segment, pinned.
        pinned: The device's address of the segment.
        layout: What lies where in it.
        rank: This rank.
        device: This rank's GPU.
        control: This rank's control block; closed with the transport.
    """

    def __init__(
        self,
        segment: arena.Segment,
        pinned: int,
        layout: arena.Layout,
        rank: int,
        device: torch.device,
        control: Control,
    ) -> None:
        self._address, self._pinned, self._layout, self._rank = segment.address, pinned, layout, rank
        self._device = device
        self._control = control
        self._releaser = Releaser(segment, layout, rank, control)
        self._operations = 0
        self._closed = False
        self._streams = [torch.cuda.Stream(device) for _ in range(_WAYS * layout.num_ranks + 1)]
        self._program = lru_cache(maxsize=256)(self._make_program)

    def dispatch(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
        """Give every rank all rows of all ranks. The ids' payload must have M rows: what is past T reads -1 there."""
        self._execute("dispatch", call, inputs, outputs)
        return [call.max_tokens] * self._layout.num_ranks

    @contextlib.contextmanager
    def combine(self, call: Call, inputs: Sequence[torch.Tensor], scratch: Scratch) -> Iterator[list[ByRank]]:
        """Give every rank back the rows that stem from it."""
        outputs = scratch(inputs)
        self._execute("combine", call, inputs, outputs)
        yield [output.unflatten(0, (self._layout.num_ranks, call.max_tokens)) for output in outputs]

    def _execute(self, kind: str, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._control.post(call)
        row_bytes = tuple(t.numel() // len(t) * t.element_size() if len(t) else 0 for t in outputs)
        lanes = self._program(kind, row_bytes, call.max_tokens, self._operations % 2)
        self._operations += 1
        bases = (0, *(t.data_ptr() for t in inputs), *(t.data_ptr() for t in outputs))
        limits = (0, *(t.numel() * t.element_size() for t in inputs))
        caller = torch.cuda.current_stream()
        for stream, lane in zip(self._streams, lanes, strict=False):
            stream.wait_stream(caller)
            handle = stream.cuda_stream
            for step in lane:
                if isinstance(step, cuda.Batch):
                    step.issue(handle)
                else:
                    src, src_offset, dst, dst_offset, nbytes = step
                    if 0 < src < len(limits):
                        nbytes = min(nbytes, limits[src] - src_offset)
                    if nbytes > 0:
                        cuda.copy(bases[dst] + dst_offset, bases[src] + src_offset, nbytes, handle)
        for stream, _ in zip(self._streams, lanes, strict=False):
            caller.wait_stream(stream)

    def check(self) -> None:
        """Raise the error that broke the Buffer, if one did."""
        self._control.check()

    def close(self) -> None:
        """Wait until the device has ended what it began, or the releaser has freed it; then unpin and leave."""
        if self._closed:
            return
        self._closed = True
        try:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                cuda.unregister(self._address)
        finally:
            self._releaser.close()
            self._control.release()
            self._control.close()

    def _make_program(self, kind: str, row_bytes: tuple[int, ...], max_rows: int, bank: int) -> list[list[_Instruction]]:
        planner = plan_dispatch if kind == "dispatch" else plan_combine
        rows = [max_rows] * self._layout.num_ranks
        schedule = planner(self._rank, rows, row_bytes, max_rows, self._layout.staging, bank, _WAYS)
        return [self._instructions(i, lane, len(row_bytes)) for i, lane in enumerate(schedule.lanes)]

    def _instructions(self, number: int, lane: Lane, payloads: int) -> list[_Instruction]:
        """The lane's steps, flags that follow each other in one batch; the first and the last tell the releaser."""

        def locate(place: Place) -> tuple[int, int]:
            if place.memory.kind == "staging":
                return 0, self._address + self._layout.slots(place.memory.rank) + place.offset
            return 1 + place.memory.payload + (payloads if place.memory.kind == "output" else 0), place.offset

        under_way = self._pinned + self._layout.control(self._rank, arena.CONTROL_LANES + 4 * number)
        instructions: list[_Copy | list[cuda.Operation]] = []
        for is_copy, steps in itertools.groupby(lane.steps, lambda step: isinstance(step, Copy)):
            if is_copy:
                instructions += [(*locate(s.src), *locate(s.dst), s.nbytes) for s in steps if isinstance(s, Copy)]
                continue
            flags: list[cuda.Operation] = [] if instructions else [(False, under_way, 1)]
            for step in steps:
                if not isinstance(step, Copy):
                    flags += [
                        (isinstance(step, Wait), self._pinned + self._layout.flag(flag), step.value) for flag in step.flags
                    ]
            instructions.append(flags)
        if isinstance(instructions[-1], list):
            instructions[-1].append((False, under_way, 0))
        return [cuda.Batch(i) if isinstance(i, list) else i for i in instructions]
