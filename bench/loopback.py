"""One GPU plays all ranks of a machine: for work on kernels and plans where there is only one GPU.

This process is rank 0, and runs rank 0's schedules, copies, flags and kernels as they are, with the whole of its link. Only
where its peers would write, it finds what it has written itself: their parts of the pinned segment are its own part, mapped
again. So every peer does what rank 0 does, at the same moment.

What that leaves out: skew between ranks, the latency between two GPUs where it differs from that of one to itself, and the
host's memory with several GPUs at it. It is no measurement of several GPUs, and there is nothing to compare NCCL with.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"
from torch._C._distributed_c10d import HashStore

import thunderep
from bench.contenders import Inputs
from thunderep.runtime import arena, rendezvous, window
from thunderep.runtime.gpu import SHARE
from thunderep.runtime.schedule import Flag
from thunderep.runtime.staging import Shape
from thunderep.testing.processes import Ranks

_MAP_FIXED, _PAGE = 0x10, mmap.PAGESIZE


def play(num_ranks: int) -> None:
    """Make this process rank 0 of so many, whose peers it plays, for the rest of its life."""
    os.environ[SHARE] = "1"
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=num_ranks)
    rendezvous.Rendezvous.exchange = lambda self, phase, answer: [answer] * num_ranks  # type: ignore[method-assign]

    # Copy engines: their flags and slots are found by address. What rank r sends to rank 0 is what rank 0 sends to rank N - r.
    flag, slots = arena.Layout.flag, arena.Layout.slots

    def own_flag(layout: arena.Layout, wanted: Flag) -> int:
        mirrored = 0 < wanted.owner < num_ranks and wanted.reader == 0
        return flag(layout, Flag(0, wanted.slot, num_ranks - wanted.owner) if mirrored else wanted)

    arena.Layout.flag = own_flag  # type: ignore[assignment, method-assign]
    arena.Layout.slots = lambda self, rank: slots(self, 0 if rank < num_ranks else rank)  # type: ignore[method-assign]

    # Kernels: theirs are found by what lies where in the window, so the memory itself is mapped again, page by page.
    slot = cached_property(
        lambda region: max(0, region.nbytes // 8 - region.slots_at) // (2 * num_ranks) // (_PAGE // 8) * (_PAGE // 8)
    )
    slot.__set_name__(window.Region, "slot")
    window.Region.slot = slot  # type: ignore[assignment]
    layouts: list[arena.Layout] = []
    make, release = Shape.layout, arena.Owner.release

    def remembered(shape: Shape, *arguments: Any) -> arena.Layout:
        layouts.append(make(shape, *arguments))
        return layouts[-1]

    def aliased(owner: arena.Owner) -> None:
        if owner._fd >= 0:
            _alias(owner, layouts[-1])
        release(owner)

    Shape.layout = remembered  # type: ignore[assignment, method-assign]
    arena.Owner.release = aliased  # type: ignore[assignment, method-assign]


def playing() -> bool:
    """Whether this process plays all ranks, so that torch.distributed moves nothing."""
    return bool(dist.get_backend() == "fake")


@contextlib.contextmanager
def first_rank(num_ranks: int, backend: str, alone: bool) -> Iterator[Callable[..., Any]]:
    """What runs a function in all rank processes, or here if this GPU plays them `alone`, and returns rank 0's result."""
    if alone:
        play(num_ranks)
        yield lambda function, *arguments: function(*arguments)
        return
    with Ranks(num_ranks, backend) as processes:
        yield lambda function, *arguments: processes.run(function, *arguments, timeout=600)[0]


def _alias(owner: arena.Owner, layout: arena.Layout) -> None:
    """Map rank 0's flags, words and slots where its peers' would be."""
    ranks, region = layout.num_ranks, window.Region(layout.num_ranks, layout.window_bytes)
    for bank in range(2):
        for peer in range(1, ranks):
            pairs = bank * ranks * ranks
            flags = region.flags_at * 8
            moves = [(flags + (pairs + peer * ranks) * _PAGE, flags + (pairs + ranks - peer) * _PAGE, window.FLAGS * 8)]
            for at, nbytes in ((region.words_at * 8, region.words * 16), (region.slots_at * 8, region.slot * 8)):
                moves.append((at + (bank * ranks + peer) * nbytes, at + bank * ranks * nbytes, nbytes))
            for to, source, nbytes in moves:
                _map(owner, layout.window + to, layout.window + source, nbytes)


def _map(owner: arena.Owner, at: int, offset: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = owner.segment.address + at
    flags, rights = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    if nbytes and libc.mmap(address, nbytes, rights, flags, owner._fd, offset) != address:
        raise OSError(ctypes.get_errno(), "mmap")


def verify(inputs: Inputs, got: thunderep.DispatchOutput, buffer: thunderep.Buffer) -> None:
    """Raise AssertionError unless rows came as if from every peer: those that rank 0 sends to rank N - r came from rank r."""
    tokens = len(inputs.x)
    for rank in range(buffer.num_ranks):
        experts = thunderep.local_experts(buffer.num_experts, -rank % buffer.num_ranks, buffer.num_ranks)
        sent = ((inputs.topk_idx >= experts.start) & (inputs.topk_idx < experts.stop)).any(dim=1)
        received = got.recv_x[rank * tokens : (rank + 1) * tokens]
        torch.testing.assert_close(received[sent], inputs.x[sent], rtol=0, atol=0)
