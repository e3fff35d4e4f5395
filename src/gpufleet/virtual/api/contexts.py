"""Contexts: made, stacked per thread, destroyed; primary contexts; peer access."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import DEFAULT_LIMITS, LARGEST_LIMITS, Context
from gpufleet.virtual.lifetimes import create_context, end_context
from gpufleet.virtual.state import State

FLAGS_MASK = 0xFF
"""CU_CTX_FLAGS_MASK."""
MAP_HOST = 8
"""CU_CTX_MAP_HOST: taken, and forgotten, since host memory is always mapped."""
API_VERSION = 3020
"""What cuCtxGetApiVersion answers for every context since CUDA 3.2."""
PRIORITIES = (0, -5)
"""Least and greatest stream priority, as on an H200."""


@call(outputs=1)
def cuCtxCreate(state: State, ctxCreateParams: Any, flags: int, dev: Any) -> Any:
    """Create a context and make it current."""
    device = state.device(dev)
    check_flags(flags)
    if ctxCreateParams is not None and (ctxCreateParams.numExecAffinityParams or ctxCreateParams.cigParams):
        raise Refusal("NOT_SUPPORTED", "virtual devices have no execution affinity and no CIG")
    context = create_context(state, device, flags)
    state.thread.stack.append(context)
    return bindings().CUcontext(context.handle)


@call(after_fault=True, by_finalizers=True)
def cuCtxDestroy(state: State, ctx: Any) -> None:
    """End a context with all that is in it; pop it if it is on top of this thread's stack.

    Where it lies deeper, or on another thread's stack, it stays there, destroyed.
    """
    if not number(ctx):
        raise Refusal("INVALID_VALUE", "the context is NULL")
    context = state.live_context(ctx)
    if context.is_primary:
        raise Refusal("INVALID_CONTEXT", "a primary context is released, not destroyed")
    if context.home is not context:
        raise Refusal("INVALID_CONTEXT", "a green context is destroyed by cuGreenCtxDestroy")
    end_context(state, context)
    stack = state.thread.stack
    if stack and stack[-1] is context:
        stack.pop()


# ---- the stack of the thread


@call(outputs=1, after_fault=True)
def cuCtxGetCurrent(state: State) -> Any:
    """Return the context on top of this thread's stack, or NULL."""
    stack = state.thread.stack
    return bindings().CUcontext(stack[-1].handle if stack else 0)


@call(after_fault=True)
def cuCtxPushCurrent(state: State, ctx: Any) -> None:
    """Put a context, alive or not, on top of this thread's stack."""
    if not number(ctx):
        raise Refusal("INVALID_VALUE", "the context is NULL")
    state.thread.stack.append(state.context(ctx))


@call(outputs=1, after_fault=True)
def cuCtxPopCurrent(state: State) -> Any:
    """Take the context on top of this thread's stack off, and return it."""
    stack = state.thread.stack
    if not stack:
        raise Refusal("INVALID_CONTEXT", "no context is current on this thread")
    return bindings().CUcontext(stack.pop().handle)


@call(after_fault=True)
def cuCtxSetCurrent(state: State, ctx: Any) -> None:
    """Replace the context on top of this thread's stack; NULL takes it off."""
    context = state.context(ctx) if number(ctx) else None
    stack = state.thread.stack
    if stack:
        stack.pop()
    if context is not None:
        stack.append(context)


# ---- questions and settings


@call(outputs=1)
def cuCtxGetDevice(state: State) -> Any:
    """Return the device of the current context, even of a destroyed one."""
    stack = state.thread.stack
    if not stack:
        raise Refusal("INVALID_CONTEXT", "no context is current on this thread")
    return bindings().CUdevice(stack[-1].device.ordinal)


@call(outputs=1)
def cuCtxGetDevice_v2(state: State, ctx: Any) -> Any:
    """Return the device of a context, or of the current one."""
    return bindings().CUdevice(_context_or_current(state, ctx).device.ordinal)


@call(outputs=1, context=True)
def cuCtxGetFlags(state: State, current: Context) -> int:
    """Return the flags of the current context."""
    return current.flags


@call(context=True)
def cuCtxSetFlags(state: State, current: Context, flags: int) -> None:
    """Change the flags of the current context."""
    check_flags(flags)
    current.flags = flags & ~MAP_HOST


@call(outputs=1)
def cuCtxGetApiVersion(state: State, ctx: Any) -> int:
    """Return the version of the API that a context follows."""
    _context_or_current(state, ctx)
    return API_VERSION


