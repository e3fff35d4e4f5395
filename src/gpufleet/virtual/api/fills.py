"""Setting memory to a value. The caller does not wait, unless the memory is the host's too."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.device_memory import ContextMemory
from gpufleet.virtual.graphs import Work
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream, enqueue, enqueue_and_wait
from gpufleet.virtual.transfers import Side, fill, locate, transfer


@call(context=True)
def cuMemsetD8(state: State, current: Context, dstDevice: Any, uc: int, N: int) -> None:
    """Set N bytes."""
    _fill(state, current.legacy, dstDevice, uc, 1, N, waits=True)


@call(context=True)
def cuMemsetD16(state: State, current: Context, dstDevice: Any, us: int, N: int) -> None:
    """Set N 16-bit values."""
    _fill(state, current.legacy, dstDevice, us, 2, N, waits=True)


@call(context=True)
def cuMemsetD32(state: State, current: Context, dstDevice: Any, ui: int, N: int) -> None:
    """Set N 32-bit values."""
    _fill(state, current.legacy, dstDevice, ui, 4, N, waits=True)


@call()
def cuMemsetD8Async(state: State, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    """Set N bytes in the order of a stream."""
    _fill(state, state.stream(hStream), dstDevice, uc, 1, N)


@call()
def cuMemsetD16Async(state: State, dstDevice: Any, us: int, N: int, hStream: Any) -> None:
    """Set N 16-bit values in the order of a stream."""
    _fill(state, state.stream(hStream), dstDevice, us, 2, N)


@call()
def cuMemsetD32Async(state: State, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
    """Set N 32-bit values in the order of a stream."""
    _fill(state, state.stream(hStream), dstDevice, ui, 4, N)


@call(context=True)
def cuMemsetD2D8(
    state: State, current: Context, dstDevice: Any, dstPitch: int, uc: int, Width: int, Height: int
) -> None:
    """Set Height rows of Width bytes."""
    _fill(state, current.legacy, dstDevice, uc, 1, Width, Height, dstPitch, waits=True)


@call(context=True)
def cuMemsetD2D16(
    state: State, current: Context, dstDevice: Any, dstPitch: int, us: int, Width: int, Height: int
) -> None:
    """Set Height rows of Width 16-bit values."""
    _fill(state, current.legacy, dstDevice, us, 2, Width, Height, dstPitch, waits=True)


@call(context=True)
def cuMemsetD2D32(
    state: State, current: Context, dstDevice: Any, dstPitch: int, ui: int, Width: int, Height: int
) -> None:
    """Set Height rows of Width 32-bit values."""
    _fill(state, current.legacy, dstDevice, ui, 4, Width, Height, dstPitch, waits=True)


@call()
def cuMemsetD2D8Async(
    state: State,
    dstDevice: Any,
    dstPitch: int,
    uc: int,
    Width: int,
    Height: int,
    hStream: Any,
) -> None:
    """Set Height rows of Width bytes in the order of a stream."""
    _fill(state, state.stream(hStream), dstDevice, uc, 1, Width, Height, dstPitch)


@call()
def cuMemsetD2D16Async(
    state: State,
    dstDevice: Any,
    dstPitch: int,
    us: int,
    Width: int,
    Height: int,
    hStream: Any,
) -> None:
    """Set Height rows of Width 16-bit values in the order of a stream."""
    _fill(state, state.stream(hStream), dstDevice, us, 2, Width, Height, dstPitch)


@call()
def cuMemsetD2D32Async(
    state: State,
    dstDevice: Any,
    dstPitch: int,
    ui: int,
    Width: int,
    Height: int,
    hStream: Any,
) -> None:
    """Set Height rows of Width 32-bit values in the order of a stream."""
    _fill(state, state.stream(hStream), dstDevice, ui, 4, Width, Height, dstPitch)


def fill_node(state: State, context: Context, parameters: Any) -> Work:
    """Return the work of a fill's node in a graph."""
    item, rows = int(parameters.elementSize), int(parameters.height)
    if item not in (1, 2, 4) or not parameters.width or not rows:
        raise Refusal("INVALID_VALUE", f"{rows} rows of {parameters.width} values of {item} bytes")
    pitch = int(parameters.pitch) if rows > 1 else None
    side = _side(number(parameters.dst), item, int(parameters.width), rows, pitch)
    operation = _operation(state, context, side, parameters.value, item, for_graph=True)
    return Work("MEMSET", context, operation)


def _fill(
    state: State,
    stream: Stream,
    pointer: Any,
    value: int,
    item: int,
    count: int,
    rows: int = 1,
    pitch: int | None = None,
    *,
    waits: bool = False,
) -> None:
    side = _side(number(pointer), item, count, rows, pitch)
    if not side.width or not rows:
        return
    operation = _operation(state, stream.context, side, value, item, for_graph=stream.capture is not None)
    if waits and not side.is_device:
        enqueue_and_wait(state.scheduler, stream, operation)
        state.check_fault()
    else:
        enqueue(state.scheduler, stream, operation, kind="MEMSET")


def _side(address: int, item: int, count: int, rows: int, pitch: int | None) -> Side:
    width = count * item
    pitch = width if pitch is None else pitch
    if address % item or (rows > 1 and (pitch % item or pitch < width)):
        raise Refusal("INVALID_VALUE", f"{address:#x} with pitch {pitch} does not suit {item}-byte values")
    return Side(address, width, rows, pitch, must_be_known=True)


def _operation(
    state: State, context: Context, side: Side, value: int, item: int, *, for_graph: bool
) -> Operation:
    memory = state.memory
    locate(memory, context, side, for_graph=for_graph)
    known = side.allocation
    if known is not None and not ContextMemory(memory, context).reaches(known):
        raise Refusal("INVALID_VALUE", f"kernels of the stream's context do not reach {known}")
    masked = value & ((1 << 8 * item) - 1)
    return transfer(context, lambda: fill(memory, side, masked, item), side)
