"""The `collective` transport: the same movements over torch.distributed (gloo for CPU tensors, NCCL for CUDA tensors).

For groups that span hosts, and for CUDA tensors on machines with fast links between GPUs. Ranks compare their calls
before anything moves where that costs no GPU synchronisation, that is for CPU tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thunderep.runtime.trace import phase
from thunderep.runtime.traffic import Stats, Traffic
from thunderep.runtime.transport import KINDS, ByRank, Call, Moved, Scratch, agree
from thunderep.runtime.watchdog import PeerError, Watchdog

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_LOOK_SECONDS = 1.0


class CollectiveTransport:
    """One rank's side of a process group. See `transport.Transport` for what its methods move.

    Args:
        group: The ranks.
        watchdog: Watches the peers' processes where they are on this host, or None; closed with the transport.
        timeout: Seconds that a peer may be silent, for CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog | None, timeout: float) -> None:
        self._group: dist.ProcessGroup | None = group
        self._num_ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._watchdog, self._timeout, self._sequence = watchdog, timeout, 0
        self._traffic = Traffic(self._num_ranks)
        self._broken: PeerError | None = None

    @contextlib.contextmanager
    def dispatch(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Iterator[Moved]:
        """Give every rank all rows of all ranks."""
        rows = self._announce(call, outputs[0].device)
        max_rows = outputs[0].shape[0] // self._num_ranks
        for sent, received in zip(inputs, outputs, strict=True):
            if received.numel() == 0:
                continue
            padded = sent.new_empty(max_rows, *sent.shape[1:])
            padded[: len(sent)] = sent
            self._run(call, received, lambda o=received, i=padded, **how: _all_gather(_bytes(o), _bytes(i), **how))
        yield Moved(rows, lambda: None)

    @contextlib.contextmanager
    def combine(self, call: Call, inputs: Sequence[torch.Tensor], scratch: Scratch) -> Iterator[list[ByRank]]:
        """Give every rank back the rows that stem from it."""
        self._announce(call, inputs[0].device)
        outputs = scratch(inputs)
        for sent, received in zip(inputs, outputs, strict=True):
            if sent.numel():
                self._run(call, received, lambda o=received, i=sent, **how: dist.all_to_all_single(_bytes(o), _bytes(i), **how))
        yield [output.unflatten(0, (self._num_ranks, call.max_tokens)) for output in outputs]

    def window(self, call: Call) -> None:
        """No kernels move rows here."""

    @property
    def routing(self) -> None:
        """No kernels move anything here."""

    def stats(self) -> Stats:
        """What this rank has moved so far."""
        return self._traffic.stats()

    def check(self) -> None:
        """Raise the error that broke this transport, if one did."""
        if self._broken is not None:
            raise PeerError(str(self._broken), self._broken.rank)

    def close(self) -> None:
        """Release everything."""
        self._group = None
        if self._watchdog is not None:
            self._watchdog.close()

    def _announce(self, call: Call, device: torch.device) -> list[int]:
        rows = self._rows(call, device)
        self._traffic.add(call, sum(rows) - call.tokens)
        return rows

    def _rows(self, call: Call, device: torch.device) -> list[int]:
        self.check()
        self._sequence += 1
        if device.type != "cpu":  # reading the peers' calls would stop the GPU
            return [call.max_tokens if rank != self._rank else call.tokens for rank in range(self._num_ranks)]
        mine = torch.tensor(call, dtype=torch.int64)
        calls = mine.new_empty(self._num_ranks * len(mine))
        self._run(call, calls, lambda **how: _all_gather(calls, mine, **how))
        return agree([Call(*row) for row in calls.view(self._num_ranks, -1).tolist()])

    @phase("collective")
    def _run(self, call: Call, output: torch.Tensor, collective: Callable[..., Any]) -> None:
        """Run a collective of this call. A backend's error about a lost peer becomes a PeerError, silence does on the CPU."""
        group = self._group
        if group is None:
            raise RuntimeError("the Buffer is closed")
        try:
            if output.is_cuda:  # to wait with a limit would stop the host; NCCL has limits of its own
                collective(group=group)
            else:
                self._wait(collective(group=group, async_op=True))
        except RuntimeError as error:
            if self._group is None:
                raise RuntimeError(f"the Buffer was closed during {KINDS[call.kind]} {self._sequence}") from error
            peers = [rank for rank in range(self._num_ranks) if rank != self._rank]
            dead = sorted(self._watchdog.dead(peers)) if self._watchdog else []
            culprit = dead[0] if dead else -1
            who = f"rank {culprit} died" if dead else "a peer failed"
            what = f"while rank {self._rank} waited in {KINDS[call.kind]} {self._sequence}"
            self._broken = PeerError(f"{who}, {what}: {error}", culprit)
            raise self._broken from error

    def _wait(self, work: Any) -> None:
        """Wait for a backend's work, at most as long as a peer may be silent, and no longer than the Buffer is open."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_SECONDS))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what the backend found, if it did not end a moment ago
                    return
                if self._group is None:
                    raise
                if time.monotonic() > end:
                    raise RuntimeError(f"silent for {self._timeout:g} s") from None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as flat bytes: no backend knows all types."""
    return tensor.view(-1).view(torch.uint8)
