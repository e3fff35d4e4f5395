"""Streams: flags, priorities, identities, order between them, values, host functions."""

from __future__ import annotations

import ctypes

from .probe import BRIEF, in_thread, ints, run_chapter

LEGACY, PER_THREAD = 1, 2
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def probe_streams(driver, image, **how):
    """What may be asked of a stream, and in which order streams run."""
    return run_chapter(
        (
            create,
            priorities,
            flags,
            identities,
            owners,
            default_streams,
            query_and_synchronize,
            order_with_the_null_stream,
            order_of_one_stream,
            stream_attributes,
            copy_attributes,
            values,
            host_functions,
            callbacks,
            without_a_context,
            in_another_context,
        ),
        driver,
        image,
        **how,
    )


def create(p):
    d = p.d
    p.each("flags", d.cuStreamCreate, {each: (each,) for each in (0, 1, 2, 3, 4, 1 << 31)})
    p.each("with_priority.flags", d.cuStreamCreateWithPriority, {each: (each, 0) for each in (0, 1, 2, 3)})
    p.ask("destroy", d.cuStreamDestroy, p.stream())
    p.ask("destroy.null", d.cuStreamDestroy, 0)
    p.ask("destroy.legacy", d.cuStreamDestroy, LEGACY)
    p.ask("destroy.per_thread", d.cuStreamDestroy, PER_THREAD)
    p.ask("destroy.thread_without_context", in_thread, d.cuStreamDestroy, p.stream())


