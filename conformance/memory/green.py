"""Green contexts: a share of a device's multiprocessors.

A green context is current to one thread at a time; destroying one that is current is in hazards.py.
"""

from __future__ import annotations

from .probe import in_thread, run_chapter

DEFAULT_STREAM = 1


def probe_green(driver, image, **how):
    """Resources, descriptors, green contexts and their streams."""
    return run_chapter(
        (
            resources,
            split,
            split_flags,
            split_of_what_was_split,
            descriptors,
            create,
            retains_the_primary_context,
            as_context,
            resources_of_contexts,
            streams,
            work,
            memory,
            modules,
            events,
            not_a_green_context,
        ),
        driver,
        image,
        **how,
    )


def multiprocessors(p, device=0):
    return p.need(p.d.cuDeviceGetDevResource, device, p.d.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)


def green_context(p, count=16, flags=DEFAULT_STREAM):
    """A green context of at least `count` multiprocessors of device 0; current nowhere."""
    d = p.d
    groups = p.need(d.cuDevSmResourceSplitByCount, 1, multiprocessors(p), 0, count)[0]
    description = p.need(d.cuDevResourceGenerateDesc, groups, 1)
    return p.need(d.cuGreenCtxCreate, description, 0, flags)


def kind(p, name):
    return getattr(p.d.CUdevResourceType, f"CU_DEV_RESOURCE_TYPE_{name}")


def resources(p):
    d = p.d
    found = p.ask("device", d.cuDeviceGetDevResource, 0, kind(p, "SM"))
    if found is not None:
        p.note("device.type", found.type)
        p.hardware("device.count", int(found.sm.smCount))
        for each in ("minSmPartitionSize", "smCoscheduledAlignment", "flags"):
            p.hardware(f"device.{each}", int(getattr(found.sm, each)) if hasattr(found.sm, each) else None)
    p.ask("no_such_device", d.cuDeviceGetDevResource, 99, kind(p, "SM"))
    for each in ("INVALID", "WORKQUEUE_CONFIG", "WORKQUEUE"):
        name = f"CU_DEV_RESOURCE_TYPE_{each}"
        if hasattr(d.CUdevResourceType, name):
            p.hardware(each, p.code(d.cuDeviceGetDevResource, 0, getattr(d.CUdevResourceType, name)))


def _sizes(p, name, groups, count, wish, flags=0):
    """Keep the code of a split, and as the hardware's how many groups of which size it gave."""
    found = p.ask(name, p.d.cuDevSmResourceSplitByCount, groups, wish, flags, count)
    if found is not None:
        made, number, rest = found
        p.hardware(
            name, [[int(each.sm.smCount) for each in made[: int(number)]], int(number), int(rest.sm.smCount)]
        )


def split(p):
    whole = multiprocessors(p)
    total = int(whole.sm.smCount)
    for count in (0, 1, 2, 8, 10, 16, 66, total - 1, total, total + 1):
        name = {total - 1: "all_but_one", total: "all", total + 1: "one_too_many"}.get(count, str(count))
        _sizes(p, f"one_of.{name}", 1, count, whole)
        _sizes(p, f"two_of.{name}", 2, count, whole)
    _sizes(p, "many_of.8", 100, 8, whole)
    _sizes(p, "many_of.16", 100, 16, whole)
    p.ask("none", p.d.cuDevSmResourceSplitByCount, 0, whole, 0, 8)


def split_flags(p):
    whole = multiprocessors(p)
    for flags in (1, 2, 3, 4):
        for count in (1, 2, 10, 16):
            _sizes(p, f"{flags}.{count}", 2, count, whole, flags)
    p.ask("empty_resource", p.d.cuDevSmResourceSplitByCount, 1, p.d.CUdevResource(), 0, 8)


def split_of_what_was_split(p):
    """A part may be split again only once a green context has it."""
    d = p.d
    made = p.need(d.cuDevSmResourceSplitByCount, 1, multiprocessors(p), 0, 32)[0]
    _sizes(p, "part", 2, 8, made[0])
    green = green_context(p, 32)
    own = p.ask("of_a_green_context", d.cuGreenCtxGetDevResource, green, kind(p, "SM"))
    if own is not None:
        _sizes(p, "part_of_a_green_context", 2, 8, own)
    p.need(d.cuGreenCtxDestroy, green)


