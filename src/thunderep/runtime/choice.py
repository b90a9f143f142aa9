"""Which transport a group gets: what each rank says of itself, and what all ranks then decide alike."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thunderep.runtime import cuda, numa, pcie, window

_log = logging.getLogger(__name__)

MAX_RANKS = dict.fromkeys(("dma", "direct", "auto"), window.MAX_RANKS)
"""Ranks of one host that a transport of CUDA tensors takes at most."""


def gpu_facts(device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
    """What the ranks must know of this rank's GPU.

    Returns:
        "name", "uuid"; "node": the memory node that it is attached to; "gbps": what its link carries, or None; "peers": the
        UUIDs of the GPUs that NCCL reaches from it without host memory. What this process does not see counts as out of reach,
        and so does everything where NCCL is told not to, or another back end moves CUDA tensors.
    """
    try:
        found = cuda.devices()
        mine = found[device.index]
    except (cuda.CudaError, IndexError):  # what uses the GPU next says what is wrong
        return {"name": "", "uuid": None, "node": None, "gbps": None, "peers": []}
    nccl = "nccl" in str(dist.get_backend_config(group)) and os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0")
    peers = [found[ordinal].uuid for ordinal in mine.peers] if nccl else []
    node, gbps = numa.node_of(mine.pci_address), pcie.one_way_gbps(mine.pci_address)
    return {"name": mine.name, "uuid": mine.uuid, "node": node, "gbps": gbps, "peers": peers}


def choose(transport: str, answers: Sequence[Mapping[str, Any]]) -> str:
    """The transport to connect: "auto" only for CUDA tensors of which kernels or copy engines move each call.

    Args:
        transport: What was asked for.
        answers: One a rank: its "host"; for CUDA tensors its "gpu", as `gpu_facts` has it.

    Raises:
        RuntimeError: The transport is for one host, and these are several; each rank's is listed.
    """
    hosts = [answer["host"] for answer in answers]
    one_host = all(host == hosts[0] for host in hosts)
    if transport in ("shm", "dma", "direct") and not one_host:
        raise RuntimeError(
            f"transport: {transport!r} needs all ranks on one host and in one process namespace; "
            + ", ".join(f"rank {rank} is on {host}" for rank, host in enumerate(hosts))
        )
    if transport != "auto":
        return transport
    reason = _why_collective(answers) if one_host else "ranks are on several hosts"
    if reason:
        _log.info("'auto' is 'collective': %s", reason)
        return "collective"
    return "auto" if "gpu" in answers[0] else "shm"


def _why_collective(answers: Sequence[Mapping[str, Any]]) -> str:
    """Why ranks of one host had better leave their rows to torch.distributed; empty: they had not."""
    if "gpu" not in answers[0]:
        return ""
    gpus = [answer["gpu"] for answer in answers]
    if len(gpus) > MAX_RANKS["auto"]:
        return f"these are more than {MAX_RANKS['auto']} ranks"
    pairs = list(itertools.permutations(gpus, 2))
    if pairs and all(other["uuid"] in gpu["peers"] for gpu, other in pairs):
        return "NCCL reaches every GPU from every other without host memory"
    return ""
