"""One rank's side of the soak: random operations, random delays, a checksum of every row, and what the process holds."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

import thunderep
from tests.dist.failures import resources

H, E, K, M = 64, 7, 3, 48


def soak(operations: int, seed: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """Run about `operations` operations; how many, and what the process held when warm and at the end.

    Everything random comes from generators that all ranks seed alike, so each rank knows every rank's tokens; delays differ.
    Row i of rank r in operation o holds values made of (r, i, o), so a row of another operation or place shows.
    """
    shared, own = random.Random(seed), random.Random()
    buffers = [
        thunderep.Buffer(num_experts=E, hidden=H, topk=K, max_tokens=M, dtype=torch.float32, staging_bytes=staging, timeout=60)
        for staging in (None, 16 * 4096)
    ]
    rank, num_ranks = buffers[0].rank, buffers[0].num_ranks
    done = 0
    warm: dict[str, int] = {}
    pending: list[Any] = []

    def finish() -> int:
        for stamp, sizes, ids, buffer, work in pending:
            _finish(stamp, sizes, ids, buffer, work.wait(), rank)
        count = len(pending)
        pending.clear()
        return count

    while done < operations:
        buffer, stamp = shared.choice(buffers), done
        sizes = [shared.choice((0, 1, 7, M // 2, M)) for _ in range(num_ranks)]
        ids = torch.randint(-1, E, (num_ranks, M, K), generator=torch.Generator().manual_seed(shared.randrange(1 << 30)))
        x, idx, weights = _rows(rank, stamp, sizes[rank]), ids[rank, : sizes[rank]], torch.ones(sizes[rank], K)
        if own.random() < 0.02:
            time.sleep(own.random() * 0.01)
        if shared.random() < 0.3:
            work = thunderep.dispatch(x, idx, weights, E, buffer, M, async_op=True)
            x.zero_()
            pending.append((stamp, sizes, ids, buffer, work))
            done += 1 + (finish() if len(pending) == 3 else 0)
        else:
            done += finish()
            _finish(stamp, sizes, ids, buffer, thunderep.dispatch(x, idx, weights, E, buffer, M), rank)
            done += 2
        if done > operations // 5 and not warm:
            warm = resources()
    done += finish()
    held = resources()
    for buffer in buffers:
        buffer.close()
    return done, warm, held


def _rows(rank: int, operation: int, tokens: int) -> torch.Tensor:
    """[tokens, H] float32 integers, exact in sums."""
    row = torch.arange(tokens).unsqueeze(1) * 64 + torch.arange(H)
    return ((row + rank * 100_003 + operation * 7919) % 65536).float()


def _finish(operation: int, sizes: list[int], ids: torch.Tensor, buffer: thunderep.Buffer, d: Any, rank: int) -> None:
    """Check what arrived, combine it and check the sum."""
    mine = buffer.local_experts
    for source, tokens in enumerate(sizes):
        rows = d.recv_x[source * M : source * M + tokens]
        chosen = ((ids[source, :tokens] >= mine.start) & (ids[source, :tokens] < mine.stop)).any(1)
        if not torch.equal(rows[chosen], _rows(source, operation, tokens)[chosen]):
            raise AssertionError(f"operation {operation}: rows of rank {source} are wrong")
    out = thunderep.combine(d.recv_x * (rank + 1), d, buffer)
    tokens = sizes[rank]
    factor = (d.is_token_in_rank * torch.arange(1, buffer.num_ranks + 1)).sum(1, keepdim=True)
    if not torch.equal(out, _rows(rank, operation, tokens) * factor):
        raise AssertionError(f"operation {operation}: the sum is wrong")
