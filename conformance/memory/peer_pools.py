"""Memory of pools, and managed memory, between devices."""

from __future__ import annotations

from .peers import Pair
from .places import access, location, new_pool
from .pointers import describe_pointer
from .probe import ints, run_chapter


def probe_peer_pools(driver, image, **how):
    """Needs two devices; a driver with one answers nothing."""
    return run_chapter(
        (
            pool_access,
            pool_access_by_either_way,
            pool_allocations_on_foreign_streams,
            managed_memory,
        ),
        driver,
        image,
        devices=2,
        **how,
    )


def pool_access(p):
    """cuMemPoolSetAccess for device 1 on a pool of device 0, and what cuMemPoolGetAccess says."""
    d = p.d
    pair = Pair(p)
    pool, stream = new_pool(p), p.stream()
    before = int(p.need(d.cuMemAllocFromPoolAsync, 4096, pool, stream))
    p.need(p.launch, "fill", before, 5, stream=stream, block=2)
    p.need(d.cuStreamSynchronize, stream)

    def say(name):
        p.note(f"{name}.value", p.ask(f"{name}.get", d.cuMemPoolGetAccess, pool, location(p, "DEVICE", 1)))

    say("at_first")
    for flag in ("READ", "NONE", "READWRITE"):
        p.ask(flag, d.cuMemPoolSetAccess, pool, [access(p, "DEVICE", 1, flag)], 1)
        say(flag)
    # Without access the kernels below would fault.
    p.need(d.cuMemPoolSetAccess, pool, [access(p, "DEVICE", 1, "READWRITE")], 1)
    after = int(p.need(d.cuMemAllocFromPoolAsync, 4096, pool, stream))
    p.need(p.launch, "fill", after, 6, stream=stream, block=2)
    p.need(d.cuStreamSynchronize, stream)
    pair.enter()
    for name, memory in (("allocated_before", before), ("allocated_after", after)):
        p.ask(f"{name}.read", p.launch, "copy", memory, pair.theirs, block=2)
        p.ask(f"{name}.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.value", p.read(pair.theirs, 2))
    pair.leave()
    p.ask(
        "several_with_one_wrong",
        d.cuMemPoolSetAccess,
        pool,
        [access(p, "DEVICE", 1, "READWRITE"), access(p, "DEVICE", 99, "READ")],
        2,
    )
    p.ask(
        "default_pool",
        d.cuMemPoolSetAccess,
        p.need(d.cuDeviceGetDefaultMemPool, 0),
        [access(p, "DEVICE", 1, "READWRITE")],
        1,
    )
    pair.close()


def pool_access_by_either_way(p):
    """Copies of pool memory need no access; peer access of the contexts does not extend to pools."""
    d = p.d
    pair = Pair(p)
    pool, stream = new_pool(p), p.stream()
    memory = int(p.need(d.cuMemAllocFromPoolAsync, 4096, pool, stream))
    p.need(p.launch, "fill", memory, 5, stream=stream, block=2)
    p.need(d.cuStreamSynchronize, stream)
    pair.enter()
    p.ask("copy_without_access", d.cuMemcpyDtoD, pair.theirs, memory, 8)
    p.note("copy_without_access.value", p.read(pair.theirs, 2))
    p.ask("read_by_the_host", d.cuMemcpyDtoH, p.pageable(), memory, 8)
    p.ask("enable", d.cuCtxEnablePeerAccess, p.context, 0)
    p.note("pool_says", p.need(d.cuMemPoolGetAccess, pool, location(p, "DEVICE", 1)))
    describe_pointer(p, "attributes_there", memory)
    pair.leave()
    pair.close()


def pool_allocations_on_foreign_streams(p):
    """The stream's device decides which pool cuMemAllocAsync takes, whatever is current."""
    d = p.d
    pair = Pair(p)
    pair.enter()
    theirs = p.stream()
    pair.leave()
    memory = p.ask("allocate", d.cuMemAllocAsync, 4096, theirs)
    handle = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    pool = p.ask("pool", d.cuPointerGetAttribute, handle, memory)
    p.note("pool.is_device_1", pool is not None and int(pool) == int(p.need(d.cuDeviceGetMemPool, 1)))
    mine = p.stream()
    p.need(d.cuStreamSynchronize, theirs)
    p.ask("free_on_my_stream", d.cuMemFreeAsync, memory, mine)
    p.ask("free_on_their_stream", d.cuMemFreeAsync, memory, theirs)
    p.ask("synchronize", d.cuStreamSynchronize, theirs)
    own = p.need(d.cuMemAllocAsync, 4096, mine)
    p.need(d.cuStreamSynchronize, mine)
    p.ask("my_memory_on_their_stream", d.cuMemFreeAsync, own, theirs)
    pool = p.need(d.cuDeviceGetMemPool, 0)
    found = p.ask("from_my_pool_on_their_stream", d.cuMemAllocFromPoolAsync, 4096, pool, theirs)
    p.note("from_my_pool_on_their_stream.given", found is not None)
    p.ask("synchronize_at_last", d.cuStreamSynchronize, theirs)
    pair.close()


def managed_memory(p):
    """One managed range, used by one device after the other."""
    d = p.d
    pair = Pair(p)
    memory = int(p.need(d.cuMemAllocManaged, 1 << 20, 1))
    ints(memory)[0] = 1
    p.ask("here", p.launch, "add", memory, 10)
    p.ask("here.synchronize", d.cuCtxSynchronize)
    pair.enter()
    p.ask("there", p.launch, "add", memory, 100)
    p.ask("there.synchronize", d.cuCtxSynchronize)
    p.ask("prefetch_there", d.cuMemPrefetchAsync, memory, 1 << 20, location(p, "DEVICE", 1), 0, 0)
    p.ask("prefetch_there.synchronize", d.cuCtxSynchronize)
    describe_pointer(p, "attributes_there", memory)
    pair.leave()
    p.note("value", ints(memory)[0])
    kind = d.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
    p.note("last_prefetch", p.need(d.cuMemRangeGetAttribute, 4, kind, memory, 1 << 20))
    accessed = d.CUmem_advise.CU_MEM_ADVISE_SET_ACCESSED_BY
    for device in (1, 0):
        p.ask(
            f"accessed_by.{device}", d.cuMemAdvise, memory, 1 << 20, accessed, location(p, "DEVICE", device)
        )
    kind = d.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY
    for size in (4, 8, 12):
        p.note(f"accessed_by.{size}", p.need(d.cuMemRangeGetAttribute, size, kind, memory, 1 << 20))
    p.need(d.cuMemFree, memory)
    pair.close()
