"""ThunderEP: expert-parallel dispatch and combine for machines whose GPUs cannot reach each other's memory.

Each rank puts its tokens into shared host memory once; each peer takes what it needs from there. See `Buffer`,
`dispatch` and `combine`.
"""

from thunderep.api import DispatchOutput, PermuteOutput, combine, dispatch, permute, unpermute
from thunderep.buffer import Buffer
from thunderep.collectives import all_gather, all_reduce, reduce_scatter
from thunderep.placement import local_experts
from thunderep.runtime.watchdog import PeerError
from thunderep.work import Work

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "DispatchOutput",
    "PeerError",
    "PermuteOutput",
    "Work",
    "all_gather",
    "all_reduce",
    "combine",
    "dispatch",
    "local_experts",
    "permute",
    "reduce_scatter",
    "unpermute",
]