@call(outputs=1)
def cuCtxGetId(state: State, ctx: Any) -> int:
    """Return a number that no other context of the process has, nor an earlier life of this one."""
    return _context_or_current(state, ctx).id


@call(outputs=2, context=True)
def cuCtxGetStreamPriorityRange(state: State, current: Context) -> tuple[int, int]:
    """Return the least and the greatest priority of a stream."""
    return PRIORITIES


@call(outputs=1, context=True)
def cuCtxGetLimit(state: State, current: Context, limit: Any) -> int:
    """Return a limit; virtual devices only remember what was set."""
    name = _limit_name(limit)
    return current.home.limits.get(name, DEFAULT_LIMITS[name])


@call(context=True)
def cuCtxSetLimit(state: State, current: Context, limit: Any, value: int) -> None:
    """Remember a limit; it has no effect."""
    name = _limit_name(limit)
    if value > LARGEST_LIMITS.get(name, value):
        raise Refusal("INVALID_VALUE", f"{name} of {value}: the most is {LARGEST_LIMITS[name]}")
    current.home.limits[name] = value


@call(outputs=1, context=True)
def cuCtxGetCacheConfig(state: State, current: Context) -> Any:
    """Return the preference that was set."""
    preference = current.home.cache_preference
    return bindings().CUfunc_cache.CU_FUNC_CACHE_PREFER_NONE if preference is None else preference


@call(context=True)
def cuCtxSetCacheConfig(state: State, current: Context, config: Any) -> None:
    """Remember a preference; virtual devices have no cache."""
    current.home.cache_preference = config


@call(outputs=1, context=True)
def cuCtxGetSharedMemConfig(state: State, current: Context) -> Any:
    """Return that banks have four bytes, as on every device since compute capability 5.0."""
    return bindings().CUsharedconfig.CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE


@call(context=True)
def cuCtxSetSharedMemConfig(state: State, current: Context, config: Any) -> None:
    """Do nothing: virtual devices have no banks of shared memory."""


@call(context=True)
def cuCtxResetPersistingL2Cache(state: State, current: Context) -> None:
    """Do nothing: virtual devices have no cache."""


@call(context=True)
def cuCtxSynchronize(state: State, current: Context) -> None:
    """Wait for all work of the current context."""
    state.wait(current)


@call()
def cuCtxSynchronize_v2(state: State, ctx: Any) -> None:
    """Wait for all work of a context, or of the current one."""
    state.wait(_context_or_current(state, ctx))


# ---- peers


@call(context=True)
def cuCtxEnablePeerAccess(state: State, current: Context, peerContext: Any, Flags: int) -> None:
    """Let kernels of the current context use what a context of another device allocates."""
    if Flags:
        raise Refusal("INVALID_VALUE", f"the flags are {Flags}: expected 0")
    current, peer = current.home, state.live_context(peerContext).home
    with state.lock:
        if peer.device is current.device:
            raise Refusal("PEER_ACCESS_UNSUPPORTED", "both contexts are of the same device")
        if peer in current.peers:
            raise Refusal("PEER_ACCESS_ALREADY_ENABLED")
        current.set_peer(peer, enabled=True)


@call(context=True)
def cuCtxDisablePeerAccess(state: State, current: Context, peerContext: Any) -> None:
    """End what cuCtxEnablePeerAccess began."""
    current, peer = current.home, state.live_context(peerContext).home
    with state.lock:
        if peer not in current.peers:
            raise Refusal("PEER_ACCESS_NOT_ENABLED")
        current.set_peer(peer, enabled=False)


def _context_or_current(state: State, handle: Any) -> Context:
    return state.live_context(handle) if number(handle) else state.current()


def check_flags(flags: int) -> None:
    """Refuse what are no flags of a context."""
    scheduling = flags & 7
    if flags & ~FLAGS_MASK or scheduling not in (0, 1, 2, 4):
        raise Refusal("INVALID_VALUE", f"{flags:#x} are no flags of a context")


def _limit_name(limit: Any) -> str:
    try:
        name = str(bindings().CUlimit(int(limit)).name).removeprefix("CU_LIMIT_")
    except ValueError:
        name = "MAX"
    if name == "MAX":
        raise Refusal("INVALID_VALUE", f"{int(limit)} is no CUlimit")
    if name not in DEFAULT_LIMITS:
        raise Refusal("UNSUPPORTED_LIMIT", f"virtual devices have no limit {name}")
    return name
