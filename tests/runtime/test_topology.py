"""What `thunderep doctor` finds. Driver and NVML are stand-ins: the hardware is not here. The driver's copies are real."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thunderep.runtime import cuda, topology, trial
from thunderep.runtime.diagnosis import Finding, diagnose
from thunderep.runtime.topology import Machine

pytest.importorskip("psutil")
pytest.importorskip("pynvml")

MIB = 1 << 20


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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts cards into the machine, of which CUDA shows `visible`, by default all, in another order than NVML.

    The driver's functions may be replaced.
    """
    monkeypatch.setattr(trial, "_ROUNDS", 2)
    monkeypatch.setattr(topology, "_policy_error", lambda: None)
    for name in (*topology.ENVIRONMENT, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)

    def put(*cards: Card, visible: list[Card] | None = None, **functions: Any) -> Driver:
        build(tmp_path, list(cards))
        driver = Driver(list(cards) if visible is None else visible, **functions)
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(list(reversed(cards)), driver))
        monkeypatch.setattr("torch.version.cuda", "12.8")
        return driver

    return put


def found(machine: Machine, subject: str) -> Finding:
    """The one finding, or the one that is not ok, about a subject."""
    about = [finding for finding in diagnose(machine) if finding.subject == subject]
    worse = [finding for finding in about if finding.level != "ok"]
    assert len(worse or about) == 1, about
    return (worse or about)[0]


def problems(machine: Machine) -> list[str]:
    return [finding.subject for finding in diagnose(machine) if finding.level == "problem"]


TWO = (Card(), Card("0000:c1:00.0"))


def test_two_good_cards_are_no_problem(install: Install, tmp_path: Path) -> None:
    driver = install(*TWO)
    machine = topology.read(tmp_path)
    assert problems(machine) == []
    assert [gpu.trial for gpu in machine.gpus] == [trial.Trial("ok", "ok")] * 2
    assert found(machine, "GPU 1 link").level == "ok"
    assert found(machine, "peer access").found.startswith("none")
    assert (driver.contexts, driver.memory) == ([], {})


def test_x4_link_of_an_x16_card_is_a_problem(install: Install, tmp_path: Path) -> None:
    install(Card(), Card("0000:c1:00.0", "NVIDIA GeForce RTX 3090", width=4, slot_width=4))
    machine = topology.read(tmp_path)
    assert problems(machine) == ["GPU 1 link"]
    finding = found(machine, "GPU 1 link")
    assert "RTX 3090 at 0000:c1:00.0: PCIe 4 x4 under load; the card has PCIe 4 x16, its slot x4" in finding.found
    assert "slot with more lanes" in finding.advice


@pytest.mark.parametrize(
    ("card", "level", "advice"),
    [
        (Card(width=8, slot_width=8), "note", "the board gives no more"),
        (Card(width=8, slot_width=16), "problem", "seat card and riser anew"),
        (Card(generation=3), "problem", "the board can do PCIe 4"),
        (Card(generation=3, possible_generation=3), "note", "the board gives no more"),
        (Card(slot_width=255), "ok", ""),  # what Linux writes for unknown
    ],
)
def test_links_below_what_card_or_slot_can_do(install: Install, tmp_path: Path, card: Card, level: str, advice: str) -> None:
    install(card)
    finding = found(topology.read(tmp_path), "GPU 0 link")
    assert (finding.level, advice in finding.advice) == (level, True), finding


def test_links_belong_to_their_cards_whatever_nvmls_order(install: Install, tmp_path: Path) -> None:
    cards = [Card(f"0000:{bus}:00.0", width=width) for bus, width in (("17", 4), ("2a", 8), ("c1", 16))]
    install(*cards)
    machine = topology.read(tmp_path)
    assert [gpu.device.uuid for gpu in machine.gpus] == [f"GPU-{card.uuid}" for card in cards]
    assert [gpu.link.width for gpu in machine.gpus if gpu.link] == [4, 8, 16]


