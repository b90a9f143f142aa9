"""What a GPU's link carries, from described /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunderep.runtime.chunks import gpu_grain
from thunderep.runtime.pcie import one_way_gbps

ADDRESS = "0000:01:00.0"


def described(root: Path, card: str | None, port: str | None, width: str | None) -> Path:
    """A tree in which the card's folder lies in its port's, as in /sys/devices; None: there is no such file."""
    folder = root / "sys/devices/pci0000:00/0000:00:01.0" / ADDRESS
    folder.mkdir(parents=True)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices" / ADDRESS).symlink_to(folder)
    files = (folder / "max_link_speed", card), (folder.parent / "max_link_speed", port), (folder / "current_link_width", width)
    for file, text in files:
        if text is not None:
            file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("card", "port", "width", "gbps"),
    [
        ("32.0 GT/s PCIe", "32.0 GT/s PCIe", "16", 55),
        ("16.0 GT/s PCIe", "16.0 GT/s PCIe", "16", 27.5),
        ("32.0 GT/s PCIe", "16.0 GT/s PCIe", "16", 27.5),
        ("16.0 GT/s PCIe", "16.0 GT/s PCIe", "4", 6.9),
        ("8.0 GT/s PCIe", None, "4", 3.4),
        ("16.0 GT/s PCIe", "Unknown", "16", 27.5),
        ("32.0 GT/s PCIe", "2.5 GT/s PCIe", "16", 55),
        ("Unknown", "Unknown", "16", None),
        ("16.0 GT/s PCIe", "16.0 GT/s PCIe", "255", None),
        (None, None, None, None),
    ],
)
def test_the_slower_of_card_and_port(
    card: str | None, port: str | None, width: str | None, gbps: float | None, tmp_path: Path
) -> None:
    found = one_way_gbps(ADDRESS, described(tmp_path, card, port, width))
    assert found == (None if gbps is None else pytest.approx(gbps, rel=0.02))


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    assert one_way_gbps("0000:ff:00.0", tmp_path) is None


def test_slow_links_make_small_chunks() -> None:
    """A chunk costs a time, in which a slow link moves little."""
    assert gpu_grain(55) == pytest.approx(512 << 10, rel=0.01)
    assert gpu_grain(27.5) == pytest.approx(256 << 10, rel=0.01)
