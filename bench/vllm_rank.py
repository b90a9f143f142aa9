"""One rank of `bench_vllm`: a vLLM engine with dummy weights; what it takes, and which tokens it gives.

    python -m bench.vllm_rank JOB.json RANK RESULT.json

Time stamps are the engines' own, of a clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thunderep.testing.processes import gpu_of

_KV_CACHE_BYTES = 4 << 30


class Phase(NamedTuple):
    """Sequences of a rank: how many, how long their prompts are, and how many tokens follow."""

    sequences: int
    prompt: int
    new: int


def engine(job: Mapping[str, Any], sharing: int) -> Any:
    """This rank's engine, one of `sharing` on its GPU; tensors and expert weights are spread over all ranks."""
    from vllm import LLM

    return LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=job["batched_tokens"],
        max_num_seqs=job["sequences"],
        gpu_memory_utilization=0.9 / sharing,
        # vLLM finds out by itself only what a process without others on its GPU can have.
        kv_cache_memory_bytes=None if sharing == 1 else _KV_CACHE_BYTES,
        enable_expert_parallel=True,
        all2all_backend="allgather_reducescatter",
        attention_backend=job["attention"],
        moe_backend=job["experts"],
        disable_custom_all_reduce=True,
        enable_prefix_caching=False,
        enforce_eager=job["eager"],
        enable_dbo=job["micro_batches"],
        disable_log_stats=False,  # with them come the time stamps
        seed=0,
    )


def run(llm: Any, phase: Phase, rank: int, repetition: int) -> dict[str, Any]:
    """Generate greedily from random prompts, the same for one rank and repetition in every run."""
    from vllm import SamplingParams

    generator = random.Random(1000 * repetition + rank)
    prompts = [
        {"prompt_token_ids": [generator.randrange(1000, 150000) for _ in range(phase.prompt)]} for _ in range(phase.sequences)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=phase.new, ignore_eos=True, detokenize=False)
    dist.barrier()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "began": min(output.metrics.queued_ts for output in outputs),
        "prefilled": max(output.metrics.first_token_ts for output in outputs),
        "ended": max(output.metrics.last_token_ts for output in outputs),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def main(job_file: str, rank: int, result_file: str) -> None:
    """Run all phases, each once to warm up."""
    job = json.loads(Path(job_file).read_text())
    ranks = job["ranks"]
    os.environ |= {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(gpu_of(rank, ranks)),
        "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(job["port"]),
    }
    dist.init_process_group("gloo", init_method=f"file://{job_file}.store", rank=rank, world_size=ranks)
    llm = engine(job, -(-ranks // torch.cuda.device_count()))
    results = {}
    for name, numbers in job["phases"].items():
        results[name] = [run(llm, Phase(*numbers), rank, i) for i in range(job["repeats"] + 1)][1:]
    dist.barrier()  # an engine that ends while another runs takes it along
    unfinished = Path(result_file + ".part")
    unfinished.write_text(json.dumps(results))
    unfinished.rename(result_file)  # whoever sees it sees all of it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
