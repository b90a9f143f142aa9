"""What `thunderep doctor` finds. Driver and NVML are stand-ins: the hardware is not here. The driver's copies are real."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.pretended import TWO, Card, Install, found, problems
from thunderep.runtime import topology, trial
from thunderep.runtime.diagnosis import diagnose

pytest.importorskip("psutil")
pytest.importorskip("pynvml")

MIB = 1 << 20


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


@pytest.mark.gpu
def test_gpus_that_are_here() -> None:
    machine = topology.read()
    assert [gpu.trial for gpu in machine.gpus] == [trial.Trial("ok", "ok")] * torch.cuda.device_count()
    for ordinal, gpu in enumerate(machine.gpus):
        assert gpu.device.uuid.endswith(str(torch.cuda.get_device_properties(ordinal).uuid))
        assert gpu.device.copy_engines > 0
