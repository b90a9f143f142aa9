"""Rank processes that tests share, and how many hypothesis examples ran."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from thunderep.testing.processes import Ranks

# It takes graphs whose calls look alike for the same, also those that were traced by another version of the operators.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("default"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

EXAMPLES: Counter[str] = Counter()
"""Examples that property tests in real processes ran, by test."""


@pytest.fixture
def count_example(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Call once an example."""
    name = request.node.nodeid.split("::")[-1]
    return lambda: EXAMPLES.update([name])


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Callable[[], Ranks]]:
    """Gives four gloo processes, the same for all tests unless one of them has killed them."""
    pool: list[Ranks] = []

    def get() -> Ranks:
        if pool and not pool[-1].alive:
            pool.pop().close()
        if not pool:
            pool.append(Ranks(4))
        return pool[-1]

    yield get
    for ranks in pool:
        ranks.close()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Callable[[], Ranks]]:
    """Gives one gloo process, as `four_ranks` does."""
    with Ranks(1) as processes:
        yield lambda: processes


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes."""
    with Ranks(2) as processes:
        yield processes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many examples ran in real processes."""
    for name, count in sorted(EXAMPLES.items()):
        terminalreporter.write_line(f"{count} examples in real processes: {name}")
