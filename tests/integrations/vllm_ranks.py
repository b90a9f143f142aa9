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

FEW_TOKENS = 4
"""Up to so many vLLM computes a shared expert elsewhere than beside the combine."""

_world: dict[str, Any] = {}


def start() -> list[str]:
    """Make vLLM's groups, with ThunderEP switched on as plugins are loaded. Returns what vLLM's communicator then is."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

    from thunderep.integrations.vllm import register

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"THUNDEREP_VLLM": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD"] = str(FEW_TOKENS)
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
    settings = SimpleNamespace(to_dict=lambda: {"n_shared_experts": 1})
    config.model_config = SimpleNamespace(is_moe=True, architecture="", hf_text_config=settings)
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
def _step(sizes: Sequence[int]) -> Iterator[None]:
    """vLLM's context of a step in which each rank has so many tokens."""
    from vllm.forward_context import get_forward_context, set_forward_context

    tokens = torch.tensor(sizes, dtype=torch.int32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_forward_context(None, _world["config"], sizes[dist.get_rank()], tokens))
        stack.enter_context(torch.inference_mode())  # as in vLLM's workers
        stack.enter_context(get_forward_context().dp_metadata.sp_local_sizes(1))
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


def dispatch_and_combine(case: Case, announced: bool = True) -> str | None:
    """None, or how our manager differs from vLLM's; a layer that is not ours announces nothing to it."""
    local = _local(case)
    with _step(case.sizes):
        theirs = _dispatch("theirs", case)
        if dispatch_problem(theirs, case, local):
            return "vLLM's manager is not understood"
        want = _world["theirs"].combine(_result(case, theirs[2], unread=False))
        if announced:
            _world["ours"].announce(case.num_experts)
        ours = _dispatch("ours", case)
        problem = dispatch_problem(ours, case, local)
        if problem:
            return problem
        # Only over a path that moves what is needed are rows of others not read: that of plain and block-scaled rows.
        plain = len(case.extra) < 2 and all(dtype == torch.float32 for _, dtype in case.extra)
        y = _result(case, ours[2], unread=announced and plain)
        if hasattr(_world["theirs"], "combine_into_output"):
            assert _world["ours"].allocate_combine_input(tuple(y.shape), y.dtype, y.device) is None
            got = torch.empty_like(want)
            _world["ours"].combine_into_output(y, got)
        else:
            got = _world["ours"].combine(y)
    return None if same_bits(got, want) else "combine differs"


def _layer(name: str, case: Case) -> torch.Tensor | str:
    """A layer's output as vLLM computes it around experts, or what is wrong with what these get."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernelModularImpl
    from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import make_moe_prepare_and_finalize_naive_dp_ep
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    parallel_state.get_ep_group().device_communicator.all2all_manager = _world[name]
    # Without a current configuration, as where vLLM loads weights once more.
    around = make_moe_prepare_and_finalize_naive_dp_ep(use_monolithic=False)
    assert type(around).__name__ == "ThunderEPPrepareAndFinalize"
    if name == "theirs":
        around = type(around).__mro__[1]()
    shared: list[Any] = []  # how often the shared expert was computed
    experts = SimpleNamespace(
        quant_config=FUSED_MOE_UNQUANTIZED_CONFIG,
        expects_unquantized_inputs=False,
        finalize_weight_and_reduce_impl=TopKWeightAndReduceNoOP,
    )
    kernel: Any = SimpleNamespace(
        prepare_finalize=around, fused_experts=experts, _maybe_apply_shared_experts=lambda expert, x: expert(x)
    )
    x, weights, ids, _ = case.of(dist.get_rank())
    vllms, count = FusedMoEKernelModularImpl, case.num_experts
    rows, _, _, all_ids, all_weights = vllms._prepare(kernel, x, weights, ids, count, None, False)
    if dispatch_problem([rows, all_weights, all_ids], case, _local(case)):
        return f"{name}: what experts get is wrong"
    y = _result(case, all_ids, unread=name == "ours")
    output = torch.empty(len(x), y.shape[1], dtype=y.dtype)
    vllms._finalize(kernel, output, y, x, all_weights, all_ids, False, shared.append, x)
    beside = name == "ours" and (max(case.sizes) > FEW_TOKENS or _world["ours"].micro_batches)
    return output if len(shared) == beside else f"{name}: the shared expert was computed {len(shared)} times"


def layer(case: Case) -> str | None:
    """Through what vLLM's layers call around their experts, whichever of a manager's methods that calls."""
    outputs = []
    for name in ("theirs", "ours"):
        with _step(case.sizes):
            outputs.append(_layer(name, case))
        if isinstance(outputs[-1], str):
            return outputs[-1]
    return None if same_bits(*outputs) else "the layer's output differs"  # type: ignore[arg-type]


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
    """Two micro-batches of a layer, each in a thread, which take turns as vLLM has them."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker import ubatching

    ubatching.current_stream = lambda: None  # there are none here
    wanted, contexts = [], []
    for case in cases:
        with _step(case.sizes):
            wanted.append(_layer("theirs", case))
            contexts.append(get_forward_context())
    _world["ours"].micro_batches = True  # as had vLLM been configured so
    barrier, events = threading.Barrier(len(cases) + 1), [threading.Event() for _ in cases]
    got: list[Any] = [None] * len(cases)

    def run(i: int) -> None:
        turns = (events[i], events[(i + 1) % len(cases)])
        mine = ubatching.UBatchContext(i, None, None, contexts[i], barrier, *turns, None, None)
        with mine, torch.inference_mode(), contexts[i].dp_metadata.sp_local_sizes(1):
            got[i] = _layer("ours", cases[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(cases))]
    ubatching._CURRENT_CONTEXTS[:] = [None] * len(cases)
    for thread in threads:
        thread.start()
    barrier.wait()
    events[0].set()
    for thread in threads:
        thread.join()
    _world["ours"].micro_batches = False
    wrong = [
        i
        for i in range(len(cases))
        if not isinstance(got[i], torch.Tensor) or not same_bits(got[i], wanted[i])  # type: ignore[arg-type]
    ]
    return f"micro-batches {wrong} differ: {got}" if wrong else None


def micro_batches_are_allowed() -> bool:
    """Whether vLLM's configuration may have micro-batches, and still names its own back end."""
    from vllm.config import ParallelConfig, VllmConfig

    parallel = ParallelConfig(ubatch_size=2, enable_expert_parallel=True)
    with contextlib.suppress(AttributeError):  # vLLM 0.26 goes on to ask the model, of which there is none
        VllmConfig(parallel_config=parallel)
    return bool(parallel.use_ubatching and parallel.all2all_backend == "allgather_reducescatter")


def chosen_back_end() -> str | None:
    """The back end that vLLM's configuration chooses for experts which move rows by themselves; None if it knows of none."""
    from vllm.config import KernelConfig, ParallelConfig, VllmConfig, kernel

    if not hasattr(kernel, "FLASHINFER_MOE_EP_BACKENDS"):
        return None
    experts = min(kernel.FLASHINFER_MOE_EP_BACKENDS)
    parallel = ParallelConfig(enable_expert_parallel=True)
    VllmConfig(parallel_config=parallel, kernel_config=KernelConfig(moe_backend=experts))
    return str(parallel.all2all_backend)


def stop() -> str | None:
    """Close what is ours; then it is closed."""
    buffers = [exchange.buffer for exchange in _world["ours"]._exchanges.values()]
    _world["ours"].destroy()
    for buffer in buffers:
        with contextlib.suppress(RuntimeError):
            buffer.check()
            return "a Buffer is open"
    return None if buffers else "there were no Buffers"
