"""Which calls wait for a stream that is busy."""

from __future__ import annotations

from .probe import BRIEF, run_chapter

SMALL, LARGE = 64, 1 << 20


def probe_waiting(driver, image, **how):
    """Each call is made while a latch kernel keeps one stream busy; did the latch run into its limit?"""
    return run_chapter(
        (
            own_stream,
            pageable_copies_by_size,
            copies_beside_a_non_blocking_stream,
            copies_beside_a_blocking_stream,
            allocation,
            creation,
            release_of_what_is_in_use,
            contexts,
        ),
        driver,
        image,
        **how,
    )


def own_stream(p):
    """Asynchronous calls on the busy stream itself."""
    d = p.d
    stream, device, other = p.stream(), p.device(LARGE), p.device(LARGE)
    pinned, pageable = p.pinned(LARGE), p.pageable(LARGE)
    registered = p.pages(LARGE)
    p.need(d.cuMemHostRegister, registered, LARGE, 0)
    for kind, host in (("pinned", pinned), ("registered", registered), ("pageable", pageable)):
        for size in (SMALL, LARGE):
            p.waits(f"in.{kind}.{size}", stream, d.cuMemcpyHtoDAsync, device, host, size, stream)
            p.waits(f"out.{kind}.{size}", stream, d.cuMemcpyDtoHAsync, host, device, size, stream)
    p.waits("between", stream, d.cuMemcpyDtoDAsync, other, device, LARGE, stream)
    p.waits("memset", stream, d.cuMemsetD8Async, device, 1, LARGE, stream)
    p.waits("launch", stream, p.launch, "fill", device, 1, stream=stream)
    p.waits("host_to_host", stream, d.cuMemcpyAsync, pinned, pageable, SMALL, stream)
    p.waits("query", stream, d.cuStreamQuery, stream)
    p.waits("synchronize", stream, d.cuStreamSynchronize, stream)
    p.waits("destroy_another", stream, d.cuStreamDestroy, p.stream())
    p.need(d.cuMemHostUnregister, registered)


def pageable_copies_by_size(p):
    """Copies in that find room in the driver's own buffers return early; at some size they no longer do."""
    d = p.d
    most = 64 << 20
    stream, device, pageable = p.stream(), p.device(most), p.pageable(most)
    for shift in (12, 16, 18, 20, 21, 22, 23, 24, 26):
        p.waits(f"in.{1 << shift}", stream, d.cuMemcpyHtoDAsync, device, pageable, 1 << shift, stream)
    p.waits("out.4", stream, d.cuMemcpyDtoHAsync, pageable, device, 4, stream)
    for count in (2, 16, 64):
        latch = p.latch(stream, BRIEF)
        answers = {p.code(d.cuMemcpyHtoDAsync, device, pageable, 1 << 16, stream) for _ in range(count)}
        p.note(f"in.{count}_of_65536", sorted(answers))
        p.note(f"in.{count}_of_65536.waits", latch.has_timed_out)
        latch.open()
        p.need(d.cuStreamSynchronize, stream)
    p.need(d.cuMemFree, device)


def _copies(p, stream):
    d = p.d
    device, other = p.device(LARGE), p.device(LARGE)
    pinned, pageable = p.pinned(LARGE), p.pageable(LARGE)
    p.waits("in.pinned", stream, d.cuMemcpyHtoD, device, pinned, LARGE)
    p.waits("in.pageable", stream, d.cuMemcpyHtoD, device, pageable, LARGE)
    p.waits("out.pinned", stream, d.cuMemcpyDtoH, pinned, device, LARGE)
    p.waits("out.pageable", stream, d.cuMemcpyDtoH, pageable, device, LARGE)
    p.waits("between", stream, d.cuMemcpyDtoD, other, device, LARGE)
    p.waits("memset", stream, d.cuMemsetD8, device, 1, LARGE)
    p.waits("launch_on_null", stream, p.launch, "fill", device, 1)
    p.waits("query_null", stream, d.cuStreamQuery, 0)
    p.waits("synchronize_null", stream, d.cuStreamSynchronize, 0)


def copies_beside_a_non_blocking_stream(p):
    _copies(p, p.stream(1))


def copies_beside_a_blocking_stream(p):
    _copies(p, p.stream(0))


