"""What vLLM calls to move tokens between ranks, in the place of its manager that gathers and scatters. See `vllm`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from thunderep.api import DispatchOutput
from thunderep.buffer import Buffer
from thunderep.integrations import vllm as plugin
from thunderep.integrations.gathered import Exchange


class ThunderEPManager(AgRsAll2AllManager):  # type: ignore[misc]  # vLLM is not typed
    """Gives what vLLM's manager gives, but for rows and ids that concern no expert of this rank.

    Which ranks take part, and how many tokens each has, is found out by the class that it derives from. Buffers are made
    when first needed, which is in vLLM's profile run, for the most tokens that its scheduler ever gives a rank.

    Args:
        cpu_group: The expert-parallel ranks.
        tcp_store_group: How ranks meet that come and go; not supported.

    Raises:
        ValueError: Elastic expert parallelism was asked for.
    """

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        if tcp_store_group is not None:
            raise ValueError(
                f"{plugin.SETTING}: elastic expert parallelism needs vLLM's own manager; unset it, or enable_elastic_ep"
            )
        super().__init__(cpu_group, tcp_store_group)
        config = get_current_vllm_config()
        self._most_tokens: int = config.scheduler_config.max_num_batched_tokens
        self._num_experts = _num_experts(config)
        self._exchanges: dict[tuple[str, int, int], Exchange] = {}
        self._under_way: dict[int, tuple[Exchange, DispatchOutput | None]] = {}
        """For each micro-batch between its dispatch and its combine how it was dispatched."""

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """[T, ...] of each to [R, ...], R the sum of all ranks' T: rows, weights, global ids, and extra tensors if any came."""
        group, sizes = self._ranks(hidden_states, is_sequence_parallel)
        exchange = self._exchange(group, hidden_states, topk_ids.shape[1])
        *gathered, extra, routing = exchange.dispatch(hidden_states, topk_weights, topk_ids, sizes, extra_tensors or ())
        self._under_way[dbo_current_ubatch_id()] = exchange, routing
        return tuple(gathered) if extra_tensors is None else (*gathered, extra)

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """As `dispatch`, for experts that choose for themselves: all rows, logits, and extra tensors if any came."""
        group, sizes = self._ranks(hidden_states, is_sequence_parallel)
        exchange = self._exchange(group, hidden_states, 1)
        x, logits, *extra = exchange.gather([hidden_states, router_logits, *(extra_tensors or ())], sizes)
        self._under_way[dbo_current_ubatch_id()] = exchange, None
        return (x, logits) if extra_tensors is None else (x, logits, extra)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """[R, H], this rank's experts' results, to [T, H]: the ranks' sums for its own tokens."""
        exchange, routing = self._under_way.pop(dbo_current_ubatch_id())
        ranks = exchange.buffer.num_ranks
        sizes = self._get_sizes(len(hidden_states) // ranks, self._get_comm_group(is_sequence_parallel))
        return exchange.combine(hidden_states, sizes, routing)

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
            exchange.buffer.close()
        super().destroy()

    def _ranks(self, rows: torch.Tensor, is_sequence_parallel: bool) -> tuple[Any, list[int]]:
        """The group that takes part, and each of its ranks' T."""
        group = self._get_comm_group(is_sequence_parallel)
        return group, self._get_sizes(len(rows), group)

    def _exchange(self, group: Any, rows: torch.Tensor, topk: int) -> Exchange:
        key = group.unique_name, rows.shape[1], topk
        if key not in self._exchanges:
            buffer = Buffer(
                group.device_group,
                num_experts=self._num_experts or 1,
                hidden=rows.shape[1],
                topk=topk,
                max_tokens=self._most_tokens,
                dtype=rows.dtype if rows.dtype.itemsize > 2 else torch.bfloat16,  # results are wider than 8-bit rows
                device=rows.device,
                transport=plugin.transport() or "auto",
            )
            # vLLM's experts lie in blocks over all expert-parallel ranks, of which a group may be a part.
            self._exchanges[key] = Exchange(buffer, self._num_experts is not None and buffer.num_ranks == self.world_size)
        return self._exchanges[key]


def _num_experts(config: Any) -> int | None:
    """Experts that are placed over ranks, copies included; None if ranks share each expert, or models differ."""
    parallel, draft = config.parallel_config, config.speculative_config
    models = [config.model_config, draft.draft_model_config if draft is not None else None]
    numbers = {model.get_num_experts() for model in models if model is not None} - {0}
    if len(numbers) != 1 or not parallel.enable_expert_parallel:
        return None
    copies: int = parallel.eplb_config.num_redundant_experts if parallel.enable_eplb else 0
    return int(numbers.pop()) + copies
