"""How ranks meet: every rank raises the same report, and nobody waits without end or without a word."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import thunderep
from tests.dist import failures
from thunderep.runtime import arena
from thunderep.runtime.rendezvous import Rendezvous, compare
from thunderep.testing.processes import Ranks


def _try_make(changes: dict[int, dict[str, Any]]) -> str:
    """Make a Buffer with changes on some ranks; what it was, or what was raised."""
    try:
        return failures.make(**changes.get(dist.get_rank(), {}))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if "buffer" in failures._kept:
            failures.close()


DISAGREE: dict[str, tuple[dict[int, dict[str, Any]], list[str]]] = {
    "num_experts": ({2: {"num_experts": 16}}, ["num_experts: rank 0 has 8, rank 1 has 8, rank 2 has 16, rank 3 has 8"]),
    "two things": ({1: {"hidden": 128}, 3: {"topk": 1}}, ["hidden: rank 0 has 256, rank 1 has 128", "rank 3 has 1"]),
    "dtype": ({0: {"dtype": torch.float32}}, ["dtype: rank 0 has 'torch.float32', rank 1 has 'torch.bfloat16'"]),
    "transport": ({1: {"transport": "collective"}}, ["transport: rank 0 has 'auto', rank 1 has 'collective'"]),
    "name": ({3: {"name": "mine"}}, ["name: ", "rank 3 has 'mine'"]),
    "timeout": ({3: {"timeout": 31.0}}, ["timeout: rank 0 has 30.0", "rank 3 has 31.0"]),
    "one rank cannot": ({2: {"transport": "telepathy"}}, ["rank 0: ok", "rank 2: transport: got 'telepathy', expected one of"]),
    "one rank has no staging": ({1: {"staging_bytes": 100}}, ["rank 1: staging_bytes: got 100; 4 ranks need at least"]),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree_all_raise_the_same_report(name: str, four_ranks: Callable[[], Ranks]) -> None:
    changes, texts = DISAGREE[name]
    reports = four_ranks().run(_try_make, changes)
    assert len(set(reports)) == 1
    assert reports[0].startswith("RuntimeError: ")
    assert all(text in reports[0] for text in texts), reports[0]
    assert four_ranks().run(_try_make, {}) == ["shm"] * 4  # and the next Buffer is made


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "num_experts": ({"num_experts": 0}, "num_experts: got 0, expected an integer of at least 1"),
    "hidden": ({"hidden": 2.5}, "hidden: got 2.5, expected an integer of at least 1"),
    "topk": ({"topk": -1}, "topk: got -1"),
    "max_tokens": ({"max_tokens": True}, "max_tokens: got True"),
    "dtype": ({"dtype": torch.float64}, "dtype: got torch.float64, expected one of"),
    "device": ({"device": "meta"}, "device: got meta"),
    "no such device": ({"device": "cuda:99"}, "device: got cuda:99, expected one of this process's"),
    "no device": ({"device": "bogus"}, "device: got 'bogus', expected a CPU or CUDA device"),
    "no type of a device": ({"device": 1.5}, "device: got 1.5, expected a CPU or CUDA device"),
    "dma on a CPU": ({"device": "cpu", "transport": "dma"}, "transport: 'dma' moves cuda tensors, but the device is cpu"),
    "timeout": ({"timeout": 0}, "timeout: got 0"),
    "staging_bytes": ({"staging_bytes": 1.5}, "staging_bytes: got 1.5"),
    "name": ({"name": 7}, "name: got 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_made_everywhere_is_a_value_error(name: str, four_ranks: Callable[[], Ranks]) -> None:
    change, text = WRONG[name]
    reports = four_ranks().run(_try_make, dict.fromkeys(range(4), change))
    assert len(set(reports)) == 1
    assert reports[0].startswith(f"ValueError: {text}"), reports[0]


def _refuse(kinds: list[str]) -> None:
    """From here on this process cannot attach to segments of these kinds."""
    from thunderep.runtime import rendezvous

    def attach(handle: arena.Handle) -> arena.Segment:
        if handle.kind in kinds:
            raise PermissionError(13, f"no {handle.kind} here")
        return arena.attach(handle)

    setattr(rendezvous, "attach", attach)  # noqa: B010  not exported from there


def test_a_rank_that_cannot_open_a_memfd_means_a_named_segment() -> None:
    with Ranks(3) as ranks:
        ranks.start(_refuse, ["memfd"], ranks=[2])
        ranks.collect(ranks=[2])
        assert ranks.run(failures.make) == ["shm"] * 3
        ranks.run(failures.once)
        assert not [name for name in _shared_memory() if name.startswith(arena.PREFIX)]


def test_a_rank_that_can_open_nothing_is_named_by_all() -> None:
    with Ranks(3) as ranks:
        ranks.start(_refuse, ["memfd", "file"], ranks=[1])
        ranks.collect(ranks=[1])
        before = ranks.run(failures.resources)
        reports = ranks.run(_try_make, {})
        assert len(set(reports)) == 1
        assert "rank 0: ok; rank 1: [Errno 13] no memfd here; rank 2: ok" in reports[0]
        assert "rank 1: [Errno 13] no file here" in reports[0]
        after = ranks.run(failures.resources)
        for field in ("descriptors", "mappings"):
            assert [held[field] for held in after] == [held[field] for held in before]
        assert not [name for name in _shared_memory() if name.startswith(arena.PREFIX)]


def _shared_memory() -> list[str]:
    return os.listdir("/dev/shm")


def test_ranks_that_do_not_come_are_named_with_the_phase() -> None:
    with Ranks(4) as ranks:
        ranks.start(_try_make, {0: {"timeout": 1.5}, 2: {"timeout": 1.5}}, ranks=[0, 2])
        began = time.monotonic()
        for rank, report in zip((0, 2), ranks.collect(20, ranks=[0, 2]), strict=True):
            assert report.startswith(
                f"RuntimeError: rank {rank}: phase 'configuration': after 1.5 s ranks 1, 3 of 4 had not arrived"
            )
        assert time.monotonic() - began < 10


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        thunderep.Buffer(num_experts=2, hidden=4, topk=1, max_tokens=4)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_names_are_unique_and_derived(alone: dist.ProcessGroup) -> None:
    arguments: dict[str, Any] = {"num_experts": 2, "hidden": 4, "topk": 1, "max_tokens": 4}
    with thunderep.Buffer(**arguments) as one, thunderep.Buffer(alone, **arguments) as two:
        assert one.name != two.name
        with pytest.raises(ValueError, match="is the name of an open Buffer"):
            thunderep.Buffer(name=one.name, **arguments)
    with thunderep.Buffer(name=one.name, **arguments) as again:
        assert again.name == one.name
        assert "rank 0 of 1, shm" in repr(again)
    assert "closed" in repr(again)


def test_nothing_is_left_in_the_store(alone: dist.ProcessGroup) -> None:
    """Buffers that come and go leave a bounded trace."""
    meeting = Rendezvous(alone, 5.0)
    assert meeting.exchange("one", {"a": 1}) == [{"a": 1}]
    assert meeting.exchange("two", 2) == [2]
    assert not meeting._store.check(["one/0"])


def test_groups_of_one_name_count_their_own_buffers() -> None:
    """A process may be in both lives of a group's name, its new peers only in the second."""
    labels = []
    for _ in range(2):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        labels += [Rendezvous(dist.group.WORLD, 5.0).label for _ in range(2)]
        dist.destroy_process_group()
    assert [label.split(".")[-1] for label in labels] == ["0", "1", "0", "1"]


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_who_comes_when_others_have_given_up_gets_no_buffer(transport: str) -> None:
    with Ranks(2) as ranks:
        ranks.start(_try_make, {0: {"timeout": 0.5, "transport": transport}}, ranks=[0])
        assert "rank 1 of 2 had not arrived" in ranks.collect(20, ranks=[0])[0]
        ranks.start(_try_make, {1: {"timeout": 0.5, "transport": transport}}, ranks=[1])
        assert "came too late, rank 0 had given up waiting" in ranks.collect(20, ranks=[1])[0]


def test_a_group_that_is_none_is_a_value_error(alone: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="group: got 'ep', expected a ProcessGroup or None"):
        thunderep.Buffer("ep", num_experts=2, hidden=4, topk=1, max_tokens=4)  # type: ignore[arg-type]


def test_compare_lists_every_rank() -> None:
    with pytest.raises(RuntimeError, match="a: rank 0 has 1, rank 1 has 2; b: rank 0 has 'x', rank 1 has 'y'"):
        compare([{"a": 1, "b": "x", "c": 0}, {"a": 2, "b": "y", "c": 9}], ["a", "b"])
    compare([{"a": 1}, {"a": 1}], ["a"])
