"""What vLLM calls to sum and gather tensors of tensor parallelism, before its own communicators. See `vllm`."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from thunderep import collectives
from thunderep.buffer import Buffer
from thunderep.integrations import vllm as plugin
from thunderep.ops.combine import SUM_DTYPES
from thunderep.runtime.transport import DTYPES


class DenseCollectives(DeviceCommunicatorBase):  # type: ignore[misc]  # vLLM is not typed
    """Gives what the communicator that it stands before gives, over a Buffer; sums are in float32 and rounded once.

    That communicator keeps all groups but the tensor-parallel one, groups made without a model, types that ThunderEP does not
    sum or gather, and, where the setting names no transport, ranks whom "auto" leaves to torch.distributed. The Buffer is made
    when first needed, which is in vLLM's profile run and so before graphs are captured, and shared by all three.

    Args:
        args: The communicator's.
        kwargs: Likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Groups are named "tp:0" and the like, and not all that hold "tp" are meant: "etp:0" is another.
        tensor_parallel = self.world_size > 1 and self.unique_name.split(":")[0] == "tp"
        self._shape = _shape(get_current_vllm_config_or_none()) if tensor_parallel else None
        self._buffer: Buffer | None = None

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The ranks' sum, a new tensor. All ranks call these methods in one order."""
        buffer = self._buffer_for(input_, SUM_DTYPES)
        result: torch.Tensor = super().all_reduce(input_) if buffer is None else collectives.all_reduce(input_, buffer)
        return result

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, of one shape, one after another along `dim`."""
        buffer = self._buffer_for(input_, DTYPES)
        if buffer is None:
            theirs: torch.Tensor = super().all_gather(input_, dim)
            return theirs
        # Pipeline stages gather slices of flattened rows; rows of one element would be slow.
        rows = input_.reshape(-1, math.gcd(len(input_), buffer.hidden)) if input_.dim() == 1 else input_
        by_rank = collectives.all_gather(rows, buffer).view(self.world_size, *input_.shape)
        dim %= input_.dim()
        return by_rank.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part along `dim` of the ranks' sum."""
        buffer = self._buffer_for(input_, SUM_DTYPES)
        if buffer is None:
            theirs: torch.Tensor = super().reduce_scatter(input_, dim)
            return theirs
        return collectives.reduce_scatter(input_.movedim(dim, 0), buffer).movedim(0, dim).contiguous()

    def destroy(self) -> None:
        """Close the Buffer, then do what the communicator does."""
        if self._buffer is not None:
            self._buffer.close()
        super().destroy()

    def _buffer_for(self, tensor: torch.Tensor, dtypes: Collection[torch.dtype]) -> Buffer | None:
        """What moves such tensors, which are alike on all ranks; None: the communicator is to."""
        if self._shape is None or tensor.dtype not in dtypes:
            return None
        if self._buffer is None:
            wish = plugin.transport() or "auto"
            buffer = Buffer(self.device_group, num_experts=1, topk=1, device=self.device, transport=wish, **self._shape)
            if wish == "auto" and buffer.transport == "collective":
                buffer.close()
                self._shape = None
                return None
            self._buffer = buffer
        return self._buffer


class ThunderEPCommunicator(DenseCollectives, CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator of GPUs, with ThunderEP's dense collectives."""


def _shape(config: Any) -> dict[str, Any] | None:
    """What a Buffer is to hold of the model that vLLM serves; None where there is none."""
    if config is None or config.model_config is None:
        return None
    return {
        "hidden": config.model_config.get_hidden_size(),
        "max_tokens": config.scheduler_config.max_num_batched_tokens,
        "dtype": config.model_config.dtype,
    }
