"""One rank's side of the transformers tests: load a model over all ranks, run it, give back what it computed."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist


def fields() -> set[str]:
    """What a `DistributedConfig` of the installed transformers can say."""
    from transformers.distributed import DistributedConfig

    return {field.name for field in dataclasses.fields(DistributedConfig)}


def thunderep_chosen(parallel: dict[str, int]) -> dict[str, Any]:
    """Arguments of `from_pretrained` for ThunderEP, by what the installed transformers offers."""
    from transformers.distributed import DistributedConfig

    if "ep_implementation" in fields():
        return {"distributed_config": DistributedConfig(**parallel, ep_implementation="thunderep")}
    if "ep_size" in fields():
        return {"distributed_config": DistributedConfig(**parallel), "experts_implementation": "thunderep"}
    plan = {"model.layers.*.mlp.experts": "thunderep"}
    return {"distributed_config": DistributedConfig(tp_size=parallel["tp_size"], tp_plan=plan)}


def load(path: str, parallel: dict[str, int]) -> Any:
    """The model at `path`, spread over all ranks."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    from transformers import AutoModelForCausalLM

    import thunderep.integrations.transformers  # noqa: F401  registers "thunderep"

    return AutoModelForCausalLM.from_pretrained(path, **thunderep_chosen(parallel), dtype=torch.float32)


def dispatches() -> int:
    """How often this rank's models have dispatched tokens by ThunderEP."""
    from thunderep.integrations.transformers import _buffers

    return sum(buffer.stats().operations.get("dispatch", 0) for buffer in _buffers.values())


def run(path: str, parallel: dict[str, int], batches: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's logits for its batch, which is the last one if there are fewer, and the gradients of all parameters."""
    model = load(path, parallel)
    before = dispatches()
    logits, grads = forward_and_backward(model, batches[min(dist.get_rank(), len(batches) - 1)])
    if dispatches() == before:
        raise RuntimeError("the model reached its experts without ThunderEP")
    return logits, {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def forward_and_backward(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits, and the gradients of the loss of predicting `batch`."""
    out = model(input_ids=batch, labels=batch)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def generate(path: str, parallel: dict[str, int], prompt: torch.Tensor) -> torch.Tensor:
    """A greedy continuation of `prompt`."""
    tokens: torch.Tensor = load(path, parallel).generate(prompt, max_new_tokens=8, do_sample=False)
    return tokens


def accumulate(path: str, parallel: dict[str, int], batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the sum of the batches' losses: forward through all of them, then backward."""
    model = load(path, parallel)
    loss = sum(model(input_ids=batch, labels=batch).loss for batch in batches)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}
