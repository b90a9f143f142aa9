"""The `shm` transport: executes schedules with memory copies and flags in the shared segment.

An operation has two parts. Each rank announces its call and reads everyone's: ranks that disagree raise before anything
has moved, and the row counts that come back make the schedule. Then the schedule's lanes run in turn on the calling
thread, each until it would wait; when all would, the thread sleeps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from thunderep.runtime import arena
from thunderep.runtime.control import Control
from thunderep.runtime.futex import fence
from thunderep.runtime.plan import Copy, Flag, Lane, Schedule, Signal, plan_combine, plan_dispatch
from thunderep.runtime.transport import Call
from thunderep.runtime.watchdog import Watchdog

_Program = tuple[tuple["_Instruction", ...], ...]


class _CopyOf:
    """A `Copy` with its memories looked up: `src` and `dst` index the operation's base addresses."""

    __slots__ = ("dst", "dst_offset", "nbytes", "src", "src_offset")

    def __init__(self, src: int, src_offset: int, dst: int, dst_offset: int, nbytes: int) -> None:
        self.src, self.src_offset, self.dst, self.dst_offset, self.nbytes = src, src_offset, dst, dst_offset, nbytes


class _FlagsOf:
    """A `Signal` or `Wait` with its flags' words looked up; `ranks` are those at the flags' other end."""

    __slots__ = ("ranks", "signal", "value", "words")

    def __init__(self, signal: bool, words: tuple[int, ...], value: int, ranks: tuple[int, ...]) -> None:
        self.signal, self.words, self.value, self.ranks = signal, words, value, ranks


_Instruction = _CopyOf | _FlagsOf


class HostTransport:
    """One rank's side of the shared segment. See `transport.Transport` for what its methods move.

    Args:
        segment: The mapped segment.
        layout: What lies where in it.
        rank: This rank.
        watchdog: Watches the peers' processes; closed with the transport.
        timeout: Seconds that a peer may be silent.
    """

    def __init__(self, segment: arena.Segment, layout: arena.Layout, rank: int, watchdog: Watchdog, timeout: float) -> None:
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._control = Control(segment, layout, rank, watchdog, timeout)
        self._lock = threading.Lock()
        self._program = lru_cache(maxsize=256)(self._make_program)

    def dispatch(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
        """Give every rank all rows of all ranks."""
        with self._lock:
            rows = self._control.announce(call)
            row_bytes = tuple(t[0].numel() * t.element_size() if len(t) else 0 for t in outputs)
            max_rows = outputs[0].shape[0] // self._layout.num_ranks
            self._execute(("dispatch", tuple(rows), row_bytes, max_rows, self._control.sequence % 2), inputs, outputs)
            return rows

    def combine(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Give every rank back the rows that stem from it."""
        with self._lock:
            rows = self._control.announce(call)
            row_bytes = tuple(t[0].numel() * t.element_size() if len(t) else 0 for t in inputs)
            max_rows = inputs[0].shape[0] // self._layout.num_ranks
            self._execute(("combine", tuple(rows), row_bytes, max_rows, self._control.sequence % 2), inputs, outputs)

    def check(self) -> None:
        """Raise the error that broke this transport, if one did."""
        self._control.check()

    def close(self) -> None:
        """Release everything."""
        if self._control.release():  # whoever waits in another thread lets go of the lock
            with self._lock:
                self._control.close()

    def _execute(
        self,
        key: tuple[str, tuple[int, ...], tuple[int, ...], int, int],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        bases = (0, *(t.data_ptr() for t in inputs), *(t.data_ptr() for t in outputs))
        lanes = [_Runner(self._segment.words, self._control.ring, lane, bases) for lane in self._program(*key)]
        blocked = lanes

        def advance() -> bool:
            nonlocal blocked
            moved = False
            for lane in blocked:
                moved |= lane.advance()
            blocked = [lane for lane in blocked if not lane.ended]
            return moved

        self._control.wait(
            advance,
            lambda: not blocked,
            lambda: sorted({rank for lane in blocked for rank in lane.waits_for()}),
            f"{key[0]} {self._control.sequence}: its rows or credits",
        )

    def _make_program(self, kind: str, rows: tuple[int, ...], row_bytes: tuple[int, ...], max_rows: int, bank: int) -> _Program:
        planner = plan_dispatch if kind == "dispatch" else plan_combine
        schedule = planner(self._rank, rows, row_bytes, max_rows, self._layout.staging, bank)
        return tuple(tuple(self._instructions(schedule, lane, len(row_bytes))) for lane in schedule.lanes)

    def _instructions(self, schedule: Schedule, lane: Lane, payloads: int) -> Iterator[_Instruction]:
        def locate(kind: str, rank: int, index: int, offset: int) -> tuple[int, int]:
            if kind == "staging":
                return 0, self._segment.address + self._layout.slots(rank) + offset
            return 1 + index + (payloads if kind == "output" else 0), offset

        for step in lane.steps:
            if isinstance(step, Copy):
                src = locate(*step.src.memory, step.src.offset)
                dst = locate(*step.dst.memory, step.dst.offset)
                yield _CopyOf(*src, *dst, step.nbytes)
            else:
                words = tuple(self._layout.flag(flag) // 4 for flag in step.flags)
                ranks = tuple(_other_end(flag, schedule.rank) for flag in step.flags)
                yield _FlagsOf(isinstance(step, Signal), words, step.value, ranks)


class _Runner:
    """One lane under way."""

    __slots__ = ("_at", "_bases", "_instructions", "_ring", "_words", "ended")

    def __init__(
        self,
        words: memoryview,
        ring: Callable[[Sequence[int]], None],
        instructions: tuple[_Instruction, ...],
        bases: tuple[int, ...],
    ) -> None:
        self._words, self._ring, self._instructions, self._bases = words, ring, instructions, bases
        self._at = 0
        self.ended = not instructions

    def advance(self) -> bool:
        """Run until the lane ends or would wait; whether anything ran."""
        words, bases, start = self._words, self._bases, self._at
        while self._at < len(self._instructions):
            step = self._instructions[self._at]
            if isinstance(step, _CopyOf):
                ctypes.memmove(bases[step.dst] + step.dst_offset, bases[step.src] + step.src_offset, step.nbytes)
            elif step.signal:
                fence()  # the copies of this lane are visible before the flags that tell of them
                for word in step.words:
                    words[word] = step.value
                self._ring(step.ranks)
            elif any(words[word] != step.value for word in step.words):
                break
            else:
                fence()  # what the flags tell of is visible to the copies that follow
            self._at += 1
        self.ended = self._at == len(self._instructions)
        return self._at > start

    def waits_for(self) -> Iterator[int]:
        """The ranks whose flags the lane waits for."""
        step = self._instructions[self._at]
        if isinstance(step, _FlagsOf):
            yield from (rank for word, rank in zip(step.words, step.ranks, strict=True) if self._words[word] != step.value)


def _other_end(flag: Flag, rank: int) -> int:
    return flag.reader if flag.owner == rank else flag.owner
