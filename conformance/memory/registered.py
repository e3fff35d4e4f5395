"""Host memory that was there before and is page-locked where it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import numpy as np

from .pointers import describe_pointer
from .probe import in_thread, ints, run_chapter

PAGE = 4096
PORTABLE, DEVICEMAP, READ_ONLY = 1, 2, 8


def probe_registered(driver, image, **how):
    """cuMemHostRegister and cuMemHostUnregister."""
    return run_chapter(
        (
            sizes,
            flags,
            twice,
            overlapping,
            neighbours_on_a_page,
            unregister,
            elsewhere,
            other_kinds_of_memory,
            attributes,
            device_pointer,
            in_a_kernel,
            numpy_arrays,
            copy_on_write,
            partly_registered,
            read_only_pages,
            mapped_files,
            after_its_context,
        ),
        driver,
        image,
        **how,
    )


def sizes(p):
    d = p.d
    area = p.pages(4 * PAGE)
    for name, address, size in (
        ("zero", area, 0),
        ("one_byte", area, 1),
        ("one_page", area, PAGE),
        ("unaligned", area + 100, 1000),
        ("unaligned_over_two_pages", area + 4000, 200),
        ("whole", area, 4 * PAGE),
    ):
        p.ask(name, d.cuMemHostRegister, address, size, 0)
        p.ask(f"{name}.unregister", d.cuMemHostUnregister, address)
    for name, address, size in (
        ("null", 0, PAGE),
        ("absurd", area, 1 << 62),
        ("not_mapped", 4096, PAGE),
        ("past_what_is_mapped", area, 1 << 40),
    ):
        p.ask(name, d.cuMemHostRegister, address, size, 0)
        p.code(d.cuMemHostUnregister, address)


def flags(p):
    """Which flags are taken, and what cuMemHostGetFlags makes of them (4, I/O memory, is not asked)."""
    d = p.d
    supported = d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    p.hardware("read_only_supported", p.need(d.cuDeviceGetAttribute, supported, 0))
    area = p.pages()
    for each in (0, PORTABLE, DEVICEMAP, PORTABLE | DEVICEMAP, 16, 1 << 31):
        p.ask(f"{each}", d.cuMemHostRegister, area, PAGE, each)
        p.note(f"{each}.value", p.ask(f"{each}.get", d.cuMemHostGetFlags, area))
        p.ask(f"{each}.unregister", d.cuMemHostUnregister, area)


def twice(p):
    d = p.d
    area = p.pages()
    p.ask("first", d.cuMemHostRegister, area, PAGE, 0)
    p.ask("again", d.cuMemHostRegister, area, PAGE, 0)
    p.ask("again_smaller", d.cuMemHostRegister, area, 100, 0)
    p.ask("again_with_other_flags", d.cuMemHostRegister, area, PAGE, PORTABLE)
    p.ask("unregister", d.cuMemHostUnregister, area)
    p.ask("unregister_again", d.cuMemHostUnregister, area)
    p.ask("register_after", d.cuMemHostRegister, area, PAGE, 0)
    p.ask("unregister_after", d.cuMemHostUnregister, area)


def overlapping(p):
    d = p.d
    area = p.pages(8 * PAGE)
    p.ask("middle", d.cuMemHostRegister, area + 2 * PAGE, 2 * PAGE, 0)
    p.ask("over_its_begin", d.cuMemHostRegister, area + PAGE, 2 * PAGE, 0)
    p.ask("over_its_end", d.cuMemHostRegister, area + 3 * PAGE, 2 * PAGE, 0)
    p.ask("inside", d.cuMemHostRegister, area + 3 * PAGE, 100, 0)
    p.ask("around", d.cuMemHostRegister, area, 8 * PAGE, 0)
    p.ask("before", d.cuMemHostRegister, area, 2 * PAGE, 0)
    p.ask("behind", d.cuMemHostRegister, area + 4 * PAGE, PAGE, 0)
    for name, at in (("before", 0), ("middle", 2), ("behind", 4)):
        p.ask(f"unregister.{name}", d.cuMemHostUnregister, area + at * PAGE)


def neighbours_on_a_page(p):
    """Two ranges that share a page but no byte."""
    d = p.d
    area = p.pages(2 * PAGE)
    p.ask("first", d.cuMemHostRegister, area, 1000, 0)
    p.ask("second", d.cuMemHostRegister, area + 1000, 1000, 0)
    p.ask("apart", d.cuMemHostRegister, area + 3000, 100, 0)
    p.ask("over_the_page_end", d.cuMemHostRegister, area + 4000, 1000, 0)
    p.ask("rest_of_the_page.flags", d.cuMemHostGetFlags, area + 2500)
    for name, at in (("first", 0), ("second", 1000), ("apart", 3000), ("over_the_page_end", 4000)):
        p.ask(f"unregister.{name}", d.cuMemHostUnregister, area + at)


def unregister(p):
    d = p.d
    area = p.pages(4 * PAGE)
    p.ask("never_registered", d.cuMemHostUnregister, area)
    p.ask("null", d.cuMemHostUnregister, 0)
    p.need(d.cuMemHostRegister, area, 4 * PAGE, 0)
    p.ask("interior", d.cuMemHostUnregister, area + 100)
    p.ask("interior_page", d.cuMemHostUnregister, area + PAGE)
    p.ask("by_cuMemFreeHost", d.cuMemFreeHost, area)
    p.ask("still_there", d.cuMemHostGetFlags, area)
    p.ask("unregister", d.cuMemHostUnregister, area)
    p.need(d.cuMemHostRegister, area + 100, 1000, 0)
    p.ask("page_of_an_unaligned_begin", d.cuMemHostUnregister, area)
    p.ask("unaligned_begin", d.cuMemHostUnregister, area + 100)


def elsewhere(p):
    """Another thread, another context of the device, no context."""
    d = p.d
    area = p.pages(2 * PAGE)
    p.ask("thread_without_context.register", in_thread, d.cuMemHostRegister, area, PAGE, 0)
    p.code(d.cuMemHostUnregister, area)
    p.need(d.cuMemHostRegister, area, PAGE, 0)
    p.ask("thread_without_context.unregister", in_thread, d.cuMemHostUnregister, area)
    p.code(d.cuMemHostUnregister, area)
    for name, each in (("plain", 0), ("portable", PORTABLE)):
        p.need(d.cuMemHostRegister, area, PAGE, each)
        other = p.new_context()
        p.ask(f"{name}.other_context.register_again", d.cuMemHostRegister, area, PAGE, 0)
        p.ask(f"{name}.other_context.flags", d.cuMemHostGetFlags, area)
        p.ask(f"{name}.other_context.launch", p.launch, "fill", area, 3, block=32)
        p.ask(f"{name}.other_context.synchronize", d.cuCtxSynchronize)
        p.note(f"{name}.other_context.value", ints(area, 32)[31])
        p.ask(f"{name}.other_context.unregister", d.cuMemHostUnregister, area)
        p.need(d.cuCtxDestroy, other)
        p.ask(f"{name}.unregister_again", d.cuMemHostUnregister, area)


def other_kinds_of_memory(p):
    d = p.d
    p.ask("device", d.cuMemHostRegister, p.device(), PAGE, 0)
    p.ask("pinned", d.cuMemHostRegister, p.pinned(), PAGE, 0)
    managed = p.need(d.cuMemAllocManaged, PAGE, 1)
    p.ask("managed", d.cuMemHostRegister, int(managed), PAGE, 0)
    p.code(d.cuMemHostUnregister, int(managed))
    p.need(d.cuMemFree, managed)


def attributes(p):
    d = p.d
    area = p.pages(2 * PAGE)
    p.need(d.cuMemHostRegister, area, 2 * PAGE, 0)
    describe_pointer(p, "begin", area)
    describe_pointer(p, "interior", area + 5000, area)
    found = p.ask("address_range", d.cuMemGetAddressRange, area + 5000)
    p.note("address_range.value", None if found is None else [int(found[0]) - area, int(found[1])])
    p.need(d.cuMemHostUnregister, area)
    describe_pointer(p, "unregistered", area)
    p.need(d.cuMemHostRegister, area + 100, 1000, 0)
    describe_pointer(p, "unaligned", area + 100)
    describe_pointer(p, "unaligned.before_it_on_its_page", area + 50, area)
    describe_pointer(p, "unaligned.behind_it_on_its_page", area + 2000, area)
    p.need(d.cuMemHostUnregister, area + 100)


def device_pointer(p):
    d = p.d
    attribute = d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    p.hardware("can_use_host_pointer", p.need(d.cuDeviceGetAttribute, attribute, 0))
    area = p.pages()
    p.need(d.cuMemHostRegister, area + 100, 1000, 0)
    for name, at in (("begin", 100), ("interior", 600), ("before_it_on_its_page", 0)):
        pointer = p.ask(name, d.cuMemHostGetDevicePointer, area + at, 0)
        p.note(f"{name}.is_the_host_address", pointer is not None and int(pointer) == area + at)
    p.ask("flags_1", d.cuMemHostGetDevicePointer, area + 100, 1)
    p.need(d.cuMemHostUnregister, area + 100)
    p.ask("unregistered", d.cuMemHostGetDevicePointer, area + 100, 0)


def in_a_kernel(p):
    d = p.d
    area = p.pages()
    p.need(d.cuMemHostRegister, area, PAGE, DEVICEMAP)
    pointer = p.need(d.cuMemHostGetDevicePointer, area, 0)
    p.ask("write", p.launch, "fill", int(pointer), 7, block=32)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", ints(area, 32)[31])
    target = p.device()
    ints(area)[0] = 11
    p.ask("read", p.launch, "copy", int(pointer), target)
    p.note("read.value", p.read(target)[0])
    p.need(d.cuMemHostUnregister, area)
    p.note("value_stays", ints(area, 32)[31])


def numpy_arrays(p):
    """Ordinary arrays of any alignment, and one that is not writeable only in NumPy's eyes."""
    d = p.d
    array = p.alive(np.zeros(100_000, np.uint8))
    for name, view in (("whole", array), ("odd_begin", array[3:]), ("odd_both", array[5:50_001])):
        p.ask(name, d.cuMemHostRegister, view.ctypes.data, view.nbytes, 0)
        p.ask(f"{name}.unregister", d.cuMemHostUnregister, view.ctypes.data)
    array.flags.writeable = False
    p.ask("flagged_read_only", d.cuMemHostRegister, array.ctypes.data, array.nbytes, 0)
    p.ask("flagged_read_only.unregister", d.cuMemHostUnregister, array.ctypes.data)


