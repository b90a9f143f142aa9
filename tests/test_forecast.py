"""The machines that come with the package, what is said of them, and how far that is from what was measured."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from thunderep.forecast.ablation import ablate
from thunderep.forecast.calibration import points
from thunderep.forecast.loss import LAYERS, lose
from thunderep.forecast.predict import KINDS, Kind, Shape, forecast
from thunderep.runtime import machines
from thunderep.runtime.ring import plan_ring
from thunderep.runtime.simulate import Executor, simulate

QWEN3 = Shape(2048, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", machines.names())
def test_every_machine_runs(name: str, kind: Kind) -> None:
    described = machines.load(name)
    small, large = (forecast(described, kind, QWEN3, tokens) for tokens in (1, 1000))
    assert 0 < small.ours < large.ours
    assert 0 < small.nccl < large.nccl
    assert large.needed <= large.ours
    assert (large.fp8 is not None and large.fp8 < large.ours) == (kind == "dispatch")


def test_the_machines_asked_for_are_there() -> None:
    sizes = {name: len(machines.load(name).gpus) for name in machines.names()}
    assert sizes == {
        "h200-2": 2,
        "h200-4": 4,
        "rtx3090-4-one-at-x4": 4,
        "rtx4090-4-one-socket": 4,
        "rtx4090-4-two-sockets": 4,
        "rtx4090-8-one-socket": 8,
        "rtx4090-8-switches": 8,
        "rtx4090-8-two-sockets": 8,
        "rtx5070ti-2": 2,
        "rtx5090-4": 4,
        "rtx5090-8": 8,
    }


@pytest.mark.parametrize("name", machines.names())
def test_every_figure_has_a_source(name: str) -> None:
    described = machines.load(name)
    figures = ["memory_gbps", "socket_link_gbps", "device_gbps", "nccl.chunk_bytes"]
    figures += [f"nccl.{protocol}" for protocol in described.nccl.protocols]
    figures += ["bridges"] if described.bridges else []
    figures += [f"copy_engines.{field}" for field in ("count", "launch_us", "copy_us", "flag_us", "flag_latency_us")]
    figures += [
        f"links.{link}.{field}" for link in described.links for field in ("one_way_gbps", "both_ways_gbps", "sm_both_ways_gbps")
    ]
    for figure in figures:
        source = described.sources.get(figure) or described.sources.get(figure.rpartition(".")[0], "")
        assert re.match("measured|calibrated|public report|PCIe arithmetic|assumed", source), figure
        assert name == "h200-2" or not re.match("measured(?! on 2 x H200)|calibrated(?! on)", source), figure


@pytest.mark.parametrize(
    ("executor", "fitted", "count", "typical", "worst"),
    [("copy engines", True, 10, 0.05, 0.06), ("nccl", True, 18, 0.03, 0.12), ("nccl", False, 54, 0.05, 0.23)],
)
def test_errors_against_what_was_measured(executor: str, fitted: bool, count: int, typical: float, worst: float) -> None:
    errors = [abs(point.error) for point in points() if (point.executor, point.fitted) == (executor, fitted)]
    assert len(errors) == count
    assert median(errors) < typical
    assert max(errors) < worst


@pytest.mark.parametrize(("name", "nbytes", "reported_gbps"), [("rtx5090-8", 1 << 28, 28), ("rtx5070ti-2", 20_000_000, 1.9)])
def test_public_reports_of_all_reduce(name: str, nbytes: int, reported_gbps: float) -> None:
    """Bus bandwidth of a ring: reduce-scatter, then all-gather."""
    described = machines.load(name)
    num_ranks = len(described.gpus)
    schedules = [plan_ring(rank, num_ranks, nbytes // num_ranks, described.nccl.chunk_bytes) for rank in range(num_ranks)]
    us = 2 * simulate(schedules, described, Executor.nccl(described.nccl.protocols["Simple"])).us
    assert 2 * (num_ranks - 1) / num_ranks * nbytes / us / 1e3 == pytest.approx(reported_gbps, rel=0.1)


def test_the_share_of_rows_that_a_peer_needs() -> None:
    assert Shape(1, 1).needed_share(4) == 0.25
    assert Shape(1, 8).needed_share(8) == pytest.approx(1 - (7 / 8) ** 8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_idea_is_told_apart(kind: Kind) -> None:
    """Two ranks with K = 8 need nearly all rows; for one token nothing but signals counts; a ring's hops grow with N."""
    parts = [part for lanes, part in machines.smaller(machines.load("rtx4090-8-one-socket")) if lanes == "16"]
    assert [len(part.gpus) for part in parts] == [2, 4, 8]
    two, _, eight = (ablate(part, kind, QWEN3, 1000) for part in parts)
    assert two.gains[2] == pytest.approx(1, abs=0.01)
    assert eight.gains[2] > 1.2
    assert 0.9 < eight.gains[1] < 1.05
    assert 0.9 < two.gains[1] < 1.05
    fast = next(part for lanes, part in machines.smaller(machines.load("h200-4")) if lanes == "16" and len(part.gpus) == 2)
    assert ablate(fast, kind, QWEN3, 1000).gains[1] > 1.05, "SMs do not fill a link of PCIe 5 both ways"
    assert ablate(parts[0], kind, QWEN3, 1).gains[1] < 0.5
    assert (eight.gains[0] > 1.5) == (kind == "dispatch")
    product = eight.gains[0] * eight.gains[1] * eight.gains[2]
    assert product == pytest.approx(eight.ring / eight.needed)


