"""What follows from the facts about a machine: findings, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thunderep.runtime import arena
from thunderep.runtime.chunks import Staging
from thunderep.runtime.cuda import DEFAULT_QUEUES
from thunderep.runtime.plan import most_lanes
from thunderep.runtime.staging import MAX_DEFAULT_STAGING
from thunderep.runtime.topology import Gpu, Machine

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing about a machine.

    Args:
        level: "problem": something will not work, or runs at a fraction of its speed. "note": worth knowing.
        subject: What it is about.
        found: What was found.
        advice: What to do; may be empty.
    """

    level: Level
    subject: str
    found: str
    advice: str = ""


def diagnose(machine: Machine) -> list[Finding]:
    """All findings about a machine."""
    checks = (_gpus, _versions, _links, _trials, _peers, _numa, _iommu, _memory, _shm, _system, _environment)
    return [finding for check in checks for finding in check(machine)]


def _gpus(machine: Machine) -> Iterator[Finding]:
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    others = ", ".join(machine.hidden)
    if not machine.gpus:
        found = f"{machine.no_gpu or 'CUDA shows no GPU'}{setting}"
        if not machine.hidden:
            yield Finding(
                "note", "GPUs", f"none: {found}", "CPU tensors go through shared memory; what needs a GPU is not checked"
            )
            return
        advice = "make nvidia-smi and the driver's libcuda of one version work here"
        if visible is not None:
            advice = f"unset CUDA_VISIBLE_DEVICES, or name some of {others}"
        yield Finding("problem", "GPUs", f"CUDA shows none of {len(machine.hidden)}: {found}", advice)
        return
    for gpu in machine.gpus:
        device = gpu.device
        found = f"{device.name}, {device.uuid}, at {device.pci_address}, {device.copy_engines} copy engines"
        if device.copy_engines < 2:
            yield Finding("note", _name(gpu), found, "it sends and receives in turn: expect half of what links with two carry")
        else:
            yield Finding("ok", _name(gpu), found)
    if len(machine.gpus) == 1:
        yield Finding(
            "note", "GPUs", f"one{setting}", "a rank takes a GPU of its own: with one there is nobody to exchange with"
        )
    if visible is not None and "MIG-" in visible:
        advice = "slices share their card's link and copy engines, and a process sees one slice only"
        yield Finding("note", "GPUs", f"a MIG slice{setting}", advice)
    elif visible is not None and len(names := visible.split(",")) > len(machine.gpus):
        advice = "CUDA ignores a name that it does not know and all after it: correct the list"
        yield Finding("problem", "GPUs", f"CUDA shows {len(machine.gpus)} of the {len(names)} named{setting}", advice)


def _versions(machine: Machine) -> Iterator[Finding]:
    v = machine.versions
    known = {
        "driver": v.driver, "driver's CUDA": v.driver_cuda, "cuda-python": v.binding_cuda, "torch": v.torch,
        "torch's CUDA": v.torch_cuda, "NCCL": v.nccl, "Triton": v.triton,
    }  # fmt: skip
    yield Finding("ok", "versions", ", ".join(f"{name} {version or 'none'}" for name, version in known.items()))
    if _needs_newer(v.binding_cuda, v.driver_cuda):
        older = ", or pip install 'cuda-python<13'" if v.driver_cuda and v.driver_cuda.startswith("12.") else ""
        found = f"cuda-python is for CUDA {v.binding_cuda}, the driver for CUDA {v.driver_cuda}"
        yield Finding("problem", "cuda-python", found, f"update the driver{older}")
    if _needs_newer(v.torch_cuda, v.driver_cuda):
        found = f"torch is for CUDA {v.torch_cuda}, the driver for CUDA {v.driver_cuda}"
        yield Finding("problem", "torch", found, "update the driver, or install torch for the driver's CUDA")
    if v.torch_cuda is None and (machine.gpus or machine.hidden):
        yield Finding("problem", "torch", f"torch {v.torch} has no CUDA", "install a torch that has")


