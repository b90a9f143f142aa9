"""One rank's side of the tests of vLLM's tensor parallelism: its own groups and its communicator of the CPU, ours before it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.dist.dense import rank_sum
from thunderep.testing.inputs import random_rows, same_bits

_world: dict[str, Any] = {}


def start(hidden: int) -> None:
    """Make vLLM's groups for tensor and expert parallelism, as on GPUs but with the communicator of the CPU."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator, cuda_communicator

    from thunderep.integrations.vllm import register

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"THUNDEREP_VLLM": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    _world["vllm's"] = cuda_communicator.CudaCommunicator
    register()
    register()  # plugins may be loaded several times

    from thunderep.integrations.vllm_communicator import DenseCollectives

    class Communicator(DenseCollectives, cpu_communicator.CpuCommunicator):  # type: ignore[misc]
        pass

    cpu_communicator.CpuCommunicator = Communicator
    parallel = ParallelConfig(
        tensor_parallel_size=ranks, enable_expert_parallel=True, distributed_executor_backend="external_launcher"
    )
    config = VllmConfig(parallel_config=parallel)
    config.scheduler_config.max_num_batched_tokens = 64
    # In the place of a model's configuration, which takes a model.
    config.model_config = SimpleNamespace(
        is_moe=True, architecture="", dtype=torch.bfloat16, get_hidden_size=lambda: hidden, get_num_experts=lambda: 4
    )
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(ranks, rank, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(ranks, backend="gloo")
    tp, ep = parallel_state.get_tp_group(), parallel_state.get_ep_group()
    _world.update(config=config, tp=tp, ep=ep, type=Communicator)


def installed() -> list[Any]:
    """The bases of the class that vLLM makes for GPUs, and whether all who name it get it, and vLLM's own is among them."""
    from vllm.distributed import stateless_coordinator
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found = resolve_obj_by_qualname("vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator")
    return [
        [base.__name__ for base in found.__mro__],
        stateless_coordinator.CudaCommunicator is found and issubclass(found, _world["vllm's"]),
    ]


def _everyones(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [random_rows(shape, dtype, torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]


def _operations() -> int:
    buffer = _world["tp"].device_communicator._buffer
    return 0 if buffer is None else sum(buffer.stats().operations.values())


def _problem(operation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, want: torch.Tensor) -> str | None:
    """None, or how `operation(x)` is not what it should be: `want`, by ThunderEP, in memory of its own."""
    before, given = _operations(), x.clone()
    with torch.inference_mode():  # as in vLLM's workers
        got = operation(x)
        if not same_bits(got, want):
            return f"got {got}, expected {want}"
        if x.numel() and _operations() != before + 1:
            return "ThunderEP did not do it"
        got.zero_()
    return None if same_bits(x, given) else "the argument has changed, or is the result"


def all_reduce(shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """None, or what was wrong."""
    everyone = _everyones(shape, dtype)
    return _problem(_world["tp"].all_reduce, everyone[dist.get_rank()], rank_sum(everyone))


def all_gather(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> str | None:
    """None, or what was wrong."""
    everyone = _everyones(shape, dtype)
    want = torch.cat([x.view(torch.uint8) if dtype.itemsize == 1 else x for x in everyone], dim).view(dtype)
    return _problem(lambda x: _world["tp"].all_gather(x, dim), everyone[dist.get_rank()], want)


def reduce_scatter(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> str | None:
    """None, or what was wrong."""
    everyone, rank = _everyones(shape, dtype), dist.get_rank()
    want = rank_sum(everyone).chunk(len(everyone), dim)[rank]
    return _problem(lambda x: _world["tp"].reduce_scatter(x, dim), everyone[rank], want)


def strided_rows() -> str | None:
    """None, or what was wrong, with every other column of a wider tensor, transposed."""
    everyone, rank = [wide[:, ::2].t() for wide in _everyones((6, 16), torch.bfloat16)], dist.get_rank()
    return next(
        filter(
            None,
            [
                _problem(_world["tp"].all_reduce, everyone[rank], rank_sum(everyone)),
                _problem(lambda x: _world["tp"].all_gather(x, 1), everyone[rank], torch.cat(everyone, 1)),
                _problem(lambda x: _world["tp"].reduce_scatter(x, 1), everyone[rank], rank_sum(everyone).chunk(2, 1)[rank]),
            ],
        ),
        None,
    )


def other_types() -> str | None:
    """None, or what was wrong with types that vLLM's own communicator keeps."""
    before, tp, ranks = _operations(), _world["tp"], range(dist.get_world_size())
    numbers = torch.arange(5) + dist.get_rank()
    if not torch.equal(tp.all_reduce(numbers), torch.stack([torch.arange(5) + rank for rank in ranks]).sum(0)):
        return "the sum is wrong"
    if not torch.equal(tp.all_gather(torch.arange(3) == dist.get_rank(), 0), torch.cat([torch.arange(3) == r for r in ranks])):
        return "what was gathered is wrong"
    return None if _operations() == before else "ThunderEP did it"


def _is_ours(communicator: Any) -> bool:
    """Whether ThunderEP sums: then into a new tensor, where vLLM's communicator of the CPU sums in place."""
    x = torch.ones(3)
    got = communicator.all_reduce(x)
    if not torch.equal(got, torch.full((3,), float(dist.get_world_size()))):
        raise AssertionError(f"the sum is {got}")
    return got is not x


def _another(config: Any, name: str = "tp:1") -> Any:
    """A communicator of the tensor-parallel ranks, made while vLLM's configuration is `config`."""
    from vllm.config import set_current_vllm_config

    tp = _world["tp"]
    with set_current_vllm_config(config) if config is not None else contextlib.nullcontext():
        return _world["type"](tp.cpu_group, tp.device, tp.device_group, name)


def other_groups() -> dict[str, bool]:
    """For each group whether ThunderEP sums."""
    groups = {name: _world[name].device_communicator for name in ("tp", "ep")}
    groups |= {"etp": _another(_world["config"], "etp:0"), "no model": _another(None)}
    return {name: _is_ours(communicator) for name, communicator in groups.items()}


def on_two_hosts(setting: str) -> bool:
    """Whether ThunderEP sums for ranks that are on different hosts."""
    communicator = _another(_world["config"])
    host = f"host {dist.get_rank()}"
    with mock.patch.dict(os.environ, THUNDEREP_VLLM=setting), mock.patch("thunderep.buffer.host_id", return_value=host):
        ours = [_is_ours(communicator) for _ in range(2)]
    communicator.destroy()
    if ours[0] != ours[1] or (communicator._buffer is not None) != ours[0]:
        raise AssertionError("a Buffer came or went")
    return ours[0]


def stop() -> str | None:
    """Close what is ours; then it is closed."""
    communicator = _world["tp"].device_communicator
    communicator.destroy()
    with contextlib.suppress(RuntimeError):
        communicator._buffer.check()
        return "the Buffer is open"
    return None