def descriptors(p):
    d = p.d
    whole = multiprocessors(p)
    made, number, rest = p.need(d.cuDevSmResourceSplitByCount, 4, whole, 0, 16)
    groups = made[: int(number)]
    p.ask("one", d.cuDevResourceGenerateDesc, [groups[0]], 1)
    p.ask("two", d.cuDevResourceGenerateDesc, [groups[0], groups[1]], 2)
    p.ask("same_twice", d.cuDevResourceGenerateDesc, [groups[0], groups[0]], 2)
    p.ask("rest", d.cuDevResourceGenerateDesc, [rest], 1)
    p.ask("one_and_rest", d.cuDevResourceGenerateDesc, [groups[0], rest], 2)
    p.ask("whole", d.cuDevResourceGenerateDesc, [whole], 1)
    again = p.need(d.cuDevSmResourceSplitByCount, 1, whole, 0, 16)[0]
    p.ask("of_two_splits", d.cuDevResourceGenerateDesc, [groups[1], again[0]], 2)
    p.ask("none", d.cuDevResourceGenerateDesc, [], 0)
    p.ask("empty", d.cuDevResourceGenerateDesc, [d.CUdevResource()], 1)


def create(p):
    d = p.d
    groups = p.need(d.cuDevSmResourceSplitByCount, 2, multiprocessors(p), 0, 16)[0]
    description = p.need(d.cuDevResourceGenerateDesc, [groups[0]], 1)
    for flags in (0, 1, 2, 3):
        green = p.ask(f"flags_{flags}", d.cuGreenCtxCreate, description, 0, flags)
        if green is not None:
            p.ask(f"flags_{flags}.destroy", d.cuGreenCtxDestroy, green)
    green = p.ask("no_description", d.cuGreenCtxCreate, 0, 0, DEFAULT_STREAM)
    if green is not None:  # so it is on driver 580
        p.need(d.cuGreenCtxDestroy, green)
    p.ask("no_such_device", d.cuGreenCtxCreate, description, 99, DEFAULT_STREAM)
    if p.device_count > 1:
        p.ask("another_device", d.cuGreenCtxCreate, description, 1, DEFAULT_STREAM)
    one = p.ask("first", d.cuGreenCtxCreate, description, 0, DEFAULT_STREAM)
    two = p.ask("second_of_the_same_share", d.cuGreenCtxCreate, description, 0, DEFAULT_STREAM)
    p.note("distinct", int(one) != int(two))
    p.ask("destroy", d.cuGreenCtxDestroy, one)
    p.ask("destroy.null", d.cuGreenCtxDestroy, 0)
    p.ask("destroy.second", d.cuGreenCtxDestroy, two)


def retains_the_primary_context(p):
    d = p.d

    def state(name):
        found = p.need(d.cuDevicePrimaryCtxGetState, 0)
        p.note(name, [int(each) for each in found])

    state("before")
    green = green_context(p)
    state("with_a_green_context")
    p.note("current_stays", p.is_current(p.context))
    p.need(d.cuGreenCtxDestroy, green)
    state("after")
    p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    p.need(d.cuDevicePrimaryCtxRelease, 0)
    state("released_while_a_green_context_lives")
    p.need(d.cuGreenCtxDestroy, green)
    state("at_last")


def as_context(p):
    d = p.d
    primary = p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    context = p.ask("convert", d.cuCtxFromGreenCtx, green)
    again = p.ask("convert_again", d.cuCtxFromGreenCtx, green)
    p.note("convert.same_again", int(context) == int(again))
    p.note("is_the_primary_context", int(context) == int(primary))
    p.ask("push", d.cuCtxPushCurrent, context)
    p.note("is_current", p.is_current(context))
    device = p.ask("device", d.cuCtxGetDevice)
    p.note("device.value", None if device is None else int(device))
    p.note("flags", p.ask("get_flags", d.cuCtxGetFlags))
    p.ask("api_version", d.cuCtxGetApiVersion, context)
    own, primarys = p.ask("id", d.cuCtxGetId, context), p.ask("primary.id", d.cuCtxGetId, primary)
    p.note("id.is_the_primarys", own == primarys)
    p.ask("green_id", d.cuGreenCtxGetId, green)
    p.ask("limit", d.cuCtxGetLimit, d.CUlimit.CU_LIMIT_STACK_SIZE)
    p.ask("set_limit", d.cuCtxSetLimit, d.CUlimit.CU_LIMIT_STACK_SIZE, 2048)
    p.ask("priority_range", d.cuCtxGetStreamPriorityRange)
    p.ask("synchronize", d.cuCtxSynchronize)
    popped = p.ask("pop", d.cuCtxPopCurrent)
    p.note("pop.is_it", int(popped) == int(context))
    p.ask("set_current", d.cuCtxSetCurrent, context)
    p.note("set_current.is_current", p.is_current(context))
    p.ask("set_back", d.cuCtxSetCurrent, p.context)
    p.ask("push_on_another_thread", in_thread, lambda: (d.cuCtxPushCurrent(context), d.cuCtxPopCurrent())[0])
    p.need(d.cuGreenCtxDestroy, green)
    p.need(d.cuDevicePrimaryCtxRelease, 0)


