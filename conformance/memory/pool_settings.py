"""Memory pools: attributes, what they hold back, creation, the current pool, access."""

from __future__ import annotations

from .places import KEEP_ALL, access, attribute, get, location, new_pool, properties, put
from .probe import run_chapter

MIB = 1 << 20


def probe_pool_settings(driver, image, **how):
    """What may be asked of a pool and changed about it."""
    return run_chapter(
        (
            pool_attributes,
            set_pool_attributes,
            usage,
            release_threshold,
            reuse,
            create,
            host_pools,
            destroy,
            current_pool,
            pool_by_location,
            who_may_use_it,
        ),
        driver,
        image,
        **how,
    )


def pool_attributes(p):
    d = p.d
    for name, pool in (
        ("default", p.need(d.cuDeviceGetDefaultMemPool, 0)),
        ("created", p.need(d.cuMemPoolCreate, properties(p))),
    ):
        for each in (
            "REUSE_FOLLOW_EVENT_DEPENDENCIES",
            "REUSE_ALLOW_OPPORTUNISTIC",
            "REUSE_ALLOW_INTERNAL_DEPENDENCIES",
            "RELEASE_THRESHOLD",
        ):
            p.note(f"{name}.{each}", get(p, pool, each))
    fresh = p.need(d.cuMemPoolCreate, properties(p))
    for each in ("RESERVED_MEM_CURRENT", "RESERVED_MEM_HIGH", "USED_MEM_CURRENT", "USED_MEM_HIGH"):
        p.note(f"fresh.{each}", get(p, fresh, each))


def set_pool_attributes(p):
    d = p.d
    pool = p.need(d.cuMemPoolCreate, properties(p))
    for each in ("REUSE_FOLLOW_EVENT_DEPENDENCIES", "REUSE_ALLOW_OPPORTUNISTIC"):
        for value in (0, 1, 2, -1):
            p.ask(f"{each}.{value}", put, p, pool, each, value)
            p.note(f"{each}.{value}.value", get(p, pool, each))
    for value in (0, 1, 12345, KEEP_ALL):
        p.ask(f"RELEASE_THRESHOLD.{value}", put, p, pool, "RELEASE_THRESHOLD", value)
        p.note(f"RELEASE_THRESHOLD.{value}.value", get(p, pool, "RELEASE_THRESHOLD"))
    for each in ("RESERVED_MEM_CURRENT", "USED_MEM_CURRENT", "RESERVED_MEM_HIGH", "USED_MEM_HIGH"):
        for value in (0, 1):
            p.ask(f"{each}.{value}", put, p, pool, each, value)
    p.ask("null_pool", d.cuMemPoolGetAttribute, 0, attribute(p, "RELEASE_THRESHOLD"))


def usage(p):
    """Bytes that a pool says are used and reserved; how much it reserves at once is the driver's choice."""
    d = p.d
    stream, pool = p.stream(), new_pool(p)

    def both(name):
        p.note(f"{name}.used", get(p, pool, "USED_MEM_CURRENT"))
        p.hardware(f"{name}.reserved", get(p, pool, "RESERVED_MEM_CURRENT"))

    small = p.need(d.cuMemAllocFromPoolAsync, 1000, pool, stream)
    both("after_1000")
    large = p.need(d.cuMemAllocFromPoolAsync, 3 * MIB + 1, pool, stream)
    both("after_3_mib_and_1")
    latch = p.latch(stream)
    p.need(d.cuMemFreeAsync, large, stream)
    both("while_a_free_waits")
    latch.open()
    p.need(d.cuStreamSynchronize, stream)
    both("after_a_free")
    p.note("used_high", get(p, pool, "USED_MEM_HIGH"))
    p.ask("reset_high", put, p, pool, "USED_MEM_HIGH", 0)
    p.note("used_high_after_reset", get(p, pool, "USED_MEM_HIGH"))
    p.ask("trim", d.cuMemPoolTrimTo, pool, 0)
    both("after_trim")
    p.need(d.cuMemFreeAsync, small, stream)
    p.need(d.cuStreamSynchronize, stream)
    both("after_all_freed")
    p.ask("trim_all", d.cuMemPoolTrimTo, pool, 0)
    both("after_trim_all")
    p.note("reserved_at_last", get(p, pool, "RESERVED_MEM_CURRENT"))


