"""Which rank owns which experts: contiguous blocks, the first E % N ranks one expert more than the others (vLLM's rule)."""

from __future__ import annotations


def local_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    """The global ids of the experts that `rank` owns; none for some ranks where there are fewer experts than ranks.

    >>> [list(local_experts(5, r, 3)) for r in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    base, extra = num_experts // num_ranks, num_experts % num_ranks  # compilers take no divmod of symbols
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))