def priorities(p):
    d = p.d
    least, greatest = p.ask("range", d.cuCtxGetStreamPriorityRange)
    p.hardware("range", [least, greatest])
    p.note("least_is_not_more_urgent", least >= greatest)
    for name, wish in (
        ("least", least),
        ("greatest", greatest),
        ("between", (least + greatest) // 2),
        ("too_small", greatest - 1),
        ("far_too_small", -1000),
        ("too_great", least + 1),
        ("far_too_great", 1000),
    ):
        stream = p.ask(name, d.cuStreamCreateWithPriority, 1, wish)
        got = p.ask(f"{name}.get", d.cuStreamGetPriority, stream)
        p.note(f"{name}.is_wish_within_range", got == min(max(wish, greatest), least))
    for name, stream in (("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD), ("plain", p.stream())):
        p.note(f"{name}.value", p.ask(f"{name}.get", d.cuStreamGetPriority, stream))


def flags(p):
    d = p.d
    for name, stream in (
        ("null", 0),
        ("legacy", LEGACY),
        ("per_thread", PER_THREAD),
        ("blocking", p.stream(0)),
        ("non_blocking", p.stream(1)),
    ):
        p.note(f"{name}.value", p.ask(name, d.cuStreamGetFlags, stream))


def identities(p):
    """cuStreamGetId tells streams apart; the null stream is the legacy stream."""
    d = p.d
    one, two = p.stream(), p.stream()
    found = {
        name: p.ask(name, d.cuStreamGetId, stream)
        for name, stream in (
            ("null", 0),
            ("legacy", LEGACY),
            ("per_thread", PER_THREAD),
            ("one", one),
            ("two", two),
        )
    }
    p.note("null_is_legacy", found["null"] == found["legacy"])
    p.note("null_is_per_thread", found["null"] == found["per_thread"])
    p.note("distinct", len({found[each] for each in ("null", "per_thread", "one", "two")}) == 4)
    p.note("stays", p.need(d.cuStreamGetId, one) == found["one"])

    def elsewhere():
        p.need(d.cuCtxPushCurrent, p.context)
        ids = [d.cuStreamGetId(each)[1] for each in (0, PER_THREAD)]
        p.need(d.cuCtxPopCurrent)
        return ids

    null, per_thread = in_thread(elsewhere)
    p.note("null_of_another_thread_is_the_same", null == found["null"])
    p.note("per_thread_of_another_thread_is_the_same", per_thread == found["per_thread"])
    other = p.new_context()
    p.note("null_of_another_context_is_the_same", p.need(d.cuStreamGetId, 0) == found["null"])
    p.need(d.cuCtxDestroy, other)
    p.ask("destroy", d.cuStreamDestroy, one)
    p.note("reused_at_once", p.need(d.cuStreamGetId, p.stream()) == found["one"])


def owners(p):
    d = p.d
    for name, stream in (
        ("null", 0),
        ("legacy", LEGACY),
        ("per_thread", PER_THREAD),
        ("created", p.stream()),
    ):
        context = p.ask(f"{name}.context", d.cuStreamGetCtx, stream)
        p.note(f"{name}.context.is_ours", context is not None and int(context) == int(p.context))
        device = p.ask(f"{name}.device", d.cuStreamGetDevice, stream)
        p.note(f"{name}.device.value", None if device is None else int(device))
        both = p.ask(f"{name}.context_v2", d.cuStreamGetCtx_v2, stream)
        p.note(f"{name}.context_v2.value", None if both is None else [int(each) != 0 for each in both])
        green = p.ask(f"{name}.green", d.cuStreamGetGreenCtx, stream)
        p.note(f"{name}.green.value", None if green is None else int(green) != 0)


def default_streams(p):
    """Work on each of the default streams, by each of their names."""
    d = p.d
    memory = p.device()
    for value, (name, stream) in enumerate((("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD)), 1):
        p.ask(f"{name}.launch", p.launch, "fill", memory, value, stream=stream)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
        p.ask(f"{name}.query", d.cuStreamQuery, stream)
        p.note(f"{name}.value", p.read(memory)[0])
    p.ask("as_handle_types", d.cuStreamQuery, d.CUstream(LEGACY))


def query_and_synchronize(p):
    d = p.d
    for name, stream in (
        ("blocking", p.stream(0)),
        ("non_blocking", p.stream(1)),
        ("per_thread", PER_THREAD),
    ):
        latch = p.latch(stream)
        p.ask(f"{name}.query", d.cuStreamQuery, stream)
        p.ask(f"{name}.query_null", d.cuStreamQuery, 0)
        p.ask(f"{name}.query_per_thread", d.cuStreamQuery, PER_THREAD)
        p.note(f"{name}.waited", latch.has_timed_out)
        latch.open()
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
        p.ask(f"{name}.query_after", d.cuStreamQuery, stream)


def order_with_the_null_stream(p):
    """Who waits for whom: a kernel on the second stream is queued while the first is latched."""
    d = p.d
    streams = {
        "null": 0,
        "legacy": LEGACY,
        "per_thread": PER_THREAD,
        "blocking": p.stream(0),
        "non_blocking": p.stream(1),
    }
    memory = p.device()
    done = p.event(2)
    answers = {}
    for first, busy in streams.items():
        for second, other in streams.items():
            p.journal(f"runs_beside.{first} < {second}")
            latch = p.latch(busy, BRIEF)
            p.need(p.launch, "fill", memory, 1, stream=other)
            p.need(d.cuEventRecord, done, other)
            p.need(d.cuEventSynchronize, done)
            answers[f"{second} beside {first}"] = not latch.has_timed_out
            latch.open()
            p.need(d.cuCtxSynchronize)
    p.keep("runs", answers)


def order_of_one_stream(p):
    """First in, first out, over kernels, copies and fills."""
    d = p.d
    stream, memory, host = p.stream(), p.device(), p.pinned()
    latch = p.latch(stream)
    p.need(d.cuMemsetD32Async, memory, 1, 1, stream)
    p.need(p.launch, "add", memory, 10, stream=stream)
    p.need(d.cuMemcpyDtoHAsync, host, memory, 4, stream)
    p.need(p.launch, "add", memory, 100, stream=stream)
    p.need(d.cuMemcpyDtoHAsync, host + 4, memory, 4, stream)
    p.note("before", list(ints(host, 2)))
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("after", list(ints(host, 2)))


def stream_attributes(p):
    d, kinds = p.d, p.d.CUstreamAttrID
    stream = p.stream()
    for each in (
        "SYNCHRONIZATION_POLICY",
        "ACCESS_POLICY_WINDOW",
        "PRIORITY",
        "MEM_SYNC_DOMAIN",
        "MEM_SYNC_DOMAIN_MAP",
        "IGNORE",
        "COOPERATIVE",
        "CLUSTER_DIMENSION",
    ):
        kind = getattr(kinds, f"CU_LAUNCH_ATTRIBUTE_{each}")
        value = p.ask(f"{each}.get", d.cuStreamGetAttribute, stream, kind)
        p.ask(f"{each}.get_null", d.cuStreamGetAttribute, 0, kind)
        if value is not None:
            p.ask(f"{each}.set_what_was_got", d.cuStreamSetAttribute, stream, kind, value)
    value = d.CUstreamAttrValue()
    value.priority = -1
    priority = kinds.CU_LAUNCH_ATTRIBUTE_PRIORITY
    p.ask("priority.set", d.cuStreamSetAttribute, stream, priority, value)
    p.note("priority.value", p.need(d.cuStreamGetAttribute, stream, priority).priority)
    p.note("priority.of_the_stream", p.need(d.cuStreamGetPriority, stream))
    value = d.CUstreamAttrValue()
    value.syncPolicy = d.CUsynchronizationPolicy.CU_SYNC_POLICY_YIELD
    policy = kinds.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
    p.ask("policy.set", d.cuStreamSetAttribute, stream, policy, value)
    p.note("policy.value", p.need(d.cuStreamGetAttribute, stream, policy).syncPolicy)


def copy_attributes(p):
    d = p.d
    source, target = p.need(d.cuStreamCreateWithPriority, 1, -1), p.stream()
    policy = d.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
    value = d.CUstreamAttrValue()
    value.syncPolicy = d.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
    p.need(d.cuStreamSetAttribute, source, policy, value)
    p.ask("copy", d.cuStreamCopyAttributes, target, source)
    p.note("priority", p.need(d.cuStreamGetPriority, target))
    p.ask("to_itself", d.cuStreamCopyAttributes, source, source)
    p.ask("from_null", d.cuStreamCopyAttributes, p.stream(), 0)
    p.ask("to_null", d.cuStreamCopyAttributes, 0, source)
    p.note("policy", p.need(d.cuStreamGetAttribute, target, policy).syncPolicy)


def values(p):
    """Writing a word in stream order, and waiting for one that is there already, so that nothing hangs."""
    d = p.d
    stream, memory, host = p.stream(), p.device(), p.pinned()
    p.write(memory, 5, 0, 6, 0)
    ints(host, 4)[:] = (5, 0, 6, 0)
    for name, address in (("device", memory), ("pinned", host)):
        p.ask(f"{name}.write32", d.cuStreamWriteValue32, stream, address, 5, 0)
        p.ask(f"{name}.write64", d.cuStreamWriteValue64, stream, address + 8, 6, 0)
        p.ask(f"{name}.wait_equal", d.cuStreamWaitValue32, stream, address, 5, 1)
        p.ask(f"{name}.wait_greater_or_equal", d.cuStreamWaitValue32, stream, address, 4, 0)
        p.ask(f"{name}.wait64", d.cuStreamWaitValue64, stream, address + 8, 6, 1)
        p.ask(f"{name}.misaligned", d.cuStreamWriteValue32, stream, address + 2, 5, 0)
        p.ask(f"{name}.unknown_flag", d.cuStreamWriteValue32, stream, address, 5, 16)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
    p.note("device.value", p.read(memory, 3))
    p.note("pinned.value", list(ints(host, 3)))
    p.ask("pageable", d.cuStreamWriteValue32, stream, p.pageable(), 5, 0)
    p.ask("null", d.cuStreamWriteValue32, stream, 0, 5, 0)
    p.ask("null_stream", d.cuStreamWriteValue32, 0, memory, 7, 0)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("null_stream.value", p.read(memory)[0])


def host_functions(p):
    d = p.d
    stream, memory, host = p.stream(), p.device(), p.pinned()
    seen = []

    @p.alive
    @HostFunction
    def note_what_is_there(which):
        seen.append([which or 0, ints(host)[0]])

    function = ctypes.cast(note_what_is_there, ctypes.c_void_p).value
    latch = p.latch(stream)
    p.need(d.cuMemsetD32Async, memory, 3, 1, stream)
    p.need(d.cuMemcpyDtoHAsync, host, memory, 4, stream)
    p.ask("first", d.cuLaunchHostFunc, stream, d.CUhostFn(function), 1)
    p.need(d.cuMemsetD32Async, memory, 4, 1, stream)
    p.need(d.cuMemcpyDtoHAsync, host, memory, 4, stream)
    p.ask("second", d.cuLaunchHostFunc, stream, d.CUhostFn(function), 2)
    p.note("waited", latch.has_timed_out)
    p.note("seen_before", list(seen))
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("seen", seen)
    for name, on in (("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD), ("blocking", p.stream(0))):
        p.ask(f"{name}", d.cuLaunchHostFunc, on, d.CUhostFn(function), 0)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, on)
    p.note("seen_at_last", len(seen))


def callbacks(p):
    """The older cuStreamAddCallback."""
    d = p.d
    stream = p.stream()
    seen = []

    @p.alive
    @Callback
    def note_the_status(of, status, data):
        seen.append([(of or 0) == int(stream), status, data or 0])

    function = d.CUstreamCallback(ctypes.cast(note_the_status, ctypes.c_void_p).value)
    p.ask("add", d.cuStreamAddCallback, stream, function, 5, 0)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("seen", seen)
    p.ask("flags_1", d.cuStreamAddCallback, stream, function, 5, 1)


def without_a_context(p):
    """A created stream knows its context; the null stream needs a current one."""
    d = p.d
    stream, event, memory = p.stream(), p.event(), p.device()
    p.need(d.cuCtxPopCurrent)
    for name, on in (("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD), ("created", stream)):
        p.ask(f"{name}.query", d.cuStreamQuery, on)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, on)
        p.ask(f"{name}.flags", d.cuStreamGetFlags, on)
        p.ask(f"{name}.priority", d.cuStreamGetPriority, on)
        p.ask(f"{name}.id", d.cuStreamGetId, on)
        p.ask(f"{name}.context", d.cuStreamGetCtx, on)
        p.ask(f"{name}.memset", d.cuMemsetD8Async, memory, 1, 16, on)
        p.ask(f"{name}.record", d.cuEventRecord, event, on)
        p.ask(f"{name}.wait", d.cuStreamWaitEvent, on, event, 0)
        p.ask(f"{name}.capturing", d.cuStreamIsCapturing, on)
    p.ask("range", d.cuCtxGetStreamPriorityRange)
    p.ask("with_priority", d.cuStreamCreateWithPriority, 1, 0)
    p.ask("event.query", d.cuEventQuery, event)
    p.ask("event.synchronize", d.cuEventSynchronize, event)
    p.ask("event.destroy", d.cuEventDestroy, event)


def in_another_context(p):
    d = p.d
    stream, memory = p.stream(), p.device()
    other = p.new_context()
    p.ask("flags", d.cuStreamGetFlags, stream)
    context = p.ask("context", d.cuStreamGetCtx, stream)
    p.note("context.is_the_first", int(context) == int(p.context))
    p.ask("memset", d.cuMemsetD8Async, memory, 1, 16, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("copy_attributes", d.cuStreamCopyAttributes, stream, p.stream())
    p.need(d.cuCtxDestroy, other)
