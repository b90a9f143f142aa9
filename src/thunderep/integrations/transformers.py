"""Expert parallelism of transformers (5.17 or newer) over ThunderEP: import this module, and name it in the configuration.

>>> import thunderep.integrations.transformers  # doctest: +SKIP
>>> config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="thunderep")  # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=config)  # doctest: +SKIP

`ep_implementation` is there from 5.23 on. From 5.19 to 5.22 leave it out, and give `from_pretrained` the argument
`experts_implementation="thunderep"`. In 5.17 and 5.18 all ranks hold one batch, and the plan names it for the experts:

>>> plan = {"model.layers.*.mlp.experts": "thunderep"}  # doctest: +SKIP
>>> config = DistributedConfig(tp_size=4, tp_plan=plan)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from thunderep.api import combine, dispatch
from thunderep.buffer import Buffer

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError:
    from thunderep.integrations.transformers_styles import EPImplementation, EPImplementationInterface

_buffers: dict[tuple[Any, ...], Buffer] = {}
"""Layers of one shape share a Buffer: all ranks run them in one order."""


class ThunderEP(EPImplementation):  # type: ignore[misc]  # transformers is not typed
    """Brings tokens to their experts by `thunderep.dispatch` and the results back by `thunderep.combine`.

    A token travels once to each rank that has some of its experts, however many, and comes back as one row. Ranks that
    hold the same batch (tensor parallelism) each bring a slice of it. Trains; gradients reach hidden states and routing
    weights of every rank.
    """

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, K] global expert ids.
            top_k_weights: [T, K].

        Returns:
            [T, H].

        Raises:
            PeerError: A rank died or stayed silent.
        """
        tokens = len(hidden_states)
        x, idx, weights = (self._slice(t) for t in (hidden_states, top_k_index, top_k_weights))
        max_tokens = self._most_tokens(tokens, x)
        buffer = self._buffer(x, idx.shape[1], max_tokens)
        d = dispatch(x, idx, weights.float(), buffer.num_experts, buffer, max_tokens)
        elsewhere = d.recv_topk_idx < 0
        # What rows hold that no expert here needs is unspecified, and must not reach a gradient.
        recv_x = d.recv_x.masked_fill(elsewhere.all(dim=1, keepdim=True), 0)
        local_idx = d.recv_topk_idx.masked_fill(elsewhere, self.num_local_experts)
        y = self.experts_forward(recv_x, local_idx, d.recv_topk_weights.to(weights.dtype))
        return self._join(combine(y.to(x.dtype), d, buffer), tokens)

    def _slice(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what its tensor-parallel group holds alike."""
        if self.tp_mesh.size() == 1:
            return batch
        whole = DTensor.from_local(batch, self.tp_mesh, [Replicate()], run_check=False)
        rows: torch.Tensor = whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        return rows

    def _join(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """The inverse of `_slice`."""
        if self.tp_mesh.size() == 1:
            return rows
        shape = torch.Size([tokens, rows.shape[1]])
        parts = DTensor.from_local(rows, self.tp_mesh, [Shard(0)], shape=shape, stride=(rows.shape[1], 1), run_check=False)
        batch: torch.Tensor = parts.full_tensor()
        return batch

    def _most_tokens(self, tokens: int, x: torch.Tensor) -> int:
        """The largest number of tokens that a rank brings, the same on all."""
        if self.shares_batch:
            slices: int = self.tp_mesh.size()
            return -(-tokens // slices)
        most = torch.tensor([len(x)], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ep_mesh.get_group())
        return int(most.item())

    def _buffer(self, x: torch.Tensor, topk: int, max_tokens: int) -> Buffer:
        """A Buffer for so many tokens. Smaller ones stay: a backward pass may still need them."""
        group, capacity = self.ep_mesh.get_group(), max(64, 1 << (max_tokens - 1).bit_length())
        key = (group, self.num_local_experts, x.shape[1], topk, x.dtype, x.device, capacity)
        if key not in _buffers:
            _buffers[key] = Buffer(
                group,
                num_experts=self.num_local_experts * self.ep_mesh.size(),
                hidden=x.shape[1],
                topk=topk,
                max_tokens=capacity,
                dtype=x.dtype,
                device=x.device,
            )
        return _buffers[key]


EPImplementationInterface.register("thunderep", ThunderEP)
