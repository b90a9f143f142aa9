"""Makes each rank's side of the chosen transport: all ranks together, and all of them the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thunderep.runtime import numa, tuning
from thunderep.runtime.chunks import gpu_grain
from thunderep.runtime.collective import CollectiveTransport
from thunderep.runtime.control import Control
from thunderep.runtime.host import HostTransport
from thunderep.runtime.rendezvous import Rendezvous, UnableError, compare, share_segment
from thunderep.runtime.staging import Shape, parts_of
from thunderep.runtime.transport import Transport
from thunderep.runtime.tuning import COPY_ENGINES_ONLY, KERNELS_ONLY, Thresholds
from thunderep.runtime.watchdog import Watchdog

_UNKNOWN_GBPS = 25.0
"""What links are taken to carry where that is not known: PCIe 4 x16."""

_log = logging.getLogger(__name__)

_FIXED = {"shm": COPY_ENGINES_ONLY, "dma": COPY_ENGINES_ONLY, "direct": KERNELS_ONLY}


class Wish(NamedTuple):
    """What to connect, as all ranks agreed.

    Attributes:
        transport: "shm", "dma", "direct", "collective"; "auto": kernels or copy engines, by size.
        shape: What sizes depend on.
        device: Where this rank's tensors live.
        staging_bytes: Bytes of staging a rank; None: as much as `shape` takes.
        timeout: Seconds that a peer may be silent.
    """

    transport: str
    shape: Shape
    device: torch.device
    staging_bytes: int | None
    timeout: float


def connect(
    wish: Wish, group: dist.ProcessGroup, meeting: Rendezvous, answers: Sequence[Mapping[str, Any]]
) -> tuple[str, Transport]:
    """Connect the ranks.

    Args:
        wish: The same on all ranks, but for the device.
        group: The ranks.
        meeting: Their rendezvous.
        answers: What each rank said of itself: "host", "pid", and for CUDA tensors its "gpu".

    Returns:
        The transport's name and the transport: that of the wish, or "collective" if that was "auto" and some rank cannot.

    Raises:
        RuntimeError: A rank could not, or did not come; the same report on all ranks.
    """
    pids = [answer["pid"] for answer in answers]
    if any(answer["host"] != answers[0]["host"] for answer in answers):
        return wish.transport, CollectiveTransport(group, None, wish.timeout)
    if wish.transport == "collective":
        return wish.transport, CollectiveTransport(group, Watchdog(pids), wish.timeout)
    gpus = [answer.get("gpu", {}) for answer in answers]
    thresholds = _FIXED.get(wish.transport) or _agree_on_thresholds(meeting, [gpu["name"] for gpu in gpus], wish.shape.topk)
    try:
        return wish.transport, _through_memory(wish, meeting, pids, thresholds, gpus)
    except UnableError as error:
        if wish.transport != "auto":
            raise
        _log.warning("'auto' falls back to 'collective': %s", error)
        return "collective", CollectiveTransport(group, Watchdog(pids), wish.timeout)


def _agree_on_thresholds(meeting: Rendezvous, gpus: Sequence[str], topk: int) -> Thresholds:
    """Rank 0's: where ranks would use different ones, none may."""
    answer: dict[str, Any] = {}
    if meeting.rank == 0:
        try:
            answer["thresholds"] = tuning.thresholds(gpus, topk)
        except ValueError as error:
            answer["error"] = ("ValueError", str(error))
    answers = meeting.exchange("thresholds", answer)
    compare(answers, ())
    agreed = Thresholds(*answers[0]["thresholds"])
    _log.info("auto: kernels up to %d bytes of rows a rank in a dispatch, %d in a combine; copy engines above", *agreed[:2])
    return agreed


def _through_memory(
    wish: Wish, meeting: Rendezvous, pids: Sequence[int], thresholds: Thresholds, gpus: Sequence[Mapping[str, Any]]
) -> Transport:
    grain = gpu_grain(min((gpu["gbps"] for gpu in gpus if gpu.get("gbps")), default=_UNKNOWN_GBPS))
    shape = wish.shape if wish.transport == "shm" else wish.shape._replace(grain=grain)
    rank, layout = meeting.rank, shape.layout(wish.transport, wish.staging_bytes, thresholds)
    segment = share_segment(meeting, layout.nbytes)
    window = layout.window_bytes // layout.num_ranks
    _log.info("%s: staging of %d bytes a rank for copies, %d for kernels", wish.transport, layout.staging.nbytes, window)
    control = Control(segment, layout, rank, Watchdog(pids), wish.timeout)
    if wish.transport == "shm":
        return HostTransport(segment, layout, rank, control)
    from thunderep.runtime import gpu

    try:
        parts = ((segment.address + at, nbytes, of) for of in range(meeting.num_ranks) for at, nbytes in parts_of(layout, of))
        numa.place(parts, [gpu["node"] for gpu in gpus])  # every rank places all: whichever pins first touches all
        return gpu.connect(meeting, segment, layout, rank, wish.device, control, thresholds, grain)
    except BaseException:
        control.release()
        control.close()
        raise
