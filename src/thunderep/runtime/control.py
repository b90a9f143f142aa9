"""A rank's control block: announcing calls, waiting for peers, and saying so when a wait cannot end.

A rank announces each operation's call in its own block and reads everyone's. It sleeps on its doorbell, which peers
ring after they have changed anything that it may wait for. A rank that gives up writes so into its status, and
whoever waits for it raises too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from thunderep.runtime import arena
from thunderep.runtime.futex import fence, futex_wait, futex_wake
from thunderep.runtime.records import Records
from thunderep.runtime.trace import phase
from thunderep.runtime.transport import KINDS, Call, agree
from thunderep.runtime.watchdog import PeerError, Watchdog

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_DOUBT_SECONDS = 1.0  # what takes longer may be what ranks disagree on
_BUSY_FACTOR = 10
_BUSY_SHARE = 0.1
_BUSY_SECONDS = 0.2

_OPEN, _CLOSED, _BROKEN = 0, 1, 2


class Control:
    """One rank's view of all control blocks.

    Args:
        segment: The mapped segment; closed with this.
        layout: What lies where in it.
        rank: This rank.
        watchdog: Watches the peers' processes; closed with this.
        timeout: Seconds that a peer may be silent.

    Attributes:
        sequence: Operations that this rank has announced.
        waited: Seconds asleep until a rank did its part, by rank.
    """

    def __init__(self, segment: arena.Segment, layout: arena.Layout, rank: int, watchdog: Watchdog, timeout: float) -> None:
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._peers = tuple(r for r in range(layout.num_ranks) if r != rank)
        self._watchdog = watchdog
        self._timeout = timeout
        self._rings = 0
        self._records = Records(segment, layout, rank)
        self._broken: RuntimeError | None = None
        self._closing = False
        self.sequence = 0
        self.waited = [0.0] * layout.num_ranks

    def check(self) -> None:
        """Raise the error that broke the Buffer, if one did."""
        if isinstance(self._broken, PeerError):
            raise PeerError(str(self._broken), self._broken.rank)
        if self._broken is not None:
            raise RuntimeError(str(self._broken))

    def release(self) -> bool:
        """Have whoever waits in another thread raise; whether this is the first call."""
        first, self._closing = not self._closing, True
        if first:
            self.ring((self._rank,))
        return first

    def close(self) -> None:
        """Leave: peers that wait for this rank raise. Nothing may be under way."""
        if self._status(self._rank)[0] == _OPEN:
            self._set_status(_CLOSED, self._rank)
        self._watchdog.close()
        self._segment.close()

    def post(self, call: Call, captured: bool = False) -> None:
        """Write this rank's next call down, waiting for nobody.

        Args:
            call: The call.
            captured: Whether this or an earlier call was captured: replays are not numbered, so it is compared with none.
        """
        self.check()
        if self._closing:
            raise RuntimeError("the Buffer is closed")
        self.sequence += 1
        self._records.write(self.sequence, call, captured)

    def compare(self) -> None:
        """Raise if a peer that has come to this rank's latest call makes another one.

        Whoever comes last finds it. What peers have issued cannot be called back, so the Buffer is broken; they find why.
        """
        found = self._records.disagreement(self.sequence)
        if found is not None:
            error = RuntimeError(found)
            self.give_up(error)
            raise error

    @phase("announce")
    def announce(self, call: Call) -> list[int]:
        """Tell all ranks this rank's next call and return T of all ranks."""
        self.post(call)
        sequence, name, records = self.sequence, KINDS[call.kind], self._records
        self.ring(self._peers)
        absent = list(self._peers)

        def arrived() -> bool:
            before = len(absent)
            absent[:] = [rank for rank in absent if not records.has(rank, sequence)]
            return len(absent) < before

        self.wait(lambda: arrived() or not absent, lambda: not absent, lambda: absent, f"{name} {sequence}: its arrival")
        fence()
        return agree([records.read(rank, sequence) for rank in range(self._layout.num_ranks)])

    def wait(
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
                awaited = waits_for()
                verdict = self._gave_up(awaited, what)
                if verdict is None:
                    asleep = time.monotonic()
                    futex_wait(bell_address, rung, _LOOK_SECONDS)
                    now = time.monotonic()
                    for rank in awaited:
                        self.waited[rank] += now - asleep
                    if now - looked >= _LOOK_SECONDS:
                        looked = now
                        verdict = self._gone(waits_for(), what, now - since)
        except BaseException as error:
            self.give_up(error)
            raise

    def awaited(self) -> list[int]:
        """The peers that an operation may still wait for, those that have written down the fewest first.

        A peer that closed its Buffer after as many operations as this rank has done its part in all of them. Who has captured
        some counts otherwise: of such a peer nothing is known.
        """
        done = {rank: self._records.last(rank)[0] for rank in self._peers}

        def left(rank: int) -> bool:
            if self._status(rank)[0] != _CLOSED:
                return True
            return done[rank] < self.sequence and not any(map(self._records.captured, (rank, self._rank)))

        return sorted(filter(left, self._peers), key=lambda rank: done[rank])

    def verdict(self, ranks: Sequence[int], what: str, seconds: float) -> RuntimeError | None:
        """An error if what this rank has waited for from `ranks`, for so many seconds, cannot come any more."""
        if seconds > _DOUBT_SECONDS or any(self._status(rank)[0] == _BROKEN for rank in self._peers):
            latest = range(max(1, self.sequence - arena.RECORDS + 1), self.sequence + 1)
            found = next(filter(None, map(self._records.disagreement, latest)), None)
            if found is not None:
                return RuntimeError(found)
        return self._gave_up(ranks, what) or self._gone(ranks, what, seconds)

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
        if self._records.last(rank)[0] > 0 or seconds > _BUSY_FACTOR * self._timeout:
            return False
        before = self._watchdog.cpu_seconds(rank)
        time.sleep(_BUSY_SECONDS)
        return self._watchdog.cpu_seconds(rank) - before > _BUSY_SHARE * _BUSY_SECONDS

    def _peer_error(self, rank: int, fault: str, what: str) -> PeerError:
        known = []
        for r in range(self._layout.num_ranks):
            sequence, kind = self._records.last(r)
            known.append(f"rank {r}: {KINDS[kind]} {sequence}" if sequence else f"rank {r}: none yet")
        text = f"rank {rank} {fault}, while rank {self._rank} waited in {what}; last known operations: {', '.join(known)}"
        return PeerError(text, rank)

    def give_up(self, error: BaseException) -> None:
        """Let nobody wait for this rank: the Buffer is broken from here on."""
        blamed = error.rank if isinstance(error, PeerError) else self._rank
        if isinstance(error, RuntimeError):
            self._broken = error
        else:
            self._broken = PeerError(f"rank {blamed}: an operation was interrupted by {type(error).__name__}", blamed)
        _log.warning("a Buffer is broken: %s", self._broken)
        self._set_status(_BROKEN, blamed)

    def _set_status(self, status: int, blamed: int) -> None:
        word = self._word(self._rank)
        self._segment.words[word + 1] = blamed
        fence()  # whoever sees the status sees who is blamed
        self._segment.words[word] = status
        self.ring(self._peers)

    def ring(self, ranks: Iterable[int]) -> None:
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
