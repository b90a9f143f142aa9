"""ThunderEP: expert-parallel dispatch and combine for machines whose GPUs cannot reach each other's memory.

Each rank puts its tokens into shared host memory once; each peer takes what it needs from there. See `Buffer`,
`dispatch` and `combine`.
"""

import logging

from thunderep.api import (
    DispatchOutput,
    PermuteOutput,
    QuantizedOutput,
    combine,
    dispatch,
    permute,
    permute_fp8,
    quantize_fp8,
    unpermute,
)
from thunderep.buffer import Buffer
from thunderep.collectives import all_gather, all_reduce, reduce_scatter
from thunderep.placement import local_experts
from thunderep.runtime.traffic import Stats
from thunderep.runtime.watchdog import PeerError
from thunderep.version import __version__ as __version__
from thunderep.work import Work

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Buffer",
    "DispatchOutput",
    "PeerError",
    "PermuteOutput",
    "QuantizedOutput",
    "Stats",
    "Work",
    "all_gather",
    "all_reduce",
    "combine",
    "dispatch",
    "local_experts",
    "permute",
    "permute_fp8",
    "quantize_fp8",
    "reduce_scatter",
    "unpermute",
]
