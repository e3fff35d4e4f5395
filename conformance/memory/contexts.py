"""Contexts: limits, configuration, flags, identities; what each call answers without a context."""

from __future__ import annotations

from .probe import BRIEF, in_thread, run_chapter

LIMITS = (
    "STACK_SIZE",
    "PRINTF_FIFO_SIZE",
    "MALLOC_HEAP_SIZE",
    "DEV_RUNTIME_SYNC_DEPTH",
    "DEV_RUNTIME_PENDING_LAUNCH_COUNT",
    "MAX_L2_FETCH_GRANULARITY",
    "PERSISTING_L2_CACHE_SIZE",
)


def probe_contexts(driver, image, **how):
    """cuCtxGetLimit and its neighbours."""
    return run_chapter(
        (
            limits,
            set_limits,
            limits_are_per_context,
            persisting_cache,
            cache_config,
            shared_memory_config,
            versions_and_identities,
            flags_of_contexts,
            change_flags,
            create,
            affinity,
            memory_information,
            synchronize_by_handle,
            attach,
            primary_flags,
            primary_reset,
            without_a_context,
        ),
        driver,
        image,
        **how,
    )


def limit(p, name):
    return getattr(p.d.CUlimit, f"CU_LIMIT_{name}")


def limits(p):
    for each in LIMITS:
        value = p.ask(each, p.d.cuCtxGetLimit, limit(p, each))
        p.hardware(each, None if value is None else int(value))
    p.ask("no_such_limit", p.d.cuCtxGetLimit, limit(p, "MAX"))


def set_limits(p):
    d = p.d
    other = p.new_context()
    for name, choices in {
        "STACK_SIZE": (0, 1, 1000, 1024, 4096, 1 << 20, 1 << 40),
        "PRINTF_FIFO_SIZE": (0, 1, 5000, 1 << 20, 1 << 50),
        "MALLOC_HEAP_SIZE": (0, 1, 16 << 20, 1 << 50),
        "DEV_RUNTIME_SYNC_DEPTH": (1, 2, 100),
        "DEV_RUNTIME_PENDING_LAUNCH_COUNT": (1, 2048),
        "MAX_L2_FETCH_GRANULARITY": (0, 32, 33, 64, 128, 256),
        "PERSISTING_L2_CACHE_SIZE": (0, 1, 1 << 20, 1 << 40),
    }.items():
        for value in choices:
            p.ask(f"{name}.{value}", d.cuCtxSetLimit, limit(p, name), value)
            found = p.call(d.cuCtxGetLimit, limit(p, name))[1]
            p.hardware(f"{name}.{value}", None if found is None else int(found))
    p.ask("no_such_limit", d.cuCtxSetLimit, limit(p, "MAX"), 1)
    for name, value in (("STACK_SIZE", 1024), ("PRINTF_FIFO_SIZE", 1 << 20), ("MALLOC_HEAP_SIZE", 8 << 20)):
        p.code(d.cuCtxSetLimit, limit(p, name), value)  # small enough for a launch
    p.need(p.launch, "fill", p.device(), 1)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.ask("MALLOC_HEAP_SIZE.after_a_launch", d.cuCtxSetLimit, limit(p, "MALLOC_HEAP_SIZE"), 32 << 20)
    p.ask("PRINTF_FIFO_SIZE.after_a_launch", d.cuCtxSetLimit, limit(p, "PRINTF_FIFO_SIZE"), 2 << 20)
    p.ask("STACK_SIZE.after_a_launch", d.cuCtxSetLimit, limit(p, "STACK_SIZE"), 8192)
    p.need(d.cuCtxDestroy, other)


def limits_are_per_context(p):
    d = p.d
    kind = limit(p, "STACK_SIZE")
    before = int(p.need(d.cuCtxGetLimit, kind))
    other = p.new_context()
    p.note("new_context_has_the_default", int(p.need(d.cuCtxGetLimit, kind)) == before)
    p.need(d.cuCtxSetLimit, kind, 4096)
    p.need(d.cuCtxDestroy, other)
    p.note("ours_stays", int(p.need(d.cuCtxGetLimit, kind)) == before)


def persisting_cache(p):
    p.ask("reset", p.d.cuCtxResetPersistingL2Cache)


