"""The demo from beginning to end."""

from __future__ import annotations

import contextlib
import json

import torch.distributed as dist
from rich.console import Console

from thunderep.demo.config import DemoConfig
from thunderep.demo.launch import RankError, launch
from thunderep.demo.model import Model
from thunderep.demo.picture import draw
from thunderep.demo.progress import Display
from thunderep.demo.report import conclude, introduce
from thunderep.demo.result import Result
from thunderep.demo.train import Step
from thunderep.demo.worker import Outcome, Reference, rank_job, reference_job


def run(config: DemoConfig, console: Console) -> Result:
    """Train on many ranks and in one process, and report.

    Raises:
        RankError: A process failed.
        OSError: The output folder cannot be written.
    """
    config.checkpoint(0).parent.mkdir(parents=True, exist_ok=True)
    introduce(console, config, sum(p.numel() for p in Model(config.model, config.seed).parameters()))
    with Display(console, config.batch * config.model.window) as display:
        steps, outcomes = _train_parallel(config, display)
        reference = _train_alone(config, display)
    result = Result(config, steps, outcomes, *reference)
    conclude(console, result)
    (config.out / "result.json").write_text(json.dumps(result.as_json()) + "\n")
    draw(result, config.out / "demo.png")
    console.print(f"Picture: [bold]{config.out / 'demo.png'}[/]. Figures: {config.out / 'result.json'}.", soft_wrap=True)
    return result


def _train_parallel(config: DemoConfig, display: Display) -> tuple[list[Step], list[Outcome]]:
    who = f"{config.ranks} rank{'s' * (config.ranks > 1)}"
    steps: list[Step] = []
    outcomes: dict[int, Outcome] = {}
    # Held here while the ranks meet: a port that no other program can take before them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    display.begin(f"{who}: starting", config.steps)
    messages = launch(rank_job, config.ranks, (config, store.port), config.out / "logs")
    with contextlib.closing(messages):
        for rank, message in messages:
            if isinstance(message, Outcome):
                outcomes[rank] = message
            elif isinstance(message, Step):
                if not steps:
                    display.rename(f"{who}: training")
                steps.append(message)
                display.step(message)
            elif rank == 0:
                (display.begin if steps else display.rename)(f"{who}: {message}")
    return steps, [outcomes[rank] for rank in range(config.ranks)]


def _train_alone(config: DemoConfig, display: Display) -> tuple[list[Step], Reference]:
    steps: list[Step] = []
    display.begin("one process: training", config.steps)
    with contextlib.closing(launch(reference_job, 1, config, config.out / "logs" / "one-process")) as messages:
        for _, message in messages:
            if isinstance(message, Reference):
                return steps, message
            steps.append(message)
            display.step(message)
    raise RankError("the one process ended without a result")
