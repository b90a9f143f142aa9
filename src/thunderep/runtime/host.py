"""The `shm` transport: executes schedules with memory copies and flags in the shared segment.

An operation has two parts. Each rank announces its call and reads everyone's: ranks that disagree raise before anything
has moved, and the row counts that come back make the schedule. Then the schedule's lanes run in turn on the calling
thread, each until it would wait; when all would, the thread sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from thunderep.runtime import arena
from thunderep.runtime.chunks import HOST_GRAIN
from thunderep.runtime.control import Control
from thunderep.runtime.futex import fence
from thunderep.runtime.plan import plan_combine, plan_combine_in_place, plan_dispatch
from thunderep.runtime.schedule import Copy, Flag, Place, Schedule, Signal, Step
from thunderep.runtime.trace import phase
from thunderep.runtime.traffic import Stats, Traffic
from thunderep.runtime.transport import ByRank, Call, Moved, Scratch


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
_Lane = tuple[_Instruction, ...]


class _Key(NamedTuple):
    """What a program depends on."""

    kind: str
    rows: tuple[int, ...]
    row_bytes: tuple[int, ...]
    max_rows: int
    bank: int


class _Program(NamedTuple):
    """A schedule, ready to run. What is lent, by payload and rank, is an address in a peer's staging until `after` has run."""

    lanes: tuple[_Lane, ...]
    lent: list[list[int | None]] | None = None
    after: tuple[_Lane, ...] = ()


