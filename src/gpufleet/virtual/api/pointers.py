"""What the driver knows of a pointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.device_memory import ContextMemory
from gpufleet.virtual.spans import Allocation
from gpufleet.virtual.state import State

_PREFIX = "CU_POINTER_ATTRIBUTE_"
_READ_WRITE = 3
"""CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE."""
_NO_DEVICE = -2
"""CU_DEVICE_INVALID."""


@call(outputs=1)
def cuPointerGetAttribute(state: State, attribute: Any, ptr: Any) -> Any:
    """Return one attribute; refuse a pointer that the driver does not know."""
    address = number(ptr)
    with state.lock:
        allocation = state.memory.find(address)
    if allocation is None:
        raise Refusal("INVALID_VALUE", f"{address:#x} is in no memory of the driver's")
    return _attribute(state, _name(attribute), allocation, address)


@call(outputs=1)
def cuPointerGetAttributes(
    state: State, numAttributes: int, attributes: Sequence[Any], ptr: Any
) -> list[Any]:
    """Return several attributes; for a pointer that the driver does not know, what means nothing."""
    if numAttributes < 1:
        raise Refusal("INVALID_VALUE", "no attributes are asked for")
    address = number(ptr)
    with state.lock:
        allocation = state.memory.find(address)
    names = [_name(attribute) for attribute in list(attributes)[:numAttributes]]
    if allocation is None:
        return [_nothing(name) for name in names]
    return [_attribute(state, name, allocation, address) for name in names]


@call()
def cuPointerSetAttribute(state: State, value: Any, attribute: Any, ptr: Any) -> None:
    """Remember CU_POINTER_ATTRIBUTE_SYNC_MEMOPS; it has no effect: copies are synchronous as documented."""
    with state.lock:
        allocation = state.memory.find(number(ptr))
    if allocation is None or _name(attribute) != "SYNC_MEMOPS":
        raise Refusal("INVALID_VALUE", "only SYNC_MEMOPS of the driver's memory can be set")
    allocation.sync_memops = bool(value)


def _attribute(state: State, name: str, allocation: Allocation, address: int) -> Any:
    types = bindings()
    if name == "CONTEXT":
        return types.CUcontext(allocation.context.handle if allocation.pool is None else 0)
    if name == "MEMORY_TYPE":
        kinds = types.CUmemorytype
        is_host = allocation.kind in ("pinned", "registered")
        return int(kinds.CU_MEMORYTYPE_HOST if is_host else kinds.CU_MEMORYTYPE_DEVICE)
    if name == "DEVICE_POINTER":
        if not ContextMemory(state.memory, state.current()).reaches(allocation):
            raise Refusal("INVALID_VALUE", f"kernels of the current context do not reach {address:#x}")
        return types.CUdeviceptr(address)
    if name == "RANGE_START_ADDR":
        return types.CUdeviceptr(allocation.start)
    if name == "HOST_POINTER":
        if not allocation.is_host:
            raise Refusal("INVALID_VALUE", f"{address:#x} is device memory: it has no host pointer")
        return address
    if name == "MEMPOOL_HANDLE":
        return types.CUmemoryPool(allocation.pool.handle if allocation.pool is not None else 0)
    values = {
        "RANGE_SIZE": allocation.size,
        "BUFFER_ID": allocation.number,
        "MEMORY_BLOCK_ID": allocation.number,
        "DEVICE_ORDINAL": allocation.ordinal,
        "IS_MANAGED": allocation.kind == "managed",
        "MAPPED": True,
        "ACCESS_FLAGS": _READ_WRITE,
        "SYNC_MEMOPS": allocation.sync_memops,
        "IS_LEGACY_CUDA_IPC_CAPABLE": allocation.kind == "device" and allocation.pool is None,
        "ALLOWED_HANDLE_TYPES": 0,
        "IS_GPU_DIRECT_RDMA_CAPABLE": 0,
        "IS_HW_DECOMPRESS_CAPABLE": 0,
        "MAPPING_SIZE": allocation.size,
        "MAPPING_BASE_ADDR": allocation.start,
    }
    if name not in values:
        raise Refusal("NOT_SUPPORTED", f"virtual memory has no attribute {name}")
    return values[name]


def _nothing(name: str) -> Any:
    types = bindings()
    handles = {
        "CONTEXT": types.CUcontext,
        "DEVICE_POINTER": types.CUdeviceptr,
        "RANGE_START_ADDR": types.CUdeviceptr,
        "MEMPOOL_HANDLE": types.CUmemoryPool,
    }
    if name in handles:
        return handles[name](0)
    if name == "DEVICE_ORDINAL":
        return _NO_DEVICE
    return False if name in ("IS_MANAGED", "MAPPED", "SYNC_MEMOPS", "IS_LEGACY_CUDA_IPC_CAPABLE") else 0


def _name(attribute: Any) -> str:
    try:
        return str(bindings().CUpointer_attribute(int(attribute)).name).removeprefix(_PREFIX)
    except ValueError:
        raise Refusal("INVALID_VALUE", f"{int(attribute)} is no CUpointer_attribute") from None
