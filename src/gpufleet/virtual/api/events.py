"""Events: recorded in streams, asked and waited for."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Event

INTERPROCESS = 4
"""CU_EVENT_INTERPROCESS."""


@call(outputs=1, context=True)
def cuEventCreate(state: State, current: Context, Flags: int) -> Any:
    """Create an event in the current context."""
    if Flags & INTERPROCESS:
        raise Refusal("NOT_SUPPORTED", "virtual devices have no events between processes")
    if Flags & ~3:
        raise Refusal("INVALID_VALUE", f"{Flags:#x} are no flags of an event")
    event = Event(current, Flags)
    with state.lock:
        state.events[event.handle] = event
        current.events[event.handle] = event
    return bindings().CUevent(event.handle)


@call(by_finalizers=True)
def cuEventDestroy(state: State, hEvent: Any) -> None:
    """End an event; what waits for it is not disturbed."""
    with state.lock:
        event = state.event(hEvent)
        del state.events[event.handle]
        event.context.events.pop(event.handle, None)


@call()
def cuEventRecord(state: State, hEvent: Any, hStream: Any) -> None:
    """Let an event mean the work that is in a stream of its context now."""
    _record(state, hEvent, hStream)


@call()
def cuEventRecordWithFlags(state: State, hEvent: Any, hStream: Any, flags: int) -> None:
    """Do what cuEventRecord does; the flags are for graphs."""
    if flags & ~1:
        raise Refusal("INVALID_VALUE", f"{flags:#x} are no flags of a recording")
    _record(state, hEvent, hStream)


@call()
def cuEventQuery(state: State, hEvent: Any) -> None:
    """Succeed if the work before the last recording has ended, or nothing was recorded."""
    if not state.event(hEvent).is_ready:
        raise Refusal("NOT_READY")


@call()
def cuEventSynchronize(state: State, hEvent: Any) -> None:
    """Wait for the work before the last recording."""
    operation = state.event(hEvent).operation
    if operation is not None:
        state.scheduler.wait(operation)
        state.check_fault()


@call(outputs=1)
def cuEventElapsedTime(state: State, hStart: Any, hEnd: Any) -> float:
    """Return the milliseconds between two events that were reached."""
    start, end = state.event(hStart), state.event(hEnd)
    if start.context is not end.context:
        raise Refusal("INVALID_HANDLE", "the events are of different contexts")
    for event in (start, end):
        if event.operation is None:
            raise Refusal("INVALID_HANDLE", f"event {event.handle:#x} was not recorded")
        if event.flags & Event.DISABLE_TIMING:
            raise Refusal("INVALID_HANDLE", f"event {event.handle:#x} was made without timing")
    if not (start.is_ready and end.is_ready):
        raise Refusal("NOT_READY")
    return (end.time - start.time) / 1e6


def _record(state: State, handle: Any, stream_handle: Any) -> None:
    event, stream = state.event(handle), state.stream(stream_handle)
    if event.context is not stream.context:
        raise Refusal("INVALID_HANDLE", "the event and the stream are of different contexts")
    event.record(state.scheduler, stream)
