"""One rank's side of the vLLM tests: its own manager and ours, in vLLM's own groups, with the same tensors.

vLLM's CPU communicator cannot gather or scatter uneven rows, so gloo stands in for NCCL where vLLM's manager needs it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from tests.dist.dense import rank_sum
from tests.integrations.moe import Case, dispatch_problem, own_result
from thunderep.testing.inputs import same_bits

_world: dict[str, Any] = {}


def start(num_experts: int) -> list[str]:
    """Make vLLM's groups, with ThunderEP switched on as plugins are loaded. Returns what vLLM's communicator then is."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

    from thunderep.integrations.vllm import register

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"THUNDEREP_VLLM": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    register()
    register()  # plugins may be loaded several times
    parallel = ParallelConfig(
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        enable_expert_parallel=True,
        distributed_executor_backend="external_launcher",
    )
    config = VllmConfig(parallel_config=parallel)
    config.scheduler_config.max_num_batched_tokens = 64
    # In the place of a model's configuration, which takes a model.
    config.model_config = SimpleNamespace(is_moe=True, get_num_experts=lambda: num_experts, architecture="")
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(ranks, rank, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        communicator = parallel_state.get_ep_group().device_communicator
        theirs = AgRsAll2AllManager(communicator.cpu_group)
    group = parallel_state.get_dp_group().device_communicator
    group.all_gatherv, group.reduce_scatterv = _all_gatherv, _reduce_scatterv
    _world.update(config=config, ours=communicator.all2all_manager, theirs=theirs)
    return [type(communicator).__name__, *(type(_world[name]).__mro__[0].__name__ for name in ("ours", "theirs"))]


def _everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensor.contiguous().view(torch.uint8))  # not all types can be pickled
    return [rows.view(tensor.dtype) for rows in everyone]