def resources_of_contexts(p):
    d = p.d
    primary = p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    total = int(multiprocessors(p).sm.smCount)
    for name, function, handle in (
        ("created", d.cuCtxGetDevResource, p.context),
        ("primary", d.cuCtxGetDevResource, primary),
        ("converted", d.cuCtxGetDevResource, context),
        ("green", d.cuGreenCtxGetDevResource, green),
    ):
        found = p.ask(name, function, handle, kind(p, "SM"))
        p.hardware(f"{name}.count", None if found is None else int(found.sm.smCount))
        p.note(f"{name}.is_the_whole_device", found is not None and int(found.sm.smCount) == total)
    p.need(d.cuGreenCtxDestroy, green)
    p.need(d.cuDevicePrimaryCtxRelease, 0)


def streams(p):
    d = p.d
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    for flags in (0, 1, 2):
        p.ask(f"flags_{flags}", d.cuGreenCtxStreamCreate, green, flags, 0)
    least, greatest = p.need(d.cuCtxGetStreamPriorityRange)
    for name, wish in (("greatest", greatest), ("too_small", greatest - 100), ("too_great", least + 100)):
        stream = p.ask(name, d.cuGreenCtxStreamCreate, green, 1, wish)
        p.note(
            f"{name}.within_range", p.need(d.cuStreamGetPriority, stream) == min(max(wish, greatest), least)
        )
    stream = p.need(d.cuGreenCtxStreamCreate, green, 1, 0)
    found = p.ask("green_context", d.cuStreamGetGreenCtx, stream)
    p.note("green_context.is_it", found is not None and int(found) == int(green))
    found = p.ask("context", d.cuStreamGetCtx, stream)
    p.note("context.is_it", found is not None and int(found) == int(context))
    both = p.ask("context_v2", d.cuStreamGetCtx_v2, stream)
    p.note(
        "context_v2.value",
        None if both is None else [int(both[0]) == int(context), int(both[1]) == int(green)],
    )
    p.note("flags", p.need(d.cuStreamGetFlags, stream))
    p.ask("null_green_context", d.cuGreenCtxStreamCreate, 0, 1, 0)
    p.need(d.cuCtxPushCurrent, context)
    inside = p.ask("plain_stream_inside", d.cuStreamCreate, 1)
    found = p.ask("plain_stream_inside.green_context", d.cuStreamGetGreenCtx, inside)
    p.note("plain_stream_inside.is_green", found is not None and int(found) == int(green))
    found = p.ask("null_stream_inside.green_context", d.cuStreamGetGreenCtx, 0)
    p.note("null_stream_inside.is_green", found is not None and int(found) == int(green))
    p.need(d.cuCtxPopCurrent)
    for each in (stream, inside):
        p.ask(f"destroy_{'green' if each is stream else 'inside'}", d.cuStreamDestroy, each)
    p.need(d.cuGreenCtxDestroy, green)


