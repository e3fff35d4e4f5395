"""Page-locked memory that the driver allocates."""

from __future__ import annotations

import ctypes

from .pointers import describe_pointer
from .probe import in_thread, ints, run_chapter

PORTABLE, DEVICEMAP, WRITECOMBINED = 1, 2, 4


def probe_pinned(driver, image, **how):
    """cuMemHostAlloc, cuMemAllocHost, cuMemFreeHost, and what may be asked of such memory."""
    return run_chapter(
        (
            allocate,
            flags,
            device_pointer,
            free,
            free_elsewhere,
            attributes,
            attributes_of_several,
            address_range,
            sync_memops,
            in_a_kernel,
            in_another_context,
            without_a_context,
            after_its_context,
        ),
        driver,
        image,
        **how,
    )


def allocate(p):
    d = p.d
    p.each("cuMemHostAlloc.size", d.cuMemHostAlloc, {size: (size, 0) for size in (0, 1, 100, 4096)})
    p.each("cuMemAllocHost.size", d.cuMemAllocHost, {size: (size,) for size in (0, 1, 100, 4096)})
    p.each("cuMemHostAlloc.flags", d.cuMemHostAlloc, {each: (64, each) for each in (*range(9), 16, 1 << 31)})
    p.ask("absurd_size", d.cuMemHostAlloc, 1 << 62, 0)
    first, second = p.pinned(100), p.pinned(100)
    p.note("alignment.256", [first % 256 == 0, second % 256 == 0])


def flags(p):
    """What cuMemHostGetFlags answers, by the flags that were asked for."""
    d = p.d
    p.note("by_flags", {each: d.cuMemHostGetFlags(p.pinned(64, each))[1] for each in range(8)})
    p.note("of_cuMemAllocHost", d.cuMemHostGetFlags(p.need(d.cuMemAllocHost, 64))[1])
    memory = p.pinned(4096)
    p.ask("interior", d.cuMemHostGetFlags, memory + 100)
    p.ask("pageable", d.cuMemHostGetFlags, p.pageable())
    p.ask("device_memory", d.cuMemHostGetFlags, p.device())
    p.ask("null", d.cuMemHostGetFlags, 0)
    p.need(d.cuMemFreeHost, memory)
    p.ask("freed", d.cuMemHostGetFlags, memory)


def device_pointer(p):
    d = p.d
    for name, each in (
        ("plain", 0),
        ("portable", PORTABLE),
        ("mapped", DEVICEMAP),
        ("combined", WRITECOMBINED),
    ):
        memory = p.pinned(4096, each)
        pointer = p.ask(name, d.cuMemHostGetDevicePointer, memory, 0)
        p.note(f"{name}.is_the_host_address", pointer is not None and int(pointer) == memory)
    memory = p.pinned()
    inside = p.ask("interior", d.cuMemHostGetDevicePointer, memory + 100, 0)
    p.note("interior.offset", int(inside) - memory if inside is not None else None)
    p.ask("flags_1", d.cuMemHostGetDevicePointer, memory, 1)
    p.ask("pageable", d.cuMemHostGetDevicePointer, p.pageable(), 0)
    p.ask("device_memory", d.cuMemHostGetDevicePointer, p.device(), 0)
    p.ask("null", d.cuMemHostGetDevicePointer, 0, 0)
    p.need(d.cuMemFreeHost, memory)
    p.ask("freed", d.cuMemHostGetDevicePointer, memory, 0)


def free(p):
    d = p.d
    memory = p.pinned()
    p.ask("null", d.cuMemFreeHost, 0)
    p.ask("interior", d.cuMemFreeHost, memory + 16)
    p.ask("by_cuMemFree", d.cuMemFree, memory)
    p.ask("by_cuMemHostUnregister", d.cuMemHostUnregister, memory)
    p.ask("still_there", d.cuMemHostGetFlags, memory)
    p.ask("first", d.cuMemFreeHost, memory)
    p.ask("second", d.cuMemFreeHost, memory)
    p.ask("pageable", d.cuMemFreeHost, p.pageable())
    p.ask("device_memory", d.cuMemFreeHost, p.device())
    p.ask("managed_memory", d.cuMemFreeHost, p.need(d.cuMemAllocManaged, 4096, 1))
    p.ask("of_cuMemAllocHost", d.cuMemFreeHost, p.need(d.cuMemAllocHost, 64))


def free_elsewhere(p):
    """Freeing on a thread without a context, and in another context of the device."""
    d = p.d
    p.ask("thread_without_context", in_thread, d.cuMemFreeHost, p.pinned())
    p.ask("cuMemAllocHost.thread_without_context", in_thread, d.cuMemFreeHost, p.need(d.cuMemAllocHost, 64))
    memory = p.pinned()
    other = p.new_context()
    p.ask("other_context", d.cuMemFreeHost, memory)
    p.need(d.cuCtxDestroy, other)


def attributes(p):
    d = p.d
    memory = p.pinned(8192)
    describe_pointer(p, "begin", memory)
    describe_pointer(p, "interior", memory + 5000, memory)
    describe_pointer(p, "write_combined", p.pinned(64, WRITECOMBINED))
    describe_pointer(p, "pageable", p.pageable())
    describe_pointer(p, "null", 0)
    device = p.device(1000)
    describe_pointer(p, "device.begin", device)
    describe_pointer(p, "device.interior", device + 600, device)
    describe_pointer(p, "device.past_end", device + 1000, device)
    p.need(d.cuMemFree, device)
    describe_pointer(p, "device.freed", device)
    p.need(d.cuMemFreeHost, memory)
    describe_pointer(p, "freed", memory)