def release_threshold(p):
    """When a stream, event or context is synchronised, a pool gives back what is above its threshold."""
    d = p.d
    stream = p.stream()
    for name, keep in (("zero", 0), ("all", KEEP_ALL)):
        pool = new_pool(p, keep)
        memory = p.need(d.cuMemAllocFromPoolAsync, 8 * MIB, pool, stream)
        p.need(d.cuMemFreeAsync, memory, stream)
        p.need(d.cuStreamSynchronize, stream)
        p.note(f"{name}.reserves_after_stream_synchronize", get(p, pool, "RESERVED_MEM_CURRENT") > 0)
        p.need(d.cuCtxSynchronize)
        p.note(f"{name}.reserves_after_context_synchronize", get(p, pool, "RESERVED_MEM_CURRENT") > 0)
        p.ask(f"{name}.trim_to_more_than_there_is", d.cuMemPoolTrimTo, pool, 1 << 40)
        p.ask(f"{name}.trim", d.cuMemPoolTrimTo, pool, 0)
        p.note(f"{name}.reserves_after_trim", get(p, pool, "RESERVED_MEM_CURRENT") > 0)
        p.ask(f"{name}.destroy", d.cuMemPoolDestroy, pool)


def reuse(p):
    """Does the next allocation of the same size get the address that was just freed?"""
    d = p.d
    first, second, event = p.stream(), p.stream(), p.event(2)
    settings = {
        "none": (0, 0, 0),
        "events": (1, 0, 0),
        "opportunistic": (0, 1, 0),
        "internal": (0, 0, 1),
    }
    for name, values in settings.items():
        pool = new_pool(p)
        names = ("FOLLOW_EVENT_DEPENDENCIES", "ALLOW_OPPORTUNISTIC", "ALLOW_INTERNAL_DEPENDENCIES")
        for each, value in zip(names, values, strict=True):
            p.need(put, p, pool, f"REUSE_{each}", value)

        def allocate(stream, pool=pool):
            return int(p.need(d.cuMemAllocFromPoolAsync, 4 * MIB, pool, stream))

        memory = allocate(first)
        latch = p.latch(first)
        p.need(d.cuMemFreeAsync, memory, first)
        same = allocate(first)
        p.note(f"{name}.same_stream", same == memory)
        p.need(d.cuMemFreeAsync, same, first)
        other = allocate(second)
        p.note(f"{name}.other_stream_while_the_free_waits", other == same)
        p.need(d.cuMemFreeAsync, other, second)
        p.note(f"{name}.waited", latch.has_timed_out)
        latch.open()
        p.need(d.cuCtxSynchronize)

        memory = allocate(first)
        latch = p.latch(first)
        p.need(d.cuMemFreeAsync, memory, first)
        p.need(d.cuEventRecord, event, first)
        p.need(d.cuStreamWaitEvent, second, event, 0)
        other = allocate(second)
        p.note(f"{name}.other_stream_behind_an_event", other == memory)
        p.need(d.cuMemFreeAsync, other, second)
        latch.open()
        p.need(d.cuCtxSynchronize)

        memory = allocate(first)
        p.need(d.cuMemFreeAsync, memory, first)
        p.need(d.cuStreamSynchronize, first)
        other = allocate(second)
        p.note(f"{name}.other_stream_when_done", other == memory)
        p.need(d.cuMemFreeAsync, other, second)
        p.need(d.cuCtxSynchronize)


def create(p):
    d = p.d
    p.ask("plain", d.cuMemPoolCreate, properties(p))
    p.ask("empty", d.cuMemPoolCreate, d.CUmemPoolProps())
    p.ask("none", d.cuMemPoolCreate, None)
    p.ask("no_such_device", d.cuMemPoolCreate, properties(p, number=99))
    p.ask("invalid_allocation_type", d.cuMemPoolCreate, properties(p, allocation="INVALID"))
    p.ask("file_descriptor", d.cuMemPoolCreate, properties(p, handles="POSIX_FILE_DESCRIPTOR"))
    p.ask("win32", d.cuMemPoolCreate, properties(p, handles="WIN32"))
    limited = p.ask("max_size", d.cuMemPoolCreate, properties(p, size=4 * MIB))
    if limited is not None:
        p.ask("max_size.more", d.cuMemAllocFromPoolAsync, 256 * MIB, limited, 0)
        p.ask("max_size.less", d.cuMemAllocFromPoolAsync, MIB, limited, 0)
        p.ask("max_size.synchronize", d.cuCtxSynchronize)


def host_pools(p):
    """New in CUDA 13: whether a machine has them differs, so every code is the machine's."""
    d = p.d
    for kind in ("HOST", "HOST_NUMA", "HOST_NUMA_CURRENT"):
        answer, pool = p.call(d.cuMemPoolCreate, properties(p, kind))
        p.hardware(kind, answer if isinstance(answer, str) else str(answer))
        if answer == "SUCCESS":
            stream = p.stream()
            answer, memory = p.call(d.cuMemAllocFromPoolAsync, 4096, pool, stream)
            p.hardware(f"{kind}.allocate", answer)
            if answer == "SUCCESS":
                p.need(d.cuStreamSynchronize, stream)
                p.hardware(f"{kind}.free", p.code(d.cuMemFreeAsync, memory, stream))
            p.need(d.cuStreamSynchronize, stream)
            p.hardware(f"{kind}.destroy", p.code(d.cuMemPoolDestroy, pool))