def allocation(p):
    d = p.d
    stream, other = p.stream(), p.stream()
    area = p.pages(LARGE)
    device = p.waits("cuMemAlloc", stream, d.cuMemAlloc, LARGE)
    p.waits("cuMemAlloc.large", stream, d.cuMemAlloc, 64 << 20)
    p.waits("cuMemFree", stream, d.cuMemFree, device)
    p.waits("cuMemFree.null", stream, d.cuMemFree, 0)
    pinned = p.waits("cuMemHostAlloc", stream, d.cuMemHostAlloc, LARGE, 0)
    p.waits("cuMemFreeHost", stream, d.cuMemFreeHost, pinned)
    p.waits("cuMemHostRegister", stream, d.cuMemHostRegister, area, LARGE, 0)
    p.waits("cuMemHostUnregister", stream, d.cuMemHostUnregister, area)
    queued = p.waits("cuMemAllocAsync", stream, d.cuMemAllocAsync, LARGE, stream)
    p.waits("cuMemFreeAsync", stream, d.cuMemFreeAsync, queued, stream)
    queued = p.waits("cuMemAllocAsync.other_stream", stream, d.cuMemAllocAsync, LARGE, other)
    p.waits("cuMemFreeAsync.other_stream", stream, d.cuMemFreeAsync, queued, other)
    queued = p.need(d.cuMemAllocAsync, LARGE, other)
    p.waits("cuMemFree.of_async", stream, d.cuMemFree, queued)
    p.waits("cuMemGetInfo", stream, d.cuMemGetInfo)
    pool = p.need(d.cuDeviceGetDefaultMemPool, 0)
    p.waits("cuMemPoolTrimTo", stream, d.cuMemPoolTrimTo, pool, 0)
    managed = p.waits("cuMemAllocManaged", stream, d.cuMemAllocManaged, 4096, 1)
    p.waits("cuMemFree.managed", stream, d.cuMemFree, managed)


def creation(p):
    d = p.d
    stream = p.stream()
    p.waits("cuStreamCreate", stream, d.cuStreamCreate, 1)
    event = p.waits("cuEventCreate", stream, d.cuEventCreate, 0)
    p.waits("cuEventDestroy", stream, d.cuEventDestroy, event)
    latch = p.latch(stream, 2.0)  # may compile
    module = p.ask("cuModuleLoadData", d.cuModuleLoadData, p.image)
    p.note("cuModuleLoadData.waits", latch.has_timed_out)
    latch.open()
    p.waits("cuModuleGetFunction", stream, d.cuModuleGetFunction, module, b"fill")
    p.waits("cuModuleUnload", stream, d.cuModuleUnload, module)
    p.waits("cuCtxGetStreamPriorityRange", stream, d.cuCtxGetStreamPriorityRange)
    p.waits(
        "cuFuncSetAttribute",
        stream,
        d.cuFuncSetAttribute,
        p.kernel("reverse"),
        d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        65536,
    )


def release_of_what_is_in_use(p):
    """Freeing memory that waits behind the latch for a copy; the copy's bytes are not looked at."""
    d = p.d
    stream, area = p.stream(), p.pages(LARGE)

    def queue(name, target, source, function, *arguments):
        latch = p.latch(stream, BRIEF)
        p.need(d.cuMemcpyAsync, target, source, SMALL, stream)
        p.ask(name, function, *arguments)
        p.note(f"{name}.waits", latch.has_timed_out)
        latch.open()
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)

    device, other = p.device(LARGE), p.device(LARGE)
    queue("cuMemFree", other, device, d.cuMemFree, device)
    pinned = p.pinned(LARGE)
    queue("cuMemFreeHost", other, pinned, d.cuMemFreeHost, pinned)
    p.need(d.cuMemHostRegister, area, LARGE, 0)
    queue("cuMemHostUnregister", other, area, d.cuMemHostUnregister, area)
    event = p.event()
    p.need(d.cuEventRecord, event, stream)
    queue("cuEventDestroy", other, p.pinned(), d.cuEventDestroy, event)
    last = p.stream()
    latch = p.latch(last, BRIEF)
    p.need(p.launch, "fill", other, 77, stream=last)
    p.ask("cuStreamDestroy", d.cuStreamDestroy, last)
    p.note("cuStreamDestroy.waits", latch.has_timed_out)
    latch.open()
    p.ask("cuStreamDestroy.synchronize", d.cuCtxSynchronize)
    p.note("cuStreamDestroy.work_was_done", p.read(other)[0] == 77)


def contexts(p):
    """Other contexts of the device, and destroying the one whose stream is busy."""
    d = p.d
    first = p.stream()
    other = p.new_context()
    p.kernel("latch")
    second = p.stream()
    p.waits("synchronize_context", second, d.cuCtxSynchronize)
    p.need(d.cuCtxPopCurrent)
    p.need(d.cuCtxPushCurrent, other)
    latch = p.latch(second, BRIEF)
    p.need(d.cuCtxPopCurrent)
    p.ask("synchronize_while_another_is_busy", d.cuCtxSynchronize)
    p.note("synchronize_while_another_is_busy.waits", latch.has_timed_out)
    p.ask("query_here", d.cuStreamQuery, first)
    p.ask("destroy_busy", d.cuCtxDestroy, other)
    p.note("destroy_busy.waits", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuCtxSynchronize)