def attributes_of_several(p):
    """cuPointerGetAttributes answers for any pointer, with zeros where there is nothing to say."""
    d, kinds = p.d, p.d.CUpointer_attribute
    asked = [
        kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        kinds.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        kinds.CU_POINTER_ATTRIBUTE_MAPPED,
    ]
    for name, pointer in (
        ("pinned", p.pinned(64)),
        ("device", p.device(1000)),
        ("pageable", p.pageable()),
        ("null", 0),
    ):
        found = p.ask(name, d.cuPointerGetAttributes, len(asked), asked, pointer)
        p.note(f"{name}.value", None if found is None else [int(each) for each in found])
    p.ask("none_asked", d.cuPointerGetAttributes, 0, [], p.device())


def address_range(p):
    d = p.d
    memory = p.pinned(8192)
    found = p.ask("pinned", d.cuMemGetAddressRange, memory + 5000)
    p.note("pinned.value", None if found is None else [int(found[0]) - memory, int(found[1])])
    p.ask("pageable", d.cuMemGetAddressRange, p.pageable())
    p.ask("null", d.cuMemGetAddressRange, 0)
    device = p.device(1000)
    found = p.ask("device.last_byte", d.cuMemGetAddressRange, device + 999)
    p.note("device.last_byte.value", None if found is None else [int(found[0]) - device, int(found[1])])
    p.ask("device.past_end", d.cuMemGetAddressRange, device + 1000)


def sync_memops(p):
    """The one attribute that may be set."""
    d, kinds = p.d, p.d.CUpointer_attribute
    setting = kinds.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    for name, pointer in (("device", p.device()), ("pinned", p.pinned()), ("pageable", p.pageable())):
        p.ask(f"{name}.set", d.cuPointerSetAttribute, 1, setting, pointer)
        found = p.ask(f"{name}.get", d.cuPointerGetAttribute, setting, pointer)
        p.note(f"{name}.value", None if found is None else bool(found))
        p.ask(f"{name}.unset", d.cuPointerSetAttribute, 0, setting, pointer)
    p.ask("other_attribute", d.cuPointerSetAttribute, 1, kinds.CU_POINTER_ATTRIBUTE_MAPPED, p.device())


def in_a_kernel(p):
    """Kernels use the memory at its host address, whatever its flags."""
    d = p.d
    for name, each in (
        ("plain", 0),
        ("portable", PORTABLE),
        ("mapped", DEVICEMAP),
        ("combined", WRITECOMBINED),
    ):
        memory = p.pinned(4096, each)
        p.ask(f"{name}.write", p.launch, "fill", memory, 7, block=32)
        p.ask(f"{name}.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.value", ints(memory, 32)[31])
        target = p.device()
        ints(memory)[0] = 11
        p.ask(f"{name}.read", p.launch, "copy", memory, target)
        p.note(f"{name}.read.value", p.read(target)[0])


def in_another_context(p):
    """Unified addressing makes it portable without the flag."""
    d = p.d
    memory = p.pinned(4096, 0)
    other = p.new_context()
    p.ask("flags", d.cuMemHostGetFlags, memory)
    p.ask("device_pointer", d.cuMemHostGetDevicePointer, memory, 0)
    describe_pointer(p, "attributes", memory)
    p.ask("launch", p.launch, "fill", memory, 5, block=32)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", ints(memory, 32)[31])
    p.need(d.cuCtxDestroy, other)
    p.ask("after_the_other_was_destroyed", d.cuMemHostGetFlags, memory)


def without_a_context(p):
    d = p.d
    memory = p.pinned()
    p.need(d.cuCtxPopCurrent)
    p.ask("cuMemHostAlloc", d.cuMemHostAlloc, 64, 0)
    p.ask("cuMemAllocHost", d.cuMemAllocHost, 64)
    p.ask("cuMemHostGetFlags", d.cuMemHostGetFlags, memory)
    p.ask("cuMemHostGetDevicePointer", d.cuMemHostGetDevicePointer, memory, 0)
    p.ask("cuMemGetAddressRange", d.cuMemGetAddressRange, memory)
    p.ask("cuMemGetInfo", d.cuMemGetInfo)
    p.ask("cuMemcpy", d.cuMemcpy, memory, memory + 64, 16)
    p.ask("cuMemsetD8", d.cuMemsetD8, memory, 0, 16)
    p.ask("cuMemAllocManaged", d.cuMemAllocManaged, 64, 1)
    describe_pointer(p, "attributes", memory)


def after_its_context(p):
    """Destroying the context frees what was allocated in it."""
    d = p.d
    other = p.new_context()
    memory, portable = p.pinned(), p.pinned(4096, PORTABLE)
    device = p.device()
    p.ask("destroy", d.cuCtxDestroy, other)
    describe_pointer(p, "plain", memory)
    describe_pointer(p, "portable", portable)
    describe_pointer(p, "device", device)
    p.ask("flags", d.cuMemHostGetFlags, memory)
    p.ask("free", d.cuMemFreeHost, memory)
    p.ask("free_portable", d.cuMemFreeHost, portable)
    p.ask("free_device", d.cuMemFree, device)
    p.ask("copy_to_device", d.cuMemcpyHtoD, p.device(), ctypes.addressof(ctypes.c_int(5)), 4)
