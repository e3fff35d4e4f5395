"""Page-locked host memory: allocated by the driver, or the caller's own, registered in place.

Virtual devices use host memory as it is, so nothing is locked; what counts is which memory they may touch.
"""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.memory import allocate, wait_for_users
from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.host_pointers import host_address, mapped_bytes
from gpufleet.virtual.lifetimes import free
from gpufleet.virtual.spans import Allocation
from gpufleet.virtual.state import State

ALLOCATION_FLAGS = 7
"""CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP, _WRITECOMBINED."""
REGISTRATION_FLAGS = 15
"""CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP, _IOMEMORY, _READ_ONLY."""
PORTABLE, MAPPED, WRITE_COMBINED = 1, 2, 4
LARGEST = 1 << 47
"""What is larger than the addresses of a process is refused as driver 580 does, NOT_SUPPORTED."""


@call(outputs=1, context=True)
def cuMemHostAlloc(state: State, current: Context, bytesize: int, Flags: int) -> int:
    """Allocate host memory that devices use too; return its address, NULL for no bytes."""
    if Flags & ~ALLOCATION_FLAGS:
        raise Refusal("INVALID_VALUE", f"{Flags:#x} are no flags of pinned memory")
    return _pinned(state, current, bytesize, Flags)


@call(outputs=1, context=True)
def cuMemAllocHost(state: State, current: Context, bytesize: int) -> int:
    """Allocate host memory that devices use too; return its address, NULL for no bytes."""
    return _pinned(state, current, bytesize, 0)


@call(by_finalizers=True)
def cuMemFreeHost(state: State, p: Any) -> None:
    """Free pinned memory, after all work that may be using it. NULL is nothing to free."""
    address = host_address(p)
    if not address:
        return
    with state.lock:
        allocation = state.memory.at(address)
    if allocation is None or allocation.kind != "pinned":
        raise Refusal("INVALID_VALUE", f"no pinned memory starts at {address:#x}")
    wait_for_users(state, allocation)
    if not free(state, allocation):
        raise Refusal("INVALID_VALUE", f"another thread freed {allocation}")


@call(outputs=1, context=True)
def cuMemHostGetDevicePointer(state: State, current: Context, p: Any, Flags: int) -> Any:
    """Return the address under which devices use pinned memory: the same one."""
    if Flags:
        raise Refusal("INVALID_VALUE", f"the flags are {Flags}: expected 0")
    address = host_address(p)
    _locked(state, address, "pinned", "registered")
    return bindings().CUdeviceptr(address)


@call(outputs=1, context=True)
def cuMemHostGetFlags(state: State, current: Context, p: Any) -> int:
    """Return the flags that pinned memory was allocated with."""
    return _locked(state, host_address(p), "pinned", "registered", "managed").flags


@call(context=True)
def cuMemHostRegister(state: State, current: Context, p: Any, bytesize: int, Flags: int) -> None:
    """Let devices use the caller's memory, which must stay where it is until it is unregistered."""
    address = host_address(p)
    if not address or bytesize <= 0 or Flags & ~REGISTRATION_FLAGS:
        raise Refusal("INVALID_VALUE", f"{bytesize} bytes at {address:#x} with flags {Flags:#x}")
    if bytesize >= LARGEST:
        raise Refusal("NOT_SUPPORTED", f"{bytesize} bytes are more than a process has addresses")
    if state.memory.holds(address, bytesize):
        raise Refusal("INVALID_VALUE", f"{address:#x} is the driver's own memory")
    _check_mapped(address, bytesize)
    with state.lock:
        if state.memory.registered.overlaps(address, bytesize):
            raise Refusal("HOST_MEMORY_ALREADY_REGISTERED", f"{bytesize} bytes at {address:#x}")
        allocation = Allocation(address, bytesize, "registered", current.home, current.device.ordinal)
        allocation.flags = Flags | MAPPED
        state.memory.registered.add(allocation)


@call(by_finalizers=True)
def cuMemHostUnregister(state: State, p: Any) -> None:
    """End what cuMemHostRegister began, after all work that may be using the memory."""
    address = host_address(p)
    with state.lock:
        allocation = state.memory.registered.at(address)
        is_known = not address or state.memory.holds(address, 1) or state.memory.find(address) is not None
    if allocation is None:
        code = "INVALID_VALUE" if is_known else "HOST_MEMORY_NOT_REGISTERED"
        raise Refusal(code, f"no registered memory starts at {address:#x}")
    # The memory is the caller's, who may unmap it next: no kernel may still hold its address.
    wait_for_users(state, allocation)
    with state.lock:
        if state.memory.registered.at(address) is allocation:
            state.memory.registered.remove(allocation)


def _pinned(state: State, context: Context, size: int, flags: int) -> int:
    if not size:
        return 0
    allocation = allocate(state, context, state.memory.host, size, "pinned")
    # Under unified addressing all pinned memory is mapped, and portable if it is cached.
    allocation.flags = MAPPED | (WRITE_COMBINED if flags & WRITE_COMBINED else PORTABLE)
    return allocation.start


def _locked(state: State, address: int, *kinds: str) -> Allocation:
    with state.lock:
        allocation = state.memory.find(address)
    if allocation is None or allocation.kind not in kinds:
        raise Refusal("INVALID_VALUE", f"{address:#x} is in no pinned memory")
    return allocation


def _check_mapped(address: int, size: int) -> None:
    """Refuse memory that the process does not have, where the system can tell."""
    mapped = mapped_bytes(address, size)
    if mapped < size:
        code = "OUT_OF_MEMORY" if mapped else "INVALID_VALUE"
        raise Refusal(code, f"only {mapped} of {size} bytes at {address:#x} are mapped")
