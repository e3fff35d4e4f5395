"""Managed memory. Each group frees what it allocates: less than 64 MiB exist at any time.

The host touches managed memory only while no kernel runs.
"""

from __future__ import annotations

from .places import location
from .pointers import describe_pointer
from .probe import ints, run_chapter

GLOBAL, HOST, SINGLE = 1, 2, 4
SIZE = 2 << 20
ADVICE = (
    "SET_READ_MOSTLY",
    "UNSET_READ_MOSTLY",
    "SET_PREFERRED_LOCATION",
    "UNSET_PREFERRED_LOCATION",
    "SET_ACCESSED_BY",
    "UNSET_ACCESSED_BY",
)


def probe_managed(driver, image, **how):
    """cuMemAllocManaged, prefetch, advice, range attributes, attachment to streams."""
    return run_chapter(
        (
            support,
            allocate,
            free,
            attributes,
            use,
            prefetch,
            prefetch_elsewhere,
            advise,
            range_attributes,
            range_attributes_of_parts,
            attach,
            in_another_context,
        ),
        driver,
        image,
        **how,
    )


def support(p):
    kinds = p.d.CUdevice_attribute
    for each in (
        "MANAGED_MEMORY",
        "CONCURRENT_MANAGED_ACCESS",
        "PAGEABLE_MEMORY_ACCESS",
        "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
        "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST",
    ):
        p.hardware(each, p.need(p.d.cuDeviceGetAttribute, getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{each}"), 0))


def allocate(p):
    d = p.d
    for name, size, flags in (
        ("global", 4096, GLOBAL),
        ("host", 4096, HOST),
        ("single", 4096, SINGLE),
        ("no_flag", 4096, 0),
        ("both_flags", 4096, GLOBAL | HOST),
        ("unknown_flag", 4096, 8),
        ("zero", 0, GLOBAL),
        ("one_byte", 1, GLOBAL),
    ):
        memory = p.ask(name, d.cuMemAllocManaged, size, flags)
        if memory is not None:
            p.note(f"{name}.alignment.256", int(memory) % 256 == 0)
            base, length = p.need(d.cuMemGetAddressRange, int(memory))
            p.note(f"{name}.range", [int(base) == int(memory), int(length)])
            p.note(f"{name}.is_zero", ints(int(memory))[0] == 0 if size >= 4 else None)
            p.need(d.cuMemFree, memory)


def free(p):
    d = p.d
    memory = p.need(d.cuMemAllocManaged, 4096, GLOBAL)
    p.ask("interior", d.cuMemFree, int(memory) + 256)
    p.ask("by_cuMemFreeHost", d.cuMemFreeHost, int(memory))
    p.ask("by_cuMemHostUnregister", d.cuMemHostUnregister, int(memory))
    p.ask("first", d.cuMemFree, memory)
    p.ask("second", d.cuMemFree, memory)


def attributes(p):
    d = p.d
    for name, flags in (("global", GLOBAL), ("host", HOST)):
        memory = int(p.need(d.cuMemAllocManaged, 8192, flags))
        describe_pointer(p, f"{name}.begin", memory)
        describe_pointer(p, f"{name}.interior", memory + 5000, memory)
        p.ask(f"{name}.host_flags", d.cuMemHostGetFlags, memory)
        p.ask(f"{name}.device_pointer", d.cuMemHostGetDevicePointer, memory, 0)
        p.need(d.cuMemFree, memory)


def use(p):
    """Host, kernel, copies and fills see the same bytes in turn."""
    d = p.d
    for name, flags in (("global", GLOBAL), ("host", HOST)):
        memory = int(p.need(d.cuMemAllocManaged, 4096, flags))
        ints(memory, 2)[:] = (1, 2)
        p.ask(f"{name}.launch", p.launch, "add", memory, 10, block=2)
        p.ask(f"{name}.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.value", list(ints(memory, 2)))
        p.ask(f"{name}.copy_in", d.cuMemcpyHtoD, memory, p.pinned(), 4)
        p.ask(f"{name}.memset", d.cuMemsetD32, memory + 4, 9, 1)
        p.need(d.cuCtxSynchronize)
        p.note(f"{name}.value_at_last", list(ints(memory, 2)))
        p.need(d.cuMemFree, memory)


def prefetch(p):
    d = p.d
    memory = int(p.need(d.cuMemAllocManaged, SIZE, GLOBAL))
    ints(memory)[0] = 5
    stream = p.stream()
    device, host = location(p, "DEVICE", 0), location(p, "HOST")
    for name, where, on in (
        ("device", device, stream),
        ("host", host, stream),
        ("device.null_stream", device, 0),
    ):
        p.ask(name, d.cuMemPrefetchAsync, memory, SIZE, where, 0, on)
        p.ask(f"{name}.synchronize", d.cuCtxSynchronize)
    p.note("value", ints(memory)[0])
    for name, arguments in {
        "twice": (memory, SIZE, device, 0, stream),
        "part": (memory + 4096, 4096, device, 0, stream),
        "unaligned": (memory + 5, 100, device, 0, stream),
        "zero_bytes": (memory, 0, device, 0, stream),
        "past_the_end": (memory, 2 * SIZE, device, 0, stream),
        "flags_1": (memory, SIZE, device, 1, stream),
        "no_such_device": (memory, SIZE, location(p, "DEVICE", 99), 0, stream),
        "negative_device": (memory, SIZE, location(p, "DEVICE", -1), 0, stream),
        "no_location": (memory, SIZE, d.CUmemLocation(), 0, stream),
        "host_with_an_id": (memory, SIZE, location(p, "HOST", 7), 0, stream),
        "numa_node_0": (memory, SIZE, location(p, "HOST_NUMA", 0), 0, stream),
        "numa_node_99": (memory, SIZE, location(p, "HOST_NUMA", 99), 0, stream),
        "current_numa_node": (memory, SIZE, location(p, "HOST_NUMA_CURRENT"), 0, stream),
        "null": (0, SIZE, device, 0, stream),
    }.items():
        p.ask(name, d.cuMemPrefetchAsync, *arguments)
        p.ask(f"{name}.synchronize", d.cuCtxSynchronize)
    p.need(d.cuMemFree, memory)
    p.ask("freed", d.cuMemPrefetchAsync, memory, SIZE, device, 0, stream)


def prefetch_elsewhere(p):
    """Memory that is not managed."""
    d = p.d
    device, stream = location(p, "DEVICE", 0), p.stream()
    p.ask("device_memory", d.cuMemPrefetchAsync, p.device(), 4096, device, 0, stream)
    p.ask("pinned", d.cuMemPrefetchAsync, p.pinned(), 4096, device, 0, stream)
    queued = p.need(d.cuMemAllocAsync, 4096, stream)
    p.ask("from_a_pool", d.cuMemPrefetchAsync, queued, 4096, device, 0, stream)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.need(d.cuMemFreeAsync, queued, stream)


def advise(p):
    d, kinds = p.d, p.d.CUmem_advise
    memory = int(p.need(d.cuMemAllocManaged, SIZE, GLOBAL))
    places = {
        "device": location(p, "DEVICE", 0),
        "host": location(p, "HOST"),
        "numa_node_0": location(p, "HOST_NUMA", 0),
        "current_numa_node": location(p, "HOST_NUMA_CURRENT"),
        "no_such_device": location(p, "DEVICE", 99),
        "no_location": d.CUmemLocation(),
    }
    for each in ADVICE:
        kind = getattr(kinds, f"CU_MEM_ADVISE_{each}")
        p.each(each, d.cuMemAdvise, {name: (memory, SIZE, kind, place) for name, place in places.items()})
    kind = kinds.CU_MEM_ADVISE_SET_READ_MOSTLY
    device = places["device"]
    p.ask("part", d.cuMemAdvise, memory + 100, 100, kind, device)
    p.ask("zero_bytes", d.cuMemAdvise, memory, 0, kind, device)
    p.ask("past_the_end", d.cuMemAdvise, memory, 2 * SIZE, kind, device)
    p.ask("null", d.cuMemAdvise, 0, SIZE, kind, device)
    p.ask("device_memory", d.cuMemAdvise, p.device(), 4096, kind, device)
    p.ask("pinned", d.cuMemAdvise, p.pinned(), 4096, kind, device)
    p.need(d.cuMemFree, memory)
    p.ask("freed", d.cuMemAdvise, memory, SIZE, kind, device)


def _ranges(p, name, memory, size=SIZE):
    """What the five range attributes say; the bindings do not know the others of CUDA 13."""
    d, kinds = p.d, p.d.CUmem_range_attribute
    answers = {}
    for each, length in (
        ("READ_MOSTLY", 4),
        ("PREFERRED_LOCATION", 4),
        ("ACCESSED_BY", 8),
        ("LAST_PREFETCH_LOCATION", 4),
    ):
        kind = getattr(kinds, f"CU_MEM_RANGE_ATTRIBUTE_{each}")
        answer, value = p.call(d.cuMemRangeGetAttribute, length, kind, memory, size)
        answers[each] = answer if answer != "SUCCESS" else value
    p.note(name, answers)


def range_attributes(p):
    d, kinds = p.d, p.d.CUmem_advise
    memory = int(p.need(d.cuMemAllocManaged, SIZE, GLOBAL))
    device, host = location(p, "DEVICE", 0), location(p, "HOST")
    _ranges(p, "fresh", memory)
    for each in ADVICE:
        for name, place in (("device", device), ("host", host)):
            p.need(d.cuMemAdvise, memory, SIZE, getattr(kinds, f"CU_MEM_ADVISE_{each}"), place)
            _ranges(p, f"{each}.{name}", memory)
    for name, place in (("device", device), ("host", host)):
        p.need(d.cuMemPrefetchAsync, memory, SIZE, place, 0, 0)
        p.need(d.cuCtxSynchronize)
        _ranges(p, f"prefetched_to_{name}", memory)
    kind = d.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY
    for size in (0, 3, 8):
        p.ask(f"size_{size}", d.cuMemRangeGetAttribute, size, kind, memory, SIZE)
    several = [kind, d.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION]
    found = p.ask("several", d.cuMemRangeGetAttributes, [4, 4], several, 2, memory, SIZE)
    p.note("several.value", found)
    p.need(d.cuMemFree, memory)
    p.ask("freed", d.cuMemRangeGetAttribute, 4, kind, memory, SIZE)
    p.ask("device_memory", d.cuMemRangeGetAttribute, 4, kind, p.device(), 4096)
    p.ask("pinned", d.cuMemRangeGetAttribute, 4, kind, p.pinned(), 4096)


def range_attributes_of_parts(p):
    """Advice for half of a range; the question reaches over the end."""
    d, kinds = p.d, p.d.CUmem_advise
    memory = int(p.need(d.cuMemAllocManaged, SIZE, GLOBAL))
    device, half = location(p, "DEVICE", 0), SIZE // 2
    for each in ("SET_READ_MOSTLY", "SET_PREFERRED_LOCATION", "SET_ACCESSED_BY"):
        p.need(d.cuMemAdvise, memory, half, getattr(kinds, f"CU_MEM_ADVISE_{each}"), device)
    p.need(d.cuMemPrefetchAsync, memory, half, device, 0, 0)
    p.need(d.cuCtxSynchronize)
    _ranges(p, "first_half", memory, half)
    _ranges(p, "second_half", memory + half, half)
    _ranges(p, "both", memory)
    _ranges(p, "past_the_end", memory, 2 * SIZE)
    p.need(d.cuMemFree, memory)


def attach(p):
    """With one flag; none and two are in hazards.py."""
    d = p.d
    memory = int(p.need(d.cuMemAllocManaged, SIZE, GLOBAL))
    on_host = int(p.need(d.cuMemAllocManaged, SIZE, HOST))
    stream = p.stream()
    for name, arguments in {
        "global": (stream, memory, 0, GLOBAL),
        "host": (stream, memory, 0, HOST),
        "single": (stream, memory, 0, SINGLE),
        "single.whole_length": (stream, memory, SIZE, SINGLE),
        "single.part": (stream, memory, 4096, SINGLE),
        "single.interior": (stream, memory + 4096, 0, SINGLE),
        "single.null_stream": (0, memory, 0, SINGLE),
        "host.null_stream": (0, memory, 0, HOST),
        "host_memory.global": (stream, on_host, 0, GLOBAL),
        "host_memory.single": (stream, on_host, 0, SINGLE),
        "device_memory": (stream, p.device(), 0, SINGLE),
        "pinned": (stream, p.pinned(), 0, SINGLE),
        "pageable.with_length": (stream, p.pages(), 4096, HOST),
        "pageable.no_length": (stream, p.pages(), 0, HOST),
        "null": (stream, 0, 0, SINGLE),
    }.items():
        p.ask(name, d.cuStreamAttachMemAsync, *arguments)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
    p.need(d.cuMemFree, memory)
    p.need(d.cuMemFree, on_host)


def in_another_context(p):
    d = p.d
    memory = int(p.need(d.cuMemAllocManaged, 4096, GLOBAL))
    other = p.new_context()
    describe_pointer(p, "attributes", memory)
    p.ask("launch", p.launch, "fill", memory, 4, block=2)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", ints(memory)[0])
    theirs = int(p.need(d.cuMemAllocManaged, 4096, GLOBAL))
    p.ask("free", d.cuMemFree, memory)
    p.need(d.cuCtxDestroy, other)
    describe_pointer(p, "after_its_context", theirs)
    p.ask("after_its_context.free", d.cuMemFree, theirs)
