"""One rank's side of the GPU tests of what profilers, counters and the log show."""

from __future__ import annotations

import logging

import torch

import thunderep
from tests.gpu.programs import MOST, Round, make


def profiled(transport: str) -> tuple[list[str], thunderep.Stats]:
    """What a profiler sees of a dispatch and a combine of `MOST` tokens, and what the Buffer counts of them."""
    with make(transport) as buffer:
        round_ = Round(buffer, MOST, 2)
        before = buffer.stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            round_.run()
        with torch.autograd.profiler.emit_nvtx():
            round_.run()
        after = buffer.stats()
    counts = {kind: after.operations[kind] - count for kind, count in before.operations.items()}
    names = sorted({event.key for event in profile.key_averages() if event.key.startswith("thunderep")})
    return names, thunderep.Stats(counts, after[1] - before[1], after[2] - before[2], after.waited)


def logged_thresholds() -> str:
    """What is logged of the thresholds of a Buffer that chooses by itself."""
    logged: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("thunderep")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    make("auto").close()
    logger.removeHandler(handler)
    return next(text for text in logged if text.startswith("auto: kernels"))
