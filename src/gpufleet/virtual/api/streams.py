"""Streams: made, asked, waited for, destroyed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpufleet.virtual.api.contexts import PRIORITIES
from gpufleet.virtual.api.events import EXTERNAL, capture_event, check_event_flags
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.host_pointers import host_address
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import LEGACY, NON_BLOCKING, PER_THREAD, Stream, call_host, wait_for_event


@call(outputs=1, context=True)
def cuStreamCreate(state: State, current: Context, Flags: int) -> Any:
    """Create a stream in the current context."""
    return create_stream(state, current, Flags, 0)


@call(outputs=1, context=True)
def cuStreamCreateWithPriority(state: State, current: Context, flags: int, priority: int) -> Any:
    """Create a stream with a priority, which is cut to the range there is and has no effect."""
    return create_stream(state, current, flags, priority)


@call(by_finalizers=True)
def cuStreamDestroy(state: State, hStream: Any) -> None:
    """End a stream at once; work in it still runs."""
    with state.lock:
        if number(hStream) in (0, LEGACY, PER_THREAD):
            raise Refusal("INVALID_HANDLE", "a default stream cannot be destroyed")
        stream = state.stream(hStream)
        state.captures.leave(stream)
        del state.streams[stream.handle]
        stream.context.remove_stream(stream)


@call()
def cuStreamSynchronize(state: State, hStream: Any) -> None:
    """Wait for all work of a stream."""
    state.wait(state.stream(hStream))


@call()
def cuStreamQuery(state: State, hStream: Any) -> None:
    """Succeed if all work of a stream has ended."""
    stream = state.stream(hStream)
    with state.lock:
        is_busy = bool(stream.pending())
    if is_busy:
        raise Refusal("NOT_READY")


@call()
def cuStreamWaitEvent(state: State, hStream: Any, hEvent: Any, Flags: int) -> None:
    """Let later work of a stream wait for an event, of whatever context and device."""
    if Flags == EXTERNAL and capture_event(state, "WAIT_EVENT", hEvent, hStream):
        return
    check_event_flags(Flags)
    wait_for_event(state.scheduler, state.stream(hStream), state.event(hEvent))


@call()
def cuLaunchHostFunc(state: State, hStream: Any, fn: Any, userData: Any) -> None:
    """Call a C function in the order of a stream, on a thread of the driver's."""
    call_host(state.scheduler, state.stream(hStream), host_action(state, fn, userData))


@call()
def cuStreamAddCallback(state: State, hStream: Any, callback: Any, userData: Any, flags: int) -> None:
    """Call a C function with the stream and its status, like cuLaunchHostFunc."""
    if flags:
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected 0")
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    function = kind(_function_address(callback))
    handle, data = number(hStream), host_address(userData)
    action = _in_callback(state, lambda: (function(handle, 0, data), userData))
    call_host(state.scheduler, state.stream(hStream), action)


# ---- questions


@call(outputs=1)
def cuStreamGetCtx(state: State, hStream: Any) -> Any:
    """Return the context of a stream."""
    return bindings().CUcontext(state.stream(hStream).context.handle)


@call(outputs=2)
def cuStreamGetCtx_v2(state: State, hStream: Any) -> tuple[Any, Any]:
    """Return the context of a stream, the primary one for a green context, and the green context."""
    context = state.stream(hStream).context
    return bindings().CUcontext(context.home.handle), bindings().CUgreenCtx(context.green_handle)


@call(outputs=1)
def cuStreamGetGreenCtx(state: State, hStream: Any) -> Any:
    """Return the green context of a stream, or NULL."""
    return bindings().CUgreenCtx(state.stream(hStream).context.green_handle)


@call(outputs=1)
def cuStreamGetDevice(state: State, hStream: Any) -> Any:
    """Return the device of a stream."""
    return bindings().CUdevice(state.stream(hStream).context.device.ordinal)


@call(outputs=1)
def cuStreamGetFlags(state: State, hStream: Any) -> int:
    """Return the flags a stream was made with."""
    return state.stream(hStream).flags


@call(outputs=1)
def cuStreamGetPriority(state: State, hStream: Any) -> int:
    """Return the priority of a stream."""
    return state.stream(hStream).priority


@call(outputs=1)
def cuStreamGetId(state: State, hStream: Any) -> int:
    """Return a number that no other stream of the process has."""
    stream = state.stream(hStream)
    return stream.context.handle + 1 if stream.is_legacy else stream.handle


def create_stream(state: State, context: Context, flags: int, priority: int) -> Any:
    """Return the handle of a new stream; the priority is cut to the range there is."""
    if flags & ~NON_BLOCKING:
        raise Refusal("INVALID_VALUE", f"{flags:#x} are no flags of a stream")
    least, greatest = PRIORITIES
    stream = Stream(context, flags, min(max(priority, greatest), least))
    with state.lock:
        state.streams[stream.handle] = stream
        context.add_stream(stream)
    return bindings().CUstream(stream.handle)


def _function_address(function: Any) -> int:
    address = number(function)
    if not address:
        raise Refusal("INVALID_VALUE", "the function is NULL")
    return address


def host_action(state: State, function: Any, data: Any) -> Callable[[], None]:
    """Return what calls a C function with a pointer."""
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_function_address(function))
    address = host_address(data)
    # `data` in the closure keeps a buffer alive until the call.
    return _in_callback(state, lambda: (called(address), data))


def _in_callback(state: State, function: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        state.thread.in_callback = True
        try:
            function()
        finally:
            state.thread.in_callback = False

    return run
