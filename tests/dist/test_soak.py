"""Many operations in a row: nothing is lost, nothing is mixed up, nothing grows."""

from __future__ import annotations

import os

from tests.dist.soak import soak
from thunderep.testing.processes import Ranks

OPERATIONS = int(os.environ.get("THUNDEREP_SOAK", "10000"))


def test_random_operations_with_random_delays() -> None:
    """Slow readers and fast writers, up to three dispatches in flight, streaming and not, two Buffers, three ranks."""
    with Ranks(3) as ranks:
        for done, warm, end in ranks.run(soak, OPERATIONS, 1, timeout=280):
            assert done >= OPERATIONS
            for what in ("descriptors", "mappings", "threads"):
                assert end[what] == warm[what], what
            assert end["resident"] < warm["resident"] + 8 * 1024, "KiB of memory"
