"""Moves rows by `dma`: executes schedules with copy engines and stream memory operations; no SM moves a byte.

Each lane has a stream of its own, forked from the caller's and joined to it before the call returns, so results and
inputs are safe in stream order as with any PyTorch operator, eager or captured. Flags are the planner's binary
semaphores, which come back to 0 by themselves, so a captured operation may be replayed any number of times and in any
order that all ranks share.

The host never learns how many tokens the peers have: chunks are cut for M rows of every rank; of a rank's own input
only what is there is copied, and the rest of what its peers receive is unspecified.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch

from thunderep.runtime import arena, cuda
from thunderep.runtime.plan import GPU_WAYS, Copy, Flag, Lane, Place, Wait, most_lanes, plan_combine, plan_dispatch
from thunderep.runtime.trace import phase

_Copy = tuple[int, int, int, int, int]  # indices of and offsets from two base addresses, bytes
_Instruction = cuda.Batch | _Copy


class CopyEngines:
    """One rank's copies, signals and waits.

    Args:
        segment: The mapped segment, pinned.
        pinned: The device's address of the segment.
        layout: What lies where in it.
        rank: This rank.
        device: This rank's GPU.
    """

    def __init__(self, segment: arena.Segment, pinned: int, layout: arena.Layout, rank: int, device: torch.device) -> None:
        self._segment, self._pinned, self._layout, self._rank = segment, pinned, layout, rank
        self._operations = 0
        self._streams = [torch.cuda.Stream(device) for _ in range(most_lanes(layout.num_ranks, GPU_WAYS))]
        self._program = lru_cache(maxsize=256)(self._make_program)

    def state(self) -> bytes:
        """What changes as long as operations get on; empty while none is under way."""
        start = self._layout.control(self._rank, arena.CONTROL_LANES)
        lanes = self._segment.bytes[start : start + 4 * arena.MAX_LANES]
        return lanes + self._segment.bytes[self._layout.flags] if any(lanes) else b""

    def release(self) -> None:
        """Set the flags as if the peers had sent and read everything."""
        words = self._segment.words
        for peer in range(self._layout.num_ranks):
            if peer != self._rank:
                for slot in range(self._layout.staging.slots):
                    words[self._layout.flag(Flag(peer, slot, self._rank)) // 4] = 1
                    words[self._layout.flag(Flag(self._rank, slot, peer)) // 4] = 0

    @phase("copy_engines")
    def run(self, kind: str, max_rows: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Issue a "dispatch" or a "combine", with M rows a rank, to the current stream."""
        row_bytes = tuple(t.numel() // len(t) * t.element_size() if len(t) else 0 for t in outputs)
        lanes = self._program(kind, row_bytes, max_rows, self._operations % 2)
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

    def _make_program(self, kind: str, row_bytes: tuple[int, ...], max_rows: int, bank: int) -> list[list[_Instruction]]:
        lanes, queues = most_lanes(self._layout.num_ranks, GPU_WAYS), cuda.hardware_queues()
        if queues <= lanes:
            warnings.warn(
                f"CUDA_DEVICE_MAX_CONNECTIONS: {queues} hardware queues for {lanes} lanes and the model's own streams: what"
                " waits may hold up what it waits for; set it to 32 before the process first uses CUDA",
                RuntimeWarning,
                stacklevel=2,
            )
        planner = plan_dispatch if kind == "dispatch" else plan_combine
        rows = [max_rows] * self._layout.num_ranks
        schedule = planner(self._rank, rows, row_bytes, max_rows, self._layout.staging, bank, GPU_WAYS)
        return [self._instructions(i, lane, len(row_bytes)) for i, lane in enumerate(schedule.lanes)]

    def _instructions(self, number: int, lane: Lane, payloads: int) -> list[_Instruction]:
        """The lane's steps, flags that follow each other in one batch; the first and the last tell the releaser."""

        def locate(place: Place) -> tuple[int, int]:
            if place.memory.kind == "staging":
                return 0, self._segment.address + self._layout.slots(place.memory.rank) + place.offset
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