def destroy(p):
    """A pool may be destroyed while memory from it is in use; the memory stays until it is freed."""
    d = p.d
    stream, pool = p.stream(), new_pool(p)
    memory = int(p.need(d.cuMemAllocFromPoolAsync, 4096, pool, stream))
    p.ask("with_memory_in_use", d.cuMemPoolDestroy, pool)
    p.ask("launch", p.launch, "fill", memory, 3, stream=stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("value", p.read(memory)[0])
    p.ask("free", d.cuMemFreeAsync, memory, stream)
    p.ask("free.synchronize", d.cuStreamSynchronize, stream)
    p.ask("default", d.cuMemPoolDestroy, p.need(d.cuDeviceGetDefaultMemPool, 0))
    p.ask("null", d.cuMemPoolDestroy, 0)


def current_pool(p):
    d = p.d
    default = p.need(d.cuDeviceGetDefaultMemPool, 0)
    p.note("current_is_default", int(p.need(d.cuDeviceGetMemPool, 0)) == int(default))
    pool = new_pool(p)
    p.ask("set", d.cuDeviceSetMemPool, 0, pool)
    p.note("set.is_current", int(p.need(d.cuDeviceGetMemPool, 0)) == int(pool))
    p.note("set.default_stays", int(p.need(d.cuDeviceGetDefaultMemPool, 0)) == int(default))
    stream = p.stream()
    memory = p.need(d.cuMemAllocAsync, 1000, stream)
    p.note("set.used", get(p, pool, "USED_MEM_CURRENT"))
    p.need(d.cuMemFreeAsync, memory, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.ask("destroy_current", d.cuMemPoolDestroy, pool)
    p.note("destroyed.current_is_default", int(p.need(d.cuDeviceGetMemPool, 0)) == int(default))
    p.ask("set_null", d.cuDeviceSetMemPool, 0, 0)
    p.ask("set_default", d.cuDeviceSetMemPool, 0, default)
    p.ask("no_such_device", d.cuDeviceGetMemPool, 99)
    p.ask("no_such_device.default", d.cuDeviceGetDefaultMemPool, 99)
    if p.device_count > 1:
        other = p.need(d.cuDeviceGetDefaultMemPool, 1)
        p.note("devices_have_pools_of_their_own", int(other) != int(default))
        p.ask("set_pool_of_another_device", d.cuDeviceSetMemPool, 0, other)


def pool_by_location(p):
    """cuMemGetMemPool and its kin, new in CUDA 13."""
    d = p.d
    types = d.CUmemAllocationType
    for kind, number in (("DEVICE", 0), ("DEVICE", 99), ("HOST", 0), ("HOST_NUMA", 0)):
        for allocation in ("PINNED", "MANAGED"):
            name = f"CU_MEM_ALLOCATION_TYPE_{allocation}"
            if not hasattr(types, name):
                continue
            place = location(p, kind, number)
            for function in (d.cuMemGetDefaultMemPool, d.cuMemGetMemPool):
                answer, pool = p.call(function, place, getattr(types, name))
                label = f"{kind}.{number}.{allocation}.{function.__name__}"
                p.hardware(label, answer if isinstance(answer, str) else str(answer))
                if answer == "SUCCESS" and (kind, number, allocation) == ("DEVICE", 0, "PINNED"):
                    default = p.need(d.cuDeviceGetDefaultMemPool, 0)
                    p.note(f"{label}.is_the_default", int(pool) == int(default))


def who_may_use_it(p):
    """Which places may use a pool's memory; device 1 is asked for in the chapter on peers."""
    d = p.d
    pool = new_pool(p)
    for name, wishes in (
        ("own.READWRITE", [access(p, "DEVICE", 0, "READWRITE")]),
        ("own.READ", [access(p, "DEVICE", 0, "READ")]),
        ("own.NONE", [access(p, "DEVICE", 0, "NONE")]),
        ("no_such_device", [access(p, "DEVICE", 99, "READWRITE")]),
        ("host", [access(p, "HOST", 0, "READWRITE")]),
        ("none", []),
    ):
        p.ask(name, d.cuMemPoolSetAccess, pool, wishes, len(wishes))
        found = p.ask(f"{name}.get", d.cuMemPoolGetAccess, pool, location(p))
        p.note(f"{name}.value", found)
    p.ask("get.no_such_device", d.cuMemPoolGetAccess, pool, location(p, "DEVICE", 99))
    p.ask("get.host", d.cuMemPoolGetAccess, pool, location(p, "HOST"))
