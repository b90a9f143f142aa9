"""NVML, the driver's management library: PCIe links and what is installed. The one module that imports `pynvml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Link:
    """A PCIe link: generations 1, 2, ... and widths in lanes.

    Args:
        generation: Under load.
        width: Under load.
        possible_generation: What card and board can do together.
        card_generation: What the card can do.
        card_width: What the card can do.
        slot_width: What the port above it can do; None: unknown.
    """

    generation: int
    width: int
    possible_generation: int
    card_generation: int
    card_width: int
    slot_width: int | None = None


class Nvml:
    """NVML's answers, within a `with`; None where there is none: no driver, not permitted, not supported.

    GPUs go by PCI address: NVML's order is not CUDA's.

    Raises:
        ModuleNotFoundError: nvidia-ml-py is not installed.
    """

    def __enter__(self) -> Nvml:
        import pynvml

        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
            self._ready = True
        except pynvml.NVMLError:
            self._ready = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ready:
            self._pynvml.nvmlShutdown()

    def driver(self) -> str | None:
        """The driver's version."""
        version: str | None = self._ask("nvmlSystemGetDriverVersion")
        return version

    def uuids(self) -> list[str]:
        """The GPUs of this machine, also those that CUDA does not show to this process."""
        found = [self._ask("nvmlDeviceGetHandleByIndex", i) for i in range(self._ask("nvmlDeviceGetCount") or 0)]
        return [name for handle in found if (name := self._ask("nvmlDeviceGetUUID", handle))]

    def uuid(self, pci_address: str) -> str | None:
        """The UUID of a GPU; of the whole one where CUDA shows a MIG slice."""
        uuid: str | None = self._ask("nvmlDeviceGetUUID", self._handle(pci_address))
        return uuid

    def trained(self, pci_address: str) -> tuple[int, int] | None:
        """Generation and width of a GPU's link at this moment: an idle link trains down."""
        handle = self._handle(pci_address)
        generation = self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        width = self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
        return (generation, width) if generation and width else None

    def link(self, pci_address: str, trained: Sequence[tuple[int, int]]) -> Link | None:
        """A GPU's link, given what `trained` said under load, several times because training takes its time."""
        if not trained:
            return None
        handle = self._handle(pci_address)
        generation, width = (max(values) for values in zip(*trained, strict=True))
        return Link(
            generation,
            width,
            self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle) or generation,
            self._ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle) or generation,
            self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle) or width,
        )

    def _handle(self, pci_address: str) -> Any:
        return self._ask("nvmlDeviceGetHandleByPciBusId", pci_address)

    def _ask(self, name: str, *arguments: Any) -> Any:
        if not self._ready or None in arguments:
            return None
        try:
            return getattr(self._pynvml, name)(*arguments)
        except self._pynvml.NVMLError:
            return None