def _needs_newer(version: str | None, driver: str | None) -> bool:
    """Whether a CUDA version is of a later major than the driver's; within a major any driver will do."""
    return version is not None and driver is not None and int(version.split(".")[0]) > int(driver.split(".")[0])


def _links(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.gpus:
        subject, link = f"{_name(gpu)} link", gpu.link
        if link is None:
            yield Finding(
                "note", subject, f"{gpu.device.name}: NVML does not tell", "lspci -vv, as root on the host: LnkCap, LnkSta"
            )
            continue
        slot = f", its slot x{link.slot_width}" if link.slot_width else ""
        found = (
            f"{gpu.device.name} at {gpu.device.pci_address}: PCIe {link.generation} x{link.width} under load;"
            f" the card has PCIe {link.card_generation} x{link.card_width}{slot}"
        )
        if link.width < min(link.card_width, link.slot_width or 1) or link.width * 4 <= link.card_width:
            advice = (
                f"all its rows pass x{link.width}: seat card and riser anew, or use a slot with more lanes (BIOS: bifurcation)"
            )
            yield Finding("problem", subject, found, advice)
        elif link.generation < link.possible_generation:
            advice = f"the board can do PCIe {link.possible_generation}: try without riser; set the slot's speed in the BIOS"
            yield Finding("problem", subject, found, advice)
        elif link.width < link.card_width or link.generation < link.card_generation:
            yield Finding("note", subject, found, "the board gives no more; another slot may")
        else:
            yield Finding("ok", subject, found)


def _trials(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.gpus:
        if gpu.trial.signals == "ok":
            yield Finding("ok", f"{_name(gpu)} signals", "stream memory operations work")
        elif gpu.trial.signals is not None:
            advice = "update the driver; until then transport='collective'"
            yield Finding("problem", f"{_name(gpu)} signals", f"no stream memory operations: {gpu.trial.signals}", advice)
        if gpu.trial.payload == "ok":
            yield Finding("ok", f"{_name(gpu)} payload", "arrives through pinned host memory as it was sent")
        elif gpu.trial.payload is not None:
            advice = "if memory could not be pinned: ulimit -l, free memory; if data differ: IOMMU, riser, memory test"
            yield Finding("problem", f"{_name(gpu)} payload", gpu.trial.payload, advice)


def _peers(machine: Machine) -> Iterator[Finding]:
    pairs = [f"{gpu.device.ordinal} to {peer}" for gpu in machine.gpus for peer in gpu.device.peers]
    if pairs:
        advice = "NCCL over peer access is likely faster between these: transport='collective'"
        yield Finding("note", "peer access", f"GPU {', '.join(pairs)}", advice)
        if any(gpu.acs_redirect for gpu in machine.gpus):
            advice = "peer copies take a detour through the host bridge; the BIOS or setpci may turn it off"
            yield Finding("note", "ACS", "ports above the GPUs redirect peer traffic", advice)
    elif len(machine.gpus) > 1:
        yield Finding("ok", "peer access", "none: rows go through host memory")


def _numa(machine: Machine) -> Iterator[Finding]:
    numa, where = machine.numa, {gpu.device.ordinal: gpu.numa_node for gpu in machine.gpus}
    cpus = f"{len(numa.cpus)} CPUs for this process"
    if len(numa.nodes) < 2:
        nodes = "one node" if numa.nodes else "/sys does not tell the nodes"
        yield Finding("ok" if numa.nodes else "note", "NUMA", f"{nodes}, {cpus}")
    else:
        found = f"{len(numa.nodes)} nodes, {cpus}" + "".join(
            f", GPU {n} on {'an unknown one' if node is None else f'node {node}'}" for n, node in where.items()
        )
        far = [n for n, node in where.items() if node is not None and not set(numa.cpus) & set(numa.nodes.get(node, numa.cpus))]
        if far:
            advice = "start each rank on its GPU's node: numactl --cpunodebind=N --membind=N"
            yield Finding("note", "NUMA", f"{found}; no CPU near GPU {', '.join(map(str, far))}", advice)
        elif len(set(where.values())) > 1:
            yield Finding(
                "note", "NUMA", found, "rows between nodes cross the sockets' link; start each rank on its GPU's node"
            )
        else:
            yield Finding("ok", "NUMA", found)
    if numa.denied and len(numa.nodes) != 1:
        advice = "memory stays where the kernel puts it; in docker: --cap-add SYS_NICE"
        yield Finding("note", "NUMA", f"calls are denied: {numa.denied}", advice)


def _iommu(machine: Machine) -> Iterator[Finding]:
    kinds = {gpu.iommu or "unknown" for gpu in machine.gpus}
    if translated := sorted(kinds - {"off", "identity", "unknown"}):
        advice = "copies are translated, which may cost speed, and CUDA supports no peer access then: boot with iommu=pt"
        yield Finding("note", "IOMMU", f"on for the GPUs: {', '.join(translated)}", advice)
    elif "unknown" in kinds:
        yield Finding("note", "IOMMU", "/sys does not tell", "on the host: ls /sys/class/iommu, empty if it is off")
    elif kinds:
        yield Finding("ok", "IOMMU", "off" if kinds == {"off"} else "on, GPUs pass untranslated")


def _memory(machine: Machine) -> Iterator[Finding]:
    memory, needed = machine.memory, _needed(machine)
    found = f"{_mib(memory.total)} in all, {_mib(memory.available)} available; a Buffer takes up to {_mib(needed)} unasked"
    if memory.available is not None and memory.available < needed:
        yield Finding("problem", "memory", found, "make room, raise the container's limit, or lower staging_bytes")
    else:
        yield Finding("ok", "memory", found)
    if machine.gpus and 0 <= memory.locked_limit < needed:
        advice = "the driver may not mind; if memory cannot be pinned: ulimit -l unlimited, in docker --ulimit memlock=-1"
        yield Finding("note", "locked memory", f"limited to {_mib(memory.locked_limit)}", advice)


def _shm(machine: Machine) -> Iterator[Finding]:
    memory, needed = machine.memory, _needed(machine)
    found = f"/dev/shm has {_mib(memory.shm_total)}, {_mib(memory.shm_free)} free"
    short = memory.shm_free is None or memory.shm_free < needed
    advice = "in docker: --shm-size=1g or --ipc=host"
    if memory.memfd and short:
        yield Finding(
            "note", "shared memory", f"{found}: enough, ThunderEP uses memfd", f"NCCL and DataLoader may want more; {advice}"
        )
    elif memory.memfd:
        yield Finding("ok", "shared memory", f"memfd; {found}")
    elif short:
        yield Finding("problem", "shared memory", f"no memfd; {found}; a Buffer needs up to {_mib(needed)}", advice)
    else:
        yield Finding("ok", "shared memory", f"no memfd; {found}")


def _system(machine: Machine) -> Iterator[Finding]:
    if machine.wsl:
        advice = "Windows limits pinned memory, and NVML answers less; if something fails here, try Linux itself"
        yield Finding("note", "system", "Windows Subsystem for Linux", advice)
    else:
        yield Finding("ok", "system", "a container" if machine.container else "no container")


def _environment(machine: Machine) -> Iterator[Finding]:
    said = machine.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    queues = int(said) if said.isdecimal() else DEFAULT_QUEUES
    if queues <= most_lanes(max(2, len(machine.gpus))):
        advice = "set 32: with fewer queues than streams that wait, a wait holds up copies and kernels that need not wait"
        yield Finding("note", "environment", f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}", advice)
    if machine.environment.get("NCCL_SHM_DISABLE") == "1":
        advice = "unset it: without peer access NCCL then goes through the network"
        yield Finding("note", "environment", "NCCL_SHM_DISABLE is 1", advice)


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.device.ordinal}"


def _needed(machine: Machine) -> int:
    """Bytes in the segment of a Buffer with the most staging that is taken unasked: one rank a GPU, and at least two."""
    num_ranks = max(2, len(machine.gpus))
    return arena.Layout(num_ranks, Staging.of(num_ranks, MAX_DEFAULT_STAGING)).nbytes


def _mib(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes / 2**20:,.0f} MiB"
