"""One rank's side of the tests of `direct` without a GPU: its kernels in Triton's interpreter, over real shared memory.

What only a GPU has is stood in for here: the inline assembly that posts and polls flags and 16-byte words, by loads and
stores of the CPU. A CPU of this kind keeps stores in order, so what fences are for is not shown here.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tests.dist.exchange import group_of
from tests.ops.direct_cases import Case
from thunderep import reference
from thunderep.ops import direct, launch
from thunderep.ops.kernels.direct import combine, dispatch, latency_combine, latency_dispatch
from thunderep.runtime.rendezvous import Rendezvous, share_segment
from thunderep.runtime.window import HEADER_BYTES, Region, Window
from thunderep.testing.inputs import random_rows, same_bits

_PATIENCE = 8.0
_OFFSET = 4096
"""Where the window begins: a segment begins with a token of its own."""


def _array(value: Any) -> Any:
    return np.ravel(value.handle.data)


def _scalar(value: Any) -> int:
    return int(_array(value)[0]) if isinstance(value, tl.tensor) else int(value)


def _tensor(values: Any) -> tl.tensor:
    values = np.asarray(values, dtype=np.uint32).view(np.int32)
    return tl.tensor(TensorHandle(values, tl.int32), tl.block_type(tl.int32, list(values.shape)) if values.shape else tl.int32)


def _until(found: Any, stop: int) -> bool:
    """Poll until `found()`, or the word at `stop` is set."""
    end = time.monotonic() + _PATIENCE
    while not found():
        if ctypes.c_uint32.from_address(stop).value:
            return False
        if time.monotonic() > end:
            raise TimeoutError("a flag did not come")
        time.sleep(0)
    return True


def release() -> None:
    """Stores are seen in order here."""


def post(flag: Any, sequence: Any, payload: Any) -> None:
    word = (_scalar(sequence) & 0xFFFFFFFF) << 32 | _scalar(payload) & 0xFFFFFFFF
    ctypes.c_uint64.from_address(_scalar(flag)).value = word


def wait(flag: Any, sequence: Any, stop: Any) -> tl.tensor:
    word = ctypes.c_uint64.from_address(_scalar(flag))
    wanted = _scalar(sequence) & 0xFFFFFFFF
    came = _until(lambda: word.value >> 32 == wanted, _scalar(stop))
    return _tensor(np.asarray(word.value & 0xFFFFFFFF if came else 0))


def wait_all(flags: Any, stride: Any, count: Any, skip: Any, sequence: Any, stop: Any) -> None:
    wanted = _scalar(sequence) & 0xFFFFFFFF
    for i in range(_scalar(count)):
        if i != _scalar(skip):
            word = ctypes.c_uint64.from_address(_scalar(flags) + i * _scalar(stride))
            _until(lambda word=word: word.value >> 32 == wanted, _scalar(stop))


def put(word: Any, a: Any, b: Any, c: Any, sequence: Any) -> None:
    addresses = _array(word)
    columns = [np.broadcast_to(_array(v) if isinstance(v, tl.tensor) else v, addresses.shape) for v in (a, b, c)]
    wanted = _scalar(sequence) & 0xFFFFFFFF
    for i, address in enumerate(addresses):
        if address:
            target = (ctypes.c_uint32 * 4).from_address(int(address))
            for k, column in enumerate(columns):
                target[k] = int(column[i]) & 0xFFFFFFFF
            target[3] = wanted  # last: who sees it sees the others


def get(word: Any, sequence: Any, stop: Any) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    addresses = _array(word)
    wanted = _scalar(sequence) & 0xFFFFFFFF
    values = np.zeros((3, len(addresses)), dtype=np.uint32)
    for i, address in enumerate(addresses):
        if address:
            source = (ctypes.c_uint32 * 4).from_address(int(address))
            if _until(lambda source=source: source[3] == wanted, _scalar(stop)):
                values[:, i] = source[:3]
    return _tensor(values[0]), _tensor(values[1]), _tensor(values[2])


for _module in (combine, dispatch, latency_combine, latency_dispatch):
    for _function in (release, post, wait, wait_all, put, get):
        if hasattr(_module, _function.__name__):
            setattr(_module, _function.__name__, _function)
    if hasattr(_module, "get4"):
        _module.get4 = get  # type: ignore[attr-defined]


def _pointer(address: int, dtype: torch.dtype) -> torch.Tensor:
    """What the interpreter takes for an address; that of an empty tensor is 0, and not used."""
    if not address:
        return torch.zeros(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


launch.Pointer = _pointer  # type: ignore[assignment, misc]


def run(case: Case) -> str | None:
    """One rank's part of `case`; None, or what was wrong."""
    group = group_of(len(case.tokens))
    if group is None:
        return None
    meeting = Rendezvous(group, 60.0)
    row = case.hidden * max(4, case.dtype.itemsize)
    region = Region.for_calls(len(case.tokens), 1 if case.room == "small" else case.max_tokens, row, case.topk, case.scales)
    if case.room == "plenty":
        region = Region(region.num_ranks, region.nbytes + region.num_ranks * (512 << 10))
    segment = share_segment(meeting, _OFFSET + region.nbytes)
    failed = True
    try:
        window = Window(segment, segment.address, _OFFSET, region, meeting.rank, torch.device("cpu"))
        bad_ids = torch.zeros(1, dtype=torch.int32)
        kernels = direct.Kernels(window, case.num_experts, bad_ids)
        problem = next(_problems(case, meeting.rank, kernels), None)
        if problem is None and window.state():
            problem = "an operation did not end"
        if problem is None and bad_ids[0]:
            problem = "ids were called bad"
        failed = problem is not None
        return problem
    finally:
        if failed:  # let the peers go
            for rank in range(meeting.num_ranks):
                segment.words[(_OFFSET + rank * HEADER_BYTES) // 4] = 1
        meeting.exchange("done", {})
        segment.close()


def let_go() -> tuple[float, bool]:
    """Rank 0 dispatches alone, and is let go after 0.3 s: how long it took, and whether nothing is under way any more."""
    group = group_of(dist.get_world_size())
    assert group is not None
    meeting = Rendezvous(group, 60.0)
    region = Region(meeting.num_ranks, 4 << 20)
    segment = share_segment(meeting, _OFFSET + region.nbytes)
    try:
        if meeting.rank:
            return 0.0, True
        window = Window(segment, segment.address, _OFFSET, region, 0, torch.device("cpu"))
        kernels = direct.Kernels(window, 8, torch.zeros(1, dtype=torch.int32))
        threading.Timer(0.3, window.release).start()
        began = time.monotonic()
        kernels.dispatch(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), None, 2)
        return time.monotonic() - began, not window.state()
    finally:
        meeting.exchange("done", {})
        segment.close()


