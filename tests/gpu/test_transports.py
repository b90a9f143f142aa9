"""The GPU transports: graphs, compilation, failures. One GPU will do: then its ranks share it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu import compiled, failures, memory, observability, programs
from tests.gpu.machine import FEW, start
from thunderep.testing.processes import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TRANSPORTS = pytest.mark.parametrize("transport", ["dma", "direct", "auto"])


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[], Ranks]]:
    with start() as ranks:
        yield lambda: ranks


@TRANSPORTS
def test_a_transport_is_what_was_asked_for(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    assert set(gpu_ranks().run(programs.keep, transport)) == {transport}
    gpu_ranks().run(programs.close)


@TRANSPORTS
def test_what_a_profiler_and_the_counters_see(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    phases = {"dma": {"copy_engines", "routing", "kernels", "sum"}, "direct": {"kernels"}}
    phases["auto"] = phases["dma"]  # so many tokens are more than the tests' thresholds
    found = gpu_ranks().run(observability.profiled, transport)
    moved = programs.MOST * (2 * programs.HIDDEN + programs.TOPK * 12), programs.MOST * 2 * programs.HIDDEN
    for names, stats in found:
        assert {name.removeprefix("thunderep:") for name in names if "::" not in name} == phases[transport]
        assert {kind: count for kind, count in stats.operations.items() if count} == {"dispatch": 2, "combine": 2}
        assert stats.bytes_sent == 2 * (moved[0] + (len(found) - 1) * moved[1])
        assert stats.bytes_received == 2 * (len(found) - 1) * sum(moved)
        assert stats.waited is None


@TRANSPORTS
def test_graphs_replayed_in_random_order_between_eager_calls(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    for seed in range(1 if FEW else 3):
        found = gpu_ranks().run(programs.replay_in_random_order, transport, 200, seed, timeout=280)
        assert found == [[]] * len(found)


@TRANSPORTS
def test_a_thousand_replays_with_new_data(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    found = gpu_ranks().run(programs.replay_often, transport, 1000, timeout=280)
    assert found == [0] * len(found)


@TRANSPORTS
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_layer_compiles_whole(transport: str, mode: str, halves: bool, gpu_ranks: Callable[[], Ranks]) -> None:
    found = gpu_ranks().run(compiled.differences, transport, mode, halves, timeout=280)
    assert found == [[]] * len(found)


@TRANSPORTS
def test_memory_is_not_reused_while_copies_run(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    found = gpu_ranks().run(memory.under_pressure, transport, 30, timeout=280)
    assert found == [0] * len(found)


@TRANSPORTS
def test_operations_in_flight_beside_a_product(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    found = gpu_ranks().run(memory.in_flight, transport, 20, timeout=280)
    assert found == [[]] * len(found)


@TRANSPORTS
def test_an_operation_that_began_before_a_capture_is_named(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    gpu_ranks().run(programs.keep, transport)
    for said in gpu_ranks().run(failures.started_before_capture):
        assert "async_op=True that began before this CUDA graph's capture" in said
    gpu_ranks().run(programs.close)


@TRANSPORTS
def test_one_rank_may_replay_what_others_issue(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    found = gpu_ranks().run(programs.one_replays_what_others_issue, transport, 30, timeout=280)
    assert found == [[]] * len(found)


@TRANSPORTS
def test_operations_come_from_several_streams(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    found = gpu_ranks().run(programs.from_several_streams, transport, 12, timeout=280)
    assert found == [[]] * len(found)


@TRANSPORTS
def test_ranks_that_disagree_are_all_told(transport: str) -> None:
    with start() as ranks:
        ranks.run(programs.keep, transport)
        assert ranks.run(programs.once) == [True] * ranks.num_ranks
        for kind, text in ranks.run(failures.different_sizes, timeout=60):
            assert kind == "RuntimeError"
            assert "ranks disagree on max_tokens" in text


@pytest.mark.parametrize("queues", ["1", "2"])
def test_lanes_may_share_hardware_queues(queues: str) -> None:
    """Of calls many times the staging, where lanes wait for each other again and again."""
    with start(CUDA_DEVICE_MAX_CONNECTIONS=queues) as ranks:
        found = ranks.run(programs.many_times_the_staging, "dma", 2000, timeout=280)
        assert found == [[]] * len(found)


@pytest.mark.skipif(FEW, reason="needs another GPU")
@TRANSPORTS
def test_another_device_may_be_the_current_one(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    assert all(gpu_ranks().run(programs.from_another_device, transport))


@TRANSPORTS
def test_ids_out_of_range_are_reported_at_the_next_call(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    gpu_ranks().run(programs.keep, transport)
    for said in gpu_ranks().run(failures.out_of_range):
        assert said[0] == said[2] == "rows for True"
        assert "topk_idx: an earlier operation got ids outside -1 to 7" in said[1]
    gpu_ranks().run(programs.close)


@TRANSPORTS
def test_nothing_grows_over_many_operations(transport: str, gpu_ranks: Callable[[], Ranks]) -> None:
    for wrong, descriptors, on_gpu, resident in gpu_ranks().run(memory.soak, transport, 4_000 if FEW else 100_000, timeout=280):
        assert wrong == 0
        assert descriptors <= 0
        assert on_gpu <= 0
        assert resident < 2048


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@TRANSPORTS
def test_a_killed_rank_is_an_error_within_two_seconds_and_frees_the_gpu(transport: str, captured: bool) -> None:
    with start() as ranks:
        ranks.run(programs.keep, transport)
        ranks.start(failures.until_error, captured)
        time.sleep(3)
        killed = time.monotonic()
        ranks.signal(1, signal.SIGKILL)
        others = [rank for rank in range(ranks.num_ranks) if rank != 1]
        for kind, blamed, text, at in ranks.collect(30, others):
            assert (kind, blamed) == ("PeerError", 1), text
            assert at - killed < 2
        ranks.start(failures.after_the_error, ranks=others)
        for said, seconds, computes in ranks.collect(30, others):
            assert said == "PeerError"
            assert seconds < 2
            assert computes


@TRANSPORTS
def test_a_stopped_rank_is_no_error(transport: str) -> None:
    with start() as ranks:
        ranks.run(programs.keep, transport)
        assert ranks.run(programs.once) == [True] * ranks.num_ranks
        ranks.start(programs.once, 8, 0.5)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        time.sleep(5)
        os.kill(ranks.pids[1], signal.SIGCONT)
        assert ranks.collect(60) == [True] * ranks.num_ranks
        assert max(ranks.run(programs.close)) < 5


@TRANSPORTS
def test_a_silent_rank_is_named_after_the_timeout(transport: str) -> None:
    with start() as ranks:
        ranks.run(failures.keep_impatient, transport)
        ranks.run(programs.once)
        ranks.start(failures.until_error, False, ranks=[0])
        (kind, blamed, text, _at), *_ = ranks.collect(60, [0])
        assert (kind, blamed) == ("PeerError", 1)
        assert "silent" in text


@pytest.mark.skipif(not FEW, reason="shows what two ranks on one GPU get")
@TRANSPORTS
def test_two_ranks_on_one_gpu_are_an_error_that_names_them(transport: str) -> None:
    with Ranks(2) as ranks:
        for said in ranks.run(failures.sharing, transport):
            assert "device: ranks 0 and 1 have the same GPU, " in said
