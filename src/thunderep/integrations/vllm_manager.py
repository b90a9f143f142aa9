"""What vLLM calls to move tokens between ranks, in the place of its manager that gathers and scatters. See `vllm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled, dbo_yield

from thunderep.api import DispatchOutput
from thunderep.buffer import Buffer
from thunderep.integrations import vllm as plugin
from thunderep.integrations.gathered import Exchange


class _UnderWay(NamedTuple):
    exchange: Exchange | None  # None: vLLM's manager moves these tokens
    sizes: Sequence[int]
    routing: DispatchOutput | None


class ThunderEPManager(AgRsAll2AllManager):  # type: ignore[misc]  # vLLM is not typed
    """Gives what vLLM's manager gives, but for rows and ids that concern no expert of this rank.

    Which ranks take part, and how many tokens each has, is found out by the class that it derives from. Buffers are made
    when first needed, which is in vLLM's profile run, for the most tokens that its scheduler ever gives a rank. Where the
    setting names no transport, and "auto" leaves the ranks to torch.distributed, vLLM's manager moves the tokens.

    Where vLLM runs two micro-batches, one computes while the other's tokens travel.

    Args:
        cpu_group: The expert-parallel ranks.
        tcp_store_group: How ranks meet that come and go; not supported.

    Attributes:
        micro_batches: Whether vLLM may run some.
        shared_experts: Whether the model has any.

    Raises:
        ValueError: Elastic expert parallelism was asked for.
    """

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        if tcp_store_group is not None:
            raise ValueError(
                f"{plugin.SETTING}: elastic expert parallelism needs vLLM's own manager; unset it, or enable_elastic_ep"
            )
        super().__init__(cpu_group, tcp_store_group)
        plugin.install_layers()
        config = get_current_vllm_config()
        # Layers may be made anew when there is no configuration to be asked any more, so they ask here.
        self.micro_batches: bool = config.parallel_config.use_ubatching
        self.shared_experts = _has_shared_experts(config.model_config)
        self._most_tokens: int = config.scheduler_config.max_num_batched_tokens
        self._expert_parallel: bool = config.parallel_config.enable_expert_parallel
        self._num_experts: dict[int, int] = {}
        """For each micro-batch that is about to dispatch how many experts its layer has."""
        self._exchanges: dict[tuple[str, int, int, int | None], Exchange | None] = {}
        self._under_way: dict[int, _UnderWay] = {}
        """For each micro-batch between its dispatch and its combine how it was dispatched."""

    def announce(self, num_experts: int) -> None:
        """Say how many experts, copies included, the layer has whose tokens this micro-batch dispatches next.

        Layers of a model may differ. A dispatch that nobody announced gathers all rows.
        """
        if self._expert_parallel:  # else ranks share each expert
            self._num_experts[dbo_current_ubatch_id()] = num_experts

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """[T, ...] of each to [R, ...], R the sum of all ranks' T: rows, weights, global ids, and extra tensors if any came."""
        exchange, sizes = self._exchange(hidden_states, topk_ids, is_sequence_parallel, extra_tensors)
        if exchange is None:
            self._under_way[dbo_current_ubatch_id()] = _UnderWay(None, sizes, None)
            theirs: tuple[Any, ...] = super().dispatch(
                hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors
            )
            return theirs
        *gathered, extra, routing = exchange.dispatch(
            hidden_states, topk_weights, topk_ids, sizes, extra_tensors or (), dbo_yield if dbo_enabled() else None
        )
        self._under_way[dbo_current_ubatch_id()] = _UnderWay(exchange, sizes, routing)
        return tuple(gathered) if extra_tensors is None else (*gathered, extra)

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """As `dispatch`, for experts that choose for themselves: all rows, logits, and extra tensors if any came."""
        exchange, sizes = self._exchange(hidden_states, None, is_sequence_parallel)
        self._under_way[dbo_current_ubatch_id()] = _UnderWay(exchange, sizes, None)
        if exchange is None:
            theirs: tuple[Any, ...] = super().dispatch_router_logits(
                hidden_states, router_logits, is_sequence_parallel, extra_tensors
            )
            return theirs
        x, logits, *extra = exchange.gather([hidden_states, router_logits, *(extra_tensors or ())], sizes)
        return (x, logits) if extra_tensors is None else (x, logits, extra)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """[R, H], this rank's experts' results, to [T, H]: the ranks' sums for its own tokens."""
        if dbo_enabled():
            finish = self.start_combine(hidden_states, is_sequence_parallel)
            dbo_yield()
            return finish()
        exchange, sizes, routing = self._under_way.pop(dbo_current_ubatch_id())
        if exchange is None:
            theirs: torch.Tensor = super().combine(hidden_states, is_sequence_parallel)
            return theirs
        return exchange.combine(hidden_states, sizes, routing)

    def start_combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> Callable[[], torch.Tensor]:
        """Begin to `combine`; what comes back gives the result, on the stream that calls it."""
        exchange, sizes, routing = self._under_way.pop(dbo_current_ubatch_id())
        if exchange is None:
            theirs: torch.Tensor = super().combine(hidden_states, is_sequence_parallel)
            return lambda: theirs
        return exchange.start_combine(hidden_states, sizes, routing)

    def allocate_combine_input(self, *args: Any, **kwargs: Any) -> None:
        """None: what is to be combined may lie anywhere."""

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """`combine`, into `output`."""
        return output.copy_(self.combine(hidden_states, is_sequence_parallel))

    def destroy(self) -> None:
        """Close all Buffers."""
        for exchange in self._exchanges.values():
            if exchange is not None:
                exchange.buffer.close()
        super().destroy()

    def _exchange(
        self,
        rows: torch.Tensor,
        topk_ids: torch.Tensor | None,
        is_sequence_parallel: bool,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Exchange | None, list[int]]:
        """What moves these tokens, None for vLLM's manager, and every rank's T."""
        group = self._get_comm_group(is_sequence_parallel)
        sizes: list[int] = self._get_sizes(len(rows), group)
        num_experts = None if topk_ids is None else self._num_experts.pop(dbo_current_ubatch_id(), None)
        key = group.unique_name, rows.shape[1], 1 if topk_ids is None else topk_ids.shape[1], num_experts
        if key not in self._exchanges:
            exchange = self._exchanges[key] = self._connect(group, rows, topk_ids, num_experts)
            if exchange is not None and topk_ids is not None and rows.is_cuda:
                exchange.warm_up(rows, topk_ids, self._most_tokens, extra_tensors or ())
        return self._exchanges[key], sizes

    def _connect(
        self, group: Any, rows: torch.Tensor, topk_ids: torch.Tensor | None, num_experts: int | None
    ) -> Exchange | None:
        wish = plugin.transport() or "auto"
        buffer = Buffer(
            group.device_group,
            num_experts=num_experts or 1,
            hidden=rows.shape[1],
            topk=1 if topk_ids is None else topk_ids.shape[1],
            max_tokens=self._most_tokens,
            dtype=rows.dtype if rows.dtype.itemsize > 2 else torch.bfloat16,  # results are wider than 8-bit rows
            device=rows.device,
            transport=wish,
        )
        if wish == "auto" and buffer.transport == "collective":
            buffer.close()
            return None
        # vLLM's experts lie in blocks over all expert-parallel ranks, of which a group may be a part.
        return Exchange(buffer, num_experts is not None and buffer.num_ranks == self.world_size)


def _has_shared_experts(model_config: Any) -> bool:
    settings = {} if model_config is None else model_config.hf_text_config.to_dict()
    return any("shared_expert" in name and bool(value) for name, value in settings.items())
