"""Events: recorded in streams, asked and waited for."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.capture import check_not_captured
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.graphs import Work
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Event, wait_for_event

INTERPROCESS = 4
"""CU_EVENT_INTERPROCESS."""
EXTERNAL = 1
"""CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL."""


@call(outputs=1, context=True)
def cuEventCreate(state: State, current: Context, Flags: int) -> Any:
    """Create an event in the current context."""
    if Flags & ~7 or (Flags & INTERPROCESS and not Flags & Event.DISABLE_TIMING):
        raise Refusal("INVALID_VALUE", f"{Flags:#x} are no flags of an event")
    event = Event(current.home, Flags)
    with state.lock:
        state.events[event.handle] = event
        current.home.events[event.handle] = event
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
    """Do what cuEventRecord does; in a capture, flag 1 lets each launch record the event."""
    if flags == EXTERNAL and capture_event(state, "EVENT_RECORD", hEvent, hStream):
        return
    check_event_flags(flags)
    _record(state, hEvent, hStream)


@call()
def cuCtxRecordEvent(state: State, hCtx: Any, hEvent: Any) -> None:
    """Let an event mean all work that is in its context now."""
    record_context(state, state.live_context(hCtx), state.event(hEvent))


def record_context(state: State, context: Context, event: Event) -> None:
    """Let an event mean all work of a context, and of its green ones if it is a primary one."""
    if event.context is not context.home:
        raise Refusal("INVALID_HANDLE", "the event is of another context")
    with state.lock:
        for stream in context.all_streams():
            if stream.capture is not None:  # which the call breaks (driver 580)
                raise stream.capture.broken_by("UNSUPPORTED", "a stream of the context is captured")
        event.record_after(state.scheduler, context.pending())
    state.scheduler.settle()


@call()
def cuCtxWaitEvent(state: State, hCtx: Any, hEvent: Any) -> None:
    """Let all later work of a context wait for an event."""
    let_context_wait(state, state.live_context(hCtx), state.event(hEvent))


def let_context_wait(state: State, context: Context, event: Event) -> None:
    """Let all later work of a context wait for an event, and of its green ones if it is a primary one."""
    with state.lock:
        streams = list(context.all_streams())
        for each in (context, *context.greens):
            each.close_gate(state.scheduler, event.operation)
    state.scheduler.settle()
    for stream in streams:
        wait_for_event(state.scheduler, stream, event)


@call()
def cuEventQuery(state: State, hEvent: Any) -> None:
    """Succeed if the work before the last recording has ended, or nothing was recorded."""
    event = state.event(hEvent)
    check_not_captured(event, breaks=True)
    if not event.is_ready:
        raise Refusal("NOT_READY")


@call()
def cuEventSynchronize(state: State, hEvent: Any) -> None:
    """Wait for the work before the last recording."""
    event = state.event(hEvent)
    check_not_captured(event, breaks=True)
    operation = event.operation
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
        check_not_captured(event, breaks=False)
        if event.operation is None:
            raise Refusal("INVALID_HANDLE", f"event {event.handle:#x} was not recorded")
        if event.flags & Event.DISABLE_TIMING:
            raise Refusal("INVALID_HANDLE", f"event {event.handle:#x} was made without timing")
    if not (start.is_ready and end.is_ready):
        raise Refusal("NOT_READY")
    return (end.time - start.time) / 1e6


def capture_event(state: State, kind: str, event: Any, stream: Any) -> bool:
    """Let each launch record an event, or wait for it, instead of the capture; False without one."""
    with state.lock:
        found = state.stream(stream)
        if found.capture is None:
            return False
        found.capture.add(found, Work(kind, event=state.event(event)))
        return True


def check_event_flags(flags: int) -> None:
    """Refuse the flags of a recording or a wait outside of a capture."""
    if flags:
        code = "ILLEGAL_STATE" if flags == EXTERNAL else "INVALID_VALUE"
        raise Refusal(code, f"the flags are {flags}: expected 0")


def _record(state: State, handle: Any, stream_handle: Any) -> None:
    event, stream = state.event(handle), state.stream(stream_handle)
    if event.context is not stream.context.home:
        raise Refusal("INVALID_HANDLE", "the event and the stream are of different contexts")
    event.record(state.scheduler, stream)
