"""Memory that is allocated and freed in the order of streams."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.memory import allocate
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
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
    with state.lock:
        allocation = state.memory.at(address)
        if allocation is None or allocation.kind != "device" or allocation.is_freed:
            raise Refusal("INVALID_VALUE", f"no device memory starts at {address:#x}")
        allocation.is_freed = True
    marker = Operation(stream.context.device.ordinal, mark=lambda: withdraw(state, allocation))
    enqueue(state.scheduler, stream, marker)


@call(outputs=1)
def cuDeviceGetDefaultMemPool(state: State, dev: Any) -> Any:
    """Return the pool that every device has."""
    return bindings().CUmemoryPool(state.device(dev).default_pool.handle)


@call(outputs=1)
def cuDeviceGetMemPool(state: State, dev: Any) -> Any:
    """Return the pool that cuMemAllocAsync takes from."""
    return bindings().CUmemoryPool(state.device(dev).current_pool.handle)


@call()
def cuDeviceSetMemPool(state: State, dev: Any, pool: Any) -> None:
    """Let cuMemAllocAsync take from another pool of the device."""
    device, chosen = state.device(dev), _pool(state, pool)
    if chosen.device is not device:
        raise Refusal("INVALID_VALUE", "the pool is of another device")
    device.current_pool = chosen


@call(outputs=1)
def cuMemPoolCreate(state: State, poolProps: Any) -> Any:
    """Create a pool on the device that the properties name."""
    kinds = bindings().CUmemLocationType
    if poolProps.location.type != kinds.CU_MEM_LOCATION_TYPE_DEVICE:
        raise Refusal("INVALID_VALUE", "a pool must be located on a device")
    pool = Pool(state.device(poolProps.location.id))
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
    if attr in high:
        if int(value):
            raise Refusal("INVALID_VALUE", "a high-water mark can be set to 0 only")
        found.used_high = found.used
    else:
        found.settings[int(attr)] = int(value)


@call()
def cuMemPoolSetAccess(state: State, pool: Any, map: Any, count: int) -> None:
    """Let the kernels of other devices use the memory of a pool, or no longer."""
    found = _pool(state, pool)
    for description in list(map)[:count]:
        ordinal = state.device(description.location.id).ordinal
        with state.lock:
            if int(description.flags):
                found.accessible_from.add(ordinal)
            elif ordinal == found.device.ordinal:
                raise Refusal("INVALID_VALUE", "a device keeps access to its own pools")
            else:
                found.accessible_from.discard(ordinal)
            state.memory.pool_access_version += 1


@call(outputs=1)
def cuMemPoolGetAccess(state: State, memPool: Any, location: Any) -> Any:
    """Return whether the kernels of a device may use the memory of a pool."""
    kinds = bindings().CUmemAccess_flags
    if state.device(location.id).ordinal in _pool(state, memPool).accessible_from:
        return kinds.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return kinds.CU_MEM_ACCESS_FLAGS_PROT_NONE


def _allocate(state: State, size: int, pool: Pool, stream_handle: Any) -> Any:
    """Allocate now; the memory is there earlier than the order of the stream asks."""
    stream = state.stream(stream_handle)
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
        allocation = allocate(state, context, pool.device.arena, size, "device")
        allocation.pool = pool
        pool.count(size)
        return allocation


def _pool(state: State, handle: Any) -> Pool:
    pool = state.pools.get(number(handle))
    if pool is None:
        raise Refusal("INVALID_VALUE", f"{number(handle):#x} is no memory pool")
    return pool
