"""One rank's side of the GPU tests of what goes wrong: peers that die, stop or stay silent, and wrong use."""

from __future__ import annotations

import time

import torch

import thunderep
from tests.gpu.programs import EXPERTS, Round, close, everyone, keep, kept, make, once


def keep_impatient(transport: str) -> str:
    """Make a Buffer that waits for 2 s, and keep it."""
    return keep(transport, timeout=2.0)


def forever(captured: bool) -> None:
    """Operations without an end."""
    round_ = Round(kept(), 8, 2)
    if captured:
        round_.capture()
    while True:
        if captured and round_.graph is not None:
            round_.graph.replay()
        else:
            round_.run()
        torch.cuda.synchronize()
        kept().check()


def until_error(captured: bool) -> tuple[str, int, str, float]:
    """Operations until one raises: the error's type, rank and text, and the time (CLOCK_MONOTONIC, alike in all processes)."""
    try:
        forever(captured)
    except RuntimeError as error:
        at = time.monotonic()
        return type(error).__name__, getattr(error, "rank", -1), str(error), at
    raise AssertionError("unreachable")


def after_the_error() -> tuple[str, float, bool]:
    """What the next call raises, how long closing takes, and whether the GPU still computes."""
    try:
        once()
        said = "nothing"
    except RuntimeError as error:
        said = type(error).__name__
    seconds = close()
    a = torch.ones(512, 512, device="cuda")
    return said, seconds, bool((a @ a == 512).all())


def sharing(transport: str) -> str:
    """What making a Buffer says where ranks have one GPU."""
    try:
        make(transport).close()
    except RuntimeError as error:
        return str(error)
    return "no error"


def out_of_range() -> list[str]:
    """What an id outside -1..E-1 leads to: the operation runs, the next one raises, the one after that runs."""
    buffer = kept()
    mine = everyone(1, 4)[buffer.rank]
    x, idx, weights = mine.x.cuda(), mine.topk_idx.cuda(), mine.topk_weights.cuda()
    wrong = idx.clone()
    wrong[0, 0] = EXPERTS
    said = []
    for ids in (wrong, idx, idx):
        try:
            d = thunderep.dispatch(x, ids, weights, EXPERTS, buffer)
            torch.cuda.synchronize()
            said.append(f"rows for {int((d.recv_topk_idx >= 0).sum()) > 0}")
        except ValueError as error:
            said.append(str(error))
    return said


def started_before_capture() -> str:
    """What an operation in a capture says while one that began before it has not been waited for."""
    buffer = kept()
    mine = everyone(1, 4)[buffer.rank]
    x, idx, weights = mine.x.cuda(), mine.topk_idx.cuda(), mine.topk_weights.cuda()
    thunderep.dispatch(x, idx, weights, EXPERTS, buffer)
    work = thunderep.dispatch(x, idx, weights, EXPERTS, buffer, async_op=True)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            thunderep.dispatch(x, idx, weights, EXPERTS, buffer)
    except RuntimeError as error:
        said = str(error)
    work.wait()
    torch.cuda.synchronize()
    return said


def different_sizes() -> tuple[str, str]:
    """Operations in which every rank has another number of tokens, and none gives max_tokens: the error in the end."""
    mine = everyone(0, 4 + 2 * kept().rank)[kept().rank]
    try:
        for _ in range(100):
            thunderep.dispatch(mine.x.cuda(), mine.topk_idx.cuda(), mine.topk_weights.cuda(), EXPERTS, kept())
            torch.cuda.synchronize()
            time.sleep(0.05)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "none", ""
