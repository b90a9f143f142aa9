"""vLLM (0.26 or newer) over ThunderEP: a plugin that vLLM finds by itself, on where the environment says so.

    THUNDEREP_VLLM=1 vllm serve Qwen/Qwen3-30B-A3B --data-parallel-size 4 --enable-expert-parallel

vLLM's back end for expert parallelism stays "allgather_reducescatter", its default; what that does is done by ThunderEP, and so
are the dense collectives of tensor parallelism on GPUs.
"""

from __future__ import annotations

import functools
import os
from typing import get_args

from thunderep.buffer import TransportName

SETTING = "THUNDEREP_VLLM"
"""Environment variable: "1" or a transport's name switches ThunderEP on; "0" or nothing leaves vLLM as it is."""


def transport() -> TransportName | None:
    """The transport that the environment asks for, "auto" if it names none; None where ThunderEP is off.

    Raises:
        ValueError: The setting is none of what it may be.
    """
    setting = os.environ.get(SETTING, "")
    names: tuple[TransportName, ...] = get_args(TransportName)
    known: dict[str, TransportName | None] = {"": None, "0": None, "1": "auto", **{name: name for name in names}}
    if setting not in known:
        raise ValueError(f"{SETTING}: got {setting!r}, expected 0, 1 or one of {', '.join(names)}")
    return known[setting]


def register() -> None:
    """Have vLLM move tensors with ThunderEP, if the environment asks for it. vLLM calls this in each of its processes.

    Raises:
        ValueError: As `transport`.
    """
    if transport() is None:
        return
    from vllm.distributed import stateless_coordinator
    from vllm.distributed.device_communicators import all2all, cuda_communicator

    from thunderep.integrations.vllm_communicator import ThunderEPCommunicator
    from thunderep.integrations.vllm_manager import ThunderEPManager

    # These names are looked up when groups are made, which is after plugins were loaded.
    all2all.AgRsAll2AllManager = ThunderEPManager
    cuda_communicator.CudaCommunicator = ThunderEPCommunicator
    stateless_coordinator.CudaCommunicator = ThunderEPCommunicator  # it insists that both are one
    _allow_micro_batches()


def install_layers() -> None:
    """Have layers begin to combine before their shared expert, rather than after it. For processes that run layers."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

    from thunderep.integrations.vllm_layers import ThunderEPPrepareAndFinalize

    naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular = ThunderEPPrepareAndFinalize


def _allow_micro_batches() -> None:
    """Have vLLM's check of its configuration pass micro-batches (--enable-dbo) over ThunderEP, which can run them."""
    from vllm.config import VllmConfig

    check = VllmConfig.__post_init__
    if check.__module__ == __name__:
        return

    @functools.wraps(check, assigned=())
    def __post_init__(self: VllmConfig) -> None:
        parallel = self.parallel_config
        if not parallel.use_ubatching or parallel.all2all_backend != "allgather_reducescatter":
            check(self)  # which may choose another back end
            return
        parallel.all2all_backend = "nixl_ep"  # one of those that the check lets pass, and that it treats like any other
        try:
            check(self)
        finally:
            parallel.all2all_backend = "allgather_reducescatter"

    VllmConfig.__post_init__ = __post_init__
