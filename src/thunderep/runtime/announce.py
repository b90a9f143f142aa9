"""Announcements of the calls of CUDA tensors: written down for the peers, compared with theirs, counted."""

from __future__ import annotations

import torch

from thunderep.runtime.control import Control
from thunderep.runtime.traffic import Stats, Traffic
from thunderep.runtime.transport import Call


class Announcer:
    """One rank's. Hosts wait for nobody: a call is announced just before it is issued, once nothing else can go wrong.

    Args:
        control: This rank's control block.
        num_ranks: N.
    """

    def __init__(self, control: Control, num_ranks: int) -> None:
        self._control, self._num_ranks = control, num_ranks
        self._traffic = Traffic(num_ranks)
        self._captured = False  # whether any call was

    def announce(self, call: Call) -> None:
        """Write down the next call. Raises what broke the Buffer, or if a peer's call of this number is another one."""
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        self._control.post(call, self._captured)
        self._control.compare()
        self._traffic.add(call, (self._num_ranks - 1) * call.max_tokens)

    def failed(self, error: BaseException) -> None:
        """What was announced has not been issued, or not all of it: the Buffer is broken, and nobody waits for this rank."""
        try:
            capturing = torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # the device is lost
            capturing = False
        if not capturing:  # else nothing was issued, whatever the capture holds
            self._control.give_up(error)

    def stats(self) -> Stats:
        """What was announced so far."""
        return self._traffic.stats()
