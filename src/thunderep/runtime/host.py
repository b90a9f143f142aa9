"""The `shm` transport: executes schedules with memory copies and flags in the shared segment.

An operation has two parts. Each rank *announces* its call in its control block and reads everyone's: ranks that
disagree raise before anything has moved, and the row counts that come back make the schedule. Then the schedule's
lanes run in turn on the calling thread, each until it would wait; when all would, the thread sleeps on this rank's
doorbell.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NoReturn

import torch

from thunderep.runtime import arena
from thunderep.runtime.futex import fence, futex_wait, futex_wake
from thunderep.runtime.plan import Copy, Flag, Lane, Schedule, Signal, plan_combine, plan_dispatch
from thunderep.runtime.transport import KINDS, Call, agree
from thunderep.runtime.watchdog import PeerError, Watchdog

_RECORD = struct.Struct("<9q")  # an announcement: its sequence number, then the fields of a Call
_SEQUENCE = struct.Struct("<q")
_LOOK_SECONDS = 0.05
_BUSY_FACTOR = 10
_BUSY_SHARE = 0.1

_OPEN, _CLOSED, _BROKEN = 0, 1, 2

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
        self._peers = tuple(r for r in range(layout.num_ranks) if r != rank)
        self._watchdog = watchdog
        self._timeout = timeout
        self._sequence = 0
        self._rings = 0
        self._broken: PeerError | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._program = lru_cache(maxsize=256)(self._make_program)

    def dispatch(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
        """Give every rank all rows of all ranks."""
        with self._lock:
            rows = self._announce(call)
            row_bytes = tuple(t[0].numel() * t.element_size() if len(t) else 0 for t in outputs)
            max_rows = outputs[0].shape[0] // self._layout.num_ranks
            self._execute(("dispatch", tuple(rows), row_bytes, max_rows, self._sequence % 2), inputs, outputs)
            return rows

    def combine(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Give every rank back the rows that stem from it."""
        with self._lock:
            rows = self._announce(call)
            row_bytes = tuple(t[0].numel() * t.element_size() if len(t) else 0 for t in inputs)
            max_rows = inputs[0].shape[0] // self._layout.num_ranks
            self._execute(("combine", tuple(rows), row_bytes, max_rows, self._sequence % 2), inputs, outputs)

    def check(self) -> None:
        """Raise the error that broke this transport, if one did."""
        if self._broken is not None:
            raise PeerError(str(self._broken), self._broken.rank)

    def close(self) -> None:
        """Release everything."""
        if self._closing:
            return
        self._closing = True
        self._ring((self._rank,))  # whoever waits in another thread wakes, sees `_closing` and lets go of the lock
        with self._lock:
            if self._segment.words[self._word(self._rank)] == _OPEN:
                self._set_status(_CLOSED, self._rank)
            self._watchdog.close()
            self._segment.close()

    def _announce(self, call: Call) -> list[int]:
        """Tell all ranks this rank's next call and return T of all ranks.

        A record may be written again two operations later: a rank announces an operation only after all have
        announced the one before it, and so have read the records of the one before that.
        """
        self.check()
        if self._closing:
            raise RuntimeError("the Buffer is closed")
        self._sequence += 1
        sequence, name = self._sequence, KINDS[call.kind]
        at = arena.CONTROL_ANNOUNCE + sequence % 2 * arena.ANNOUNCE_BYTES
        memory = self._segment.bytes
        _RECORD.pack_into(memory, self._layout.control(self._rank, at), 0, *call.as_tuple())
        fence()  # whoever sees the sequence number sees the call
        _SEQUENCE.pack_into(memory, self._layout.control(self._rank, at), sequence)
        self._ring(self._peers)
        records = [self._layout.control(rank, at) for rank in range(self._layout.num_ranks)]
        absent = list(self._peers)

        def arrived() -> bool:
            before = len(absent)
            absent[:] = [rank for rank in absent if _SEQUENCE.unpack_from(memory, records[rank])[0] != sequence]
            return len(absent) < before

        self._wait(lambda: arrived() or not absent, lambda: not absent, lambda: absent, f"{name} {sequence}: its arrival")
        fence()
        return agree([Call(*_RECORD.unpack_from(memory, record)[1:]) for record in records])

    def _execute(
        self,
        key: tuple[str, tuple[int, ...], tuple[int, ...], int, int],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        bases = (0, *(t.data_ptr() for t in inputs), *(t.data_ptr() for t in outputs))
        lanes = [_Runner(self, lane, bases) for lane in self._program(*key)]
        blocked = lanes

        def advance() -> bool:
            nonlocal blocked
            moved = False
            for lane in blocked:
                moved |= lane.advance()
            blocked = [lane for lane in blocked if not lane.ended]
            return moved

        self._wait(
            advance,
            lambda: not blocked,
            lambda: sorted({rank for lane in blocked for rank in lane.waits_for()}),
            f"{key[0]} {self._sequence}: its rows or credits",
        )

    def _wait(
        self, advance: Callable[[], bool], ended: Callable[[], bool], waits_for: Callable[[], Sequence[int]], what: str
    ) -> None:
        """Call `advance` until `ended`, asleep while nothing moves. Raises PeerError if what it waits for cannot come."""
        words, bell = self._segment.words, self._word(self._rank, arena.CONTROL_DOORBELL)
        bell_address = self._segment.address + bell * 4
        verdict: PeerError | None = None
        since = looked = time.monotonic()
        try:
            while True:
                rung = words[bell]
                moved = advance()
                if ended():
                    return
                if self._closing:
                    raise RuntimeError(f"the Buffer was closed during {what.split(':')[0]}")
                if moved:
                    verdict, since = None, time.monotonic()
                    continue
                if verdict is not None:  # found before this last look at the flags, so nothing that the peer did was missed
                    raise verdict
                verdict = self._gave_up(waits_for(), what)
                if verdict is None:
                    futex_wait(bell_address, rung, _LOOK_SECONDS)
                    now = time.monotonic()
                    if now - looked >= _LOOK_SECONDS:
                        looked = now
                        verdict = self._gone(waits_for(), what, now - since)
        except BaseException as error:
            self._break(error)

    def _gave_up(self, ranks: Sequence[int], what: str) -> PeerError | None:
        """A PeerError if one of `ranks` has closed its Buffer, or any peer has found the Buffer broken."""
        for rank in self._peers:
            status, blamed = self._status(rank)
            if status == _BROKEN and blamed == self._rank:
                return self._peer_error(rank, f"gave up waiting for rank {self._rank}, this one", what)
            if status == _BROKEN and blamed != rank:
                return self._peer_error(blamed, f"{self._fault(blamed)}, as rank {rank} found", what)
            if status == _BROKEN or (status == _CLOSED and rank in ranks):
                return self._peer_error(rank, self._fault(rank), what)
        return None

    def _fault(self, rank: int) -> str:
        """What is wrong with a rank that one gave up on."""
        status, blamed = self._status(rank)
        if self._watchdog.dead((rank,)):
            return f"died (process {self._watchdog.pids[rank]})"
        if status == _CLOSED:
            return "closed its Buffer"
        return "was interrupted" if status == _BROKEN and blamed == rank else "fell silent"

    def _status(self, rank: int) -> tuple[int, int]:
        """A rank's status and whom it blames."""
        word = self._word(rank)
        return self._segment.words[word], self._segment.words[word + 1]

    def _gone(self, ranks: Sequence[int], what: str, seconds: float) -> PeerError | None:
        """A PeerError if the process of one of `ranks` has ended, or it has been silent for longer than it may be."""
        for rank in sorted(self._watchdog.dead(ranks)):
            return self._peer_error(rank, self._fault(rank), what)
        if seconds > self._timeout:
            for rank in ranks:
                if not self._compiles(rank, seconds):
                    return self._peer_error(rank, f"was silent for {seconds:.1f} s", what)
        return None

    def _compiles(self, rank: int, seconds: float) -> bool:
        """Whether a rank that has not made its first call is at work: it may compile for minutes, and then uses its CPU."""
        if self._last_operation(rank)[0] > 0 or seconds > _BUSY_FACTOR * self._timeout:
            return False
        before = self._watchdog.cpu_seconds(rank)
        time.sleep(_LOOK_SECONDS)
        return self._watchdog.cpu_seconds(rank) - before > _BUSY_SHARE * _LOOK_SECONDS

    def _peer_error(self, rank: int, fault: str, what: str) -> PeerError:
        known = []
        for r in range(self._layout.num_ranks):
            sequence, kind = self._last_operation(r)
            known.append(f"rank {r}: {KINDS[kind]} {sequence}" if sequence else f"rank {r}: none yet")
        text = f"rank {rank} {fault}, while rank {self._rank} waited in {what}; last known operations: {', '.join(known)}"
        return PeerError(text, rank)

    def _last_operation(self, rank: int) -> tuple[int, int]:
        """Sequence number and kind of the operation that `rank` announced last."""
        records = (self._layout.control(rank, arena.CONTROL_ANNOUNCE + i * arena.ANNOUNCE_BYTES) for i in (0, 1))
        return max(_RECORD.unpack_from(self._segment.bytes, record)[:2] for record in records)

    def _break(self, error: BaseException) -> NoReturn:
        """Let nobody wait for this rank: the Buffer is broken from here on. Raises `error`."""
        if isinstance(error, PeerError):
            self._broken, blamed = error, error.rank
        else:
            blamed = self._rank
            self._broken = PeerError(f"rank {blamed}: an operation was interrupted by {type(error).__name__}", blamed)
        self._set_status(_BROKEN, blamed)
        raise error

    def _set_status(self, status: int, blamed: int) -> None:
        word = self._word(self._rank)
        self._segment.words[word + 1] = blamed
        fence()  # whoever sees the status sees who is blamed
        self._segment.words[word] = status
        self._ring(self._peers)

    def _ring(self, ranks: Sequence[int]) -> None:
        """Wake `ranks`, after everything that this rank wrote before.

        A doorbell gets a value that it did not have: the ringer and its own count. So a rank that read its doorbell,
        looked at the flags and then sleeps on the value it read cannot miss a flag that was set in between, although
        rings may overwrite each other.
        """
        fence()
        self._rings += 1
        value = (self._rank << 24 | self._rings & 0xFFFFFF) & 0xFFFFFFFF
        for rank in ranks:
            word = self._word(rank, arena.CONTROL_DOORBELL)
            self._segment.words[word] = value
            futex_wake(self._segment.address + word * 4)

    def _word(self, rank: int, offset: int = arena.CONTROL_STATUS) -> int:
        return self._layout.control(rank, offset) // 4

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

    __slots__ = ("_at", "_bases", "_instructions", "_transport", "ended")

    def __init__(self, transport: HostTransport, instructions: tuple[_Instruction, ...], bases: tuple[int, ...]) -> None:
        self._transport, self._instructions, self._bases = transport, instructions, bases
        self._at = 0
        self.ended = not instructions

    def advance(self) -> bool:
        """Run until the lane ends or would wait; whether anything ran."""
        words, bases, start = self._transport._segment.words, self._bases, self._at
        while self._at < len(self._instructions):
            step = self._instructions[self._at]
            if isinstance(step, _CopyOf):
                ctypes.memmove(bases[step.dst] + step.dst_offset, bases[step.src] + step.src_offset, step.nbytes)
            elif step.signal:
                fence()  # the copies of this lane are visible before the flags that tell of them
                for word in step.words:
                    words[word] = step.value
                self._transport._ring(step.ranks)
            elif any(words[word] != step.value for word in step.words):
                break
            else:
                fence()  # what the flags tell of is visible to the copies that follow
            self._at += 1
        self.ended = self._at == len(self._instructions)
        return self._at > start

    def waits_for(self) -> Iterator[int]:
        step = self._instructions[self._at]
        if isinstance(step, _FlagsOf):
            words = self._transport._segment.words
            yield from (rank for word, rank in zip(step.words, step.ranks, strict=True) if words[word] != step.value)


def _other_end(flag: Flag, rank: int) -> int:
    return flag.reader if flag.owner == rank else flag.owner
