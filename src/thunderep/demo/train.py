"""The training loop: the same in one process and on each of many ranks.

Every rank's objective is its share of the global batch's mean, so gradients add up over ranks. The experts' are complete
where they arise, because the tokens of all ranks come to the expert. All others are summed by one all-reduce a step, which also
carries what is reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from thunderep.demo.config import DemoConfig
from thunderep.demo.data import global_batch
from thunderep.demo.model import Model


@dataclass(frozen=True)
class Step:
    """What one training step reports: numbers of the whole batch, the same on every rank."""

    index: int
    loss: float
    """Mean cross-entropy, in nats a byte, before the step's update."""
    gradient_norm: float
    """Of all parameters' gradient, experts of all ranks included, before clipping."""
    load: list[list[float]]
    """For each layer the share of choices that each expert got."""
    seconds: float
    """Wall time of the step."""


class Gradients:
    """The gradients of a model's parameters, and their sum over ranks.

    Replicated parameters' gradients, and a few numbers to be summed beside them, are views of one flat tensor.

    Args:
        model: The model; parameters of modules called `experts` are the rank's own, all others are replicated.
        extra: How many more numbers to sum.
    """

    def __init__(self, model: Model, extra: int) -> None:
        named = list(model.named_parameters())
        self.local = [p for name, p in named if ".experts." in name]
        self.replicated = [p for name, p in named if ".experts." not in name]
        sizes = [p.numel() for p in self.replicated]
        self._flat = torch.zeros(sum(sizes) + 1 + extra, device=self.replicated[0].device)
        *views, self._square, self.extra = self._flat.split([*sizes, 1, extra])
        for parameter, view in zip(self.replicated, views, strict=True):
            parameter.grad = view.view_as(parameter)
        for parameter in self.local:
            parameter.grad = torch.zeros_like(parameter)

    def zero(self) -> None:
        """Before a backward."""
        self._flat.zero_()
        for parameter in self.local:
            assert parameter.grad is not None
            parameter.grad.zero_()

    def reduce(self, ranks: int) -> torch.Tensor:
        """Sum over ranks, after a backward. Returns the norm of the whole model's gradient."""
        self._square.fill_(_square(self.local))
        if ranks > 1:
            dist.all_reduce(self._flat)
        norm: torch.Tensor = (self._square[0] + _square(self.replicated)).sqrt()
        return norm


def _square(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The sum of the gradients' squares; 0 for a rank without experts."""
    norms = [p.grad.norm() for p in parameters if p.grad is not None]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def train(model: Model, config: DemoConfig, text: torch.Tensor, rank: int, report: Callable[[Step], None]) -> None:
    """Train `model` in place on this rank's share of every global batch; `report` each step."""
    if config.compile:  # layers have one shape: they share one graph, compiled once
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    sizes = config.model
    gradients = Gradients(model, extra=1 + sizes.layers * sizes.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for index in range(config.steps):
        begin = time.perf_counter()
        inputs, targets = _share(text, index, config, rank)
        loss, balance, load = model(inputs, targets, config.max_tokens)
        loss = loss / (config.batch * sizes.window)
        gradients.zero()
        (loss + config.balance * balance / (config.batch * sizes.layers)).backward()
        gradients.extra.copy_(torch.cat((loss.detach().view(1), load.flatten())))
        norm = gradients.reduce(config.ranks)
        nn.utils.clip_grads_with_norm_(model.parameters(), config.clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(config, index)
        optimizer.step()
        report(_step(index, gradients.extra, norm, load.shape, time.perf_counter() - begin))


@torch.no_grad()
def evaluate(model: Model, config: DemoConfig, text: torch.Tensor, rank: int) -> float:
    """The mean loss on batches of `text`, in nats a byte: of all ranks, on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=config.device)
    for index in range(config.evaluation_batches):
        inputs, targets = _share(text, index, config, rank)
        total += model(inputs, targets, config.max_tokens)[0]
    if config.ranks > 1:
        dist.all_reduce(total)
    return total.item() / (config.evaluation_batches * config.batch * config.model.window)


def _share(text: torch.Tensor, index: int, config: DemoConfig, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a global batch, inputs and targets, on its device."""
    inputs, targets = global_batch(text, index, config.batch, config.model.window, config.seed)
    share = config.share(rank)
    return inputs[share].to(config.device), targets[share].to(config.device)


def _learning_rate(config: DemoConfig, step: int) -> float:
    """A short warm-up, then a cosine down to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup) * (0.05 + 0.95 * cosine)


def _step(index: int, extra: torch.Tensor, norm: torch.Tensor, shape: torch.Size, seconds: float) -> Step:
    loss, load = extra[0], extra[1:].view(shape)
    return Step(index, loss.item(), norm.item(), (load / load.sum(dim=1, keepdim=True)).tolist(), seconds)
