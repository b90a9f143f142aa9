"""The driver: GPUs, pinned memory, copies on copy engines, and waits that need no SM. The one module that imports cuda-python.

Every call goes through `_call`, which checks its code. cuda-python 12 and 13 both do; a function that is missing is
named. Streams are the integers that torch calls `cuda_stream`.

Facts used here (CUDA driver API): a stream memory write is ordered after all earlier work of its stream, with a fence, so what
that work wrote is visible to whoever sees the value; a wait keeps later work of its stream back. Both cost no SM.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_QUEUES = 8
"""Hardware queues that CUDA spreads a process's streams over, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise: up to 32."""

_BATCH = 255  # operations that one call takes


class CudaError(RuntimeError):
    """A driver call failed."""


def hardware_queues() -> int:
    """Queues that streams share: what waits at the head of one holds up all streams in it."""
    said = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(said) if said.isdecimal() else DEFAULT_QUEUES


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(f"CUDA tensors over host memory need the package cuda-python: {error}") from error
    return driver


def _call(name: str, *arguments: Any, what: str = "") -> Any:
    """Call a driver function and return what it gives beside the code; its code is checked here."""
    driver = _driver()
    function = getattr(driver, name, None)
    if function is None:
        raise CudaError(f"{name} is missing in cuda-python; {_versions(driver)}")
    try:
        code, *results = function(*arguments)
    except RuntimeError as error:  # no driver, or one without this function
        raise CudaError(f"{name}: {error}") from error
    if int(code) != 0:
        _, text = driver.cuGetErrorName(code)
        shown = text.decode() if isinstance(text, bytes) else str(code)
        raise CudaError(f"{name}{f' ({what})' if what else ''} failed: {shown}; {_versions(driver)}")
    return results[0] if len(results) == 1 else tuple(results)


def _versions(driver: Any) -> str:
    code, version = driver.cuDriverGetVersion()
    known = f"{version // 1000}.{version % 1000 // 10}" if int(code) == 0 else "unknown"
    return f"driver for CUDA {known}, cuda-python for CUDA {getattr(driver, 'CUDA_VERSION', 0) / 1000:g}"


def versions() -> tuple[int | None, int | None]:
    """The CUDA versions of the driver and of cuda-python as cuda.h has them, 12040 for 12.4; None where there is none."""
    try:
        binding = int(_driver().CUDA_VERSION)
    except CudaError:
        return None, None
    try:
        return int(_call("cuDriverGetVersion")), binding
    except CudaError:
        return None, binding


@dataclass(frozen=True)
class Device:
    """A GPU that this process sees.

    Args:
        ordinal: Its place in CUDA's order, which other libraries need not share.
        name: What its maker calls it.
        uuid: "GPU-" and its UUID.
        pci_address: domain:bus:device.function in lower-case hexadecimal digits, as in /sys/bus/pci/devices.
        copy_engines: How many copies it can have under way beside its kernels.
        peers: Ordinals of the GPUs whose memory it can reach.
    """

    ordinal: int
    name: str
    uuid: str
    pci_address: str
    copy_engines: int
    peers: tuple[int, ...]


def devices() -> list[Device]:
    """All GPUs that this process sees.

    Raises:
        CudaError: There is no driver, or no GPU.
    """
    _call("cuInit", 0)
    handles = [_call("cuDeviceGet", ordinal) for ordinal in range(_call("cuDeviceGetCount"))]
    engines = _driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
    return [
        Device(
            ordinal,
            _string(_call("cuDeviceGetName", 256, handle)),
            f"GPU-{uuid.UUID(bytes=bytes(_call('cuDeviceGetUuid', handle).bytes))}",
            _string(_call("cuDeviceGetPCIBusId", 16, handle)).lower(),
            _call("cuDeviceGetAttribute", engines, handle),
            tuple(n for n, peer in enumerate(handles) if n != ordinal and _call("cuDeviceCanAccessPeer", handle, peer)),
        )
        for ordinal, handle in enumerate(handles)
    ]


def _string(text: bytes) -> str:
    return text.split(b"\0")[0].decode()


@contextlib.contextmanager
def context(ordinal: int) -> Iterator[None]:
    """Make the context of a GPU current that all libraries in this process share."""
    device = _call("cuDeviceGet", ordinal)
    _call("cuCtxPushCurrent", _call("cuDevicePrimaryCtxRetain", device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent")
        _call("cuDevicePrimaryCtxRelease", device)


@contextlib.contextmanager
def allocate(nbytes: int) -> Iterator[int]:
    """Memory of the current context's GPU, by its address; freed at the end."""
    address = int(_call("cuMemAlloc", nbytes))
    try:
        yield address
    finally:
        _call("cuMemFree", address)


def capture_id(stream: int) -> int:
    """What tells the capture that a stream is part of from all others; 0: it is part of none."""
    status, number, *_ = _call("cuStreamGetCaptureInfo", stream)
    return int(number) if int(status) == int(_driver().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE) else 0


def current_capture(stream: int) -> int:
    """`capture_id` of the current stream, this one; next to free where no capture is under way."""
    return capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0


def synchronize() -> None:
    """Wait until the current context's GPU has done all it was given; the host then sees what copies wrote."""
    _call("cuCtxSynchronize")


def register(address: int, nbytes: int) -> int:
    """Pin host memory for all devices of this process and return the address by which a device knows it.

    Raises:
        CudaError: It cannot be pinned; the size is in the message.
    """
    driver = _driver()
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    _call("cuMemHostRegister", address, nbytes, flags, what=f"{nbytes} bytes; see ulimit -l and free memory")
    try:
        return device_address(address)
    except BaseException:
        unregister(address)
        raise


def device_address(address: int) -> int:
    """The address by which the current context's device knows pinned host memory."""
    return int(_call("cuMemHostGetDevicePointer", address, 0))


def unregister(address: int) -> None:
    """Unpin what `register` pinned. Nothing on a device may use it any more."""
    _call("cuMemHostUnregister", address)


def copy(dst: int, src: int, nbytes: int, stream: int) -> None:
    """Copy between pinned host memory and a device, or within a device, in stream order, on a copy engine."""
    _call("cuMemcpyAsync", dst, src, nbytes, stream)


Operation = tuple[bool, int, int]
"""A stream memory operation: wait or write, the device's address of a 32-bit word, and its value."""


class Batch:
    """Stream memory operations, built once and issued any number of times: building costs several microseconds each.

    Args:
        operations: In order; a wait ends when the word has the value.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._parts = []
        for start in range(0, len(operations), _BATCH):
            part = [_operation(*operation) for operation in operations[start : start + _BATCH]]
            self._parts.append((len(part), part))

    def issue(self, stream: int) -> None:
        """Issue the operations in order on `stream`."""
        for count, part in self._parts:
            _call("cuStreamBatchMemOp", stream, count, part, 0, what="waiting and signalling on a stream")


def _operation(wait: bool, address: int, value: int) -> Any:
    driver = _driver()
    params = driver.CUstreamBatchMemOpParams()
    kinds = driver.CUstreamBatchMemOpType
    if wait:
        params.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        part = params.waitValue
        part.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
    else:
        params.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        part = params.writeValue
        part.flags = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value
    part.operation = params.operation
    part.address = address
    part.value = driver.cuuint32_t(value)
    return params


def probe(word: int, stream: int) -> None:
    """Raise CudaError unless stream memory operations work on this device, on the word at device address `word`.

    The word must be 0, and is 0 again once the stream has come to here.
    """
    Batch([(False, word, 1), (True, word, 1), (False, word, 0)]).issue(stream)
