"""The same job by torch.distributed alone: what the operators are measured against.

Dispatch gathers every rank's rows, expert ids and weights; combine is a reduce-scatter. The three tensors are gathered the
fastest way that each back end has: in one group with NCCL; with gloo, whose grouped gather mixes up tensors of different types,
all are begun before any is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

# torch 2.13 renamed them and deprecates the old names; 2.9 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gathered(NamedTuple):
    """Rows [N * T, H], global expert ids [N * T, K] and weights [N * T, K] of all ranks, by rank."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def start_dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Callable[[], Gathered]:
    """Begin to gather x [T, H], topk_idx [T, K] and topk_weights [T, K] of all ranks; T is the same on each. Call to wait."""
    size = dist.get_world_size()
    inputs = (x, topk_idx, topk_weights)
    outputs = Gathered(*(t.new_empty(size * t.shape[0], t.shape[1]) for t in inputs))
    works: list[Any]
    if x.is_cuda:
        with _coalescing_manager(device=x.device, async_ops=True) as group:
            for output, value in zip(outputs, inputs, strict=True):
                _all_gather(output, value, async_op=True)
        works = [group]
    else:
        works = [_all_gather(output, value, async_op=True) for output, value in zip(outputs, inputs, strict=True)]

    def wait() -> Gathered:
        for work in works:
            work.wait()
        return outputs

    return wait


def start_combine(y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to sum y [N * T, H] over the ranks, to keep this rank's block, [T, H]. Call to wait."""
    result = y.new_empty(y.shape[0] // dist.get_world_size(), y.shape[1])
    work = _reduce_scatter(result, y, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Gathered:
    """Gather x [T, H], topk_idx [T, K] and topk_weights [T, K] of all ranks; T is the same on each."""
    size = dist.get_world_size()
    inputs = (x, topk_idx, topk_weights)
    outputs = Gathered(*(t.new_empty(size * t.shape[0], t.shape[1]) for t in inputs))
    with _coalescing_manager(device=x.device) if x.is_cuda else nullcontext():
        works = [_all_gather(output, value, async_op=not x.is_cuda) for output, value in zip(outputs, inputs, strict=True)]
    if not x.is_cuda:
        for work in works:
            work.wait()
    return outputs


def combine(y: torch.Tensor) -> torch.Tensor:
    """Sum y [N * T, H] over the ranks and keep this rank's block, [T, H]. Rows that no local expert computed are 0."""
    result = y.new_empty(y.shape[0] // dist.get_world_size(), y.shape[1])
    _reduce_scatter(result, y)
    return result
