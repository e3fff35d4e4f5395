"""Copies of boxes: planes of rows of bytes."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.copies import rectangle
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.graphs import Work
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream, enqueue, enqueue_and_wait
from gpufleet.virtual.transfers import Side, locate, move, transfer

Planes = list[tuple[Side, Side]]
"""Target and source of each plane."""


@call(context=True)
def cuMemcpy3D(state: State, current: Context, pCopy: Any) -> None:
    """Copy a box, and wait unless both sides are device memory."""
    planes = _planes(pCopy)
    if planes:
        operation = _operation(state, current, planes, pCopy, for_graph=False)
        waits = not all(side.is_device for plane in planes for side in plane)
        _enqueue(state, current.legacy, operation, waits)


@call()
def cuMemcpy3DAsync(state: State, pCopy: Any, hStream: Any) -> None:
    """Copy a box in the order of a stream, and wait where memory is pageable."""
    planes, stream = _planes(pCopy), state.stream(hStream)
    if planes:
        is_captured = stream.capture is not None
        operation = _operation(state, stream.context, planes, pCopy, for_graph=is_captured)
        waits = not is_captured and any(side.is_pageable for plane in planes for side in plane)
        _enqueue(state, stream, operation, waits)


def copy_node(state: State, context: Context, parameters: Any) -> Work:
    """Return the work of a copy's node in a graph."""
    planes = _planes(parameters)
    if not planes:
        raise Refusal("INVALID_VALUE", "there is nothing to copy")
    return Work("MEMCPY", context, _operation(state, context, planes, parameters, for_graph=True))


def _enqueue(state: State, stream: Stream, operation: Operation, waits: bool) -> None:
    if waits:
        enqueue_and_wait(state.scheduler, stream, operation)
        state.check_fault()
    else:
        enqueue(state.scheduler, stream, operation, kind="MEMCPY")


def _operation(state: State, context: Context, planes: Planes, keep: object, *, for_graph: bool) -> Operation:
    memory = state.memory
    locate(memory, context, *(side for plane in planes for side in plane), for_graph=for_graph)

    def run() -> None:
        for to, source in planes:
            move(memory, to, source)
        _ = keep  # a caller's buffer lives until the copy is done

    return transfer(context, run, *(side for plane in planes for side in plane))


def _planes(copy: Any) -> Planes:
    if copy is None:
        raise Refusal("INVALID_VALUE", "the description of the copy is NULL")
    depth = int(copy.Depth)
    if not copy.WidthInBytes or not copy.Height or not depth:
        return []
    return list(zip(_side(copy, "dst", depth), _side(copy, "src", depth), strict=True))


def _side(copy: Any, name: str, depth: int) -> list[Side]:
    """Return the planes of one side, each `Height` of that side's rows behind the one before."""
    width, rows = int(copy.WidthInBytes), int(copy.Height)
    x, y, z = (int(getattr(copy, f"{name}{field}")) for field in ("XInBytes", "Y", "Z"))
    height, pitch = int(getattr(copy, f"{name}Height")), int(getattr(copy, f"{name}Pitch"))
    if (depth > 1 or z) and y + rows > height:
        raise Refusal(
            "INVALID_VALUE", f"{rows} rows from row {y} on: a plane of the {name} side has {height}"
        )
    kind, host, device = (getattr(copy, f"{name}{field}") for field in ("MemoryType", "Host", "Device"))
    return [
        rectangle(kind, host, device, pitch, x, y + (z + plane) * height, width, rows)
        for plane in range(depth)
    ]
