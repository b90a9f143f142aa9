"""What transformers 5.23 calls `EPImplementation` and its registry, for 5.17 to 5.22, which have registries of styles.

A style says how a module's parameters are split over ranks and what surrounds its forward; a plan names one for each
module. From 5.19 on the plan's name for dispatched experts is fixed, so `experts_implementation` chooses among its styles.
Before, plans that mask the router are the only ones, so the user's plan names this style for the experts alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import __version__

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, MoEParamShard
except ImportError as error:
    raise ImportError(f"thunderep.integrations.transformers needs transformers 5.17 or newer; found {__version__}") from error

DISPATCH = "ep_dispatch_experts"


class EPImplementation:
    """What an implementation knows of its experts: its base class, as in 5.23."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        self.experts_forward = experts.forward
        self.num_local_experts: int = experts.num_experts  # type: ignore[assignment]  # nn.Module's attributes are not typed
        self.ep_mesh = ep_mesh
        self.tp_mesh = tp_mesh
        tp_ranks, ep_ranks = (dist.get_process_group_ranks(mesh.get_group()) for mesh in (tp_mesh, ep_mesh))
        self.shares_batch = tp_ranks == ep_ranks


class EPImplementationInterface:
    """Registers an implementation, as in 5.23, by the registries there are."""

    @staticmethod
    def register(name: str, implementation: type[EPImplementation]) -> None:
        """Lets a configuration choose `implementation`.

        Args:
            name: The value of `experts_implementation` where models have plans that dispatch tokens, else a style's name.
            implementation: Built once for each module of experts.
        """
        if DISPATCH in ALL_PARALLEL_STYLES:
            ALL_EXPERTS_FUNCTIONS.register(name, _local_experts)
            ALL_PARALLEL_STYLES.register(DISPATCH, _chosen_by_config(name, implementation))
        else:
            ALL_PARALLEL_STYLES.register(name, _SplitExperts(implementation))


class _SplitExperts(MoEParamShard):  # type: ignore[misc]  # transformers is not typed
    """A share of the experts on each rank of one mesh, all of which hold the same batch."""

    def __init__(self, implementation: type[EPImplementation]) -> None:
        super().__init__(Shard(0), shards_expert_dim=True)
        self.implementation = implementation

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return _install(self, module, self.implementation(module, mesh, mesh), mesh)


def _local_experts(experts: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """The experts that this rank has, as transformers computes them if nothing is chosen."""
    parallel = getattr(experts.config, "distributed_config", None)
    if parallel is not None and parallel.ep_size > 1 and not hasattr(experts, "ep_implementation"):
        raise ValueError(
            f"experts_implementation: the model's ep_plan masks the router of {type(experts).__name__}; "
            f"expected a plan that names {DISPATCH!r} for these experts and nothing for their router"
        )
    y: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *args)
    return y


def _chosen_by_config(name: str, implementation: type[EPImplementation]) -> Any:
    """The style of dispatched experts: `implementation` where a model's configuration names it, else transformers' own."""
    stock = ALL_PARALLEL_STYLES[DISPATCH]

    class Dispatch(type(stock)):  # type: ignore[misc]  # known when it runs
        def install_forward(self, module: nn.Module, ep_mesh: DeviceMesh, *, tp_mesh: DeviceMesh) -> Any:
            if getattr(getattr(module, "config", None), "_experts_implementation", None) != name:
                return super().install_forward(module, ep_mesh, tp_mesh=tp_mesh)
            return _install(self, module, implementation(module, ep_mesh, tp_mesh), ep_mesh)

    return Dispatch()


def _install(style: Any, module: nn.Module, implementation: Any, mesh: DeviceMesh) -> nn.Module:
    """Puts `implementation` before the experts' own forward, which it calls, and gives both plain tensors."""

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        given = (hidden_states, top_k_index, top_k_weights)
        x, idx, weights = (t.to_local() if isinstance(t, DTensor) else t for t in given)
        with style.context_around_forward(module, mesh):
            y: torch.Tensor = implementation(x, idx, weights)
        return y.to(x.dtype)

    module.ep_implementation = implementation
    module.forward = forward
    return module
