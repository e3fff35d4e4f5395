"""Where managed memory is to be: advised and asked. All devices and the host reach it anyway."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.placements import HOST, NOWHERE, Placements
from gpufleet.virtual.spans import Allocation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import enqueue

ATTACH_SINGLE = 4
"""CU_MEM_ATTACH_SINGLE: for one stream, which the default stream cannot be."""


@call()
def cuMemPrefetchAsync(
    state: State, devPtr: Any, count: int, location: Any, flags: int, hStream: Any
) -> None:
    """Remember in the order of a stream where memory was wanted."""
    allocation = _managed(state, devPtr, count)
    if flags:
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected 0")
    where, stream = _prefetched_to(state, location), state.stream(hStream)
    placements, start = _placements(allocation), number(devPtr) - allocation.start
    operation = Operation(
        stream.context.device.ordinal,
        mark=lambda: placements.change(start, start + count, prefetched=where),
    )
    enqueue(state.scheduler, stream, operation)


@call()
def cuStreamAttachMemAsync(state: State, hStream: Any, dptr: Any, length: int, flags: int) -> None:
    """Do nothing in the order of a stream: every stream and the host reach managed memory."""
    stream, address = state.stream(hStream), number(dptr)
    with state.lock:
        allocation = state.memory.at(address)
    if allocation is None or allocation.kind != "managed" or length not in (0, allocation.size):
        raise Refusal("INVALID_VALUE", f"{length} bytes at {address:#x} are no managed memory as a whole")
    if flags not in (1, 2, ATTACH_SINGLE) or (flags == ATTACH_SINGLE and stream.is_legacy):
        raise Refusal("INVALID_VALUE", f"the flags are {flags} for {stream.handle:#x}")
    enqueue(state.scheduler, stream, Operation(stream.context.device.ordinal))


@call(context=True)
def cuMemAdvise(state: State, current: Context, devPtr: Any, count: int, advice: Any, location: Any) -> None:
    """Remember an advice."""
    allocation = _managed(state, devPtr, count)
    name = str(advice.name).removeprefix("CU_MEM_ADVISE_")
    kind, start = _place(location), number(devPtr) - allocation.start
    end = start + count
    if name.endswith("ACCESSED_BY") and kind not in ("DEVICE", "HOST"):
        raise Refusal("INVALID_VALUE", "only a device or the host accesses memory")
    where = HOST
    if kind == "DEVICE":
        where = int(location.id)
        needs_device = name.endswith("ACCESSED_BY") or name == "SET_PREFERRED_LOCATION"
        if needs_device and not 0 <= where < len(state.devices):
            raise Refusal("INVALID_VALUE", f"there is no device {where}")
    with state.lock:
        placements = _placements(allocation)
        if name.endswith("ACCESSED_BY"):
            placements.access(start, end, where, name == "SET_ACCESSED_BY")
        elif name.endswith("READ_MOSTLY"):
            placements.change(start, end, read_mostly=name == "SET_READ_MOSTLY")
        elif name.endswith("PREFERRED_LOCATION"):
            placements.change(start, end, preferred=where if name.startswith("SET") else NOWHERE)


@call(outputs=1)
def cuMemRangeGetAttribute(state: State, dataSize: int, attribute: Any, devPtr: Any, count: int) -> Any:
    """Return what was advised for all of a range."""
    return _attribute(state, dataSize, attribute, devPtr, count)


@call(outputs=1)
def cuMemRangeGetAttributes(
    state: State, dataSizes: Any, attributes: Any, numAttributes: int, devPtr: Any, count: int
) -> list[Any]:
    """Return several of what was advised for all of a range."""
    asked = list(zip(dataSizes, attributes, strict=True))[:numAttributes]
    if len(asked) != numAttributes or not asked:
        raise Refusal("INVALID_VALUE", f"{len(asked)} attributes, where {numAttributes} were said")
    return [_attribute(state, size, attribute, devPtr, count) for size, attribute in asked]


def _attribute(state: State, size: int, attribute: Any, pointer: Any, count: int) -> Any:
    allocation = _managed(state, pointer, count)
    name = str(attribute.name).removeprefix("CU_MEM_RANGE_ATTRIBUTE_")
    start = number(pointer) - allocation.start
    if size <= 0 or size % 4 or (size != 4 and name != "ACCESSED_BY"):
        raise Refusal("INVALID_VALUE", f"{size} bytes are not the size of {name}")
    with state.lock:
        common = _placements(allocation).common(start, start + count)
    if name == "ACCESSED_BY":
        found = sorted(common.accessed_by - {HOST}) + [HOST] * (HOST in common.accessed_by)
        return (found + [NOWHERE] * (size // 4))[: size // 4]
    values = {
        "READ_MOSTLY": int(common.read_mostly),
        "PREFERRED_LOCATION": common.preferred,
        "LAST_PREFETCH_LOCATION": common.prefetched,
    }
    if name not in values:
        raise Refusal("NOT_SUPPORTED", f"virtual devices do not know {name}")
    return values[name]


def _managed(state: State, pointer: Any, count: int) -> Allocation:
    address = number(pointer)
    with state.lock:
        allocation = state.memory.find(address, count)
    if count <= 0 or allocation is None or allocation.kind != "managed":
        raise Refusal("INVALID_VALUE", f"{count} bytes at {address:#x} are no managed memory")
    return allocation


def _placements(allocation: Allocation) -> Placements:
    if allocation.placements is None:
        allocation.placements = Placements(allocation.size)
    return allocation.placements


def _prefetched_to(state: State, location: Any) -> int:
    kind = _place(location)
    if kind == "DEVICE":
        return state.device(location.id).ordinal
    if kind == "HOST_NUMA" and location.id:
        raise Refusal("INVALID_VALUE", f"there is no NUMA node {location.id} here")
    return HOST


def _place(location: Any) -> str:
    """The kind of a CUmemLocation."""
    name = str(location.type.name).removeprefix("CU_MEM_LOCATION_TYPE_")
    if name in ("INVALID", "NONE"):
        raise Refusal("INVALID_VALUE", "the location is none")
    return name
