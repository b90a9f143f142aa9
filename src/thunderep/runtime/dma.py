"""Moves rows by `dma`: executes schedules with copy engines and stream memory operations; no SM moves what travels.

Each lane that sends or receives has a stream of its own, forked from the caller's and joined to it before the call returns,
so results and inputs are safe in stream order as with any PyTorch operator, eager or captured. What stays on this GPU is
copied on the caller's stream when the caller says so: SMs do that, which need not be free at once. Lanes are issued in
turns, since CUDA may have streams share a hardware queue.

Flags are the planner's binary semaphores, which come back to 0 by themselves, so a captured operation may be replayed any
number of times and in any order that all ranks share.

The host never learns how many tokens the peers have: chunks are cut for M rows of every rank; of a rank's own input
only what is there is copied, and the rest of what its peers receive is unspecified.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from thunderep.runtime import arena, cuda
from thunderep.runtime.plan import LOCAL, most_lanes, plan_combine, plan_dispatch
from thunderep.runtime.schedule import Copy, Flag, Place, Schedule, Wait
from thunderep.runtime.trace import phase

_Copy = tuple[int, int, int, int, int]  # indices of and offsets from two base addresses, bytes
_Instruction = cuda.Batch | _Copy


class _Program(NamedTuple):
    """A schedule ready to be issued."""

    lanes: int
    instructions: Sequence[tuple[int, _Instruction]]  # with its lane's number, in the order in which to issue them
    local: Sequence[tuple[int, _Instruction]]  # copies of what stays on this GPU: wait for nothing, and nothing for them


class CopyEngines:
    """One rank's copies, signals and waits.

    Args:
        segment: The mapped segment, pinned.
        pinned: The device's address of the segment.
        layout: What lies where in it.
        rank: This rank.
        device: This rank's GPU.
        grain: How finely to cut, see `chunks.in_turn`; the same on all ranks.
    """

    def __init__(
        self, segment: arena.Segment, pinned: int, layout: arena.Layout, rank: int, device: torch.device, grain: int
    ) -> None:
        self._segment, self._pinned, self._layout, self._rank = segment, pinned, layout, rank
        self._device, self._grain = device, grain
        self._streams = [torch.cuda.Stream(device) for _ in range(most_lanes(layout.num_ranks))]
        self._program = lru_cache(maxsize=256)(self._make_program)

    def state(self) -> bytes:
        """What changes as long as operations get on; empty while none is under way."""
        start = self._layout.control(self._rank, arena.CONTROL_LANES)
        lanes = self._segment.bytes[start : start + 4 * len(self._streams)]
        return lanes + self._segment.bytes[self._layout.flags] if any(lanes) else b""

    def release(self) -> None:
        """Set the flags as if the peers had sent and read everything."""
        words = self._segment.words
        for peer in range(self._layout.num_ranks):
            if peer != self._rank:
                for slot in range(self._layout.staging.slots):
                    words[self._layout.flag(Flag(peer, slot, self._rank)) // 4] = 1
                    words[self._layout.flag(Flag(self._rank, slot, peer)) // 4] = 0

    @contextlib.contextmanager
    def moving(
        self, kind: str, max_rows: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Iterator[Callable[[], None]]:
        """Issue a "dispatch" or a "combine", with M rows a rank; what is issued within the context runs beside it.

        The current stream goes on after both. The context's value copies what stays here, on the stream that is current then.
        """
        row_bytes = tuple(t.numel() // len(t) * t.element_size() if len(t) else 0 for t in outputs)
        program = self._program(kind, row_bytes, max_rows)
        caller, streams = torch.cuda.current_stream(), self._streams[: program.lanes]
        here = caller.record_event()
        for stream in streams:
            stream.wait_event(here)

        def own() -> None:
            with torch.cuda.device(self._device):  # a null stream is the current device's
                self._issue(program.local, [torch.cuda.current_stream().cuda_stream], inputs, outputs)

        try:
            self._issue(program.instructions, [stream.cuda_stream for stream in streams], inputs, outputs)
            yield own
        finally:
            for stream in streams:
                caller.wait_stream(stream)

    @phase("copy_engines")
    def _issue(
        self,
        instructions: Sequence[tuple[int, _Instruction]],
        streams: Sequence[int],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        bases = (0, *(t.data_ptr() for t in inputs), *(t.data_ptr() for t in outputs))
        limits = (0, *(t.numel() * t.element_size() for t in inputs))
        for lane, instruction in instructions:
            if isinstance(instruction, cuda.Batch):
                instruction.issue(streams[lane])
            else:
                src, src_offset, dst, dst_offset, nbytes = instruction
                if 0 < src < len(limits):
                    nbytes = min(nbytes, limits[src] - src_offset)
                if nbytes > 0:
                    cuda.copy(bases[dst] + dst_offset, bases[src] + src_offset, nbytes, streams[lane])

    def _make_program(self, kind: str, row_bytes: tuple[int, ...], max_rows: int) -> _Program:
        lanes, queues = most_lanes(self._layout.num_ranks), cuda.hardware_queues()
        if queues <= lanes:
            warnings.warn(
                f"CUDA_DEVICE_MAX_CONNECTIONS: {queues} hardware queues for {lanes} lanes and the model's own streams: what"
                " waits may hold up what need not; set it to 32 before the process first uses CUDA",
                RuntimeWarning,
                stacklevel=2,
            )
        planner, bank = (plan_dispatch, 0) if kind == "dispatch" else (plan_combine, 1)
        rows = [max_rows] * self._layout.num_ranks
        schedule = planner(self._rank, rows, row_bytes, max_rows, self._layout.staging, bank, self._grain)
        local = [lane for lane in schedule.lanes if lane.name == LOCAL]
        flagged = replace(schedule, lanes=tuple(lane for lane in schedule.lanes if lane.name != LOCAL))
        instructions = list(self._instructions(flagged, len(row_bytes)))
        stays = [(0, self._copy(step, len(row_bytes))) for lane in local for step in lane.steps if isinstance(step, Copy)]
        return _Program(len(flagged.lanes), instructions, stays)

    def _instructions(self, schedule: Schedule, payloads: int) -> Iterator[tuple[int, _Instruction]]:
        """The steps with their lanes, in the order in which to issue them; flags that follow each other in one batch.

        A lane's first flags and its last ones tell the releaser that it is under way, and that it no longer is.
        """
        left = [len(lane.steps) for lane in schedule.lanes]
        groups = itertools.groupby(schedule.issue_order(), lambda step: (step[0], isinstance(step[1], Copy)))
        for (lane, _), group in groups:
            steps = [step for _, step in group]
            first, left[lane] = left[lane] == len(schedule.lanes[lane].steps), left[lane] - len(steps)
            copies = [step for step in steps if isinstance(step, Copy)]
            for copy in copies:
                yield lane, self._copy(copy, payloads)
            if copies:
                continue
            under_way = self._pinned + self._layout.control(self._rank, arena.CONTROL_LANES + 4 * lane)
            flags: list[cuda.Operation] = [(False, under_way, 1)] if first else []
            for step in steps:
                if not isinstance(step, Copy):
                    flags += [
                        (isinstance(step, Wait), self._pinned + self._layout.flag(flag), step.value) for flag in step.flags
                    ]
            yield lane, cuda.Batch(flags if left[lane] else [*flags, (False, under_way, 0)])

    def _copy(self, copy: Copy, payloads: int) -> _Copy:
        return (*self._locate(copy.src, payloads), *self._locate(copy.dst, payloads), copy.nbytes)

    def _locate(self, place: Place, payloads: int) -> tuple[int, int]:
        """The index of a base address, as `_issue` lists them, and the offset from it."""
        if place.memory.kind == "staging":
            return 0, self._segment.address + self._layout.slots(place.memory.rank) + place.offset
        return 1 + place.memory.payload + (payloads if place.memory.kind == "output" else 0), place.offset
