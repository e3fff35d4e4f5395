"""At which address is this object's memory, and may a kernel of this stream use it?"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gpufleet.errors import CudaError, WrongContext
from gpufleet.protocols import foreign_memory

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
    memory = foreign_memory(value, queue)
    if memory is None:
        return None
    address = memory.address
    if not address:
        raise ValueError("its data pointer is null: pass None where a null pointer is meant")
    driver = queue.context.driver
    needs_check = driver.is_virtual or int(driver.cuDeviceGetCount()) > 1
    if needs_check and not _is_reachable(address, queue.context):
        raise _not_reachable(f"the {type(value).__name__} with memory at {address:#x}", None, queue.context)
    passed.setdefault(threading.get_ident(), []).append(memory.owner)
    return address


passed: dict[int, list[Any]] = {}
"""What keeps the memory of other libraries' arrays that threads, by identity, are passing to kernels."""


def keep_passed(queue: Queue) -> None:
    """Keep what was passed to the kernel that was launched last on this thread, until it is done."""
    owners = passed.pop(threading.get_ident(), ())
    if not owners:
        return
    if queue.graph is None:
        queue.hold(*owners)
    else:
        queue.graph.keep(*owners)


def _handle_value(value: Any) -> int | None:
    """Read a handle of `cuda.bindings`, such as a CUdeviceptr or CUtexObject."""
    return int(value) if hasattr(value, "getPtr") and hasattr(value, "__int__") else None


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