def _problems(case: Case, rank: int, kernels: direct.Kernels) -> Iterator[str]:
    most, ranks = case.max_tokens, range(len(case.tokens))
    for operation in range(case.rounds):
        everyone = [case.of(r, operation) for r in ranks]
        mine = everyone[rank]
        wanted = reference.dispatch(
            [t.x for t in everyone],
            [t.topk_idx for t in everyone],
            [t.topk_weights for t in everyone],
            case.num_experts,
            most,
            [t.x_scales for t in everyone] if case.scales else None,  # type: ignore[misc]
        )
        got = kernels.dispatch(mine.x, mine.topk_idx, mine.topk_weights, mine.x_scales, most)
        needed = (wanted[rank][1] >= 0).any(dim=1)
        for name, value, expected in zip(("x", "idx", "weights", "scales", "in_rank"), got, wanted[rank], strict=True):
            if name in ("x", "scales"):
                value, expected = value[needed], expected[needed]
            if not same_bits(value, expected):
                yield f"round {operation}: dispatch: {name} differs"
        routing = kernels.exchange_routing(mine.topk_idx, mine.topk_weights, mine.x_scales, most)
        for name, value, expected in zip(("idx", "weights", "scales", "in_rank"), routing, wanted[rank][1:], strict=True):
            if name == "scales":
                value, expected = value[needed], expected[needed]
            if not same_bits(value, expected):
                yield f"round {operation}: routing alone: {name} differs"
        in_rank = [w[4] for w in wanted]
        if case.dtype in (torch.float32, torch.float16):
            parts = [_results(case, r, operation, wanted[r][1]) for r in ranks]
            choices = [torch.rand(wanted[r][1].shape, generator=torch.Generator().manual_seed(r)) for r in ranks]
            sums = reference.combine(parts, in_rank)
            if not same_bits(kernels.combine([parts[rank]], got[1], got[4])[0], sums[rank]):
                yield f"round {operation}: combine differs"
            rows, weights = kernels.combine([parts[rank], choices[rank]], got[1], got[4])
            own = [torch.where(wanted[r][1] >= 0, choices[r], 0) for r in ranks]
            if not same_bits(rows, sums[rank]) or not same_bits(weights, reference.combine(own, in_rank)[rank]):
                yield f"round {operation}: combine with weights differs"
            grads = [
                random_rows((t, case.hidden), case.dtype, torch.Generator().manual_seed(r)) for r, t in enumerate(case.tokens)
            ]
            spread = kernels.spread(grads[rank], got[4], most).unflatten(0, (-1, most))
            for r, tokens in enumerate(case.tokens):
                if not same_bits(spread[r, :tokens], torch.where(in_rank[r][:, rank : rank + 1], grads[r], 0)):
                    yield f"round {operation}: spread differs in rank {r}'s rows"
            if operation == 0:
                yield from _dense_problems(kernels, grads, parts, rank, most)


def _dense_problems(
    kernels: direct.Kernels, rows: list[torch.Tensor], like: list[torch.Tensor], rank: int, most: int
) -> Iterator[str]:
    """Every row to every rank, and back, as dense collectives use the kernels."""
    everywhere = [torch.ones(len(own), len(rows), dtype=torch.bool) for own in rows]
    gathered = kernels.spread(rows[rank], everywhere[rank], most).unflatten(0, (-1, most))
    if not all(same_bits(got[: len(sent)], sent) for got, sent in zip(gathered, rows, strict=True)):
        yield "spread to everyone differs"
    dense = [random_rows(tuple(p.shape), p.dtype, torch.Generator().manual_seed(r)) for r, p in enumerate(like)]
    total = kernels.combine([dense[rank]], torch.zeros(len(dense[rank]), 1, dtype=torch.int32), everywhere[rank])[0]
    if not same_bits(total, reference.combine(dense, everywhere)[rank]):
        yield "combine of everything differs"


def _results(case: Case, rank: int, operation: int, recv_idx: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed * 1000 + operation * 10 + rank + 500)
    y = random_rows((len(recv_idx), case.hidden), case.dtype, generator)
    y[(recv_idx < 0).all(dim=1)] = float("nan")  # nothing may read these rows
    return y
