"""Descriptions of machines for `simulate`; the JSON files beside this one, and any other of the same form.

Bandwidth is in GB/s (10^9 bytes a second), time in microseconds. In every file `sources` says of each figure whether it was
measured, comes from a public report, is PCIe arithmetic, was calibrated (fitted to measurements) or is assumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Link:
    """A link between a GPU, or a switch, and the host.

    Attributes:
        one_way_gbps: What each direction carries.
        both_ways_gbps: What both directions together carry when copy engines use them at once.
        sm_both_ways_gbps: The same when SMs do.
    """

    one_way_gbps: float
    both_ways_gbps: float
    sm_both_ways_gbps: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """Where a GPU sits: the kind of its own link, its socket, and the switch or host bridge that it shares, if any."""

    link: str
    socket: int = 0
    bridge: str | None = None


@dataclass(frozen=True, slots=True)
class CopyEngines:
    """What moves bytes for `dma`.

    Attributes:
        count: Engines a GPU: 1 for everything; 2, one of them for the way down (host to device); 3, one also for copies within.
        launch_us: What an operation costs beside its nodes.
        copy_us: Latency of a copy, before it queues for its engine.
        flag_us: Cost of a batch of stream memory operations, however many it holds.
        flag_latency_us: From a signal to the GPU that waits for it, through host memory.
    """

    count: int
    launch_us: float
    copy_us: float
    flag_us: float
    flag_latency_us: float


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of NCCL's protocols: cost of a launch, latency of a hop, bytes on the wire for each byte of data."""

    launch_us: float
    hop_us: float
    overhead: float


@dataclass(frozen=True, slots=True)
class Nccl:
    """NCCL's ring: `chunk_bytes`, over all its channels, go in one step; protocols by name."""

    chunk_bytes: int
    protocols: Mapping[str, Protocol]


@dataclass(frozen=True, slots=True)
class MachineModel:
    """GPUs of one host, without peer access.

    Attributes:
        name: For people.
        gpus: By rank.
        links: Kinds of link, by name; each GPU has a link of its own.
        bridges: Switches or host bridges that GPUs share, by name.
        memory_gbps: Reads and writes of one socket's memory together.
        socket_link_gbps: From any socket to any other, each direction.
        device_gbps: A copy within a GPU.
        copy_engines: What moves bytes for `dma`.
        nccl: What moves bytes for NCCL.
        sources: Where each figure comes from.
    """

    name: str
    gpus: tuple[Gpu, ...]
    links: Mapping[str, Link]
    bridges: Mapping[str, Link]
    memory_gbps: float
    socket_link_gbps: float
    device_gbps: float
    copy_engines: CopyEngines
    nccl: Nccl
    sources: Mapping[str, str]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> MachineModel:
        """From the content of a machine file.

        Raises:
            ValueError: Something is missing, unknown, of another type or too small, or a GPU names a link or bridge that is
                not there.
        """
        try:
            nccl = content["nccl"]
            parts = {
                "gpus": tuple(_made(Gpu, gpu) for gpu in content["gpus"]),
                "links": {name: _made(Link, link) for name, link in content["links"].items()},
                "bridges": {name: _made(Link, link) for name, link in content["bridges"].items()},
                "copy_engines": _made(CopyEngines, content["copy_engines"]),
                "nccl": _made(Nccl, {**nccl, "protocols": {name: _made(Protocol, p) for name, p in nccl["protocols"].items()}}),
            }
            machine = _made(cls, {**content, **parts})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a machine description: {error}") from error
        links = [*machine.links.values(), *machine.bridges.values()]
        ceilings = [ceiling for link in links for ceiling in (link.one_way_gbps, link.both_ways_gbps, link.sm_both_ways_gbps)]
        engines, protocols = machine.copy_engines, machine.nccl.protocols.values()
        sizes = [*ceilings, machine.memory_gbps, machine.socket_link_gbps, machine.device_gbps, machine.nccl.chunk_bytes]
        sizes += [engines.count, len(machine.gpus), *(protocol.overhead for protocol in protocols)]
        if not all(size > 0 for size in sizes):
            raise ValueError("every bandwidth, chunk and overhead, and the numbers of GPUs and copy engines must be above 0")
        times = [engines.launch_us, engines.copy_us, engines.flag_us, engines.flag_latency_us]
        if not all(time >= 0 for time in (*times, *(t for p in protocols for t in (p.launch_us, p.hop_us)))):
            raise ValueError("no time may be below 0")
        for gpu in machine.gpus:
            if gpu.link not in machine.links or gpu.bridge not in {None, *machine.bridges}:
                raise ValueError(f"gpus: {gpu} names a link or a bridge that is not there")
        return machine


def _made(kind: type[_Part], values: Mapping[str, Any]) -> _Part:
    """That part of a description; raises TypeError for fields that are missing, unknown, or of another type."""
    for field, expected in get_type_hints(kind).items():
        numbers = (int, float) if expected is float else expected
        if expected in (int, float, str, str | None) and field in values and not isinstance(values[field], numbers):
            raise TypeError(f"{field}: got {values[field]!r}, expected {getattr(expected, '__name__', expected)}")
    return kind(**values)


def smaller(machine: MachineModel) -> Iterator[tuple[str, MachineModel]]:
    """The machine with 2, 4, 8, ... of its GPUs and with all of them, each with slots of 16, 8 and 4 lanes.

    By PCIe arithmetic: half the lanes carry half as much. A machine whose GPUs do not all sit alike comes as it is.

    Yields:
        The lanes of every slot, "mixed" where they differ, and the machine.
    """
    if len(set(machine.gpus)) > 1:
        yield ("16" if {gpu.link for gpu in machine.gpus} == {"x16"} else "mixed"), machine
        return
    counts = [2**i for i in range(1, len(machine.gpus).bit_length()) if 2**i < len(machine.gpus)]
    for count in (*counts, len(machine.gpus)):
        for lanes in (16, 8, 4):
            links = {
                name: Link(*(lanes / 16 * gbps for gbps in (link.one_way_gbps, link.both_ways_gbps, link.sm_both_ways_gbps)))
                for name, link in machine.links.items()
            }
            yield str(lanes), replace(machine, gpus=machine.gpus[:count], links=links)


def names() -> list[str]:
    """The machines that come with the package."""
    files = [Path(entry.name) for entry in resources.files(__name__).iterdir()]
    return sorted(file.stem for file in files if file.suffix == ".json")


def load(name: str) -> MachineModel:
    """The machine of that name, or of that file if it ends in .json.

    Raises:
        ValueError: There is none, or it cannot be read.
    """
    if not name.endswith(".json") and name not in names():
        raise ValueError(f"machine: got {name!r}, expected a file that ends in .json or one of {', '.join(names())}")
    file = Path(name) if name.endswith(".json") else resources.files(__name__) / f"{name}.json"
    try:
        return MachineModel.of(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"machine: {name}: {error}") from error
