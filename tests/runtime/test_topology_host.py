"""What `thunderep doctor` finds beside GPUs: memory, NUMA nodes, containers, settings. The machine is pretended."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.pretended import TWO, Card, Install, found, write
from thunderep.runtime import topology
from thunderep.runtime.diagnosis import diagnose

pytest.importorskip("psutil")
pytest.importorskip("pynvml")

MIB = 1 << 20

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
