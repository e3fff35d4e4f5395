"""Stream-ordered allocation."""

from __future__ import annotations

from .places import new_pool, properties
from .pointers import describe_pointer
from .probe import run_chapter

LEGACY, PER_THREAD = 1, 2
MIB = 1 << 20


def probe_pools(driver, image, **how):
    """cuMemAllocAsync, cuMemFreeAsync, and the pools that they draw on."""
    return run_chapter(
        (
            support,
            allocate,
            allocate_on_each_stream,
            free,
            free_on_another_stream,
            free_by_the_other_function,
            free_what_is_not_from_a_pool,
            order,
            use_on_another_stream,
            attributes,
            copies,
            in_another_context,
            without_a_context,
            stream_destroyed,
            context_destroyed,
        ),
        driver,
        image,
        **how,
    )


def support(p):
    d, kinds = p.d, p.d.CUdevice_attribute
    for each in ("MEMORY_POOLS_SUPPORTED", "MEMPOOL_SUPPORTED_HANDLE_TYPES", "HOST_MEMORY_POOLS_SUPPORTED"):
        name = f"CU_DEVICE_ATTRIBUTE_{each}"
        p.hardware(
            each, p.need(d.cuDeviceGetAttribute, getattr(kinds, name), 0) if hasattr(kinds, name) else None
        )


