"""Green contexts: made of a share of a device's multiprocessors, used as contexts, destroyed."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.device_resources import whole
from gpufleet.virtual.api.events import let_context_wait, record_context
from gpufleet.virtual.api.streams import create_stream
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.green_contexts import GreenContext, Share
from gpufleet.virtual.lifetimes import create_green, end_green
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import NON_BLOCKING

DEFAULT_STREAM = 1
"""CU_GREEN_CTX_DEFAULT_STREAM, without which driver 580 makes none."""


@call(outputs=1)
def cuGreenCtxCreate(state: State, desc: Any, dev: Any, flags: int) -> Any:
    """Create a green context, current nowhere; no description stands for the whole device."""
    device = state.device(dev)
    if flags != DEFAULT_STREAM:
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected CU_GREEN_CTX_DEFAULT_STREAM")
    share = Share(device, range(device.multiprocessors))
    if number(desc):
        share = state.shares.get(number(desc), share)
    if share.device is not device:
        raise Refusal("INVALID_DEVICE", f"the description is of device {share.device.ordinal}")
    return bindings().CUgreenCtx(create_green(state, device, share).green_handle)


@call(by_finalizers=True)
def cuGreenCtxDestroy(state: State, hCtx: Any) -> None:
    """End a green context after its work, and release the primary context."""
    end_green(state, _alive(state, hCtx))


@call(outputs=1)
def cuCtxFromGreenCtx(state: State, hCtx: Any) -> Any:
    """Return the CUcontext by which a green context is made current, the same each time."""
    return bindings().CUcontext(_alive(state, hCtx).handle)


@call(outputs=1)
def cuGreenCtxGetId(state: State, greenCtx: Any) -> int:
    """Return a number that no other context of the process has."""
    return _alive(state, greenCtx).id


@call(outputs=1)
def cuGreenCtxGetDevResource(state: State, hCtx: Any, typename: Any) -> Any:
    """Return the multiprocessors of a green context."""
    return whole(state, _alive(state, hCtx).share, typename)


@call(outputs=1)
def cuGreenCtxStreamCreate(state: State, greenCtx: Any, flags: int, priority: int) -> Any:
    """Create a stream in a green context, whatever is current; it must be a non-blocking one."""
    green = _alive(state, greenCtx)
    if flags != NON_BLOCKING:
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected CU_STREAM_NON_BLOCKING")
    return create_stream(state, green, flags, priority)


@call()
def cuGreenCtxRecordEvent(state: State, hCtx: Any, hEvent: Any) -> None:
    """Let an event mean all work that is in a green context now."""
    record_context(state, _alive(state, hCtx), state.event(hEvent))


@call()
def cuGreenCtxWaitEvent(state: State, hCtx: Any, hEvent: Any) -> None:
    """Let all later work of a green context wait for an event."""
    let_context_wait(state, _alive(state, hCtx), state.event(hEvent))


def _alive(state: State, handle: Any) -> GreenContext:
    green = state.green_contexts.get(number(handle))
    if green is None:
        raise Refusal("INVALID_CONTEXT", f"{number(handle):#x} is no green context")
    if green.is_destroyed:
        raise Refusal("CONTEXT_IS_DESTROYED", f"green context {number(handle):#x} was destroyed")
    return green
