"""What vLLM's layers do before and after their experts, in the place of its own class that gathers and scatters. See `vllm`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import vllm.envs
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import MoEPrepareAndFinalizeNaiveDPEPModular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)


class ThunderEPPrepareAndFinalize(MoEPrepareAndFinalizeNaiveDPEPModular):  # type: ignore[misc]  # vLLM is not typed
    """Does what the class that it derives from does, but lets vLLM compute a layer's shared expert while results travel."""

    def supports_async(self) -> bool:
        """Whether something can be computed meanwhile: the other micro-batch, or a shared expert where there are many tokens.

        With few tokens vLLM has a better place for it, on a stream beside the routed experts.
        """
        manager = _manager()
        return bool(manager.micro_batches or (manager.shared_experts and _many_tokens()))

    def supports_dbo(self) -> bool:
        """Whether micro-batches may take turns: the manager lets them."""
        return True

    def prepare(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, *args: Any, **kwargs: Any
    ) -> Any:
        """What the class that it derives from does, over a manager that knows of the layer's experts."""
        _manager().announce(num_experts)
        return super().prepare(a1, topk_weights, topk_ids, num_experts, *args, **kwargs)

    def prepare_async(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """As `prepare`, during which the other micro-batch computes."""
        prepared = self.prepare(*args, **kwargs)
        return lambda: prepared

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
        """Begin to `finalize`. Returns what vLLM calls next, nothing, and what fills `output`, [T, H].

        Where there are micro-batches, the other one computes between the two.
        """
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        y = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        finish = _manager().start_combine(y, self.is_sequence_parallel)
        return (lambda: None), (lambda: output.copy_(finish()))

    def _comm_region(self) -> contextlib.AbstractContextManager[None]:
        """What newer versions of vLLM enter for communication; the manager does by itself what is to be done there."""
        return contextlib.nullcontext()


def _manager() -> Any:
    """The `ThunderEPManager`, which has this class installed."""
    return get_ep_group().device_communicator.all2all_manager


def _many_tokens() -> bool:
    """Whether in this step a rank has more tokens than vLLM computes shared experts of on a stream beside."""
    across = get_forward_context().dp_metadata if is_forward_context_available() else None
    threshold: int = vllm.envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    return across is None or bool(across.num_tokens_across_dp_cpu.max() > threshold)
