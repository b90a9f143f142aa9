"""One rank of a small run over the GPU transports, for tools that watch a process.

python -m tests.gpu.small_run RANK RANKS STORE
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import thunderep
from tests.gpu import programs


def main(rank: int, ranks: int, store: str) -> None:
    """Dispatches and combines of few and of many tokens, eager, over `dma` and `direct`; exits with 1 if one is wrong."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    right = []
    for transport in ("dma", "direct"):
        with programs.make(transport, max_tokens=256, timeout=200.0) as buffer:
            for tokens in (1, 8, 200):
                right.append(programs.Round(buffer, tokens, 2).check(tokens, replay=False))
            idx = torch.zeros(3, programs.TOPK, dtype=torch.int64, device="cuda")
            x = torch.ones(3, programs.HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            d = thunderep.dispatch(x, idx, torch.ones(3, programs.TOPK, device="cuda"), programs.EXPERTS, buffer)
            thunderep.combine(d.recv_x, d, buffer).sum().backward()
            torch.cuda.synchronize()
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
