"""What this machine is: GPUs and their links, NUMA, memory, limits and versions, as facts; `diagnosis` judges them.

GPUs are those that CUDA shows, in its order; NVML and /sys are asked about them by PCI address. What a kernel or a
container does not tell is None. What the files mean stands in the Linux kernel's documentation: admin-guide/cgroup-v2,
ABI/testing/sysfs-bus-pci and ABI/testing/sysfs-kernel-iommu_groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from thunderep.runtime import arena, cuda, numa, pcie
from thunderep.runtime.nvml import Link, Nvml
from thunderep.runtime.trial import Trial, run

ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_SHM_DISABLE")
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}  # the number of the system call


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Args:
        device: How the driver describes it.
        link: Its link to the host.
        numa_node: The memory node that it is attached to.
        iommu: "off", or the type of its group: "identity" without translation, "DMA" or "DMA-FQ" with it.
        acs_redirect: Whether a port above it sends what GPUs tell each other up to the host bridge; only root can read that.
        trial: What came of using it.
    """

    device: cuda.Device
    link: Link | None
    numa_node: int | None
    iommu: str | None
    acs_redirect: bool | None
    trial: Trial


@dataclass(frozen=True)
class Numa:
    """Memory nodes.

    Args:
        nodes: Their CPUs.
        cpus: The CPUs that this process may run on.
        denied: The error of a NUMA call, if it is not allowed.
    """

    nodes: dict[int, list[int]]
    cpus: list[int]
    denied: str | None


@dataclass(frozen=True)
class Memory:
    """Host memory, in bytes.

    Args:
        total: What the machine has.
        available: What this process may still take.
        locked_limit: What it may lock (`ulimit -l`); -1: any amount.
        shm_total: The size of /dev/shm.
        shm_free: What is free there.
        memfd: Whether segments need no /dev/shm.
    """

    total: int
    available: int | None
    locked_limit: int
    shm_total: int | None
    shm_free: int | None
    memfd: bool


@dataclass(frozen=True)
class Versions:
    """What is installed; None: not there. `driver_cuda` and `binding_cuda` are the CUDA of the driver and of cuda-python."""

    driver: str | None
    driver_cuda: str | None
    binding_cuda: str | None
    torch: str
    torch_cuda: str | None
    nccl: str | None
    triton: str | None


@dataclass(frozen=True)
class Machine:
    """All that is known.

    Args:
        gpus: What CUDA shows to this process.
        no_gpu: Why that is none, if so.
        hidden: UUIDs of the machine's other GPUs.
        numa: Memory nodes.
        memory: Host memory.
        versions: What is installed.
        wsl: Whether this is the Windows Subsystem for Linux.
        container: Whether this is a container.
        environment: Variables that matter, as far as they are set.
    """

    gpus: list[Gpu]
    no_gpu: str | None
    hidden: list[str]
    numa: Numa
    memory: Memory
    versions: Versions
    wsl: bool
    container: bool
    environment: dict[str, str]


def read(root: Path = Path("/")) -> Machine:
    """Look at this machine, and use each GPU for a moment.

    Args:
        root: Where its proc, sys and dev lie.

    Raises:
        ModuleNotFoundError: nvidia-ml-py or psutil is not installed.
    """
    import psutil

    no_gpu = None
    devices: list[cuda.Device] = []
    with Nvml() as nvml:
        try:
            devices = cuda.devices()
        except cuda.CudaError as error:
            no_gpu = str(error)
        trained: dict[str, list[tuple[int, int]]] = {device.pci_address: [] for device in devices}

        def under_load(device: cuda.Device) -> None:
            if reading := nvml.trained(device.pci_address):
                trained[device.pci_address].append(reading)

        trials = run(devices, under_load)
        links = [nvml.link(address, readings) for address, readings in trained.items()]
        shown = [nvml.uuid(address) for address in trained]
        hidden = [uuid for uuid in nvml.uuids() if uuid not in shown]
        versions = _versions(nvml.driver())
    process = psutil.Process()
    marks = (os.path.exists(root / ".dockerenv"), os.path.exists(root / "run/.containerenv"))
    return Machine(
        gpus=[_gpu(*facts, root) for facts in zip(devices, links, trials, strict=True)],
        no_gpu=no_gpu,
        hidden=hidden,
        numa=Numa(numa.nodes(root), sorted(process.cpu_affinity()), _policy_error()),
        memory=_memory(root, psutil.virtual_memory().total, process.rlimit(psutil.RLIMIT_MEMLOCK)[0]),
        versions=versions,
        wsl="microsoft" in _text(root / "proc/sys/kernel/osrelease").lower(),
        container=any(marks) or "KUBERNETES_SERVICE_HOST" in os.environ,
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def _gpu(device: cuda.Device, link: Link | None, trial: Trial, root: Path) -> Gpu:
    folder = root / "sys/bus/pci/devices" / device.pci_address
    above = folder.resolve().parents  # a device's folder lies in that of the port above it
    if link is not None:
        card, slot = pcie.lanes(folder / "max_link_width") or 0, pcie.lanes(above[0] / "max_link_width")
        link = replace(link, card_width=max(link.card_width, card), slot_width=slot)
    iommu = _text(folder / "iommu_group/type") or None
    with contextlib.suppress(OSError):
        iommu = iommu if os.listdir(root / "sys/class/iommu") else "off"
    redirects = [_acs_redirect(port / "config") for port in above if port.name.count(":") == 2]
    redirect = True if True in redirects else False if False in redirects else None
    return Gpu(device, link, numa.node_of(device.pci_address, root), iommu, redirect, trial)


def _acs_redirect(config: Path) -> bool | None:
    """Whether a port's configuration space has P2P Request Redirect on; None: not readable, or it has no such control."""
    try:
        space = config.read_bytes()
    except OSError:
        return None
    offset = 0x100  # the first extended capability, which holds the offset of the next
    for _ in range(len(space) // 8):
        header = int.from_bytes(space[offset : offset + 4], "little")
        if header & 0xFFFF == 0x000D:  # Access Control Services: capabilities at 4, control at 6
            return bool(int.from_bytes(space[offset + 6 : offset + 8], "little") & 1 << 2)
        offset = header >> 20
    return None


def _policy_error() -> str | None:
    """Why this process may not use NUMA calls, which docker denies without CAP_SYS_NICE; None: it may."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"not known on {platform.machine()}"
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), None, None, None, None, None) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def _memory(root: Path, total: int, locked_limit: int) -> Memory:
    size = free = None
    with contextlib.suppress(OSError):
        space = os.statvfs(root / "dev/shm")
        size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    return Memory(total, arena.available_memory(root), locked_limit, size, free, arena.supports_memfd())


def nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded, which need not be the one that PyTorch was built with; () without NCCL."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ()
    code = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except OSError:  # it is part of PyTorch's own library
        return tuple(torch.cuda.nccl.version())
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def _versions(driver: str | None) -> Versions:
    driver_cuda, binding_cuda = (f"{v // 1000}.{v % 1000 // 10}" if v else None for v in cuda.versions())
    triton = None
    nccl = ".".join(map(str, nccl_version())) or None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
    return Versions(driver, driver_cuda, binding_cuda, torch.__version__, torch.version.cuda, nccl, triton)


def _text(path: Path) -> str:
    """What a file holds; nothing if it is not there or not readable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None
