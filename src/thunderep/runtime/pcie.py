"""PCIe links of GPUs as the kernel shows them (ABI/testing/sysfs-bus-pci in its documentation)."""

from __future__ import annotations

from pathlib import Path

_SHARE = 0.86
"""What copies get of a link's bit rate: 55 of 64 GB/s on an H200."""

_LEAST = 8.0
"""Billions of transfers a second, PCIe 3: a virtual machine's ports may say less than they do."""


def one_way_gbps(pci_address: str, root: Path = Path("/")) -> float | None:
    """What a GPU's link to its host carries one way, about; None: not known.

    The speed is what card and port could both do, since an idle link trains down; the width is that of now, which stays.
    """
    card = (root / "sys/bus/pci/devices" / pci_address).resolve()
    speeds = [speed for folder in (card, card.parent) if (speed := _transfers(folder / "max_link_speed"))]
    width = lanes(card / "current_link_width")
    return None if not speeds or width is None else _SHARE * min(speeds) * width / 8


def lanes(file: Path) -> int | None:
    """A width as the kernel has it; None: not known, for which 255 stands too."""
    try:
        found = int(file.read_text())
    except (OSError, ValueError):
        return None
    return found if 0 < found <= 32 else None


def _transfers(file: Path) -> float | None:
    """Billions of transfers a second, of a text such as "16.0 GT/s PCIe"."""
    try:
        found = float(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return found if found >= _LEAST else None
