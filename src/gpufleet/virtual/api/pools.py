"""Memory that is allocated and freed in the order of streams."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.memory import allocate
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.devices import Device
from gpufleet.virtual.graph_memory import capture_allocation, free_graph_memory
from gpufleet.virtual.lifetimes import withdraw
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.pools import Pool
from gpufleet.virtual.spans import Allocation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import enqueue


@call(outputs=1)
def cuMemAllocAsync(state: State, bytesize: int, hStream: Any) -> Any:
    """Allocate from the current pool of the stream's device."""
    stream = state.stream(hStream)
    return _allocate(state, bytesize, stream.context.device.current_pool, hStream)


@call(outputs=1)
def cuMemAllocFromPoolAsync(state: State, bytesize: int, pool: Any, hStream: Any) -> Any:
    """Allocate from a pool."""
    return _allocate(state, bytesize, _pool(state, pool), hStream)


@call(by_finalizers=True)
def cuMemFreeAsync(state: State, dptr: Any, hStream: Any) -> None:
    """Free memory, after the work that is in a stream now."""
    stream = state.stream(hStream)
    address = number(dptr)
    if not address:
        return
    if stream.capture is not None or address in state.graphs.memories:
        free_graph_memory(state, address, stream)
        return
    with state.lock:
        allocation = state.memory.at(address)
        if allocation is None or allocation.kind not in ("device", "managed") or allocation.is_freed:
            raise Refusal("INVALID_VALUE", f"no device memory starts at {address:#x}")
        if allocation.kind == "managed":
            raise Refusal("NOT_SUPPORTED", "managed memory is not freed in the order of a stream")
        allocation.is_freed = True
        if allocation.pool is not None:
            allocation.pool.count(-allocation.size)
    marker = Operation(stream.context.device.ordinal, mark=lambda: withdraw(state, allocation))
    enqueue(state.scheduler, stream, marker)


@call(outputs=1)
def cuDeviceGetDefaultMemPool(state: State, dev: Any) -> Any:
    """Return the pool that every device has."""
    return bindings().CUmemoryPool(state.device(dev).default_pool.handle)


@call(outputs=1)
def cuDeviceGetMemPool(state: State, dev: Any) -> Any:
    """Return the pool that cuMemAllocAsync takes from."""
    if not 0 <= int(dev) < len(state.devices):  # as driver 580 answers; others say INVALID_DEVICE
        raise Refusal("INVALID_VALUE", f"there is no device {int(dev)}")
    return bindings().CUmemoryPool(state.devices[int(dev)].current_pool.handle)


@call(outputs=1)
def cuMemGetDefaultMemPool(state: State, location: Any, typename: Any) -> Any:
    """Return the pool that every device has, by location."""
    return bindings().CUmemoryPool(_device_at(state, location).default_pool.handle)


@call(outputs=1)
def cuMemGetMemPool(state: State, location: Any, typename: Any) -> Any:
    """Return the pool that cuMemAllocAsync takes from, by location."""
    return bindings().CUmemoryPool(_device_at(state, location).current_pool.handle)


@call()
def cuDeviceSetMemPool(state: State, dev: Any, pool: Any) -> None:
    """Let cuMemAllocAsync take from another pool of the device."""
    chosen = _pool(state, pool)
    if chosen.device.ordinal != int(dev):
        raise Refusal("INVALID_VALUE", f"the pool is of device {chosen.device.ordinal}")
    chosen.device.current_pool = chosen


