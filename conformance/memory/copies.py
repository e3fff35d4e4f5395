"""Copies between all kinds of memory, 2-D copies, and memset."""

from __future__ import annotations

import ctypes

from .probe import ints, run_chapter

KINDS = ("pageable", "pinned", "registered", "managed", "device")
SIZE = 8192
COUNT = SIZE // 4


def probe_copies(driver, image, **how):
    """Every direction with every kind of memory, ranges that do not fit, rows, and fills."""
    return run_chapter(
        (
            directions,
            directions_async,
            past_the_end,
            nothing_to_copy,
            freed_memory,
            overlapping,
            source_changed_after_an_async_copy,
            rows,
            rows_that_do_not_fit,
            rows_by_kind,
            pitched_allocation,
            planes,
            fill,
            fill_rows,
            fill_kinds,
            past_the_end_of_pinned,
        ),
        driver,
        image,
        **how,
    )


def memory_of_each_kind(p):
    d = p.d
    registered = p.pages(SIZE)
    p.need(d.cuMemHostRegister, registered, SIZE, 0)
    return {
        "pageable": p.pageable(SIZE),
        "pinned": p.pinned(SIZE),
        "registered": registered,
        "managed": int(p.need(d.cuMemAllocManaged, SIZE, 1)),
        "device": p.device(SIZE),
    }


def give_back(p, memory):
    p.need(p.d.cuCtxSynchronize)
    p.need(p.d.cuMemHostUnregister, memory["registered"])
    p.need(p.d.cuMemFree, memory["managed"])


def put(p, kind, address, value):
    if kind == "device":
        p.write(address, *[value] * COUNT)
    else:
        ints(address, COUNT)[:] = [value] * COUNT


def last(p, kind, address):
    if kind == "device":
        return p.read(address, COUNT)[-1]
    return ints(address, COUNT)[COUNT - 1]


def each_direction(p, functions, *stream):
    """Keep {"from > to": [code, whether the bytes arrived]} for each function."""
    source, target = memory_of_each_kind(p), memory_of_each_kind(p)
    for name, function in functions.items():
        answers = {}
        for begin in KINDS:
            for end in KINDS:
                if "device" in ((begin,) if "HtoD" in name else (end,) if "DtoH" in name else ()):
                    continue  # the driver may read it as the host does: see hazards.py
                label = f"{begin} > {end}"
                put(p, begin, source[begin], 5)
                put(p, end, target[end], 0)
                p.journal(f"{name}.{label}")
                answer = p.code(function, target[end], source[begin], SIZE, *stream)
                p.need(p.d.cuCtxSynchronize)
                answers[label] = [answer, last(p, end, target[end]) == 5]
        p.keep(name, answers)
    give_back(p, source)
    give_back(p, target)


def directions(p):
    d = p.d
    each_direction(
        p,
        {
            "cuMemcpy": d.cuMemcpy,
            "cuMemcpyHtoD": d.cuMemcpyHtoD,
            "cuMemcpyDtoH": d.cuMemcpyDtoH,
            "cuMemcpyDtoD": d.cuMemcpyDtoD,
        },
    )


def directions_async(p):
    d = p.d
    each_direction(
        p,
        {
            "cuMemcpyAsync": d.cuMemcpyAsync,
            "cuMemcpyHtoDAsync": d.cuMemcpyHtoDAsync,
            "cuMemcpyDtoHAsync": d.cuMemcpyDtoHAsync,
            "cuMemcpyDtoDAsync": d.cuMemcpyDtoDAsync,
        },
        p.stream(),
    )


