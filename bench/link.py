"""What a GPU's link to host memory carries both ways at once, with all ranks at it: the limit of any transport here."""

from __future__ import annotations

import torch
import torch.distributed as dist

_BYTES = 16 << 20
_COPIES = 20


def two_way_gbps() -> float:
    """In every rank: GB/s each way by copy engines, the slowest rank's."""
    device = torch.device("cuda", torch.cuda.current_device())
    out, back = (torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    sent, got = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    best = 0.0
    for _ in range(4):  # the first warms up
        torch.cuda.synchronize()
        dist.barrier()
        start, ends = torch.cuda.Event(enable_timing=True), [torch.cuda.Event(enable_timing=True) for _ in streams]
        start.record()
        for stream, end, (to, source) in zip(streams, ends, ((out, sent), (got, back)), strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                for _ in range(_COPIES):
                    to.copy_(source, non_blocking=True)
                end.record()
        torch.cuda.synchronize()
        best = max(best, _BYTES * _COPIES / max(start.elapsed_time(end) for end in ends) / 1e6)
    slowest = torch.tensor(best, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return slowest.item()
