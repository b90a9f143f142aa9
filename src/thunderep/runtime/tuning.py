"""Up to which size kernels move a call and from where on copy engines do: what `auto` goes by on CUDA."""

from __future__ import annotations

import os
from typing import NamedTuple

from thunderep.runtime.transport import DTYPES, OUTWARD, Call

ENVIRONMENT = "THUNDEREP_THRESHOLDS"
"""Environment variable: thresholds to use whatever else is known, as "dispatch,combine" in bytes. Rank 0's counts."""


class Thresholds(NamedTuple):
    """Bytes of rows that a rank brings to a call, up to which kernels move it; copy engines move what is larger.

    Attributes:
        dispatch: For rows that go to experts, and for the gradient of a combine.
        combine: For rows that come back, and for the gradient of a dispatch.
    """

    dispatch: int
    combine: int

    def take(self, call: Call) -> bool:
        """Whether kernels move `call`. What ranks agree on decides, so all decide alike."""
        return rows_bytes(call) <= (self.dispatch if OUTWARD[call.kind] else self.combine)


BUILT_IN = Thresholds(dispatch=4 << 20, combine=4 << 20)
"""Provisional. Source: sketches of both ways on two H200s without peer access, PCIe 5 x16, replayed as graphs, all-gather of
4 KiB rows: kernels took 127 us for 4 MiB a rank, copy engines 152; for 8 MiB it was 280 and 254. Assumed of combine too."""

_ITEM_BYTES = [dtype.itemsize for dtype in DTYPES]


def rows_bytes(call: Call) -> int:
    """The bytes of M rows: what a rank brings to a call at most."""
    return call.max_tokens * call.hidden * _ITEM_BYTES[call.dtype]


def thresholds() -> Thresholds:
    """What this process would use.

    Raises:
        ValueError: The environment variable does not hold two numbers.
    """
    given = os.environ.get(ENVIRONMENT)
    if given is None:
        return BUILT_IN
    try:
        dispatch, combine = map(int, given.split(","))
    except ValueError:
        raise ValueError(f"{ENVIRONMENT}: got {given!r}, expected bytes as 'dispatch,combine'") from None
    return Thresholds(dispatch, combine)