def copy_on_write(p):
    """Pages that were never touched before they are registered."""
    d = p.d
    area = p.pages(4 * PAGE)
    p.need(d.cuMemHostRegister, area, 4 * PAGE, 0)
    target = p.device(4 * PAGE)
    p.ask("copy_untouched", d.cuMemcpyHtoD, target, area, 4 * PAGE)
    p.note("untouched.value", p.read(target, 2))
    p.need(p.launch, "fill", target, 9, block=32)
    p.ask("copy_back", d.cuMemcpyDtoH, area, target, 4 * PAGE)
    p.note("value", list(ints(area, 2)))
    p.need(d.cuMemHostUnregister, area)


def partly_registered(p):
    """Copies that reach over the end of what is registered."""
    d = p.d
    area = p.pages(4 * PAGE)
    p.need(d.cuMemHostRegister, area + PAGE, PAGE, 0)
    target, stream = p.device(4 * PAGE), p.stream()
    for name, at, size in (
        ("over_its_begin", 0, 2),
        ("over_its_end", 1, 2),
        ("around", 0, 4),
        ("beside", 2, 2),
    ):
        address, count = area + at * PAGE, size * PAGE
        p.ask(f"{name}.in", d.cuMemcpyHtoD, target, address, count)
        p.ask(f"{name}.out", d.cuMemcpyDtoH, address, target, count)
        p.ask(f"{name}.in_async", d.cuMemcpyHtoDAsync, target, address, count, stream)
        p.ask(f"{name}.out_async", d.cuMemcpyDtoHAsync, address, target, count, stream)
        p.ask(f"{name}.synchronize", d.cuStreamSynchronize, stream)
    p.need(d.cuMemHostUnregister, area + PAGE)


