"""The kernels of `direct`: in the interpreter against the reference all-to-all, and compiled for the cards they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.direct_cases import Case, exchange, let_go
from thunderep.ops import direct
from thunderep.runtime.transport import KINDS, Call
from thunderep.runtime.window import OPERATION, Region
from thunderep.testing.processes import Ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """N in 1..3, ragged T, any E, K, H, type, -1; in one launch, in words, or in rounds of a few rows."""
    tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
    return Case(
        tokens=tokens,
        num_experts=draw(st.integers(1, 9)),
        topk=draw(st.integers(1, 4)),
        hidden=draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 1540]))),
        extra_rows=draw(st.integers(0, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        idx_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        scales=draw(st.sampled_from([0, 0, 1, 4])),
        drop=draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
        room=draw(st.sampled_from(["small", "fits", "plenty"])),
        rounds=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Callable[[], Ranks]]:
    pool: list[Ranks] = []

    def get() -> Ranks:
        if pool and not pool[-1].alive:
            pool.pop().close()
        if not pool:
            pool.append(Ranks(3, environment={"TRITON_INTERPRET": "1"}))
        return pool[-1]

    yield get
    for ranks in pool:
        ranks.close()


@settings(max_examples=100)
@given(case=cases())
def test_interpreted_equals_the_reference(
    case: Case, interpreting: Callable[[], Ranks], count_example: Callable[[], None]
) -> None:
    problems = interpreting().run(exchange, case)
    assert problems == [None] * len(problems), case
    count_example()


NAMED = {
    "no tokens on one rank": Case((3, 0, 2)),
    "no tokens on one rank, flagged": Case((3, 0, 2), room="fits"),
    "no tokens anywhere": Case((0, 0), extra_rows=0),
    "nothing chosen": Case((4, 4), drop=1.0),
    "fewer experts than ranks": Case((2, 2, 2), num_experts=2),
    "more chunks than blocks": Case((40, 70), hidden=5, room="fits"),
    "fp8 rows with a scale per 128 columns": Case((3, 0, 2), hidden=300, dtype=torch.float8_e4m3fn, scales=3),
    "fp8 rows with scales, flagged": Case((3, 0, 2), hidden=300, dtype=torch.float8_e4m3fn, scales=3, room="fits"),
    "many rounds": Case((20, 33), hidden=8, room="small"),
    "rows wider than a block": Case((3, 3), hidden=7000, rounds=1),
    "rows wider than a block, flagged": Case((3, 3), hidden=7000, rounds=1, room="fits"),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name: str, interpreting: Callable[[], Ranks]) -> None:
    problems = interpreting().run(exchange, NAMED[name])
    assert problems == [None] * len(problems)


def test_kernels_whose_peers_do_not_come_can_be_let_go(interpreting: Callable[[], Ranks]) -> None:
    seconds, idle = interpreting().run(let_go)[0]
    assert 0.2 < seconds < 5
    assert idle


@pytest.mark.parametrize("capability", [89, 90, 120], ids=["RTX 4090", "H200", "RTX 5090"])
def test_every_kernel_compiles_for(capability: int) -> None:
    program = Path(__file__).with_name("compile_direct.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert int(done.stdout) > 20


class Diary:
    """Writes down what kernels do, in the place of an announcer and of launches."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.broken = False

    def announce(self, call: Call) -> None:
        self.entries.append(f"announce {KINDS[call.kind]}")

    def failed(self, error: BaseException) -> None:
        self.entries.append(f"failed: {error}")

    def launch(self, tokens: int, *addresses: int | None) -> None:
        self.entries.append("launch")
        if self.broken:
            raise RuntimeError("no binary")


class NoWindow:
    """A window that nothing is moved through."""

    address, rank, ticket = 1 << 30, 0, torch.full((1,), OPERATION)
    region = Region.for_calls(2, 4, 64, 2)

    def __init__(self, announcer: Diary) -> None:
        self.announcer = announcer


def test_a_call_is_announced_when_nothing_but_its_launch_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this rank's device would be an operation behind what its peers were told, without anybody noticing."""
    diary = Diary()
    kernels = direct.Kernels(NoWindow(diary), 4, torch.zeros(1, dtype=torch.int32))  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "_combines", lambda *arguments: (diary.launch,))
    y, idx, in_rank = torch.zeros(8, 32), torch.zeros(8, 2, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.bool)
    call = Call(KINDS.index("combine"), 4, 4, 2, 32)
    kernels.combine([y], idx, in_rank, call)
    assert diary.entries == ["announce combine", "launch"]
    diary.entries.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda *arguments, **more: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            kernels.combine([y], idx, in_rank, call)
    assert diary.entries == []
    diary.broken = True
    with pytest.raises(RuntimeError, match="no binary"):
        kernels.combine([y], idx, in_rank, call)
    assert diary.entries == ["announce combine", "launch", "failed: no binary"]
