"""At which address is this object's memory, and may a kernel of this stream use it?"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from gpufleet.errors import CudaError, WrongContext

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.memory import DeviceBuffer
    from gpufleet.queue import Queue


def buffer_address(buffer: DeviceBuffer, queue: Queue) -> int:
    """Return the address of a buffer that a kernel on `queue` may use, and note that it does.

    Every context of the buffer's device may, and those of its peers with access enabled.

    Raises
    ------
    ContextClosed
        If the buffer or its context was closed.
    WrongContext
        If it is memory of another device, or of another driver.
    """
    buffer.check_open()
    mine, its = queue.context, buffer.context
    if its is not mine:
        _check_reachable(buffer, mine, its)
    buffer.used_on(queue)
    return buffer.address


def _check_reachable(buffer: DeviceBuffer, mine: Context, its: Context) -> None:
    if its.driver is not mine.driver:
        raise WrongContext(
            f"{buffer!r} cannot be used by a kernel in {mine!r}: one is of the {its.driver.name} driver, the "
            f"other of the {mine.driver.name} driver"
        )
    if its.device.ordinal != mine.device.ordinal and not _is_reachable(buffer.address, mine):
        raise _not_reachable(repr(buffer), its.device.ordinal, mine)


def foreign_address(value: Any, queue: Queue) -> int | None:
    """Return the address of another library's GPU memory, or None if `value` is nothing of the kind.

    Work on `queue` will wait for what the array's own library says is still writing it.

    Raises
    ------
    TypeError, ValueError
        If it is an array that a kernel cannot take: one without memory, or with a mask.
    WrongContext
        If it is memory that the device cannot reach.
    """
    address = _handle_value(value)
    if address is not None:
        return address
    address = _array_interface_address(value, queue)
    if address is None:
        address = _dlpack_address(value, queue)
    if address is None:
        return None
    driver = queue.context.driver
    needs_check = driver.is_virtual or int(driver.cuDeviceGetCount()) > 1
    if needs_check and not _is_reachable(address, queue.context):
        raise _not_reachable(f"the {type(value).__name__} with memory at {address:#x}", None, queue.context)
    return address


def _handle_value(value: Any) -> int | None:
    """Read a handle of `cuda.bindings`, such as a CUdeviceptr or CUtexObject."""
    return int(value) if hasattr(value, "getPtr") and hasattr(value, "__int__") else None


def _array_interface_address(value: Any, queue: Queue) -> int | None:
    """Read `__cuda_array_interface__`, https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
    try:
        interface = value.__cuda_array_interface__
    except AttributeError:
        return None
    except RuntimeError as error:  # PyTorch's, for a tensor that requires grad
        raise TypeError(str(error)) from error
    address = interface["data"][0]
    if not address:
        raise ValueError("its data pointer is null: pass None where a null pointer is meant")
    if interface.get("mask") is not None:
        raise ValueError("it has a mask, which a kernel would not see")
    producer = interface.get("stream")
    if producer is not None and producer != queue.address:
        _wait_for(producer, queue)
    return int(address)


LEGACY_AND_PER_THREAD = (1, 2)
"""CU_STREAM_LEGACY and CU_STREAM_PER_THREAD: special values, not handles."""


def _wait_for(producer: int, queue: Queue) -> None:
    """Let `queue` wait for what is queued on another library's stream so far."""
    driver = queue.context.driver
    if producer in LEGACY_AND_PER_THREAD:
        current = driver.cuCtxGetCurrent()
        owner = current if int(current) else queue.context.handle
    else:
        owner = driver.cuStreamGetCtx(producer)
    driver.cuCtxPushCurrent(owner)
    try:
        event = driver.cuEventCreate(DISABLE_TIMING)
        try:
            driver.cuEventRecord(event, producer)
            driver.cuStreamWaitEvent(queue.handle, event, 0)
        finally:
            driver.cuEventDestroy(event)
    finally:
        driver.cuCtxPopCurrent()


DISABLE_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""


class _DLTensor(ctypes.Structure):
    """The first fields of `DLManagedTensor`, https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type", ctypes.c_uint32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_DLPACK_ON_GPU = (2, 3, 13)
"""kDLCUDA, kDLCUDAHost (pinned memory, which kernels reach) and kDLCUDAManaged."""


def _dlpack_address(value: Any, queue: Queue) -> int | None:
    if not hasattr(value, "__dlpack_device__") or value.__dlpack_device__()[0] not in _DLPACK_ON_GPU:
        return None
    # The producer orders its own work before this stream. 0 is not allowed, 1 is the default stream.
    capsule = value.__dlpack__(stream=queue.address or 1)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    if not tensor.data:
        raise ValueError("its data pointer is null: pass None where a null pointer is meant")
    return int(tensor.data + tensor.byte_offset)


def _is_reachable(address: int, context: Context) -> bool:
    """Ask the driver whether kernels of `context` may use an address of another device or library."""
    from cuda.bindings.driver import CUpointer_attribute

    try:
        with context:
            context.driver.cuPointerGetAttribute(
                CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address
            )
    except CudaError as error:
        if error.name == "CUDA_ERROR_INVALID_VALUE":
            return False
        raise
    return True


def _not_reachable(what: str, owner: int | None, context: Context) -> WrongContext:
    whose = "" if owner is None else f" of device {owner}"
    return WrongContext(
        f"{what} cannot be used by a kernel in {context!r}: it is memory{whose} that device "
        f"{context.device.ordinal} has no access to; copy it over with buffer.copy_from, or "
        "open it with context.enable_peer_access(the owner's context)"
    )