def allocate(p):
    d = p.d
    stream = p.stream()
    for size in (0, 1, 1000, MIB, (2 << 20) + 1, 1 << 45):
        found = p.ask(f"{size}", d.cuMemAllocAsync, size, stream)
        if found is not None:
            p.note(f"{size}.alignment.256", int(found) % 256 == 0)
            ends = p.ask(f"{size}.range", d.cuMemGetAddressRange, int(found))
            p.note(
                f"{size}.range.value", None if ends is None else [int(ends[0]) == int(found), int(ends[1])]
            )
            p.ask(f"{size}.free", d.cuMemFreeAsync, found, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    first, second = (int(p.need(d.cuMemAllocAsync, 1, stream)) for _ in range(2))
    p.hardware("two_of_one_byte.distance", abs(second - first))


def allocate_on_each_stream(p):
    d = p.d
    for name, stream in (
        ("null", 0),
        ("legacy", LEGACY),
        ("per_thread", PER_THREAD),
        ("blocking", p.stream(0)),
        ("non_blocking", p.stream(1)),
    ):
        memory = p.ask(f"{name}.allocate", d.cuMemAllocAsync, 4096, stream)
        p.ask(f"{name}.launch", p.launch, "fill", int(memory), 8, stream=stream, block=32)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
        p.note(f"{name}.value", p.read(int(memory), 32)[31])
        p.ask(f"{name}.free", d.cuMemFreeAsync, memory, stream)
        p.ask(f"{name}.free.synchronize", d.cuStreamSynchronize, stream)


def free(p):
    d = p.d
    stream = p.stream()
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.ask("null", d.cuMemFreeAsync, 0, stream)
    p.ask("interior", d.cuMemFreeAsync, int(memory) + 256, stream)
    p.ask("first", d.cuMemFreeAsync, memory, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("second", d.cuMemFreeAsync, memory, stream)
    p.ask("then_cuMemFree", d.cuMemFree, memory)


def free_on_another_stream(p):
    """The allocation is complete, so any stream may free it."""
    d = p.d
    first, second = p.stream(), p.stream()
    for name, other in (("other", second), ("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD)):
        memory = p.need(d.cuMemAllocAsync, 4096, first)
        p.need(d.cuStreamSynchronize, first)
        p.ask(name, d.cuMemFreeAsync, memory, other)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, other)


def free_by_the_other_function(p):
    d = p.d
    stream = p.stream()
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.ask("cuMemFree", d.cuMemFree, memory)
    p.ask("cuMemFree.again", d.cuMemFree, memory)
    p.ask("cuMemFreeAsync_after", d.cuMemFreeAsync, memory, stream)
    memory = p.need(d.cuMemAllocAsync, 4096, stream)
    p.ask("cuMemFree.interior", d.cuMemFree, int(memory) + 256)
    p.ask("cuMemFreeHost", d.cuMemFreeHost, int(memory))
    p.ask("cuMemFree.at_last", d.cuMemFree, memory)
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def free_what_is_not_from_a_pool(p):
    d = p.d
    stream = p.stream()
    device = p.device()
    p.ask("cuMemAlloc", d.cuMemFreeAsync, device, stream)
    p.ask("cuMemAlloc.synchronize", d.cuStreamSynchronize, stream)
    p.ask("cuMemAlloc.then_cuMemFree", d.cuMemFree, device)
    p.ask("cuMemAlloc.interior", d.cuMemFreeAsync, p.device() + 256, stream)
    p.ask("pageable", d.cuMemFreeAsync, p.pageable(), stream)
    p.ask("pinned", d.cuMemFreeAsync, p.pinned(), stream)
    managed = p.need(d.cuMemAllocManaged, 4096, 1)
    p.ask("managed", d.cuMemFreeAsync, managed, stream)
    p.ask("managed.synchronize", d.cuStreamSynchronize, stream)
    p.ask("managed.then_cuMemFree", d.cuMemFree, managed)


def order(p):
    """Allocation, kernel, copy and free behind a latch: the calls return, the work comes later."""
    d = p.d
    stream, result = p.stream(), p.device()
    latch = p.latch(stream)
    memory = p.ask("allocate", d.cuMemAllocAsync, 4096, stream)
    p.ask("launch", p.launch, "fill", int(memory), 6, stream=stream)
    p.ask("copy", d.cuMemcpyDtoDAsync, result, int(memory), 64, stream)
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    p.ask("free_again", d.cuMemFreeAsync, memory, stream)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(result)[0])


def use_on_another_stream(p):
    """Another stream uses the memory once it waits for an event behind the allocation."""
    d = p.d
    first, second = p.stream(), p.stream()
    made, used = p.event(2), p.event(2)
    latch = p.latch(first)
    memory = p.need(d.cuMemAllocAsync, 4096, first)
    p.need(d.cuEventRecord, made, first)
    p.ask("wait", d.cuStreamWaitEvent, second, made, 0)
    p.ask("launch", p.launch, "fill", int(memory), 4, stream=second, block=32)
    p.need(d.cuEventRecord, used, second)
    p.need(d.cuStreamWaitEvent, first, used, 0)
    result = p.device()
    p.need(d.cuMemcpyDtoDAsync, result, int(memory), 64, first)
    p.ask("free", d.cuMemFreeAsync, memory, first)
    p.ask("query_second", d.cuStreamQuery, second)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, first)
    p.note("value", p.read(result)[0])


def attributes(p):
    d = p.d
    stream = p.stream()
    memory = int(p.need(d.cuMemAllocAsync, 1000, stream))
    describe_pointer(p, "begin", memory)
    describe_pointer(p, "interior", memory + 600, memory)
    p.need(d.cuStreamSynchronize, stream)
    pool = new_pool(p)
    own = p.need(d.cuMemAllocFromPoolAsync, 1000, pool, stream)
    handle = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    p.note("pool_handle", int(p.need(d.cuPointerGetAttribute, handle, own)) == int(pool))
    default = p.need(d.cuDeviceGetDefaultMemPool, 0)
    p.note("default_handle", int(p.need(d.cuPointerGetAttribute, handle, memory)) == int(default))
    p.need(d.cuMemFreeAsync, memory, stream)
    p.need(d.cuStreamSynchronize, stream)
    describe_pointer(p, "freed", memory)


def copies(p):
    """Ranges are checked as for any other device memory."""
    d = p.d
    stream, host = p.stream(), p.pageable(8 * MIB)
    memory = int(p.need(d.cuMemAllocAsync, 1000, stream))
    p.need(d.cuStreamSynchronize, stream)
    p.ask("whole", d.cuMemcpyHtoD, memory, host, 1000)
    p.ask("one_more", d.cuMemcpyHtoD, memory, host, 1001)
    p.ask("to_1024", d.cuMemcpyHtoD, memory, host, 1024)
    p.ask("past_1024", d.cuMemcpyHtoD, memory, host, 1025)
    p.ask("memset_past_end", d.cuMemsetD8, memory, 0, 4096)
    p.need(d.cuMemFreeAsync, memory, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.ask("freed", d.cuMemcpyHtoD, memory, host, 16)


def in_another_context(p):
    """A pool belongs to the device, so every context of the device may use and free what it gives."""
    d = p.d
    stream = p.stream()
    memory = int(p.need(d.cuMemAllocAsync, 4096, stream))
    p.need(d.cuStreamSynchronize, stream)
    other = p.new_context()
    theirs = p.stream()
    describe_pointer(p, "attributes", memory)
    p.ask("launch", p.launch, "fill", memory, 9, stream=theirs)
    p.ask("synchronize", d.cuStreamSynchronize, theirs)
    p.note("value", p.read(memory)[0])
    p.ask("free_on_its_own_stream", d.cuMemFreeAsync, memory, theirs)
    p.ask("free.synchronize", d.cuStreamSynchronize, theirs)
    p.ask("allocate_on_the_first_contexts_stream", d.cuMemAllocAsync, 4096, stream)
    p.need(d.cuCtxDestroy, other)


def without_a_context(p):
    d = p.d
    stream = p.stream()
    pool = p.need(d.cuDeviceGetDefaultMemPool, 0)
    p.need(d.cuCtxPopCurrent)
    p.ask("allocate_on_null", d.cuMemAllocAsync, 4096, 0)
    memory = p.ask("allocate_on_a_stream", d.cuMemAllocAsync, 4096, stream)
    p.ask("free_on_null", d.cuMemFreeAsync, memory, 0)
    p.ask("free_on_a_stream", d.cuMemFreeAsync, memory, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("from_pool_on_null", d.cuMemAllocFromPoolAsync, 4096, pool, 0)
    p.ask("cuMemPoolTrimTo", d.cuMemPoolTrimTo, pool, 0)
    p.ask("cuMemPoolCreate", d.cuMemPoolCreate, properties(p))
    p.ask("cuDeviceGetMemPool", d.cuDeviceGetMemPool, 0)


def stream_destroyed(p):
    """The memory outlives the stream that it was allocated on."""
    d = p.d
    stream, other = p.stream(), p.stream()
    memory = int(p.need(d.cuMemAllocAsync, 4096, stream))
    p.ask("destroy", d.cuStreamDestroy, stream)
    p.ask("launch", p.launch, "fill", memory, 5, stream=other)
    p.ask("synchronize", d.cuStreamSynchronize, other)
    p.note("value", p.read(memory)[0])
    p.ask("free", d.cuMemFreeAsync, memory, other)
    p.ask("free.synchronize", d.cuStreamSynchronize, other)


def context_destroyed(p):
    """The memory outlives the context that it was allocated in."""
    d = p.d
    other = p.new_context()
    theirs = p.stream()
    memory = int(p.need(d.cuMemAllocAsync, 4096, theirs))
    p.need(p.launch, "fill", memory, 5, stream=theirs)
    p.need(d.cuStreamSynchronize, theirs)
    p.ask("destroy", d.cuCtxDestroy, other)
    describe_pointer(p, "attributes", memory)
    p.ask("range", d.cuMemGetAddressRange, memory)
    p.ask("read", d.cuMemcpyDtoH, p.pageable(), memory, 4)
    stream = p.stream()
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("free_again", d.cuMemFreeAsync, memory, stream)