def _all_gatherv(tensors: Sequence[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
    return [torch.cat(_everyones(tensor)) for tensor in tensors]


def _reduce_scatterv(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return torch.split(rank_sum(_everyones(tensor)), list(sizes))[dist.get_rank()]


@contextlib.contextmanager
def _step(sizes: Sequence[int], ubatch: int | None = None) -> Iterator[None]:
    """vLLM's context of a step in which each rank has so many tokens, or of a micro-batch of one."""
    from vllm.forward_context import get_forward_context, set_forward_context
    from vllm.v1.worker import ubatching

    tokens = torch.tensor(sizes, dtype=torch.int32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_forward_context(None, _world["config"], sizes[dist.get_rank()], tokens))
        stack.enter_context(torch.inference_mode())  # as in vLLM's workers
        stack.enter_context(get_forward_context().dp_metadata.sp_local_sizes(1))
        if ubatch is not None:
            ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()] = ubatch
            stack.callback(ubatching._THREAD_ID_TO_CONTEXT.clear)
        yield


def _local(case: Case) -> range:
    """This rank's experts, as vLLM places them."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    _, expert_map, _ = determine_expert_map(dist.get_world_size(), dist.get_rank(), case.num_experts)
    local: list[int] = (expert_map >= 0).nonzero().flatten().tolist()
    assert local == list(thunderep.local_experts(case.num_experts, dist.get_rank(), dist.get_world_size()))
    return range(local[0], local[-1] + 1)


def _dispatch(name: str, case: Case) -> list[torch.Tensor]:
    x, weights, ids, extra = case.of(dist.get_rank())
    got = _world[name].dispatch(x, weights, ids, extra_tensors=extra or None)
    assert len(got) == (4 if extra else 3)
    return [*got[:3], *(got[3] if extra else ())]


def _result(case: Case, ids: torch.Tensor, unread: bool) -> torch.Tensor:
    return own_result(case, dist.get_rank(), ids, _local(case), unread)


def dispatch_and_combine(case: Case) -> str | None:
    """None, or how our manager differs from vLLM's."""
    local = _local(case)
    with _step(case.sizes):
        theirs = _dispatch("theirs", case)
        if dispatch_problem(theirs, case, local):
            return "vLLM's manager is not understood"
        want = _world["theirs"].combine(_result(case, theirs[2], unread=False))
        ours = _dispatch("ours", case)
        problem = dispatch_problem(ours, case, local)
        if problem:
            return problem
        # Only over a path that moves what is needed are rows of others not read: that of plain and block-scaled rows.
        y = _result(case, ours[2], unread=len(case.extra) < 2 and all(dtype == torch.float32 for _, dtype in case.extra))
        if hasattr(_world["theirs"], "combine_into_output"):
            assert _world["ours"].allocate_combine_input(tuple(y.shape), y.dtype, y.device) is None
            got = torch.empty_like(want)
            _world["ours"].combine_into_output(y, got)
        else:
            got = _world["ours"].combine(y)
    return None if same_bits(got, want) else "combine differs"


def prepare_and_finalize(case: Case) -> str | None:
    """Through what vLLM's layers call around their experts, whichever of a manager's methods that calls."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import make_moe_prepare_and_finalize_naive_dp_ep
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    around = make_moe_prepare_and_finalize_naive_dp_ep(use_monolithic=False)
    communicator = parallel_state.get_ep_group().device_communicator
    x, weights, ids, _ = case.of(dist.get_rank())
    outputs = []
    for name in ("theirs", "ours"):
        communicator.all2all_manager = _world[name]
        with _step(case.sizes):
            rows, _, _, all_ids, all_weights = around.prepare(
                x, weights, ids, case.num_experts, None, False, FUSED_MOE_UNQUANTIZED_CONFIG
            )
            if dispatch_problem([rows, all_weights, all_ids], case, _local(case)):
                return f"{name}: what experts get is wrong"
            y = _result(case, all_ids, unread=name == "ours")
            outputs.append(torch.empty(len(x), case.hidden, dtype=y.dtype))
            around.finalize(outputs[-1], y, all_weights, all_ids, False, TopKWeightAndReduceNoOP())
    return None if same_bits(*outputs) else "the layer's output differs"


def router_logits(case: Case) -> str | None:
    """The same for experts that choose for themselves."""
    x, _, _, extra = case.of(dist.get_rank())
    logits = torch.randn(len(x), case.num_experts)
    with _step(case.sizes):
        theirs, ours = (
            _world[name].dispatch_router_logits(x, logits, extra_tensors=extra or None) for name in ("theirs", "ours")
        )
        flat = [[*got[:2], *(got[2] if extra else ())] for got in (theirs, ours)]
        if not all(same_bits(a, b) for a, b in zip(*flat, strict=True)):
            return "what was gathered differs"
        y = case.result_of(dist.get_rank())
        want, got = (_world[name].combine(y) for name in ("theirs", "ours"))
    return None if same_bits(got, want) else "combine differs"


def micro_batches(cases: Sequence[Case]) -> str | None:
    """Micro-batches take turns: all dispatch, then all combine."""
    results = []
    for i, case in enumerate(cases):
        with _step(case.sizes, ubatch=i):
            results.append(_result(case, _dispatch("ours", case)[2], unread=True))
    for i, case in enumerate(cases):
        with _step(case.sizes, ubatch=i):
            got = _world["ours"].combine(results[i])
        with _step(case.sizes):
            theirs = _dispatch("theirs", case)
            if not same_bits(got, _world["theirs"].combine(_result(case, theirs[2], unread=False))):
                return f"micro-batch {i} differs"
    return None


def stop() -> str | None:
    """Close what is ours; then it is closed."""
    buffers = [exchange.buffer for exchange in _world["ours"]._exchanges.values()]
    _world["ours"].destroy()
    for buffer in buffers:
        with contextlib.suppress(RuntimeError):
            buffer.check()
            return "a Buffer is open"
    return None if buffers else "there were no Buffers"