def test_narrower_slots_lose_more_and_what_is_lost_adds_up() -> None:
    described = machines.load("rtx5090-4")
    rows = [lose(part, slot, QWEN3, 512, 5000.0) for slot, part in machines.smaller(described)]
    assert [(row.ranks, row.slot) for row in rows] == [(n, lanes) for n in (2, 4) for lanes in ("16", "8", "4")]
    for wide, narrow in pairwise(rows[:3]):
        assert wide.lost(wide.ours) < narrow.lost(narrow.ours) < 2 * 5000
    row = rows[0]
    seconds = 512 / 5000 + LAYERS * row.ours * 1e-6  # of a step: compute, then wait
    assert row.ranks * 512 / seconds == pytest.approx(row.ranks * 5000 - row.lost(row.ours))
    assert row.lost(0.0) == 0


@pytest.mark.parametrize(("name", "slot"), [("rtx4090-8-two-sockets", "16"), ("rtx3090-4-one-at-x4", "mixed")])
def test_a_machine_of_unlike_gpus_comes_as_it_is(name: str, slot: str) -> None:
    described = machines.load(name)
    assert list(machines.smaller(described)) == [(slot, described)]


def test_a_description_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    content = json.loads((Path(machines.__file__).parent / "h200-2.json").read_text())
    file.write_text(json.dumps(content | {"name": "mine", "memory_gbps": 10}))
    assert forecast(machines.load(str(file)), "dispatch", QWEN3, 4096).ours > 6_000


ENGINES = {"count": 3, "launch_us": 8.0, "copy_us": 2.4, "flag_us": 5.0, "flag_latency_us": 2.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gbps": 0}, "above 0"),
        ({"gpus": []}, "above 0"),
        ({"nccl": {"chunk_bytes": 1, "protocols": {"LL": {"launch_us": 1, "hop_us": 1, "overhead": -2}}}}, "above 0"),
        ({"gpus": [{"link": "x8"}]}, "names a link"),
        ({"gpus": [{"link": "x16", "bridge": "b"}]}, "or a bridge that is not there"),
        ({"colour": "red"}, "colour"),
        ({"copy_engines": {"count": 3}}, "launch_us"),
        ({"links": 3}, "not a machine description"),
        ({"memory_gbps": "fast"}, "memory_gbps: got 'fast', expected float"),
        ({"gpus": [{"link": 16}]}, "link: got 16, expected str"),
        ({"gpus": [3]}, "not a machine description"),
        ({"gpus": [{"link": "x16", "socket": None}]}, "socket: got None, expected int"),
        ({"copy_engines": ENGINES | {"count": 2.5}}, "count: got 2.5, expected int"),
        ({"copy_engines": ENGINES | {"copy_us": -1}}, "below 0"),
    ],
)
def test_bad_descriptions_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "bad.json"
    content = json.loads((Path(machines.__file__).parent / "h200-2.json").read_text())
    file.write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=message):
        machines.load(str(file))


@pytest.mark.parametrize("name", ["no-such-machine", "/no/such/file.json", "../h200-2"])
def test_unknown_machines_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"machine: .*{name}"):
        machines.load(name)
