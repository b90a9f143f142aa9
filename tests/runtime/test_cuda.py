"""What the driver's answers become. The driver is a stand-in: the hardware is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thunderep.runtime import cuda


class Driver(SimpleNamespace):
    """A driver for CUDA 12.4 beside a cuda-python for CUDA 13, whose functions return given codes."""

    CUDA_VERSION = 13000
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_32=1, CU_STREAM_MEM_OP_WRITE_VALUE_32=2)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=SimpleNamespace(value=1))
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=SimpleNamespace(value=0))
    cuuint32_t = staticmethod(int)

    def __init__(self, **functions: Any) -> None:
        super().__init__(**functions)
        self.batches: list[list[Any]] = []

    def CUstreamBatchMemOpParams(self) -> SimpleNamespace:
        return SimpleNamespace(waitValue=SimpleNamespace(), writeValue=SimpleNamespace())

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 12040

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, {2: b"CUDA_ERROR_OUT_OF_MEMORY", 801: b"CUDA_ERROR_NOT_SUPPORTED"}[code]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    return made


def test_memory_that_cannot_be_pinned_is_an_error_at_once_with_its_size_and_the_limit(driver: Driver) -> None:
    driver.cuMemHostRegister = lambda address, nbytes, flags: (2,)
    with pytest.raises(cuda.CudaError, match=r"cuMemHostRegister \(4096 bytes; see ulimit -l .*CUDA_ERROR_OUT_OF_MEMORY"):
        cuda.register(1 << 20, 4096)


def test_a_function_that_the_driver_lacks_is_named_with_both_versions(driver: Driver) -> None:
    with pytest.raises(
        cuda.CudaError, match=r"cuMemcpyAsync is missing in cuda-python; driver for CUDA 12.4, cuda-python for CUDA 13"
    ):
        cuda.copy(0, 0, 1, 0)


def test_no_stream_memory_operations_is_an_error_of_the_probe(driver: Driver) -> None:
    driver.cuStreamBatchMemOp = lambda stream, count, operations, flags: (801,)
    with pytest.raises(cuda.CudaError, match=r"cuStreamBatchMemOp \(waiting and signalling on a stream\) failed: CUDA_E"):
        cuda.probe(1 << 20, 0)


def test_a_batch_holds_any_number_of_operations_in_order(driver: Driver) -> None:
    issued: list[Any] = []

    def batch(stream: int, count: int, operations: list[Any], flags: int) -> tuple[int]:
        assert count == len(operations) <= 255
        issued.extend(operations)
        return (0,)

    driver.cuStreamBatchMemOp = batch
    cuda.Batch([(i % 2 == 0, 64 * i, i) for i in range(300)]).issue(0)
    assert [o.address if hasattr(o, "address") else None for o in issued] == [None] * 300
    parts = [o.waitValue if o.operation == 1 else o.writeValue for o in issued]
    assert [(part.address, part.value) for part in parts] == [(64 * i, i) for i in range(300)]
    assert [o.operation for o in issued] == [1, 2] * 150


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_the_first_call_says_so() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(cuda.CudaError, match="cuMemHostRegister"):
        cuda.register(1 << 20, 4096)


@pytest.mark.parametrize(("said", "queues"), [(None, 8), ("32", 32), ("1", 1), ("many", 8)])
def test_hardware_queues_are_what_the_environment_says(said: str | None, queues: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", said)
    assert cuda.hardware_queues() == queues
