"""How contexts, green contexts, modules and allocations begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.green_contexts import GreenContext

if TYPE_CHECKING:
    from gpufleet.virtual.devices import Device
    from gpufleet.virtual.green_contexts import Share
    from gpufleet.virtual.modules import Module
    from gpufleet.virtual.spans import Allocation
    from gpufleet.virtual.state import State


def create_context(state: State, device: Device, flags: int) -> Context:
    """Return a new context of a device."""
    with state.lock:
        _charge_context(device)
        context = Context(device, flags)
        state.contexts[context.handle] = context
        return context


def retain_primary(state: State, device: Device) -> Context:
    """Return a device's primary context, retained once more; it begins a new life if it has none."""
    with device.primary_lock, state.lock:
        if device.primary.is_destroyed:
            _charge_context(device)
            device.primary.clear()
            device.primary.flags = device.primary_flags
            device.primary.is_destroyed = False
        device.primary_retained += 1
        return device.primary


def release_primary(state: State, device: Device) -> None:
    """Give one retain of a primary context back; the last one ends it."""
    with device.primary_lock:
        with state.lock:
            if not device.primary_retained:
                raise Refusal("INVALID_CONTEXT", f"device {device.ordinal}'s primary context is not retained")
            device.primary_retained -= 1
            is_last = not device.primary_retained
        if is_last:
            end_context(state, device.primary)
            device.primary_flags = 0


def reset_primary(state: State, device: Device) -> None:
    """End a primary context and its green ones; its other retains stay."""
    with device.primary_lock:
        for green in list(device.primary.greens):
            if _end_green(state, green):
                device.primary_retained -= 1
        end_context(state, device.primary)


def end_context(state: State, context: Context) -> None:
    """Wait for a context's work, and others' copies of its memory, then end it and what belongs to it."""
    _wait(state, context)
    with state.lock:
        owned = list(state.memory.owned_by(context))
    wait_for_copies(state, *owned)
    with state.lock:
        if context.is_destroyed:
            return
        context.is_destroyed = True
        context.device.arena.refund(context.device.context_bytes)
        for other in state.contexts.values():
            if context in other.peers:
                other.set_peer(context, enabled=False)
    _wait(state, context)  # what other threads had begun to enter before
    _end_contents(state, context)


def create_green(state: State, device: Device, share: Share) -> GreenContext:
    """Return a new green context, which retains the primary context."""
    retain_primary(state, device)
    with state.lock:
        green = GreenContext(device, share)
        device.primary.greens.append(green)
        state.contexts[green.handle] = state.green_contexts[green.green_handle] = green
        return green


def end_green(state: State, green: GreenContext) -> None:
    """Wait for a green context's work, then end it, and give its retain of the primary context back."""
    if _end_green(state, green):
        release_primary(state, green.device)


def _end_green(state: State, green: GreenContext) -> bool:
    """End a green context, whose streams stay without it; False if another thread does."""
    _wait(state, green)
    with state.lock:
        if green.is_destroyed:
            return False
        green.is_destroyed = True
        green.home.greens.remove(green)
    _wait(state, green)  # what other threads had begun to enter before
    with state.lock:
        for stream in green.streams.values():
            state.captures.leave(stream)
            state.streams.pop(stream.handle, None)
            state.detached_streams.add(stream.handle)
        green.streams = {}
    return True


def unload(state: State, module: Module) -> None:
    """End a module: its kernels cannot be launched any more, its variables have no memory."""
    with state.lock:
        state.modules.pop(module.handle, None)
        module.context.modules.pop(module.handle, None)
        for function in module.functions.values():
            state.functions.pop(function.handle, None)
        variables, module.variables = module.variables, {}
    for allocation in variables.values():
        free(state, allocation)


def free(state: State, allocation: Allocation) -> bool:
    """End an allocation; its pages go once no operation that runs now can be touching them.

    Returns False if it had ended before.
    """
    is_there = withdraw(state, allocation)
    state.scheduler.settle()
    return is_there


def withdraw(state: State, allocation: Allocation) -> bool:
    """Do the part of `free` that may be done with the lock held."""
    with state.lock:
        if state.memory.at(allocation.start) is not allocation:
            return False
        if allocation.pool is not None and not allocation.is_freed:
            allocation.pool.count(-allocation.size)
        state.scheduler.retire(state.memory.withdraw(allocation))
        return True


def _end_contents(state: State, context: Context) -> None:
    for module in list(context.modules.values()):
        unload(state, module)
    with state.lock:
        for stream in context.streams.values():
            state.captures.leave(stream)
            state.streams.pop(stream.handle, None)
        for event in context.events:
            state.events.pop(event, None)
        context.streams, context.events, context.peers = {}, {}, set()
        owned = list(state.memory.owned_by(context))
    for allocation in owned:
        if allocation.kind == "registered":
            with state.lock:
                state.memory.registered.remove(allocation)
        else:
            free(state, allocation)


def _wait(state: State, context: Context) -> None:
    with state.lock:
        pending = context.pending()
    for operation in pending:
        state.scheduler.wait(operation)


def wait_for_copies(state: State, *allocations: Allocation) -> None:
    """Wait for the copies and fills that streams of other contexts were given, and that use this memory."""
    with state.lock:
        users = [operation for allocation in allocations for operation in allocation.users]
    for operation in users:
        state.scheduler.wait(operation)


def _charge_context(device: Device) -> None:
    if not device.arena.charge(device.context_bytes):
        raise Refusal(
            "OUT_OF_MEMORY",
            f"a context takes {device.context_bytes} bytes of device {device.ordinal}, "
            f"{device.arena.capacity - device.arena.used} are free",
        )