def past_the_end(p):
    """Ranges that end behind an allocation of the driver's; 8 MiB are more than any rounding."""
    d = p.d
    size = 8 << 20
    host, device = p.pageable(size), p.device(4096)
    p.ask("device.source", d.cuMemcpyDtoH, host, device, size)
    p.ask("device.target", d.cuMemcpyHtoD, device, host, size)
    p.ask("device.both", d.cuMemcpyDtoD, device, device + 2048, 4096)
    p.ask("device.one_byte", d.cuMemcpyHtoD, device, host, 4097)
    p.ask("device.begins_behind", d.cuMemcpyHtoD, device + 4096, host, 1)
    stream = p.stream()
    p.ask("async.device.source", d.cuMemcpyDtoHAsync, host, device, size, stream)
    p.ask("async.device.target", d.cuMemcpyHtoDAsync, device, host, size, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    managed = int(p.need(d.cuMemAllocManaged, 4096, 1))
    p.ask("managed.source", d.cuMemcpyDtoH, host, managed, size)
    p.ask("managed.target", d.cuMemcpyHtoD, managed, host, size)
    p.need(d.cuMemFree, managed)


def nothing_to_copy(p):
    d = p.d
    host, device, stream = p.pageable(), p.device(), p.stream()
    for name, to, origin in (
        ("valid", device, host),
        ("wild", 0x1234, host),
        ("null", 0, 0),
        ("null_source", device, 0),
        ("behind_the_end", device + 4096, host),
    ):
        p.ask(f"{name}.cuMemcpyHtoD", d.cuMemcpyHtoD, to, origin, 0)
        p.ask(f"{name}.cuMemcpyHtoDAsync", d.cuMemcpyHtoDAsync, to, origin, 0, stream)
        p.ask(f"{name}.cuMemcpy", d.cuMemcpy, to, origin, 0)
    p.ask("null_target_of_some", d.cuMemcpyHtoD, 0, host, 16)
    p.ask("null_source_of_some.device", d.cuMemcpyDtoH, host, 0, 16)
    p.ask("null_both_of_some", d.cuMemcpyDtoD, 0, 0, 16)


def freed_memory(p):
    d = p.d
    host, device, pinned, other = p.pageable(), p.device(), p.pinned(), p.device()
    p.need(d.cuMemFree, device)
    p.ask("device.source", d.cuMemcpyDtoH, host, device, 16)
    p.ask("device.target", d.cuMemcpyHtoD, device, host, 16)
    p.ask("device.to_device", d.cuMemcpyDtoD, other, device, 16)
    p.ask("device.memset", d.cuMemsetD8, device, 0, 16)
    p.need(d.cuMemFreeHost, pinned)
    p.ask("pinned.as_device", d.cuMemcpyDtoD, other, pinned, 16)


def overlapping(p):
    """Only the codes: the bytes are undefined."""
    d = p.d
    device, pinned = p.device(SIZE), p.pinned(SIZE)
    for name, to, origin in (("forward", 512, 0), ("backward", 0, 512), ("same", 0, 0)):
        p.ask(f"device.{name}", d.cuMemcpyDtoD, device + to, device + origin, 4096)
        p.ask(f"pinned.{name}", d.cuMemcpy, pinned + to, pinned + origin, 4096)


def source_changed_after_an_async_copy(p):
    """Has the source been read when the call returns? Then what is written into it later is not copied."""
    d = p.d
    most = 1 << 20
    target, result, stream = p.device(most), p.device(), p.stream()
    for name, source, size in (
        ("pageable", p.pageable(), 64),
        ("pageable_65536", p.pageable(most), 65536),
        ("pageable_1_mib", p.pageable(most), most),
        ("pinned", p.pinned(), 64),
    ):
        ints(source)[0] = 1
        latch = p.latch(stream)
        p.ask(f"{name}.copy", d.cuMemcpyHtoDAsync, target, source, size, stream)
        ints(source)[0] = 2
        p.note(f"{name}.waited", latch.has_timed_out)
        latch.open()
        p.need(p.launch, "copy", target, result, stream=stream)
        p.need(d.cuStreamSynchronize, stream)
        p.note(f"{name}.value", p.read(result)[0])


def row_copy(p, source, target, width, height, source_pitch, target_pitch, **more):
    """A CUDA_MEMCPY2D between two (memory type, address)."""
    types = p.d.CUmemorytype
    copy = p.d.CUDA_MEMCPY2D()
    for side, (kind, address), pitch in (("src", source, source_pitch), ("dst", target, target_pitch)):
        setattr(copy, f"{side}MemoryType", getattr(types, f"CU_MEMORYTYPE_{kind}"))
        if kind == "HOST":
            setattr(copy, f"{side}Host", address)
        else:
            setattr(copy, f"{side}Device", p.d.CUdeviceptr(address))
        setattr(copy, f"{side}Pitch", pitch)
    copy.WidthInBytes, copy.Height = width, height
    for field, value in more.items():
        setattr(copy, field, value)
    return copy


def rows(p):
    """A 2-D copy moves a rectangle and leaves the bytes between the rows alone."""
    d = p.d
    host, device, back = p.pinned(4096), p.device(4096), p.pinned(4096)
    ints(host, 1024)[:] = range(1024)
    for name, function in (
        ("cuMemcpy2D", d.cuMemcpy2D),
        ("cuMemcpy2DUnaligned", d.cuMemcpy2DUnaligned),
        ("cuMemcpy2DAsync", lambda copy: d.cuMemcpy2DAsync(copy, 0)),
    ):
        p.need(d.cuMemsetD32, device, 0xFFFFFFFF, 1024)
        into = row_copy(p, ("HOST", host), ("DEVICE", device), 32, 4, 128, 64)
        into.srcXInBytes, into.srcY, into.dstXInBytes, into.dstY = 8, 1, 16, 2
        p.ask(f"{name}.in", function, into)
        p.need(d.cuCtxSynchronize)
        p.note(f"{name}.in.value", p.read(device, 112))
        out = row_copy(p, ("DEVICE", device), ("HOST", back), 16, 3, 64, 32, srcXInBytes=20, srcY=2)
        ctypes.memset(back, 0, 4096)
        p.ask(f"{name}.out", function, out)
        p.need(d.cuCtxSynchronize)
        p.note(f"{name}.out.value", list(ints(back, 24)))


def rows_that_do_not_fit(p):
    d = p.d
    host, device, other = p.pinned(8192), p.device(8192), p.device(8192)
    limit = p.need(d.cuDeviceGetAttribute, d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH, 0)
    p.hardware("max_pitch", limit)
    for name, width, height, source_pitch, target_pitch in (
        ("fits", 64, 4, 128, 128),
        ("width_is_pitch", 128, 4, 128, 128),
        ("width_over_source_pitch", 129, 4, 128, 256),
        ("width_over_target_pitch", 129, 4, 256, 128),
        ("pitch_0_one_row", 64, 1, 0, 0),
        ("pitch_0", 64, 4, 0, 0),
        ("width_0", 0, 4, 128, 128),
        ("height_0", 64, 0, 128, 128),
        ("odd_pitch", 33, 3, 37, 41),
        ("past_the_end", 64, 4096, 128, 128),
        ("last_row_ends_with_the_memory", 64, 64, 128, 128),
        ("pitch_over_the_limit", 64, 1, limit + 1, 128),
    ):
        into = row_copy(p, ("HOST", host), ("DEVICE", device), width, height, source_pitch, target_pitch)
        inside = row_copy(p, ("DEVICE", other), ("DEVICE", device), width, height, source_pitch, target_pitch)
        p.ask(f"{name}.in", d.cuMemcpy2D, into)
        p.ask(f"{name}.between", d.cuMemcpy2D, inside)
        p.ask(f"{name}.unaligned", d.cuMemcpy2DUnaligned, inside)
        p.ask(f"{name}.async", d.cuMemcpy2DAsync, into, 0)
    p.ask(
        "x_and_width_over_pitch",
        d.cuMemcpy2D,
        row_copy(p, ("HOST", host), ("DEVICE", device), 64, 2, 128, 128, dstXInBytes=96),
    )
    p.ask("null_struct", d.cuMemcpy2D, None)
    p.ask("empty_struct", d.cuMemcpy2D, d.CUDA_MEMCPY2D())


def rows_by_kind(p):
    """Which memory types a 2-D copy takes for which memory."""
    d = p.d
    memory, target = memory_of_each_kind(p), p.device(SIZE)
    answers = {}
    for kind in KINDS:
        for named in ("HOST", "DEVICE", "UNIFIED"):
            if kind == "device" and named == "HOST":
                continue  # the driver would read it as the host does
            put(p, kind, memory[kind], 6)
            p.write(target, 0)
            p.journal(f"by_type.{kind} as {named}")
            answer = p.code(
                d.cuMemcpy2D, row_copy(p, (named, memory[kind]), ("DEVICE", target), 64, 2, 128, 128)
            )
            p.need(d.cuCtxSynchronize)
            answers[f"{kind} as {named}"] = [answer, p.read(target)[0] == 6]
    p.keep("by_type", answers)
    give_back(p, memory)


def pitched_allocation(p):
    d = p.d
    for width, height, element in ((100, 10, 4), (512, 10, 4), (513, 1, 16), (1, 1, 8)):
        found = p.ask(f"{width}x{height}x{element}", d.cuMemAllocPitch, width, height, element)
        p.hardware(f"{width}x{height}x{element}.pitch", None if found is None else int(found[1]))
        if found is not None:
            size = p.need(d.cuMemGetAddressRange, int(found[0]))[1]
            p.note(
                f"{width}x{height}x{element}.size_is_pitch_times_height", int(size) == int(found[1]) * height
            )
            p.note(f"{width}x{height}x{element}.pitch_is_a_multiple_of_32", int(found[1]) % 32 == 0)
            p.need(d.cuMemFree, found[0])
    for name, arguments in {
        "width_0": (0, 10, 4),
        "height_0": (100, 0, 4),
        "element_0": (100, 10, 0),
        "element_1": (100, 10, 1),
        "element_3": (100, 10, 3),
        "element_32": (100, 10, 32),
    }.items():
        p.ask(name, d.cuMemAllocPitch, *arguments)


def planes(p):
    """One 3-D copy."""
    d = p.d
    host, device = p.pinned(8192), p.device(8192)
    ints(host, 2048)[:] = range(2048)
    p.need(d.cuMemsetD32, device, 0, 2048)
    copy = d.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.srcHost = d.CUmemorytype.CU_MEMORYTYPE_HOST, host
    copy.dstMemoryType, copy.dstDevice = d.CUmemorytype.CU_MEMORYTYPE_DEVICE, d.CUdeviceptr(device)
    copy.srcPitch = copy.dstPitch = 64
    copy.srcHeight = copy.dstHeight = 4
    copy.WidthInBytes, copy.Height, copy.Depth = 8, 2, 3
    p.ask("copy", d.cuMemcpy3D, copy)
    p.note("value", [p.read(device, 256)[at] for at in (0, 1, 2, 16, 17, 32, 64, 65, 128, 192)])
    copy.srcHeight = 1
    p.ask("height_over_source_height", d.cuMemcpy3D, copy)
    copy.srcHeight, copy.Depth = 4, 0
    p.ask("depth_0", d.cuMemcpy3D, copy)
    copy.Depth = 1000
    p.ask("past_the_end", d.cuMemcpy3DAsync, copy, 0)


def fill(p):
    d = p.d
    device = p.device(4096)
    for bits, value in ((8, 0xAB), (16, 0xABCD), (32, 0x12345678)):
        size = bits // 8
        function, queued = getattr(d, f"cuMemsetD{bits}"), getattr(d, f"cuMemsetD{bits}Async")
        p.need(d.cuMemsetD8, device, 0, 4096)
        p.ask(f"{bits}.some", function, device, value, 3)
        p.note(f"{bits}.some.value", [each & 0xFFFFFFFF for each in p.read(device, 4)])
        p.ask(f"{bits}.offset", function, device + 8, value, 2)
        p.ask(f"{bits}.none", function, device, value, 0)
        p.ask(f"{bits}.none_wild", function, 0x1234, value, 0)
        p.ask(f"{bits}.misaligned", function, device + 1, value, 2)
        p.ask(f"{bits}.to_the_end", function, device, value, 4096 // size)
        p.ask(f"{bits}.past_the_end", function, device, value, 4096 // size + 1)
        p.ask(f"{bits}.async", queued, device, value, 3, 0)
        p.ask(f"{bits}.async.misaligned", queued, device + 1, value, 2, 0)
        p.ask(f"{bits}.async.past_the_end", queued, device, value, 4096 // size + 1, 0)
    p.ask("null", d.cuMemsetD8, 0, 1, 16)
    p.ask("synchronize", d.cuCtxSynchronize)


def fill_rows(p):
    d = p.d
    device = p.device(4096)
    for bits, value in ((8, 0xAB), (16, 0xABCD), (32, 7)):
        function, queued = getattr(d, f"cuMemsetD2D{bits}"), getattr(d, f"cuMemsetD2D{bits}Async")
        size = bits // 8
        p.need(d.cuMemsetD8, device, 0, 4096)
        p.ask(f"{bits}.fits", function, device, 16, value, 8 // size, 3)
        p.note(f"{bits}.fits.value", [each & 0xFFFFFFFF for each in p.read(device, 16)])
        p.ask(f"{bits}.width_is_pitch", function, device, 16, value, 16 // size, 3)
        p.ask(f"{bits}.width_over_pitch", function, device, 16, value, 16 // size + 1, 3)
        p.ask(f"{bits}.odd_pitch", function, device, 17, value, 2, 3)
        p.ask(f"{bits}.pitch_0", function, device, 0, value, 2, 3)
        p.ask(f"{bits}.pitch_0_one_row", function, device, 0, value, 2, 1)
        p.ask(f"{bits}.width_0", function, device, 16, value, 0, 3)
        p.ask(f"{bits}.height_0", function, device, 16, value, 2, 0)
        p.ask(f"{bits}.past_the_end", function, device, 1 << 20, value, 2, 9)
        p.ask(f"{bits}.misaligned", function, device + 1, 16, value, 2, 3)
        p.ask(f"{bits}.async", queued, device, 16, value, 8 // size, 3, 0)
    p.ask("synchronize", d.cuCtxSynchronize)


def fill_kinds(p):
    """Which memory a memset takes."""
    d = p.d
    memory = memory_of_each_kind(p)
    answers = {}
    for kind in KINDS:
        put(p, kind, memory[kind], 0)
        p.journal(f"cuMemsetD32.{kind}")
        answer = p.code(d.cuMemsetD32, memory[kind], 9, COUNT)
        p.need(d.cuCtxSynchronize)
        answers[kind] = [answer, last(p, kind, memory[kind]) == 9]
    p.keep("cuMemsetD32", answers)
    give_back(p, memory)


def past_the_end_of_pinned(p):
    d = p.d
    size = 8 << 20
    small, big, stream = p.pinned(4096), p.device(size), p.stream()
    p.ask("source", d.cuMemcpyHtoD, big, small, size)
    p.ask("target", d.cuMemcpyDtoH, small, big, size)
    p.ask("async.source", d.cuMemcpyHtoDAsync, big, small, size, stream)
    p.ask("async.target", d.cuMemcpyDtoHAsync, small, big, size, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
