"""The transports of CUDA tensors on one host, `dma`, `direct` and `auto`: who has which GPU, what is pinned, what ends when.

Copy engines move rows through a ring of slots; kernels do the whole of an operation in a window, or what engines cannot do
of it: ids, weights and scales. Both lie in one pinned segment and share nothing else, so operations may go either way in any
order that all ranks share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from thunderep.runtime import arena, cuda
from thunderep.runtime.announce import Announcer
from thunderep.runtime.control import Control
from thunderep.runtime.dma import CopyEngines
from thunderep.runtime.release import Releaser
from thunderep.runtime.rendezvous import Rendezvous, require_able
from thunderep.runtime.traffic import Stats
from thunderep.runtime.transport import DTYPES, OUTWARD, ByRank, Call, Moved, Scratch
from thunderep.runtime.tuning import KERNELS_ONLY, Thresholds
from thunderep.runtime.window import Region, Window

SHARE = "THUNDEREP_SHARE_GPU"
"""Environment variable: "1" lets several ranks have one GPU, for tests; they take turns on it."""


def connect(
    meeting: Rendezvous,
    segment: arena.Segment,
    layout: arena.Layout,
    rank: int,
    device: torch.device,
    control: Control,
    thresholds: Thresholds,
    grain: int,
) -> GpuTransport:
    """Pin the segment on all ranks and make each rank's transport, or raise the same report on all.

    Raises:
        UnableError: A rank could not pin the memory, or has no stream memory operations.
        RuntimeError: Two ranks share a GPU.
    """
    answer: dict[str, object] = {"gpu": str(torch.cuda.get_device_properties(device).uuid)}
    pinned = 0
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context, and current
            pinned = cuda.register(segment.address, segment.nbytes)
            stream = torch.cuda.current_stream()
            cuda.probe(pinned + layout.control(rank, arena.CONTROL_PROBE), stream.cuda_stream)
            stream.synchronize()
    except RuntimeError as error:  # the driver's, by `cuda` or by PyTorch
        answer["error"] = str(error)
    try:
        answers = meeting.exchange("pinning", answer)
        require_able([a.get("error") for a in answers])
        gpus = [a["gpu"] for a in answers]
        for gpu in gpus:
            if gpus.count(gpu) > 1 and os.environ.get(SHARE) != "1":
                sharing = [str(r) for r, other in enumerate(gpus) if other == gpu]
                raise RuntimeError(
                    f"device: ranks {' and '.join(sharing)} have the same GPU, {gpu}; give each its own, or set {SHARE}=1"
                )
        return GpuTransport(segment, pinned, layout, rank, device, control, thresholds, grain)
    except BaseException:
        if pinned:
            cuda.unregister(segment.address)
        raise


class GpuTransport:
    """One rank's side of the pinned segment. See `transport.Transport` for what its methods move.

    Args:
        segment: The mapped segment, pinned; unpinned and closed with the transport.
        pinned: The device's address of the segment.
        layout: What lies where in it.
        rank: This rank.
        device: This rank's GPU.
        control: This rank's control block; closed with the transport.
        thresholds: Which calls kernels move, the same on all ranks.
        grain: How finely copy engines cut, see `chunks.in_turn`; the same on all ranks.
    """

    def __init__(
        self,
        segment: arena.Segment,
        pinned: int,
        layout: arena.Layout,
        rank: int,
        device: torch.device,
        control: Control,
        thresholds: Thresholds,
        grain: int,
    ) -> None:
        self._segment, self._num_ranks, self._device, self._control = segment, layout.num_ranks, device, control
        self._thresholds, self._announcer = thresholds, Announcer(control, layout.num_ranks)
        self._engines = CopyEngines(segment, pinned, layout, rank, device, grain)
        region = Region(layout.num_ranks, layout.window_bytes)
        self._window = Window(segment, pinned, layout.window, region, rank, device, self._announcer)
        peers = [peer for peer in range(layout.num_ranks) if peer != rank]
        self._releaser = Releaser(control, peers, self._state, self._release)
        self._by_kernels = lru_cache(maxsize=4096)(self._takes_kernels)
        self._closed = False

    def window(self, call: Call) -> Window | None:
        """The window in which kernels do all of such a call, and announce it; None if the other methods are to move it."""
        return self._window if self._by_kernels(call) else None

    def _takes_kernels(self, call: Call) -> bool:
        """Whether kernels are to move such calls; where copy engines could, only if the window has room for their rows."""
        if not self._thresholds.take(call):
            return False
        row_bytes = call.hidden * DTYPES[call.dtype].itemsize
        holds = self._window.region.holds(OUTWARD[call.kind], row_bytes, call.topk, max(0, call.scales))
        return holds or self._thresholds == KERNELS_ONLY  # which says that there is no room

    @property
    def routing(self) -> Window:
        """The window in which kernels exchange ids, weights and scales while copy engines move rows."""
        return self._window

    @contextlib.contextmanager
    def dispatch(self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Iterator[Moved]:
        """Give every rank all rows of all ranks; how many they are the host does not learn."""
        with self._moving("dispatch", call, inputs, outputs) as own:
            yield Moved([call.max_tokens] * self._num_ranks, own)

    @contextlib.contextmanager
    def combine(self, call: Call, inputs: Sequence[torch.Tensor], scratch: Scratch) -> Iterator[list[ByRank]]:
        """Give every rank back the rows that stem from it."""
        outputs = scratch(inputs)
        with self._moving("combine", call, inputs, outputs):
            pass
        yield [output.unflatten(0, (self._num_ranks, call.max_tokens)) for output in outputs]

    @contextlib.contextmanager
    def _moving(
        self, kind: str, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Iterator[Callable[[], None]]:
        self._announcer.announce(call)
        try:
            with self._engines.moving(kind, call.max_tokens, inputs, outputs) as own:
                yield own
        except BaseException as error:
            self._announcer.failed(error)
            raise

    def _state(self) -> bytes:
        """As `Releaser` has it: the engines' part is always as long, so both together are as telling as each alone."""
        return self._engines.state() + self._window.state()

    def _release(self) -> None:
        self._engines.release()
        self._window.release()

    def stats(self) -> Stats:
        """What this rank has moved so far."""
        return self._announcer.stats()

    def check(self) -> None:
        """Raise the error that broke the Buffer, if one did."""
        self._control.check()

    def close(self) -> None:
        """Wait until the device has ended what it began, or the releaser has freed it; then unpin and leave."""
        if self._closed:
            return
        if self._releaser.is_current:  # which the garbage collector may choose; it must stay free to let go what waits
            threading.Thread(target=self.close, name="thunderep close").start()
            return
        self._closed = True
        try:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                cuda.unregister(self._segment.address)
        finally:
            self._releaser.close()
            self._control.release()
            self._control.close()
