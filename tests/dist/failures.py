"""One rank's side of the failure tests."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import unittest.mock
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from thunderep.testing.inputs import random_tokens

_kept: dict[str, thunderep.Buffer] = {}


def make(**options: Any) -> str:
    """Make a Buffer and keep it."""
    arguments: dict[str, Any] = {"num_experts": 8, "hidden": 256, "topk": 2, "max_tokens": 512, "timeout": 30.0} | options
    _kept["buffer"] = thunderep.Buffer(**arguments)
    return _kept["buffer"].transport


def close() -> None:
    """Close it."""
    _kept.pop("buffer").close()


def once(tokens: int = 64, delay: float = 0.0) -> float:
    """One dispatch and one combine after `delay` seconds; seconds that they took."""
    buffer = _kept["buffer"]
    time.sleep(delay)
    mine = random_tokens(buffer.rank, tokens, hidden=buffer.hidden, num_experts=buffer.num_experts, topk=buffer.topk)
    began = time.monotonic()
    d = thunderep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, buffer.num_experts, buffer)
    thunderep.combine(d.recv_x, d, buffer)
    return time.monotonic() - began


def forever(tokens: int = 512) -> None:
    """Operations without an end."""
    while True:
        once(tokens)


def forgotten() -> list[str]:
    """Buffers with operations in the background, of which nothing is kept: the threads that are left of them."""
    for _ in range(3):
        make()
        mine = random_tokens(0, 3, hidden=256, num_experts=8, topk=2)
        buffer = _kept.pop("buffer")
        thunderep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, 8, buffer, async_op=True).wait()
        del buffer
        gc.collect()
    deadline = time.monotonic() + 5
    while (left := [t.name for t in threading.enumerate() if "async" in t.name]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def half_made(failing: int) -> tuple[str, float]:
    """Make a Buffer, which fails on one rank in the end; what then is said, and after how many seconds."""
    if dist.get_rank() == failing:
        with unittest.mock.patch("thunderep.buffer._log.info", side_effect=MemoryError), contextlib.suppress(MemoryError):
            make()
        gc.collect()
        return "", 0.0
    make()
    try:
        began = time.monotonic()
        _kind, _rank, text, at = until_error(8)
        return text, at - began
    finally:
        close()


def short_of_memory(failing: int) -> str:
    """Make a Buffer for which one rank has no memory; what is raised."""
    patch = unittest.mock.patch("thunderep.buffer.Workspace", side_effect=MemoryError)
    with patch if dist.get_rank() == failing else contextlib.nullcontext():
        try:
            make()
        except RuntimeError as error:
            return str(error)
    return "made"


def until_error(tokens: int = 512) -> tuple[str, int, str, float]:
    """Operations until one raises: the error's type, rank and text, and the time (CLOCK_MONOTONIC, alike in all processes)."""
    try:
        forever(tokens)
    except RuntimeError as error:
        at = time.monotonic()
        return type(error).__name__, getattr(error, "rank", -1), str(error), at
    raise AssertionError("unreachable")


def after_the_error() -> list[str]:
    """What a broken Buffer says, and that it still closes."""
    said = []
    for _ in range(2):
        try:
            once()
        except RuntimeError as error:
            said.append(type(error).__name__)
    try:
        _kept["buffer"].check()
    except RuntimeError as error:
        said.append(type(error).__name__)
    began = time.monotonic()
    close()
    said.append("closed" if time.monotonic() - began < 1 else "slow")
    return said


def resources() -> dict[str, int]:
    """What this process holds: descriptors, mappings of shared segments, threads, resident KiB."""
    with open("/proc/self/maps") as maps:
        mappings = sum("thunderep" in line for line in maps)
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings,
        "threads": int(fields["Threads"]),
        "resident": int(fields["VmRSS"].split()[0]),
    }


def only_rank(rank: int, action: str) -> str | None:
    """Try something on one rank only: the kind of error that every rank sees."""
    mine = dist.get_rank() == rank
    buffer = _kept["buffer"]
    tokens = 3 if mine and action == "tokens" else 4
    max_tokens = (9 if mine else 8) if action == "max_tokens" else None
    dtype = torch.float16 if mine and action == "dtype" else torch.bfloat16
    idx_dtype = torch.int32 if mine and action == "idx_dtype" else torch.int64
    scales = 2 if mine and action == "scales" else 0
    t = random_tokens(
        0, tokens, hidden=buffer.hidden, num_experts=8, topk=buffer.topk, dtype=dtype, idx_dtype=idx_dtype, scales=scales
    )
    try:
        if mine and action == "kind":
            idx = torch.full((4 * buffer.num_ranks, buffer.topk), -1)
            in_rank = torch.zeros(4, buffer.num_ranks, dtype=torch.bool)
            torch.ops.thunderep.combine(t.x.new_zeros(len(idx), buffer.hidden), idx, in_rank, buffer.name)
        elif mine and action == "async_op":
            thunderep.dispatch(t.x, t.topk_idx, t.topk_weights, 8, buffer, async_op=True).wait()
        else:
            thunderep.dispatch(t.x, t.topk_idx, t.topk_weights, 8, buffer, max_tokens, t.x_scales)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None