def cache_config(p):
    d = p.d
    p.note("default", p.ask("get", d.cuCtxGetCacheConfig))
    for each in d.CUfunc_cache:
        p.ask(f"{each.name}.set", d.cuCtxSetCacheConfig, each)
        p.note(f"{each.name}.value", p.ask(f"{each.name}.get", d.cuCtxGetCacheConfig))


def shared_memory_config(p):
    d = p.d
    p.note("default", p.ask("get", d.cuCtxGetSharedMemConfig))
    for each in d.CUsharedconfig:
        p.ask(f"{each.name}.set", d.cuCtxSetSharedMemConfig, each)
        p.note(f"{each.name}.value", p.ask(f"{each.name}.get", d.cuCtxGetSharedMemConfig))


def versions_and_identities(p):
    d = p.d
    p.hardware("version", int(p.ask("version", d.cuCtxGetApiVersion, p.context)))
    p.ask("version.null", d.cuCtxGetApiVersion, 0)
    own = p.ask("id", d.cuCtxGetId, p.context)
    null = p.ask("id.null", d.cuCtxGetId, 0)
    p.note("id.null_is_the_current", null == own)
    other = p.new_context()
    theirs = p.need(d.cuCtxGetId, other)
    p.note("id.distinct", own != theirs)
    p.note(
        "version.same",
        int(p.need(d.cuCtxGetApiVersion, other)) == int(p.need(d.cuCtxGetApiVersion, p.context)),
    )
    device = p.ask("device_v2", d.cuCtxGetDevice_v2, p.context)
    p.note("device_v2.value", None if device is None else int(device))
    p.need(d.cuCtxDestroy, other)
    again = p.new_context()
    p.note("id.not_used_again", p.need(d.cuCtxGetId, again) not in (own, theirs))
    p.need(d.cuCtxDestroy, again)


def flags_of_contexts(p):
    p.note("value", p.ask("get", p.d.cuCtxGetFlags))


def change_flags(p):
    d = p.d
    for flags in (0, 1, 2, 4, 8, 16, 128, 256, 3, 1 << 20):
        p.ask(f"{flags}", d.cuCtxSetFlags, flags)
        p.note(f"{flags}.value", p.need(d.cuCtxGetFlags))
    p.code(d.cuCtxSetFlags, 0)


def create(p):
    d = p.d
    for flags in (1, 2, 4, 3, 8, 16, 128, 256, 1 << 20):
        context = p.ask(f"flags_{flags}", d.cuCtxCreate, None, flags, 0)
        if context is not None:
            p.note(f"flags_{flags}.value", p.need(d.cuCtxGetFlags))
            p.need(d.cuCtxDestroy, context)
    p.ask("no_such_device", d.cuCtxCreate, None, 0, 99)
    p.note("current_stays", p.is_current(p.context))


def affinity(p):
    d = p.d
    kind = d.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT
    found = p.ask("supported", d.cuDeviceGetExecAffinitySupport, kind, 0)
    p.hardware("supported", None if found is None else int(found))
    p.ask("get", d.cuCtxGetExecAffinity, kind)


def memory_information(p):
    d = p.d
    free, total = p.ask("get", d.cuMemGetInfo)
    p.note("free_is_less_than_total", 0 < int(free) < int(total))
    whole = p.ask("device_total", d.cuDeviceTotalMem, 0)
    p.note("total_is_the_devices", int(whole) == int(total))
    size = 512 << 20
    memory = p.need(d.cuMemAlloc, size)
    less = int(p.need(d.cuMemGetInfo)[0])
    p.note("allocation_counts", int(free) - less >= size)
    p.need(d.cuMemFree, memory)
    p.note("free_gives_back", int(p.need(d.cuMemGetInfo)[0]) - less >= size)


def synchronize_by_handle(p):
    """cuCtxSynchronize for a context that is not current (the bindings' name for it ends in _v2)."""
    d = p.d
    other = p.new_context()
    busy = p.stream()
    p.kernel("latch")
    latch = p.latch(busy, BRIEF)
    p.need(d.cuCtxPopCurrent)
    p.ask("other", d.cuCtxSynchronize_v2, other)
    p.note("other.waits", latch.has_timed_out)
    p.ask("null", d.cuCtxSynchronize_v2, 0)
    latch.open()
    p.need(d.cuCtxDestroy, other)


def attach(p):
    """The calls that were deprecated long ago: a use count that created contexts have."""
    d = p.d
    other = p.new_context()
    found = p.ask("attach", d.cuCtxAttach, 0)
    p.note("attach.is_the_current", found is not None and int(found) == int(other))
    p.ask("attach.flags_1", d.cuCtxAttach, 1)
    p.ask("detach", d.cuCtxDetach, other)
    p.note("still_current", p.is_current(other))


