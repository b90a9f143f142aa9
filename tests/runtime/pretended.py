"""A Linux machine with GPUs that are not here: its files, driver and NVML, and what `thunderep doctor` finds on it."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thunderep.runtime.diagnosis import Finding, diagnose
from thunderep.runtime.topology import Machine


@dataclass(eq=False)
class Card:
    """A card in a slot. Its link is at PCIe 1 while it has nothing to copy."""

    address: str = "0000:17:00.0"
    name: str = "NVIDIA GeForce RTX 4090"
    generation: int = 4
    width: int = 16
    possible_generation: int = 4
    card_generation: int = 4
    slot_width: int = 16
    engines: int = 2
    peers: bool = False
    iommu: str | None = None
    node: int = 0
    acs: bool = False

    @property
    def uuid(self) -> uuid.UUID:
        return uuid.uuid5(uuid.NAMESPACE_OID, self.address)


class Driver(SimpleNamespace):
    """CUDA's driver, in whose order cards come, with ordinals as handles."""

    CUDA_VERSION = 12080
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT=40)
    CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_32=1, CU_STREAM_MEM_OP_WRITE_VALUE_32=2)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=SimpleNamespace(value=1))
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=SimpleNamespace(value=0))
    cuuint32_t = staticmethod(int)

    def __init__(self, cards: list[Card], **functions: Any) -> None:
        super().__init__(**functions)
        self.cards = cards
        self.contexts: list[int] = []
        self.memory: dict[int, Any] = {}
        self.busy: Card | None = None

    def CUstreamBatchMemOpParams(self) -> SimpleNamespace:
        return SimpleNamespace(waitValue=SimpleNamespace(), writeValue=SimpleNamespace())

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        names = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE", 801: b"CUDA_ERROR_NOT_SUPPORTED"}
        return 0, names[code]

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 12040

    def cuInit(self, flags: int) -> tuple[int]:
        return (0 if self.cards else 100,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, len(self.cards)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, self.cards[device].name.encode().ljust(length, b"\0")

    def cuDeviceGetUuid(self, device: int) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(bytes=self.cards[device].uuid.bytes)

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, self.cards[device].address.upper().encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, self.cards[device].engines

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[int, int]:
        return 0, int(self.cards[device].peers)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
        return (0,)

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.contexts.pop()

    def cuCtxSynchronize(self) -> tuple[int]:
        self.busy = None
        return (0,)

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        memory = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[int]:
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address

    def cuStreamBatchMemOp(self, stream: int, count: int, operations: list[Any], flags: int) -> tuple[int]:
        return (0,)

    def cuMemcpyAsync(self, dst: int, src: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memmove(dst, src, nbytes)
        self.busy = self.cards[self.contexts[-1]]
        return (0,)


class Nvml(SimpleNamespace):
    """NVML, in whose order cards come; a card is its own handle."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, cards: list[Card], driver: Driver) -> None:
        def find(address: str) -> Card:
            for card in cards:
                if card.address == address:
                    return card
            raise self.NVMLError(address)

        super().__init__(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "550.54.14",
            nvmlDeviceGetCount=lambda: len(cards),
            nvmlDeviceGetHandleByIndex=lambda index: cards[index],
            nvmlDeviceGetHandleByPciBusId=find,
            nvmlDeviceGetUUID=lambda card: f"GPU-{card.uuid}",
            nvmlDeviceGetCurrPcieLinkGeneration=lambda card: card.generation if driver.busy == card else 1,
            nvmlDeviceGetCurrPcieLinkWidth=lambda card: card.width,
            nvmlDeviceGetMaxPcieLinkGeneration=lambda card: card.possible_generation,
            nvmlDeviceGetGpuMaxPcieLinkGeneration=lambda card: card.card_generation,
            nvmlDeviceGetMaxPcieLinkWidth=lambda card: min(16, card.slot_width),
        )


def write(path: Path, text: str | bytes | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else str(text).encode())


def build(root: Path, cards: list[Card]) -> None:
    """The files of a Linux machine with these cards, each under a port of its own."""
    write(root / "proc/sys/kernel/osrelease", "6.8.0-45-generic")
    write(root / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    write(root / "sys/devices/system/node/node0/cpulist", "0-3,8\n")
    for name in ("dev/shm", "sys/class/iommu", "sys/bus/pci/devices"):
        (root / name).mkdir(parents=True)
    for number, card in enumerate(cards):
        port = root / "sys/devices/pci0000:00" / f"0000:00:{number:02x}.0"
        folder = port / card.address
        control = (0x0D | 1 << 16 | 0 << 20).to_bytes(4, "little") + bytes([0, 0, 4 * card.acs, 0])
        write(port / "config", bytes(0x100) + (0x01 | 1 << 16 | 0x140 << 20).to_bytes(4, "little") + bytes(0x3C) + control)
        write(port / "max_link_width", card.slot_width)
        write(folder / "max_link_width", 16)
        write(folder / "numa_node", card.node)
        if card.iommu:
            write(root / "sys/class/iommu/dmar0/type", "")
            write(folder / "iommu_group/type", card.iommu)
        (root / "sys/bus/pci/devices" / card.address).symlink_to(folder)


Install = Callable[..., Driver]


def found(machine: Machine, subject: str) -> Finding:
    """The one finding, or the one that is not ok, about a subject."""
    about = [finding for finding in diagnose(machine) if finding.subject == subject]
    worse = [finding for finding in about if finding.level != "ok"]
    assert len(worse or about) == 1, about
    return (worse or about)[0]


def problems(machine: Machine) -> list[str]:
    return [finding.subject for finding in diagnose(machine) if finding.level == "problem"]


TWO = (Card(), Card("0000:c1:00.0"))
