"""Up to which size kernels move a call and from where on copy engines do: what `auto` goes by on CUDA.

What `thunderep tune` measured lies in the user's cache directory (XDG Base Directory Specification), a file for each machine
as it was measured: its GPUs, its driver, this package's version.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thunderep.runtime import cuda
from thunderep.runtime.transport import COLLECTIVES, DTYPES, KINDS, OUTWARD, Call
from thunderep.version import __version__

_log = logging.getLogger(__name__)

ENVIRONMENT = "THUNDEREP_THRESHOLDS"
"""Environment variable: thresholds to use whatever else is known, as "dispatch,combine" in bytes."""

_ITEM_BYTES = [dtype.itemsize for dtype in DTYPES]


class Thresholds(NamedTuple):
    """Bytes of rows that a rank brings to a call, up to which kernels move it; copy engines move what is larger.

    Attributes:
        dispatch: For rows that go to experts, and for the gradient of a combine.
        combine: For rows that come back, and for the gradient of a dispatch.
        dense: For `all_gather`, `reduce_scatter` and `all_reduce`, of which all rows are needed; None: as the others.
        beside: For what runs beside other work, if that is less; None: as the others.
    """

    dispatch: int
    combine: int
    dense: int | None = None
    beside: int | None = None

    def take(self, call: Call) -> bool:
        """Whether kernels move `call`. What ranks agree on decides, so all decide alike."""
        limit = self.dispatch if OUTWARD[call.kind] else self.combine
        if self.dense is not None and KINDS[call.kind] in COLLECTIVES:
            limit = self.dense
        if call.async_op and self.beside is not None:
            limit = min(limit, self.beside)
        return call.max_tokens * call.hidden * _ITEM_BYTES[call.dtype] <= limit


KERNELS_ONLY = Thresholds(sys.maxsize, sys.maxsize)
COPY_ENGINES_ONLY = Thresholds(-1, -1)

BESIDE = 1 << 20
"""Beside other work kernels move no more: until SMs are free they cannot begin, and then other work lacks them.

Provisional. Source: an H200 that played its peer itself (`bench.loopback`), products of 8192 x 8192 matrices beside dispatches
of 16 MiB: with copy engines the products took as long as alone, with kernels a third longer.
"""

BUILT_IN = Thresholds(dispatch=4 << 20, combine=4 << 20, beside=BESIDE)
"""Provisional. Source: as above, a dispatch and a combine of 4 KiB rows, replayed as graphs: for 2 MiB a rank kernels took 84
and 81 us, copy engines 90 and 90; for 4 MiB 142 and 145, 141 and 143; for 8 MiB 266 and 270, 248 and 247."""

NEEDED_SHARE = 0.7
"""Share of the rows up to which kernels, which move only rows that are needed, are taken to beat copy engines at any size.

Provisional. Source: two H200s without peer access, PCIe 5 x16; with rows under way both ways at once kernels moved 35 GB/s each
way, copy engines 49.
"""

MOSTLY_NEEDED_SHARE = 0.9
"""Share of the rows up to which kernels are taken to beat copy engines at dispatches of up to 16 MiB."""

MOSTLY_NEEDED = BUILT_IN._replace(dispatch=16 << 20, dense=BUILT_IN.dispatch)
"""Provisional. Source: an H200 that played 4 ranks (`bench.loopback`), a dispatch and a combine of 4 KiB rows with K = 8, which
is a share of 0.9: for 4 MiB a rank kernels took 277 and 347 us, copy engines 343 and 409; for 8 MiB 536 and 688, 604 and 682;
for 16 MiB 999 and 1251, 1134 and 1250. Four ranks that shared it took 1951 us for a dispatch of 8 MiB, copy engines 2483."""


def built_in(num_ranks: int, topk: int) -> Thresholds:
    """What holds where nothing was measured.

    Args:
        num_ranks: N, of which a rank needs the share 1 - (1 - 1/N)^K of the rows, if experts are chosen evenly.
        topk: K.
    """
    share = 1 - (1 - 1 / num_ranks) ** topk
    if share <= NEEDED_SHARE:
        return Thresholds(sys.maxsize, sys.maxsize, dense=BUILT_IN.dispatch)
    return MOSTLY_NEEDED if share <= MOSTLY_NEEDED_SHARE else BUILT_IN


def thresholds(gpus: Sequence[str], topk: int) -> Thresholds:
    """From the environment, else what was measured for these GPUs, else what is built in.

    Args:
        gpus: Name of each rank's GPU.
        topk: K.

    Raises:
        ValueError: The environment variable does not hold two numbers.
    """
    given = os.environ.get(ENVIRONMENT)
    if given is not None:
        try:
            dispatch, combine = map(int, given.split(","))
        except ValueError:
            raise ValueError(f"{ENVIRONMENT}: got {given!r}, expected bytes as 'dispatch,combine'") from None
        return Thresholds(dispatch, combine)
    found = load(gpus)
    if found is None:
        _say_untuned()
        return built_in(len(gpus), topk)
    return found


def load(gpus: Sequence[str]) -> Thresholds | None:
    """What was measured for these GPUs; None: nothing was, or the file is of no use, about which there is a warning."""
    measured_on = machine(gpus)
    try:
        path = _path(measured_on)
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("thresholds are not read: %s", error)
        return None
    try:
        found = Thresholds(**content["thresholds"])
        if content["machine"] != measured_on:
            raise ValueError("it is of another machine")
        if not all(type(value) is int and value >= 0 for value in found if value is not None):
            raise ValueError(f"thresholds must be integers of at least 0, got {found}")
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("thresholds in %s are not used: %s: %s", path, type(error).__name__, error)
        return None
    return found


def save(gpus: Sequence[str], found: Thresholds, measured: Sequence[Mapping[str, Any]]) -> Path:
    """Keep thresholds, and beside them what they were found from; readers see the old file or the new one, whole.

    Raises:
        OSError: It cannot be written.
    """
    measured_on = machine(gpus)
    path = _path(measured_on)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": measured_on, "thresholds": found._asdict(), "measured": list(measured)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False) as file:
        try:
            json.dump(content, file, indent=1)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path


def machine(gpus: Sequence[str]) -> dict[str, Any]:
    """What thresholds hold for."""
    try:
        module = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        module = ""
    return {"gpus": sorted(gpus), "driver": f"{module} CUDA {cuda.versions()[0]}".strip(), "thunderep": __version__}


def _path(measured_on: Mapping[str, Any]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(measured_on, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "thunderep" / f"thresholds-{name}.json"


@functools.cache
def _say_untuned() -> None:
    """Once a process."""
    _log.info("auto goes by built-in thresholds; `thunderep tune` measures those of this machine")