def work(p):
    """Kernels of the primary context's modules run in a green stream, also from another context."""
    d = p.d
    primary = p.need(d.cuDevicePrimaryCtxRetain, 0)
    p.need(d.cuCtxPushCurrent, primary)
    memory, function = p.device(), p.kernel("fill")
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    stream = p.need(d.cuGreenCtxStreamCreate, green, 1, 0)
    p.ask("primary_current", p.launch, "fill", memory, 1, stream=stream, handle=function)
    p.ask("primary_current.synchronize", d.cuStreamSynchronize, stream)
    p.note("primary_current.value", p.read(memory)[0])
    p.need(d.cuCtxPushCurrent, context)
    for name, on in (
        ("green_current", stream),
        ("green_current.null_stream", 0),
        ("green_current.per_thread", 2),
    ):
        p.ask(name, p.launch, "fill", memory, 2, stream=on, handle=function)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, on)
    p.note("green_current.value", p.read(memory)[0])
    p.need(d.cuCtxPopCurrent)
    p.need(d.cuCtxPopCurrent)
    p.ask("created_current", p.launch, "fill", memory, 3, stream=stream, handle=function)
    p.ask("created_current.synchronize", d.cuStreamSynchronize, stream)
    p.ask("created_contexts_kernel", p.launch, "fill", memory, 4, stream=stream)
    p.ask("created_contexts_kernel.synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    p.need(d.cuStreamDestroy, stream)
    p.need(d.cuGreenCtxDestroy, green)
    p.need(d.cuDevicePrimaryCtxRelease, 0)
    p.forget_kernels(primary)


def memory(p):
    d = p.d
    primary = p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    p.need(d.cuCtxPushCurrent, context)
    for name, function, arguments in (
        ("cuMemAlloc", d.cuMemAlloc, (4096,)),
        ("cuMemHostAlloc", d.cuMemHostAlloc, (4096, 0)),
        ("cuMemAllocAsync", d.cuMemAllocAsync, (4096, 0)),
        ("cuMemAllocManaged", d.cuMemAllocManaged, (4096, 1)),
    ):
        found = p.ask(name, function, *arguments)
        if found is None:
            continue
        p.need(d.cuCtxSynchronize)
        owner = p.ask(
            f"{name}.context",
            d.cuPointerGetAttribute,
            d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT,
            int(found),
        )
        names = {int(context): "green", int(primary): "primary", 0: "none"}
        p.note(f"{name}.context.value", None if owner is None else names.get(int(owner), "another"))
        p.ask(f"{name}.free", d.cuMemFreeHost if name == "cuMemHostAlloc" else d.cuMemFree, found)
    kept = p.device()
    p.need(d.cuCtxPopCurrent)
    p.need(d.cuGreenCtxDestroy, green)
    p.ask("after_the_green_context", d.cuMemcpyDtoH, p.pageable(), kept, 4)
    p.ask("after_the_green_context.free", d.cuMemFree, kept)
    p.need(d.cuDevicePrimaryCtxRelease, 0)


def modules(p):
    """A module that is loaded in a green context belongs to the primary one."""
    d = p.d
    primary = p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    p.need(d.cuCtxPushCurrent, p.need(d.cuCtxFromGreenCtx, green))
    module = p.ask("load", d.cuModuleLoadData, p.image)
    function = p.ask("function", d.cuModuleGetFunction, module, b"fill")
    stored = p.device()
    p.ask("launch", p.launch, "fill", stored, 5, handle=function)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.need(d.cuCtxPopCurrent)
    p.need(d.cuGreenCtxDestroy, green)
    p.need(d.cuCtxPushCurrent, primary)
    p.ask("launch_in_primary_after", p.launch, "fill", stored, 6, handle=function)
    p.ask("launch_in_primary_after.synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(stored)[0])
    p.need(d.cuCtxPopCurrent)
    p.need(d.cuDevicePrimaryCtxRelease, 0)


def events(p):
    d = p.d
    p.need(d.cuDevicePrimaryCtxRetain, 0)
    green = green_context(p)
    context = p.need(d.cuCtxFromGreenCtx, green)
    p.need(d.cuCtxPushCurrent, context)
    event = p.event()
    stream = p.need(d.cuGreenCtxStreamCreate, green, 1, 0)
    p.ask("record", d.cuEventRecord, event, stream)
    p.ask("record_for_the_context", d.cuGreenCtxRecordEvent, green, event)
    p.ask("synchronize", d.cuEventSynchronize, event)
    p.ask("wait_for_the_context", d.cuGreenCtxWaitEvent, green, event)
    p.ask("record_as_a_context", d.cuCtxRecordEvent, context, event)
    p.need(d.cuCtxPopCurrent)
    foreign = p.event()
    p.need(d.cuEventRecord, foreign, 0)
    p.ask("record_a_foreign_event", d.cuGreenCtxRecordEvent, green, foreign)
    p.ask("wait_for_a_foreign_event", d.cuGreenCtxWaitEvent, green, foreign)
    p.need(d.cuStreamDestroy, stream)
    p.need(d.cuGreenCtxDestroy, green)
    p.need(d.cuDevicePrimaryCtxRelease, 0)


def not_a_green_context(p):
    """Null handles; handles of the wrong kind are not tried."""
    d = p.d
    p.ask("convert", d.cuCtxFromGreenCtx, 0)
    p.ask("destroy", d.cuGreenCtxDestroy, 0)
    p.ask("resource", d.cuGreenCtxGetDevResource, 0, kind(p, "SM"))
    p.ask("context_resource", d.cuCtxGetDevResource, 0, kind(p, "SM"))
    p.ask("id", d.cuGreenCtxGetId, 0)
