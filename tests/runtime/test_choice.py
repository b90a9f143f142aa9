"""Which transport a group gets, by what its ranks say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from thunderep.runtime import cuda
from thunderep.runtime.choice import choose, gpu_facts


def answers(*reach: tuple[int, ...], hosts: str = "") -> list[dict[str, Any]]:
    """What ranks say whose GPUs reach those of the named ranks."""
    return [
        {"host": hosts[rank : rank + 1], "gpu": {"uuid": str(rank), "peers": [str(peer) for peer in peers]}}
        for rank, peers in enumerate(reach)
    ]


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        (answers((), ()), "auto"),
        (answers((1,), (0,)), "collective"),
        (answers((1, 2), (0, 2), (0,)), "auto"),
        (answers((1,), ()), "auto"),
        (answers((), (), hosts="ab"), "collective"),
        (answers(()), "auto"),
        (answers(*[()] * 31), "auto"),
        (answers(*[()] * 32), "collective"),
        ([{"host": "a"}, {"host": "a"}], "shm"),
        ([{"host": "a"}, {"host": "b"}], "collective"),
        ([{"host": "a", "gpu": {"uuid": "the same", "peers": []}}] * 2, "auto"),
    ],
    ids=[
        "host memory",
        "peer access",
        "a pair without",
        "one way",
        "two hosts",
        "one rank",
        "31",
        "32",
        "CPU",
        "CPUs",
        "one GPU",
    ],
)
def test_what_auto_becomes(said: list[dict[str, Any]], chosen: str) -> None:
    assert choose("auto", said) == chosen


@pytest.mark.parametrize("transport", ["shm", "dma", "direct"])
def test_one_host_is_asked_for(transport: str) -> None:
    with pytest.raises(RuntimeError, match=f"transport: '{transport}' needs all ranks on one host .*rank 1 is on b"):
        choose(transport, answers((), (), hosts="ab"))


@pytest.mark.parametrize(
    ("backend", "disable", "peers"),
    [("cuda:nccl", None, ["GPU-b"]), ("cuda:nccl", "0", ["GPU-b"]), ("cuda:nccl", "1", []), ("cuda:gloo", None, [])],
)
def test_peer_access_counts_where_nccl_may_use_it(
    backend: str, disable: str | None, peers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [cuda.Device(0, "H200", "GPU-a", "", 3, (1,)), cuda.Device(1, "H200", "GPU-b", "", 3, (0,))]
    monkeypatch.setattr(cuda, "devices", lambda: found)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if disable is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", disable)
    facts = gpu_facts(torch.device("cuda", 0), None)  # type: ignore[arg-type]
    assert facts == {"name": "H200", "uuid": "GPU-a", "node": None, "gbps": None, "peers": peers}
