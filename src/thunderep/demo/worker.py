"""What a process of the demo does: one rank of many, or the whole model alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from thunderep.demo.config import DemoConfig
from thunderep.demo.data import load_corpus
from thunderep.demo.generate import generate
from thunderep.demo.measure import Exchange, measure
from thunderep.demo.model import MixtureOfExperts, Model
from thunderep.demo.train import Gradients, Step, evaluate, train
from thunderep.nn import ExpertParallel

_TIMEOUT_SECONDS = 300

_ROWS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
"""What rows may be rounded to on their way to the experts when the trained model is evaluated."""

_THREADS = 1
"""Of torch in each process: products this small gain little from more, and on a busy machine lose much."""


@dataclass(frozen=True)
class Outcome:
    """What a rank has at the end."""

    held_out: float
    """The trained model's loss on held-out text."""
    held_out_bf16: float
    """The same with the rows that experts get rounded to bfloat16."""
    held_out_fp8: float
    """The same with those rows sent as fp8, in a quarter of the bytes that these float32 rows have."""
    replicas_equal: bool
    """Whether the parameters that all ranks hold have the same bits on all."""
    sample: str
    exchanges: list[Exchange]


@dataclass(frozen=True)
class Reference:
    """What the one process has at the end: losses on the same held-out text."""

    held_out: float
    """Of the model that it trained."""
    gathered: float
    """Of the model that the ranks trained, put together from their checkpoints."""


def rank_job(rank: int, arguments: tuple[DemoConfig, int], send: Callable[[Any], None]) -> None:
    """Train, generate and measure as one rank; sends what it begins (a string), each Step (rank 0) and at last an Outcome."""
    config, port = arguments
    with _process_group(rank, config, port), _buffer(config) as buffer:
        model = build_model(config, buffer)
        text, held_out = load_corpus(config.corpus_bytes, 2 * config.model.window)
        send("compiling" if config.compile else "training")
        train(model, config, text, rank, send if rank == 0 else _ignore)
        torch.save(model.state_dict(), config.checkpoint(rank))
        send("writing samples")
        with torch.compiler.set_stance("force_eager"):  # shapes change from call to call
            sample = generate(model, config, rank)
            exact, bf16, fp8 = (_evaluate_as(rows, model, config, held_out, rank) for rows in _ROWS)
        send("measuring dispatch and combine")
        send(Outcome(exact, bf16, fp8, _replicas_equal(model), sample, measure(buffer, config) if config.ranks > 1 else []))


def reference_job(rank: int, config: DemoConfig, send: Callable[[Any], None]) -> None:
    """Train the same model in one process, without thunderep's operators and without a compiler.

    Sends each Step and at last a Reference.
    """
    torch.set_num_threads(_THREADS)
    alone = dataclasses.replace(config, ranks=1, compile=False)
    text, held_out = load_corpus(config.corpus_bytes, 2 * config.model.window)
    model = Model(config.model, config.seed).to(config.device)
    train(model, alone, text, rank, send)
    own = evaluate(model, alone, held_out, rank)
    model.load_state_dict(_gathered(config))
    send(Reference(own, evaluate(model, alone, held_out, rank)))


def _gathered(config: DemoConfig) -> dict[str, torch.Tensor]:
    """The ranks' checkpoints as one model's: all experts, in rank order."""
    parts = [torch.load(config.checkpoint(r), map_location=config.device, weights_only=True) for r in range(config.ranks)]
    return {name: torch.cat([p[name] for p in parts]) if ".experts." in name else value for name, value in parts[0].items()}


def build_model(config: DemoConfig, buffer: thunderep.Buffer) -> Model:
    """The model as this rank has it: of the experts its own, with the initial values that they have in the whole model."""
    model = Model(config.model, config.seed)
    mine = slice(buffer.local_experts.start, buffer.local_experts.stop)
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            initial = {name: value[mine] for name, value in layer.experts.state_dict().items()}
            layer.experts = ExpertParallel(buffer, config.model.expert_hidden)
            layer.experts.load_state_dict(initial)
    return model.to(config.device)


def _evaluate_as(rows: torch.dtype, model: Model, config: DemoConfig, text: torch.Tensor, rank: int) -> float:
    """The loss on `text` if the rows that experts get are rounded to a type on their way."""
    layers = [module for module in model.modules() if isinstance(module, ExpertParallel)]
    hooks = []
    for layer in layers:
        if rows == torch.float8_e4m3fn:
            layer.dispatch_dtype = rows
        else:
            hooks.append(
                layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(rows).to(inputs[0].dtype), *inputs[1:]))
            )
    loss = evaluate(model, config, text, rank)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        layer.dispatch_dtype = None
    return loss


@contextlib.contextmanager
def _process_group(rank: int, config: DemoConfig, port: int) -> Iterator[None]:
    torch.set_num_threads(_THREADS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names that do not resolve are common in containers
    device = None
    if config.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    timeout = timedelta(seconds=_TIMEOUT_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo" if device is None else "nccl", store=store, rank=rank, world_size=config.ranks, timeout=timeout, device_id=device
    )
    yield
    dist.destroy_process_group()


def _buffer(config: DemoConfig) -> thunderep.Buffer:
    sizes = config.model
    return thunderep.Buffer(
        num_experts=sizes.experts,
        hidden=sizes.hidden,
        topk=sizes.topk,
        max_tokens=config.max_tokens,
        dtype=torch.float32,
        device=config.device,
        timeout=_TIMEOUT_SECONDS,
    )


def _replicas_equal(model: Model) -> bool:
    """Whether the replicated parameters have the same bits on all ranks."""
    mine = torch.cat([p.detach().flatten() for p in Gradients(model, extra=0).replicated])
    first = mine.clone()
    dist.broadcast(first, src=0)
    equal = torch.tensor([int(torch.equal(mine, first))], device=mine.device)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    return bool(equal.item())


def _ignore(step: Step) -> None:
    pass