class HostTransport:
    """One rank's side of the shared segment. See `transport.Transport` for what its methods move.

    Args:
        segment: The mapped segment.
        layout: What lies where in it.
        rank: This rank.
        control: This rank's control block; closed with the transport.
    """

    def __init__(self, segment: arena.Segment, layout: arena.Layout, rank: int, control: Control) -> None:
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._control = control
        self._traffic = Traffic(layout.num_ranks)
        self._lock = threading.Lock()
        self._program = lru_cache(maxsize=256)(self._make_program)

    @contextlib.contextmanager
    def dispatch(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Iterator[Moved]:
        """Give every rank all rows of all ranks."""
        with self._lock:
            rows = self._announce(call)
            program = self._program(self._key("dispatch", call, rows, outputs))
            self._execute("dispatch", program.lanes, inputs, outputs)
        yield Moved(rows, lambda: None)

    @contextlib.contextmanager
    def combine(self, call: Call, inputs: Sequence[torch.Tensor], scratch: Scratch) -> Iterator[list[ByRank]]:
        """Give every rank back the rows that stem from it: where they lie in the staging, if the call fits there."""
        with self._lock:
            rows = self._announce(call)
            program = self._program(self._key("combine", call, rows, inputs))
            if program.lent is None:
                outputs = scratch(inputs)
                self._execute("combine", program.lanes, inputs, outputs)
                yield [output.unflatten(0, (self._layout.num_ranks, call.max_tokens)) for output in outputs]
            else:
                self._execute("combine", program.lanes, inputs)
                try:
                    yield [
                        [_rows_at(address, call.tokens, like) for address in addresses]
                        for addresses, like in zip(program.lent, inputs, strict=True)
                    ]
                finally:
                    self._execute("combine", program.after)

    def window(self, call: Call) -> None:
        """No kernels move rows here."""

    @property
    def routing(self) -> None:
        """No kernels move anything here."""

    def stats(self) -> Stats:
        """What this rank has moved so far."""
        return self._traffic.stats(self._control.waited)

    def check(self) -> None:
        """Raise the error that broke this transport, if one did."""
        self._control.check()

    def close(self) -> None:
        """Release everything."""
        if self._control.release():  # whoever waits in another thread lets go of the lock
            with self._lock:
                self._control.close()

    def _announce(self, call: Call) -> list[int]:
        rows = self._control.announce(call)
        self._traffic.add(call, sum(rows) - call.tokens)
        return rows

    def _key(self, kind: str, call: Call, rows: Sequence[int], tensors: Sequence[torch.Tensor]) -> _Key:
        row_bytes = tuple(t.numel() // len(t) * t.element_size() if len(t) else 0 for t in tensors)
        return _Key(kind, tuple(rows), row_bytes, call.max_tokens, self._control.sequence % 2)

    @phase("move")
    def _execute(
        self, kind: str, lanes: Sequence[_Lane], inputs: Sequence[torch.Tensor] = (), outputs: Sequence[torch.Tensor] = ()
    ) -> None:
        bases = (0, *(t.data_ptr() for t in inputs), *(t.data_ptr() for t in outputs))
        blocked = [_Runner(self._segment.words, lane, bases) for lane in lanes]

        def advance() -> bool:
            nonlocal blocked
            moved = False
            for lane in blocked:
                moved |= lane.advance()
                self._control.ring(lane.to_wake)  # once for all that it signalled: a wake costs as much as a small copy
                lane.to_wake.clear()
            blocked = [lane for lane in blocked if not lane.ended]
            return moved

        self._control.wait(
            advance,
            lambda: not blocked,
            lambda: sorted({rank for lane in blocked for rank in lane.waits_for()}),
            f"{kind} {self._control.sequence}: its rows or credits",
        )

    def _make_program(self, key: _Key) -> _Program:
        shape = (self._rank, key.rows, key.row_bytes, key.max_rows, self._layout.staging, key.bank)
        schedule = plan_combine_in_place(*shape) if key.kind == "combine" else None
        if schedule is not None:
            return self._lend(schedule, len(key.row_bytes))
        schedule = (plan_combine if key.kind == "combine" else plan_dispatch)(*shape, HOST_GRAIN)
        return _Program(tuple(self._instructions(schedule.rank, lane.steps, len(key.row_bytes)) for lane in schedule.lanes))

    def _lend(self, schedule: Schedule, payloads: int) -> _Program:
        """Of what is received, only the addresses: whoever sums the rows reads them there, then the slots are given back."""
        addresses: list[list[int | None]] = [[None] * self._layout.num_ranks for _ in range(payloads)]
        lanes: list[_Lane] = []
        after: list[_Lane] = []
        for lane in schedule.lanes:
            if lane.name == "receive":
                chunks, *copies, credits = lane.steps
                for copy in reversed(copies):  # the first of a payload has its beginning
                    assert isinstance(copy, Copy)
                    addresses[copy.dst.memory.payload][copy.src.memory.rank] = self._staging(copy.src)
                lanes.append(self._instructions(schedule.rank, (chunks,), payloads))
                after.append(self._instructions(schedule.rank, (credits,), payloads))
            else:
                lanes.append(self._instructions(schedule.rank, lane.steps, payloads))
        return _Program(tuple(lanes), addresses, tuple(after))

    def _instructions(self, rank: int, steps: Sequence[Step], payloads: int) -> _Lane:
        def locate(place: Place) -> tuple[int, int]:
            if place.memory.kind == "staging":
                return 0, self._staging(place)
            return 1 + place.memory.payload + (payloads if place.memory.kind == "output" else 0), place.offset

        instructions: list[_Instruction] = []
        for step in steps:
            if isinstance(step, Copy):
                instructions.append(_CopyOf(*locate(step.src), *locate(step.dst), step.nbytes))
            else:
                words = tuple(self._layout.flag(flag) // 4 for flag in step.flags)
                ranks = tuple(_other_end(flag, rank) for flag in step.flags)
                instructions.append(_FlagsOf(isinstance(step, Signal), words, step.value, ranks))
        return tuple(instructions)

    def _staging(self, place: Place) -> int:
        return self._segment.address + self._layout.slots(place.memory.rank) + place.offset


class _Runner:
    """One lane under way."""

    __slots__ = ("_at", "_bases", "_instructions", "_words", "ended", "to_wake")

    def __init__(
        self,
        words: memoryview,
        instructions: tuple[_Instruction, ...],
        bases: tuple[int, ...],
    ) -> None:
        self._words, self._instructions, self._bases = words, instructions, bases
        self._at = 0
        self.to_wake: set[int] = set()
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
                self.to_wake.update(step.ranks)
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


def _rows_at(address: int | None, rows: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, ...] as `like` has it in the memory at `address`; none at all where there is none."""
    nbytes = rows * like[:1].nbytes
    if address is None or nbytes == 0:
        return like.new_empty(0, *like.shape[1:])
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=like.dtype).view(rows, *like.shape[1:])


def _other_end(flag: Flag, rank: int) -> int:
    return flag.reader if flag.owner == rank else flag.owner
