"""Primary contexts: one for each device, alive while somebody retains it."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.contexts import check_flags
from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import call
from gpufleet.virtual.lifetimes import release_primary, reset_primary, retain_primary
from gpufleet.virtual.state import State


@call(outputs=1)
def cuDevicePrimaryCtxRetain(state: State, dev: Any) -> Any:
    """Return the primary context, made alive if it is not; it does not become current."""
    return bindings().CUcontext(retain_primary(state, state.device(dev)).handle)


@call(by_finalizers=True)
def cuDevicePrimaryCtxRelease(state: State, dev: Any) -> None:
    """Give one retain back; the last one ends the context."""
    release_primary(state, state.device(dev))


@call()
def cuDevicePrimaryCtxReset(state: State, dev: Any) -> None:
    """End the context and all that is in it; its retains stay."""
    reset_primary(state, state.device(dev))


@call()
def cuDevicePrimaryCtxSetFlags(state: State, dev: Any, flags: int) -> None:
    """Set the flags of the primary context, now and for its later lives."""
    device = state.device(dev)
    check_flags(flags)
    device.primary_flags = device.primary.flags = flags


@call(outputs=2)
def cuDevicePrimaryCtxGetState(state: State, dev: Any) -> tuple[int, int]:
    """Return the flags, and whether the context is alive."""
    device = state.device(dev)
    return device.primary_flags, int(not device.primary.is_destroyed)
