"""The operators `torch.ops.thunderep.*`: importing this package registers them."""

from thunderep.ops import (
    background,
    collectives,
    combine,
    dispatch,
    grouped_mm,
    library,
    permute,
    permute_fp8,
    quantize,
    swiglu,
    unpermute,
)

__all__ = [
    "background",
    "collectives",
    "combine",
    "dispatch",
    "grouped_mm",
    "library",
    "permute",
    "permute_fp8",
    "quantize",
    "swiglu",
    "unpermute",
]
