"""How fast does vLLM prefill and decode with ThunderEP, beside vLLM as it is, and do both give the same tokens?

    NCCL_P2P_DISABLE=1 python -m bench.bench_vllm --model qwen3-30b-a3b --ranks 2 --transport direct

Data and expert parallelism, one GPU a rank; published model shapes with dummy weights, so nothing is downloaded. Needs vLLM
and an installed ThunderEP: vLLM finds plugins only among installed packages. It has not run on several GPUs yet.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from bench.report import console
from bench.vllm_rank import Phase
from thunderep.integrations.vllm import SETTING

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_models.json").read_text())
PHASES = {"prefill": Phase(16, 1024, 1), "decode 64": Phase(64, 32, 64), "decode 256": Phase(256, 32, 64)}
STOCK, OURS = "vLLM", "with ThunderEP"
_PORTS = 16

Results = Sequence[dict[str, list[dict[str, Any]]]]
"""By rank: for each phase its repetitions, see `vllm_rank.run`."""


def seconds(results: Results, phase: str) -> float:
    """Median time until the last rank ends: of prefill since the first one began, of decoding since the last first token."""
    times: list[float] = []
    for runs in zip(*(rank[phase] for rank in results), strict=True):
        prefill = phase.startswith("prefill")
        start = min(run["began"] for run in runs) if prefill else max(run["prefilled"] for run in runs)
        times.append(max(run["ended"] for run in runs) - start)
    return statistics.median(times)


def summarise(stock: Results, ours: Results) -> list[dict[str, Any]]:
    """For each phase tokens per second of all ranks, their ratio, and how many sequences have the same tokens."""
    rows = []
    for name in stock[0]:
        prompt, new = PHASES[name].prompt, PHASES[name].new
        a, b = ([tokens for rank in results for run in rank[name] for tokens in run["tokens"]] for results in (stock, ours))
        count = len(a) // len(stock[0][name]) * (prompt if name.startswith("prefill") else new - 1)
        speeds = [count / seconds(results, name) for results in (stock, ours)]
        rows.append({
            "phase": name, STOCK: round(speeds[0]), OURS: round(speeds[1]), "ratio": round(speeds[1] / speeds[0], 3),
            "identical": sum(x == y for x, y in zip(a, b, strict=True)), "sequences": len(a),
        })  # fmt: skip
    return rows


def write_model(model: str, layers: int | None, folder: Path) -> str:
    """A folder with the model's configuration, cut to `layers`."""
    config = dict(MODELS[model])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def free_port() -> int:
    """A port such that several after it are free as well: vLLM counts upward from the one that it is given."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            for following in range(port + 1, port + _PORTS):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", following))
            return port


def launch(job: dict[str, Any], setting: str, timeout: float) -> Results:
    """Run a job on all ranks, in processes of its own. Raises RuntimeError if a rank fails or they take too long."""
    with tempfile.TemporaryDirectory(prefix="thunderep-bench-") as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job | {"port": free_port()}))
        outs = [Path(folder, f"{rank}.json") for rank in range(job["ranks"])]
        environment = os.environ | {SETTING: setting, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        commands = [[sys.executable, "-m", "bench.vllm_rank", str(file), str(r), str(out)] for r, out in enumerate(outs)]
        # Sessions of their own, so that what an engine started can be ended with it.
        processes = [subprocess.Popen(command, env=environment, start_new_session=True) for command in commands]
        try:
            end = time.monotonic() + timeout
            while not all(out.exists() for out in outs):
                failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
                if failed or time.monotonic() > end:
                    raise RuntimeError(f"ranks {failed} failed" if failed else f"not done after {timeout:g} s")
                time.sleep(0.2)
            return [json.loads(out.read_text()) for out in outs]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Repeatable; all if left out: {', '.join(MODELS)}.")] = None,
    layers: Annotated[int | None, typer.Option(min=2, help="Cut models to so many; if left out, all.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="One GPU each.")] = 2,
    transport: Annotated[str, typer.Option(help=f"What {SETTING} is set to.")] = "1",
    micro_batches: Annotated[
        bool, typer.Option("--micro-batches", help="Have ThunderEP overlap two of them, which vLLM as it is cannot do.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="No compilation, no CUDA graphs.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Of each phase, after one to warm up; the median counts.")] = 3,
    attention: Annotated[str, typer.Option(help="vLLM's attention back end.")] = "TRITON_ATTN",
    experts: Annotated[str, typer.Option(help="vLLM's expert back end.")] = "triton",
    batched_tokens: Annotated[int, typer.Option(min=1024, help="In a step of a rank, at most.")] = 16384,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a model, with or without.")] = 1200,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("bench/results"),
) -> None:
    """Measure vLLM's prefill and decoding with ThunderEP and without; print a table, write JSON."""
    unknown = sorted(set(model or ()) - set(MODELS))
    if unknown:
        raise typer.BadParameter(f"got {', '.join(unknown)}; expected {', '.join(MODELS)}", param_hint="--model")
    if importlib.util.find_spec("vllm") is None:
        raise typer.BadParameter("vLLM is not installed")
    if "thunderep" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise typer.BadParameter("vLLM would not find ThunderEP; install it, for example with: pip install --no-deps .")
    shape = {"ranks": ranks, "eager": eager, "repeats": repeats, "attention": attention, "experts": experts}
    job: dict[str, Any] = shape | {"batched_tokens": batched_tokens, "sequences": 256, "phases": PHASES}
    facts = shape | {"transport": transport, "micro_batches": micro_batches, "layers": layers}
    facts |= {"NCCL_P2P_DISABLE": os.environ.get("NCCL_P2P_DISABLE", "")}
    facts |= {"vllm": importlib.metadata.version("vllm"), "torch": importlib.metadata.version("torch")}
    table = Table("model", "phase", f"{STOCK}, tokens/s", f"{OURS}, tokens/s", "ratio", "same tokens", title=f"{ranks} ranks")
    rows = []
    for name in model or MODELS:
        with tempfile.TemporaryDirectory(prefix="thunderep-model-") as folder:
            job["model"] = write_model(name, layers, Path(folder, name))
            stock = launch(job | {"micro_batches": False}, "0", timeout)
            ours = launch(job | {"micro_batches": micro_batches}, transport, timeout)
        for row in summarise(stock, ours):
            rows.append({"model": name} | row)
            cells = (row["phase"], row[STOCK], row[OURS], row["ratio"], f"{row['identical']} of {row['sequences']}")
            table.add_row(name, *map(str, cells))
    console().print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"vllm-{ranks}-ranks.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
