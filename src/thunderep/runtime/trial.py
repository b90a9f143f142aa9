"""Puts each GPU to work for a moment: signals on a stream, and a payload through pinned host memory to the next GPU."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thunderep.runtime import arena, cuda

_PAYLOAD = 16 << 20
_SENT, _SLOT, _RECEIVED, _END = (mmap.PAGESIZE + i * _PAYLOAD for i in range(4))  # behind a page with a word for signals
_ROUNDS, _COPIES = 8, 8  # 1 GiB: long enough for a link to train up


@dataclass(frozen=True)
class Trial:
    """What came of it: "ok" or the error; None: not tried.

    Args:
        signals: Stream memory operations.
        payload: A payload sent by this GPU, as it arrived at the next one (at itself, if it is the only one).
    """

    signals: str | None
    payload: str | None


def run(devices: Sequence[cuda.Device], under_load: Callable[[cuda.Device], None]) -> list[Trial]:
    """Try every GPU, through a segment as a Buffer has it.

    Args:
        devices: The GPUs; each takes a context and 16 MiB.
        under_load: Called several times for each, while copies are under way.
    """
    if not devices:
        return []
    try:
        with _pinned_segment(devices[0]) as segment:
            pairs = zip(devices, [*devices[1:], devices[0]], strict=True)
            return [
                Trial(_signals(source, segment.address), _payload(source, target, segment, under_load))
                for source, target in pairs
            ]
    except (OSError, RuntimeError) as error:
        return [Trial(None, str(error))] * len(devices)


@contextlib.contextmanager
def _pinned_segment(device: cuda.Device) -> Iterator[arena.Segment]:
    owner = arena.Owner(_END, "memfd" if arena.supports_memfd() else "file")
    owner.release()
    segment = owner.segment
    segment.words[0] = 0  # the token was there
    try:
        with cuda.context(device.ordinal):
            cuda.register(segment.address, segment.nbytes)
            try:
                yield segment
            finally:
                cuda.unregister(segment.address)
    finally:
        segment.close()


def _signals(device: cuda.Device, word: int) -> str:
    try:
        with cuda.context(device.ordinal):
            cuda.probe(cuda.device_address(word), 0)
            cuda.synchronize()
    except cuda.CudaError as error:
        return str(error)
    return "ok"


def _payload(
    source: cuda.Device, target: cuda.Device, segment: arena.Segment, under_load: Callable[[cuda.Device], None]
) -> str:
    sent = os.urandom(_PAYLOAD)
    segment.bytes[_SENT:_END] = sent + bytes(_END - _SLOT)
    try:
        with cuda.context(source.ordinal), cuda.allocate(_PAYLOAD) as memory:
            pinned = cuda.device_address(segment.address)
            cuda.copy(memory, pinned + _SENT, _PAYLOAD, 0)
            for _ in range(_ROUNDS):
                for _ in range(_COPIES):
                    cuda.copy(pinned + _SLOT, memory, _PAYLOAD, 0)
                under_load(source)
                cuda.synchronize()  # the slot is written: the host and the next GPU see it
        with cuda.context(target.ordinal), cuda.allocate(_PAYLOAD) as memory:
            pinned = cuda.device_address(segment.address)
            cuda.copy(memory, pinned + _SLOT, _PAYLOAD, 0)
            cuda.copy(pinned + _RECEIVED, memory, _PAYLOAD, 0)
            cuda.synchronize()  # what arrived is in host memory: the host sees it
    except cuda.CudaError as error:
        return str(error)
    return "ok" if segment.bytes[_RECEIVED:_END] == sent else f"what arrived at GPU {target.ordinal} is not what was sent"