def test_uuid_in_cuda_visible_devices(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Card(width=4), Card("0000:c1:00.0")
    install(first, second, visible=[second])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{second.uuid}")
    machine = topology.read(tmp_path)
    assert problems(machine) == []
    assert machine.hidden == [f"GPU-{first.uuid}"]
    assert [gpu.device.uuid for gpu in machine.gpus] == [f"GPU-{second.uuid}"]


def test_cuda_visible_devices_that_hides_all_cards(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(*TWO, visible=[])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0000")
    finding = found(topology.read(tmp_path), "GPUs")
    assert finding.level == "problem"
    assert "CUDA shows none of 2: cuInit failed: CUDA_ERROR_NO_DEVICE" in finding.found
    assert "'GPU-0000'" in finding.found
    assert all(str(card.uuid) in finding.advice for card in TWO)


def test_cuda_visible_devices_with_a_wrong_name(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(*TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,7")
    assert "CUDA shows 2 of the 3 named" in found(topology.read(tmp_path), "GPUs").found


def test_mig_slice(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(name="NVIDIA H100")
    install(card)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3f0e")
    machine = topology.read(tmp_path)
    notes = [finding.found for finding in diagnose(machine) if finding.subject == "GPUs"]
    assert any("a MIG slice" in note for note in notes)
    assert machine.gpus[0].link is not None
    assert (problems(machine), machine.hidden) == ([], [])


def test_no_driver(install: Install, tmp_path: Path) -> None:
    def absent(*_: object) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    install(visible=[], cuInit=absent, cuDriverGetVersion=absent)
    machine = topology.read(tmp_path)
    assert problems(machine) == []
    assert found(machine, "GPUs").level == "note"
    assert "none: cuInit: libcuda.so.1 not found" in found(machine, "GPUs").found
    assert found(machine, "memory").level == "ok"
    assert machine.versions.binding_cuda == "12.8"


def test_no_stream_memory_operations(install: Install, tmp_path: Path) -> None:
    install(Card(), cuStreamBatchMemOp=lambda *_: (801,))
    finding = found(topology.read(tmp_path), "GPU 0 signals")
    assert finding.level == "problem"
    assert "CUDA_ERROR_NOT_SUPPORTED" in finding.found
    assert "transport='collective'" in finding.advice


def test_payload_that_arrives_changed(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(*TWO)
    copy = driver.cuMemcpyAsync

    def faulty(dst: int, src: int, nbytes: int, stream: int) -> tuple[int]:
        copy(dst, src, nbytes, stream)
        if driver.busy is TWO[1]:
            last = ctypes.c_uint8.from_address(dst + nbytes - 1)
            last.value = 128
        return (0,)

    monkeypatch.setattr(driver, "cuMemcpyAsync", faulty)
    monkeypatch.setattr("os.urandom", bytes)
    machine = topology.read(tmp_path)
    assert [gpu.trial.payload for gpu in machine.gpus] == [
        f"what arrived at GPU {target} is not what was sent" for target in (1, 0)
    ]
    assert problems(machine) == ["GPU 0 payload", "GPU 1 payload"]


def test_memory_that_cannot_be_pinned(install: Install, tmp_path: Path) -> None:
    install(Card(), cuMemHostRegister=lambda *_: (2,))
    machine = topology.read(tmp_path)
    assert problems(machine) == ["GPU 0 payload"]
    assert "bytes; see ulimit -l and free memory) failed: CUDA_ERROR_OUT_OF_MEMORY" in found(machine, "GPU 0 payload").found


def test_cuda_python_for_a_newer_driver(install: Install, tmp_path: Path) -> None:
    install(Card(), CUDA_VERSION=13000)
    finding = found(topology.read(tmp_path), "cuda-python")
    assert (finding.level, finding.found) == ("problem", "cuda-python is for CUDA 13.0, the driver for CUDA 12.4")
    assert finding.advice == "update the driver, or pip install 'cuda-python<13'"


def test_torch_for_a_newer_driver_or_none(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Card())
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "torch is for CUDA 13.0" in found(topology.read(tmp_path), "torch").found
    monkeypatch.setattr("torch.version.cuda", None)
    assert "has no CUDA" in found(topology.read(tmp_path), "torch").found


def test_peer_access_is_told_by_pair_and_acs_with_it(install: Install, tmp_path: Path) -> None:
    install(Card(peers=True, acs=True), Card("0000:c1:00.0"))
    machine = topology.read(tmp_path)
    assert found(machine, "peer access").found == "GPU 0 to 1"
    assert [gpu.acs_redirect for gpu in machine.gpus] == [True, False]
    assert found(machine, "ACS").level == "note"


def test_one_copy_engine(install: Install, tmp_path: Path) -> None:
    install(Card(engines=1))
    assert found(topology.read(tmp_path), "GPU 0").level == "note"


@pytest.mark.parametrize(
    ("kind", "level", "text"),
    [(None, "ok", "off"), ("identity", "ok", "untranslated"), ("DMA", "note", "DMA"), ("DMA-FQ", "note", "DMA-FQ")],
)
def test_iommu(install: Install, tmp_path: Path, kind: str | None, level: str, text: str) -> None:
    install(Card(iommu=kind))
    finding = found(topology.read(tmp_path), "IOMMU")
    assert (finding.level, text in finding.found) == (level, True), finding


def test_what_a_container_hides_is_a_note(install: Install, tmp_path: Path) -> None:
    install(Card())
    empty = tmp_path / "empty"
    (empty / "sys/bus/pci/devices/0000:17:00.0/numa_node").mkdir(parents=True)  # cannot be read as a file
    machine = topology.read(empty)
    assert problems(machine) == []
    assert machine.gpus[0].numa_node is None
    assert {found(machine, subject).level for subject in ("NUMA", "IOMMU", "shared memory")} == {"note"}


def test_nvml_that_answers_nothing(install: Install, tmp_path: Path) -> None:
    install(Card())
    nvml: Any = sys.modules["pynvml"]

    def fails() -> None:
        raise nvml.NVMLError("not supported")

    nvml.nvmlInit = fails
    machine = topology.read(tmp_path)
    assert found(machine, "GPU 0 link").level == "note"
    assert problems(machine) == []


DENY = """
from tests.runtime.seccomp import deny
from thunderep.runtime import topology
number = topology._GET_MEMPOLICY[topology.platform.machine()]
print(topology._policy_error() if deny(number) else "no seccomp")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="NUMA calls are Linux's")
def test_numa_call_that_docker_denies_is_a_note(install: Install, tmp_path: Path) -> None:
    answer = subprocess.run([sys.executable, "-c", DENY], capture_output=True, text=True, check=True).stdout.strip()
    if answer == "no seccomp":
        pytest.skip("no filter of system calls here")
    assert answer == "Operation not permitted"
    install(Card())
    machine = topology.read(tmp_path)
    numa = replace(machine.numa, nodes={0: [0, 1], 1: [2, 3]}, cpus=[0, 1], denied=answer)
    finding = found(replace(machine, numa=numa), "NUMA")
    assert (finding.level, "Operation not permitted" in finding.found) == ("note", True)
    assert "--cap-add SYS_NICE" in finding.advice


def test_gpus_on_other_numa_nodes(install: Install, tmp_path: Path) -> None:
    install(Card(node=0), Card("0000:c1:00.0", node=1))
    machine = topology.read(tmp_path)
    assert machine.numa.nodes == {0: [0, 1, 2, 3, 8]}
    numa = replace(machine.numa, nodes={0: [0, 1], 1: [2, 3]}, cpus=[0, 1], denied=None)
    finding = found(replace(machine, numa=numa), "NUMA")
    assert "no CPU near GPU 1" in finding.found
    assert "numactl" in finding.advice
    finding = found(replace(machine, numa=replace(numa, cpus=[0, 1, 2, 3])), "NUMA")
    assert (finding.level, "GPU 1 on node 1" in finding.found) == ("note", True)


def test_small_dev_shm_is_fine_with_memfd_and_a_problem_without(install: Install, tmp_path: Path) -> None:
    install(*TWO)
    machine = topology.read(tmp_path)
    memory = replace(machine.memory, shm_total=64 * MIB, shm_free=63 * MIB)
    finding = found(replace(machine, memory=replace(memory, memfd=True)), "shared memory")
    assert (finding.level, "64 MiB" in finding.found, "memfd" in finding.found) == ("note", True, True)
    finding = found(replace(machine, memory=replace(memory, memfd=False)), "shared memory")
    assert (finding.level, "63 MiB free" in finding.found, "up to 512 MiB" in finding.found) == ("problem", True, True)
    assert "--shm-size" in finding.advice


def test_memory_is_what_system_and_control_group_leave(install: Install, tmp_path: Path) -> None:
    install(*TWO)
    assert topology.read(tmp_path).memory.available == 32 << 30
    write(tmp_path / "sys/fs/cgroup/memory.max", 256 * MIB)
    write(tmp_path / "sys/fs/cgroup/memory.current", 56 * MIB)
    finding = found(topology.read(tmp_path), "memory")
    assert (finding.level, "200 MiB available" in finding.found) == ("problem", True)


def test_locked_memory(install: Install, tmp_path: Path) -> None:
    install(*TWO)
    machine = topology.read(tmp_path)
    limited = replace(machine, memory=replace(machine.memory, locked_limit=8 * MIB))
    assert "limited to 8 MiB" in found(limited, "locked memory").found
    free = replace(machine, memory=replace(machine.memory, locked_limit=-1))
    assert not [finding for finding in diagnose(free) if finding.subject == "locked memory"]


def test_wsl_and_containers(install: Install, tmp_path: Path) -> None:
    install(Card())
    assert found(topology.read(tmp_path), "system").level == "ok"
    write(tmp_path / ".dockerenv", "")
    assert found(topology.read(tmp_path), "system").found == "a container"
    write(tmp_path / "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2")
    finding = found(topology.read(tmp_path), "system")
    assert (finding.level, "Windows limits pinned memory" in finding.advice) == ("note", True)


def test_settings_that_hurt(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Card())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    few = found(topology.read(tmp_path), "environment")
    assert (few.level, few.found) == (
        "note",
        "CUDA_DEVICE_MAX_CONNECTIONS is 2",
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    assert "network" in found(topology.read(tmp_path), "environment").advice


@pytest.mark.gpu
def test_gpus_that_are_here() -> None:
    machine = topology.read()
    assert [gpu.trial for gpu in machine.gpus] == [trial.Trial("ok", "ok")] * torch.cuda.device_count()
    for ordinal, gpu in enumerate(machine.gpus):
        assert gpu.device.uuid.endswith(str(torch.cuda.get_device_properties(ordinal).uuid))
        assert gpu.device.copy_engines > 0
