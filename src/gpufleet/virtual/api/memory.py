"""Device and managed memory: allocated, freed, described."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.arena import Arena
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.device_memory import ContextMemory
from gpufleet.virtual.graph_memory import free_now
from gpufleet.virtual.lifetimes import free, wait_for_copies
from gpufleet.virtual.spans import Allocation
from gpufleet.virtual.state import State

PITCH_ALIGNMENT = 512


@call(outputs=1, context=True)
def cuMemAlloc(state: State, current: Context, bytesize: int) -> Any:
    """Allocate device memory in the current context."""
    return _pointer(allocate(state, current, current.device.arena, bytesize, "device"))


@call(outputs=2, context=True)
def cuMemAllocPitch(
    state: State, current: Context, WidthInBytes: int, Height: int, ElementSizeBytes: int
) -> tuple[Any, int]:
    """Allocate rows that each start at a multiple of 512 bytes."""
    if ElementSizeBytes not in (4, 8, 16):
        raise Refusal("INVALID_VALUE", f"an element of {ElementSizeBytes} bytes: expected 4, 8 or 16")
    pitch = -(-WidthInBytes // PITCH_ALIGNMENT) * PITCH_ALIGNMENT
    allocation = allocate(state, current, current.device.arena, pitch * Height, "device")
    return _pointer(allocation), pitch


@call(outputs=1, context=True)
def cuMemAllocManaged(state: State, current: Context, bytesize: int, flags: int) -> Any:
    """Allocate memory that the host and all devices use at the same addresses."""
    if flags not in (1, 2):
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected 1 (global) or 2 (host)")
    allocation = allocate(state, current, state.memory.host, bytesize, "managed")
    return _pointer(allocation)


@call(by_finalizers=True)
def cuMemFree(state: State, dptr: Any) -> None:
    """Free memory, after all work of the devices that may be using it. NULL is nothing to free."""
    address = number(dptr)
    if not address:
        return
    memory = state.graphs.memories.get(address)
    if memory is not None:
        free_now(state, memory)
        return
    allocation = _freeable(state, address)
    if allocation.pool is None:  # for memory of a pool, driver 580 does not wait
        wait_for_users(state, allocation)
    if not free(state, allocation):
        raise Refusal("INVALID_VALUE", f"another thread freed {allocation}")


@call(outputs=2, context=True)
def cuMemGetInfo(state: State, current: Context) -> tuple[int, int]:
    """Return the free and the total bytes of the current context's device."""
    arena = current.device.arena
    return arena.capacity - arena.used, arena.capacity


@call(outputs=2, context=True)
def cuMemGetAddressRange(state: State, current: Context, dptr: Any) -> tuple[Any, int]:
    """Return start and size of the allocation that a pointer points into."""
    with state.lock:
        allocation = state.memory.find(number(dptr))
    if allocation is None or not ContextMemory(state.memory, current).reaches(allocation):
        raise Refusal("NOT_FOUND", f"{number(dptr):#x} is in no allocation that kernels of the context reach")
    return _pointer(allocation), allocation.size


def allocate(state: State, context: Context, arena: Arena, size: int, kind: str) -> Allocation:
    """Return new memory of an arena, or refuse."""
    if size <= 0:
        raise Refusal("INVALID_VALUE", f"{size} bytes: expected at least 1")
    allocation = state.memory.allocate(arena, size, kind, context)
    if allocation is None:
        owner = "the host" if arena.ordinal < 0 else f"device {arena.ordinal}"
        left = arena.capacity - arena.used
        raise Refusal(
            "OUT_OF_MEMORY", f"{size} bytes do not fit: {owner} has {left} of {arena.capacity} free"
        )
    return allocation


def wait_for_users(state: State, allocation: Allocation) -> None:
    """Wait for all work of the devices that reach an allocation, and for copies of others that use it.

    cuMemFree is implicitly synchronising: work that was issued before it still finds the memory.
    """
    for device in state.devices:
        if (
            allocation.is_host
            or device.ordinal == allocation.ordinal
            or _reaches(state, device.ordinal, allocation)
        ):
            state.wait_for_device(device)
    wait_for_copies(state, allocation)


def _reaches(state: State, ordinal: int, allocation: Allocation) -> bool:
    """Say whether kernels of a device may be using the memory as a peer's; they do not say what they use."""
    with state.lock:
        on_device = [each for each in state.contexts.values() if each.device.ordinal == ordinal]
        return any(allocation.context in context.peers for context in on_device)


def _freeable(state: State, address: int) -> Allocation:
    with state.lock:
        allocation = state.memory.at(address)
    if allocation is None or allocation.kind not in ("device", "managed") or allocation.is_freed:
        raise Refusal("INVALID_VALUE", f"no allocation to be freed starts at {address:#x}")
    return allocation


def _pointer(allocation: Allocation) -> Any:
    return bindings().CUdeviceptr(allocation.start)