def primary_flags(p):
    d = p.d

    def state(name):
        p.note(name, [int(each) for each in p.need(d.cuDevicePrimaryCtxGetState, 0)])

    state("at_first")
    for flags in (4, 3, 256, 1 << 20, 0):
        p.ask(f"{flags}", d.cuDevicePrimaryCtxSetFlags, 0, flags)
        state(f"{flags}.state")
    p.need(d.cuDevicePrimaryCtxRetain, 0)
    p.ask("while_active", d.cuDevicePrimaryCtxSetFlags, 0, 4)
    state("while_active.state")
    p.need(d.cuDevicePrimaryCtxRelease, 0)
    state("released")
    p.code(d.cuDevicePrimaryCtxSetFlags, 0, 0)
    p.ask("no_such_device", d.cuDevicePrimaryCtxSetFlags, 99, 0)


def primary_reset(p):
    """Ends the primary context, and nothing outside this process."""
    d = p.d
    p.ask("inactive", d.cuDevicePrimaryCtxReset, 0)
    primary = p.need(d.cuDevicePrimaryCtxRetain, 0)
    p.need(d.cuCtxPushCurrent, primary)
    memory = p.device()
    p.need(d.cuCtxPopCurrent)
    p.ask("active", d.cuDevicePrimaryCtxReset, 0)
    p.note("state", [int(each) for each in p.need(d.cuDevicePrimaryCtxGetState, 0)])
    p.ask("memory_after", d.cuMemGetAddressRange, memory)
    p.ask("release_after", d.cuDevicePrimaryCtxRelease, 0)
    p.ask("release_again", d.cuDevicePrimaryCtxRelease, 0)
    p.note("state_at_last", [int(each) for each in p.need(d.cuDevicePrimaryCtxGetState, 0)])


def without_a_context(p):
    d = p.d
    p.need(d.cuCtxPopCurrent)
    for name, function, arguments in (
        ("cuCtxGetLimit", d.cuCtxGetLimit, (limit(p, "STACK_SIZE"),)),
        ("cuCtxSetLimit", d.cuCtxSetLimit, (limit(p, "STACK_SIZE"), 1024)),
        ("cuCtxGetCacheConfig", d.cuCtxGetCacheConfig, ()),
        ("cuCtxGetSharedMemConfig", d.cuCtxGetSharedMemConfig, ()),
        ("cuCtxGetFlags", d.cuCtxGetFlags, ()),
        ("cuCtxSetFlags", d.cuCtxSetFlags, (0,)),
        ("cuCtxGetId.null", d.cuCtxGetId, (0,)),
        ("cuCtxGetId", d.cuCtxGetId, (p.context,)),
        ("cuCtxGetApiVersion.null", d.cuCtxGetApiVersion, (0,)),
        ("cuCtxGetApiVersion", d.cuCtxGetApiVersion, (p.context,)),
        ("cuCtxResetPersistingL2Cache", d.cuCtxResetPersistingL2Cache, ()),
        ("cuCtxGetStreamPriorityRange", d.cuCtxGetStreamPriorityRange, ()),
        (
            "cuFuncGetAttribute",
            d.cuFuncGetAttribute,
            (d.CUfunction_attribute(0), p.kernel("fill", p.context)),
        ),
        ("cuOccupancy", d.cuOccupancyMaxActiveBlocksPerMultiprocessor, (p.kernel("fill", p.context), 32, 0)),
        ("cuStreamCreateWithPriority", d.cuStreamCreateWithPriority, (1, 0)),
        (
            "cuThreadExchangeStreamCaptureMode",
            d.cuThreadExchangeStreamCaptureMode,
            (d.CUstreamCaptureMode(0),),
        ),
        ("cuGraphCreate", d.cuGraphCreate, (0,)),
        ("cuDeviceGetDevResource", d.cuDeviceGetDevResource, (0, d.CUdevResourceType(1))),
        ("cuDeviceGraphMemTrim", d.cuDeviceGraphMemTrim, (0,)),
        ("cuCtxAttach", d.cuCtxAttach, (0,)),
    ):
        p.ask(name, function, *arguments)
    p.ask("thread.cuCtxGetDevice", in_thread, d.cuCtxGetDevice)
