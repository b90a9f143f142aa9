"""NCCL's ring through host memory as a schedule, to be simulated beside ours.

Rank r sends to rank r + 1 only. A chunk goes round in N - 1 hops: its rank writes it to host memory; each rank on its way
reads it and writes it on, both at once (a copy from staging to staging; with a sum where rows are reduced); the last reads it.
All of NCCL's channels together are one lane, since they run in step. The credits of its buffers are left out: a rank's
neighbours do the same as it does at the same time, so they do not hold it up.

A reduce-scatter moves as many bytes over the same hops as an all-gather of as many rows a rank, so both are this schedule.
"""

from __future__ import annotations

from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Schedule, Signal, Step, Wait


def plan_ring(rank: int, num_ranks: int, nbytes: int, chunk_bytes: int) -> Schedule:
    """The schedule of one rank.

    Args:
        rank: Whose schedule.
        num_ranks: N.
        nbytes: Bytes that each rank brings (all-gather) or gets (reduce-scatter).
        chunk_bytes: What goes in one step.
    """
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    steps: list[Step] = []
    for start in range(0, nbytes, chunk_bytes):
        for hop in range(num_ranks):
            slot = start // chunk_bytes * num_ranks + hop
            src = Place(Memory("input", rank), start)
            dst = Place(Memory("output", rank), after * nbytes + start)
            if hop > 0:
                src = Place(Memory("staging", before), (slot - 1) * chunk_bytes)
                steps.append(Wait((Flag(before, slot - 1, rank),), 1))  # the chunk is in host memory
            if hop < num_ranks - 1:
                dst = Place(Memory("staging", rank), slot * chunk_bytes)
            steps.append(Copy(src, dst, min(chunk_bytes, nbytes - start)))
            if hop < num_ranks - 1:
                steps.append(Signal((Flag(rank, slot, after),), 1))  # the next rank may read it
    return Schedule(rank, (Lane("ring", tuple(steps)),))
