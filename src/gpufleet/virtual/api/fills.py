"""Setting memory to a value. The caller does not wait, unless the memory is the host's too."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream, enqueue, enqueue_and_wait
from gpufleet.virtual.transfers import Side, fill, locate


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
    width = count * item
    pitch = width if pitch is None else pitch
    address = number(pointer)
    if address % item or (rows > 1 and (pitch % item or pitch < width)):
        raise Refusal("INVALID_VALUE", f"{address:#x} with pitch {pitch} does not suit {item}-byte values")
    if not width or not rows:
        return
    memory = state.memory
    side = Side(address, width, rows, pitch, must_be_known=True)
    locate(memory, side)
    masked = value & ((1 << 8 * item) - 1)
    operation = Operation(stream.context.device.ordinal, lambda: fill(memory, side, masked, item))
    if waits and not side.is_device:
        enqueue_and_wait(state.scheduler, stream, operation)
        state.check_fault()
    else:
        enqueue(state.scheduler, stream, operation)