def read_only_pages(p):
    """Anonymous pages that the process itself may only read; copies out of them only."""
    area = p.pages(2 * PAGE)
    ints(area)[0] = 21
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(area, 2 * PAGE, mmap.PROT_READ) != 0:
        raise OSError("mprotect refused to make pages read-only")
    target = p.device()
    for name, each in (("plain", 0), ("read_only", READ_ONLY), ("read_only_mapped", READ_ONLY | DEVICEMAP)):
        _register_and_read(p, name, area, PAGE, each, target)
    protect(area, 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


def _register_and_read(p, name, address, size, flags, target):
    """Keep [code of registering, flags, code of a copy in, its first int, code of unregistering]."""
    d = p.d
    p.journal(name)
    answers = [p.code(d.cuMemHostRegister, address, size, flags)]
    if answers[0] == "SUCCESS":
        answers.append(p.call(d.cuMemHostGetFlags, address)[1])
        answers.append(p.code(d.cuMemcpyHtoD, target, address, size))
        answers.append(p.read(target)[0])
        answers.append(p.code(d.cuMemHostUnregister, address))
    p.hardware(name, answers)


def mapped_files(p):
    """numpy.memmap in each of its modes, on a disk and in shared memory."""
    target = p.device(4 * PAGE)
    for place, folder in (("disk", tempfile.gettempdir()), ("shared_memory", "/dev/shm")):
        if not os.path.isdir(folder):
            continue
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\x07" * (4 * PAGE))
            file.flush()
            for mode in ("r", "r+", "c"):
                mapping = p.alive(np.memmap(file.name, np.uint8, mode))
                address = mapping.ctypes.data
                for name, each in (("plain", 0), ("read_only", READ_ONLY)):
                    _register_and_read(p, f"{place}.{mode}.{name}", address, 4 * PAGE, each, target)


def after_its_context(p):
    """Destroying the context in which memory was registered."""
    d = p.d
    area = p.pages(2 * PAGE)
    other = p.new_context()
    p.need(d.cuMemHostRegister, area, PAGE, 0)
    p.need(d.cuMemHostRegister, area + PAGE, PAGE, PORTABLE)
    p.ask("destroy", d.cuCtxDestroy, other)
    for name, at in (("plain", 0), ("portable", PAGE)):
        describe_pointer(p, f"{name}.attributes", area + at)
        p.ask(f"{name}.unregister", d.cuMemHostUnregister, area + at)
        p.ask(f"{name}.register", d.cuMemHostRegister, area + at, PAGE, 0)
        p.ask(f"{name}.unregister_again", d.cuMemHostUnregister, area + at)