@call(outputs=1)
def cuMemPoolCreate(state: State, poolProps: Any) -> Any:
    """Create a pool on the device that the properties name."""
    types = bindings()
    if poolProps is None or poolProps.allocType != types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED:
        raise Refusal("INVALID_VALUE", "a pool must be of pinned memory")
    handles = types.CUmemAllocationHandleType
    shareable = (handles.CU_MEM_HANDLE_TYPE_NONE, handles.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if poolProps.handleTypes not in shareable:
        raise Refusal("INVALID_VALUE", f"virtual devices have no {poolProps.handleTypes.name}")
    pool = Pool(_device_at(state, poolProps.location), limit=int(poolProps.maxSize))
    state.pools[pool.handle] = pool
    return bindings().CUmemoryPool(pool.handle)


@call(by_finalizers=True)
def cuMemPoolDestroy(state: State, pool: Any) -> None:
    """End a pool; memory from it stays until it is freed."""
    found = _pool(state, pool)
    if found is found.device.default_pool:
        raise Refusal("INVALID_VALUE", "a default pool cannot be destroyed")
    with state.lock:
        state.pools.pop(found.handle, None)
        if found.device.current_pool is found:
            found.device.current_pool = found.device.default_pool


@call()
def cuMemPoolTrimTo(state: State, pool: Any, minBytesToKeep: int) -> None:
    """Do nothing: pools keep no free memory."""
    _pool(state, pool)


@call(outputs=1)
def cuMemPoolGetAttribute(state: State, pool: Any, attr: Any) -> Any:
    """Return how much memory of a pool is used, or a setting."""
    found, kinds = _pool(state, pool), bindings().CUmemPool_attribute
    amounts = {
        kinds.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: found.used,
        kinds.CU_MEMPOOL_ATTR_USED_MEM_CURRENT: found.used,
        kinds.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: found.used_high,
        kinds.CU_MEMPOOL_ATTR_USED_MEM_HIGH: found.used_high,
        kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: found.settings.get(int(attr), 0),
    }
    if attr in amounts:
        return bindings().cuuint64_t(amounts[attr])
    return found.settings.get(int(attr), 1)


@call()
def cuMemPoolSetAttribute(state: State, pool: Any, attr: Any, value: Any) -> None:
    """Remember a setting; of amounts, the high-water marks can be set back to 0."""
    found, kinds = _pool(state, pool), bindings().CUmemPool_attribute
    high = (kinds.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, kinds.CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    if attr in high and not int(value):
        found.used_high = found.used
    elif attr == kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        found.settings[int(attr)] = int(value)
    elif str(attr.name).startswith("CU_MEMPOOL_ATTR_REUSE"):
        found.settings[int(attr)] = int(bool(value))
    else:
        raise Refusal("INVALID_VALUE", f"{attr.name} cannot be set to {int(value)}")


@call()
def cuMemPoolSetAccess(state: State, pool: Any, map: Any, count: int) -> None:
    """Let the kernels of other devices use the memory of a pool, or no longer."""
    found, flags = _pool(state, pool), bindings().CUmemAccess_flags
    wishes = list(map)[:count]
    if not wishes:
        raise Refusal("INVALID_VALUE", "no access is described")
    if any(
        wish.flags == flags.CU_MEM_ACCESS_FLAGS_PROT_READ or not _is_device(wish.location) for wish in wishes
    ):
        raise Refusal("NOT_SUPPORTED", "a device reads and writes the memory of a pool, or neither")
    ordinals = [state.device(wish.location.id).ordinal for wish in wishes]
    with state.lock:
        for ordinal, wish in zip(ordinals, wishes, strict=True):
            if int(wish.flags):
                found.accessible_from.add(ordinal)
            elif ordinal == found.device.ordinal:
                raise Refusal("INVALID_DEVICE", "a device keeps access to its own pools")
            else:
                found.accessible_from.discard(ordinal)
        state.memory.pool_access_version += 1


@call(outputs=1)
def cuMemPoolGetAccess(state: State, memPool: Any, location: Any) -> Any:
    """Return whether the kernels of a device may use the memory of a pool."""
    kinds, pool = bindings().CUmemAccess_flags, _pool(state, memPool)
    if _is_device(location) and _device_at(state, location).ordinal in pool.accessible_from:
        return kinds.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return kinds.CU_MEM_ACCESS_FLAGS_PROT_NONE


def _allocate(state: State, size: int, pool: Pool, stream_handle: Any) -> Any:
    """Allocate now; the memory is there earlier than the order of the stream asks. No bytes are NULL."""
    stream = state.stream(stream_handle)
    if not size:
        return bindings().CUdeviceptr(0)
    if stream.capture is not None:
        return bindings().CUdeviceptr(capture_allocation(state, stream, pool.device, size))
    try:
        allocation = _take(state, stream.context, pool, size)
    except Refusal as refusal:
        if refusal.code != "OUT_OF_MEMORY":
            raise
        state.wait(stream)  # frees that are on their way in it make room, as they would in stream order
        allocation = _take(state, stream.context, pool, size)
    return bindings().CUdeviceptr(allocation.start)


def _take(state: State, context: Context, pool: Pool, size: int) -> Allocation:
    with state.lock:
        if pool.limit and pool.used + size > pool.limit:
            raise Refusal("OUT_OF_MEMORY", f"the pool has {pool.used} of {pool.limit} bytes in use")
        allocation = allocate(state, context, pool.device.arena, size, "device")
        allocation.pool = pool
        pool.count(size)
        return allocation


def _is_device(location: Any) -> bool:
    return bool(location.type == bindings().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)


def _device_at(state: State, location: Any) -> Device:
    """The device that a location names."""
    if not _is_device(location) or not 0 <= location.id < len(state.devices):
        raise Refusal("INVALID_VALUE", f"a pool of {location.type.name} {location.id}")
    return state.devices[int(location.id)]


def _pool(state: State, handle: Any) -> Pool:
    pool = state.pools.get(number(handle))
    if pool is None:
        raise Refusal("INVALID_VALUE", f"{number(handle):#x} is no memory pool")
    return pool
