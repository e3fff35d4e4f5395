"""Memory: where it lies, how much there is, how it is copied and filled."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from virtual_fakes import Latch, assert_waits_for, code, fill, ptx, read_ints, value

Run = Callable[..., str]


def write(d: Any, pointer: Any, array: np.ndarray[Any, Any]) -> None:
    assert code(d.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes)) == "SUCCESS"


def read(d: Any, pointer: Any, size: int) -> np.ndarray[Any, Any]:
    array = np.empty(size, np.uint8)
    assert code(d.cuMemcpyDtoH(array.ctypes.data, pointer, size)) == "SUCCESS"
    return array


# ---- allocation


def test_memory_is_counted_and_given_back(d: Any, context: Any) -> None:
    free, total = value(d.cuMemGetInfo())
    assert total == 64 << 20 == value(d.cuDeviceTotalMem(0))
    pointers = [value(d.cuMemAlloc(size)) for size in (1, 512, 4096, 100_000, 1 << 20)]
    left = value(d.cuMemGetInfo())[0]
    assert free - left >= 1 + 512 + 4096 + 100_000 + (1 << 20)
    assert all(int(pointer) % 512 == 0 for pointer in pointers)
    for pointer in pointers:
        d.cuMemFree(pointer)
    assert value(d.cuMemGetInfo())[0] == free


def test_a_device_can_be_filled_and_not_overfilled(d: Any, context: Any) -> None:
    free = value(d.cuMemGetInfo())[0]
    pointer = value(d.cuMemAlloc(free))
    assert value(d.cuMemGetInfo())[0] == 0
    assert code(d.cuMemAlloc(1)) == "OUT_OF_MEMORY"
    assert "0 of 67108864 free" in d.last_error_log
    value(d.cuCtxCreate(None, 0, 1))
    assert code(d.cuMemAlloc(1)) == "SUCCESS"
    d.cuMemFree(pointer)


def test_fragments_do_not_keep_a_device_from_being_filled(d: Any, context: Any) -> None:
    free = value(d.cuMemGetInfo())[0]
    pointers = [value(d.cuMemAlloc(1 << 20)) for _ in range(free >> 20)]
    for pointer in pointers[::2]:
        d.cuMemFree(pointer)
    assert code(d.cuMemAlloc(len(pointers[::2]) << 20)) == "SUCCESS"


def test_new_memory_is_zero_whatever_was_there(d: Any, context: Any) -> None:
    for _ in range(200):  # more than the blocks that rest before they are used again
        pointer = value(d.cuMemAlloc(8192))
        assert not read(d, pointer, 8192).any()
        d.cuMemsetD8(pointer, 0xEE, 8192)
        d.cuMemFree(pointer)


def test_many_allocations_live_at_once(make_driver: Callable[..., Any]) -> None:
    d = make_driver(memory=1 << 30)
    value(d.cuCtxCreate(None, 0, 0))
    pointers = [value(d.cuMemAlloc(16)) for _ in range(40_000)]
    assert len({int(pointer) for pointer in pointers}) == 40_000
    for pointer in (pointers[0], pointers[20_000], pointers[-1]):
        d.cuMemsetD8(pointer, 7, 16)
        assert (read(d, pointer, 16) == 7).all()
    for pointer in pointers:
        assert code(d.cuMemFree(pointer)) == "SUCCESS"


def test_spans_are_a_snapshot(d: Any, context: Any) -> None:
    first = value(d.cuMemAlloc(100))
    memory = d._state.context(context).memory(d._state.memory)
    starts, ends = memory.spans()
    assert (starts.tolist(), ends.tolist()) == ([int(first)], [int(first) + 100])
    assert memory.spans()[0] is starts
    second = value(d.cuMemAlloc(100))
    assert starts.tolist() == [int(first)]
    assert sorted(memory.spans()[0].tolist()) == sorted([int(first), int(second)])
    d.cuMemFree(first)
    assert memory.spans()[0].tolist() == [int(second)]


def test_the_region_is_one_array_of_real_addresses(d: Any, context: Any) -> None:
    pointer = value(d.cuMemAlloc(64))
    memory = d._state.context(context).memory(d._state.memory)
    view = memory.view(np.uint32)
    index = (int(pointer) - memory.base) // 4
    view[index] = 0xABCD
    assert read_ints(d, pointer, 1) == [0xABCD]
    assert view.ctypes.data == memory.base
    assert memory.base % 4096 == 0


GUARD = """
import ctypes, sys
from gpufleet.virtual import VirtualDriver
d = VirtualDriver(devices=1, visible_devices=None)
d.cuInit(0); d.cuCtxCreate(None, 0, 0)
size = 8192
first, second = (int(d.cuMemAlloc(size)[1]) for _ in range(2))
ctypes.memset(first, 1, size)
if sys.argv[1] == "freed":
    d.cuMemFree(first)
    ctypes.memset(first, 1, 1)
else:
    ctypes.memset(first + size, 1, 1)
"""


@pytest.mark.parametrize("what", ["end", "freed"])
@pytest.mark.skipif(sys.platform == "win32", reason="looks for SIGSEGV")
def test_touching_what_is_behind_or_freed_ends_the_process(what: str) -> None:
    assert subprocess.run([sys.executable, "-c", GUARD, what], check=False).returncode == -11


def test_faults_are_explained_by_the_nearest_allocation(d: Any, context: Any) -> None:
    pointer = int(value(d.cuMemAlloc(100)))
    memory = d._state.context(context).memory(d._state.memory)
    assert memory.describe(pointer + 50).startswith("in the 100-byte device allocation")
    assert memory.describe(pointer + 103).startswith("4 bytes past the end of the 100-byte device allocation")
    assert memory.describe(pointer + 100).startswith("1 byte past the end")
    assert "before the start" in memory.describe(pointer - 8)
    assert memory.describe(0) == "not near any memory that the driver knows"
    d.cuMemFree(pointer)
    assert memory.describe(pointer + 4) == f"in memory that was freed (100 bytes at {pointer:#x})"


# ---- copies


def test_copies_in_and_out_of_arrays_and_addresses(d: Any, context: Any) -> None:
    pointer = value(d.cuMemAlloc(1 << 20))
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    d.cuMemcpyHtoD(pointer, data, data.nbytes)  # a buffer will do for an address
    assert (read(d, pointer, data.nbytes) == data).all()
    d.cuMemcpyHtoD(int(pointer) + 3, b"abc", 3)
    assert read(d, int(pointer) + 3, 3).tobytes() == b"abc"


def test_copies_between_allocations_and_devices(d: Any, context: Any) -> None:
    first = value(d.cuMemAlloc(4096))
    d.cuMemsetD8(first, 5, 4096)
    value(d.cuCtxCreate(None, 0, 1))
    second = value(d.cuMemAlloc(4096))
    d.cuMemcpyDtoD(second, first, 4096)
    assert (read(d, second, 4096) == 5).all()
    assert code(d.cuMemsetD8(first, 6, 4096)) == "INVALID_VALUE"  # unlike copies, fills need access
    d.cuCtxSetCurrent(context)
    d.cuMemsetD8(first, 6, 4096)
    d.cuMemcpy(second, first, 2048)
    assert read(d, second, 4096).tolist() == [6] * 2048 + [5] * 2048


@pytest.mark.parametrize("call", ["cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpy"])
def test_ranges_are_checked_to_the_byte(d: Any, context: Any, call: str) -> None:
    pointer = int(value(d.cuMemAlloc(1000)))
    array = np.zeros(2000, np.uint8)
    host = array.ctypes.data
    to, source = {"cuMemcpyDtoH": (host, pointer), "cuMemcpyDtoD": (pointer, pointer)}.get(
        call, (pointer, host)
    )
    copy = getattr(d, call)
    assert code(copy(to, source, 1000)) == "SUCCESS"
    assert code(copy(to, source, 1001)) == "INVALID_VALUE"
    assert code(copy(0, source, 1)) == "INVALID_VALUE"
    assert code(copy(to, 0, 1)) == "INVALID_VALUE"
    assert code(copy(0, 0, 0)) == "SUCCESS"


def test_a_small_copy_from_pageable_memory_takes_its_bytes_at_once(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    latch, stream = Latch(), value(d.cuStreamCreate(1))
    pointer, source = value(d.cuMemAlloc(64)), np.full(64, 3, np.uint8)
    launch(kernel(latch), stream=stream)
    assert code(d.cuMemcpyHtoDAsync(pointer, source.ctypes.data, 64, stream)) == "SUCCESS"
    source[:] = 9
    assert code(d.cuStreamQuery(stream)) == "NOT_READY"
    latch.open()
    d.cuStreamSynchronize(stream)
    assert (read(d, pointer, 64) == 3).all()


@pytest.mark.parametrize("direction", ["HtoD", "DtoH"])
def test_a_large_copy_of_pageable_memory_blocks_the_caller(
    d: Any, context: Any, kernel: Any, launch: Run, direction: str
) -> None:
    size = 4 << 20
    latch, stream = Latch(), value(d.cuStreamCreate(1))
    pointer, host = int(value(d.cuMemAlloc(size))), np.zeros(size, np.uint8)
    launch(kernel(latch), stream=stream)
    latch.wait_until_entered()

    def copy() -> None:
        d.cuCtxPushCurrent(context)
        to, source = (pointer, host.ctypes.data) if direction == "HtoD" else (host.ctypes.data, pointer)
        getattr(d, f"cuMemcpy{direction}Async")(to, source, size, stream)

    assert_waits_for(latch, copy)


@pytest.mark.parametrize("registered", [False, True])
def test_copies_of_pinned_memory_do_not_block(
    d: Any, context: Any, kernel: Any, launch: Run, registered: bool
) -> None:
    size = 1 << 20
    latch, stream = Latch(), value(d.cuStreamCreate(1))
    own = np.zeros(size, np.uint8)
    host = own.ctypes.data if registered else value(d.cuMemHostAlloc(size, 0))
    if registered:
        assert code(d.cuMemHostRegister(own, size, 0)) == "SUCCESS"
    pointer = value(d.cuMemAlloc(size))
    launch(kernel(latch), stream=stream)
    d.cuMemsetD8Async(pointer, 8, size, stream)
    d.cuMemcpyDtoHAsync(host, pointer, size, stream)
    assert code(d.cuStreamQuery(stream)) == "NOT_READY"
    latch.open()
    d.cuStreamSynchronize(stream)
    assert ctypes.string_at(host, size) == b"\x08" * size


def test_blocking_copies_do_not_wait_for_a_non_blocking_stream(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    latch, stream = Latch(), value(d.cuStreamCreate(1))
    pointer = value(d.cuMemAlloc(64))
    launch(kernel(latch), stream=stream)
    latch.wait_until_entered()
    assert not read(d, pointer, 64).any()
    latch.open()


def test_copies_within_the_device_do_not_block(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    latch = Latch()
    first, second = value(d.cuMemAlloc(64)), value(d.cuMemAlloc(64))
    launch(kernel(latch))
    d.cuMemsetD8(first, 4, 64)
    d.cuMemcpyDtoD(second, first, 64)
    assert code(d.cuStreamQuery(0)) == "NOT_READY"
    latch.open()
    assert (read(d, second, 64) == 4).all()


def test_rectangles(d: Any, context: Any) -> None:
    kinds = d.CUmemorytype
    pointer, pitch = value(d.cuMemAllocPitch(30, 5, 4))
    assert pitch % 512 == 0
    host = np.arange(200, dtype=np.uint8).reshape(10, 20)
    copy = d.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.srcHost, copy.srcPitch = kinds.CU_MEMORYTYPE_HOST, host.ctypes.data, 20
    copy.srcXInBytes, copy.srcY = 2, 3
    copy.dstMemoryType, copy.dstDevice, copy.dstPitch = kinds.CU_MEMORYTYPE_DEVICE, pointer, pitch
    copy.dstXInBytes, copy.dstY = 1, 1
    copy.WidthInBytes, copy.Height = 10, 4
    assert code(d.cuMemcpy2D(copy)) == "SUCCESS"
    device = read(d, pointer, pitch * 5).reshape(5, pitch)
    assert (device[1:5, 1:11] == host[3:7, 2:12]).all()
    assert not device[0].any()
    assert not device[:, 11:].any()
    copy.Height = 5  # one row too many for the device
    assert code(d.cuMemcpy2D(copy)) == "INVALID_VALUE"
    copy.Height, copy.dstPitch = 4, 5
    assert code(d.cuMemcpy2DAsync(copy, 0)) == "INVALID_VALUE"


@pytest.mark.parametrize(("bits", "item"), [(8, 1), (16, 2), (32, 4)])
def test_fills(d: Any, context: Any, bits: int, item: int) -> None:
    pointer = int(value(d.cuMemAlloc(64)))
    number = 0x11223344 & ((1 << bits) - 1)
    assert code(getattr(d, f"cuMemsetD{bits}")(pointer + item, number, 4)) == "SUCCESS"
    words = read(d, pointer, 64).view(f"u{item}")
    assert words[:6].tolist() == [0, number, number, number, number, 0]
    if item > 1:
        assert code(getattr(d, f"cuMemsetD{bits}")(pointer + 1, 0, 4)) == "INVALID_VALUE"
    assert code(getattr(d, f"cuMemsetD{bits}Async")(pointer, 0, 64 // item + 1, 0)) == "INVALID_VALUE"
    assert code(getattr(d, f"cuMemsetD2D{bits}")(pointer, 16, number, 8 // item, 3)) == "SUCCESS"
    rows = read(d, pointer, 48).reshape(3, 16)
    assert (rows[:, :8].copy().view(f"u{item}") == number).all()
    assert not rows[1:, 8:].any()


# ---- freeing what is in use


def test_free_waits_for_the_device(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    latch, pointer = Latch(), value(d.cuMemAlloc(64))
    launch(kernel(latch), stream=value(d.cuStreamCreate(1)))
    latch.wait_until_entered()
    assert_waits_for(latch, lambda: d.cuMemFree(pointer))


def test_free_does_not_wait_for_another_device(d: Any, kernel: Any, launch: Run) -> None:
    value(d.cuCtxCreate(None, 0, 1))
    latch = Latch()
    launch(kernel(latch))
    latch.wait_until_entered()
    value(d.cuCtxCreate(None, 0, 0))
    assert code(d.cuMemFree(value(d.cuMemAlloc(64)))) == "SUCCESS"
    latch.open()


def test_a_copy_that_comes_after_the_free_of_its_memory_faults(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    latch, stream, other = Latch(), value(d.cuStreamCreate(1)), value(d.cuStreamCreate(1))
    pointer, target = value(d.cuMemAllocAsync(64, other)), value(d.cuMemAlloc(64))
    launch(kernel(latch), stream=stream)
    d.cuMemcpyDtoDAsync(target, pointer, 64, stream)
    d.cuMemFreeAsync(pointer, other)
    latch.open()
    assert code(d.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"
    assert "was freed" in str(d.fault)


def test_pages_stay_while_a_running_kernel_may_touch_them(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    pointer = int(value(d.cuMemAlloc(64)))
    latch = Latch()
    seen: list[bytes] = []

    def body(launched: Any) -> None:
        launched.memory.spans()
        latch(launched)
        seen.append(ctypes.string_at(pointer, 4))  # it had the spans before the memory was freed

    launch(kernel(body), stream=value(d.cuStreamCreate(1)))
    latch.wait_until_entered()
    d.cuMemFreeAsync(pointer, value(d.cuStreamCreate(1)))
    assert code(d.cuMemFree(pointer)) == "INVALID_VALUE"
    latch.open()
    d.cuCtxSynchronize()
    assert seen == [bytes(4)]
    assert d.fault is None


# ---- pools


def test_stream_ordered_memory(d: Any, context: Any, launch: Run, kernel: Any) -> None:
    free = value(d.cuMemGetInfo())[0]
    stream = value(d.cuStreamCreate(1))
    pointer = value(d.cuMemAllocAsync(128, stream))
    launch(kernel(fill), pointer, 6, stream, threads=32)
    out = value(d.cuMemHostAlloc(128, 0))
    d.cuMemcpyDtoHAsync(out, pointer, 128, stream)
    assert code(d.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
    assert code(d.cuMemFreeAsync(pointer, stream)) == "INVALID_VALUE"
    d.cuStreamSynchronize(stream)
    assert list((ctypes.c_int * 32).from_address(out)) == [6] * 32
    assert value(d.cuMemGetInfo())[0] == free


def test_frees_on_their_way_make_room(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    stream = value(d.cuStreamCreate(1))
    for _ in range(10):  # 10 times 40 MiB on a device of 64
        pointer = value(d.cuMemAllocAsync(40 << 20, stream))
        d.cuMemsetD8Async(pointer, 1, 40 << 20, stream)
        d.cuMemFreeAsync(pointer, stream)
    assert code(d.cuStreamSynchronize(stream)) == "SUCCESS"


def test_pool_attributes(d: Any, context: Any) -> None:
    pool, kinds = value(d.cuDeviceGetDefaultMemPool(0)), d.CUmemPool_attribute
    pointer = value(d.cuMemAllocAsync(1000, 0))
    assert int(value(d.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))) == 1000
    d.cuMemFree(pointer)
    assert int(value(d.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))) == 0
    assert int(value(d.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_USED_MEM_HIGH))) == 1000
    d.cuMemPoolSetAttribute(pool, kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, d.cuuint64_t(1 << 20))
    assert int(value(d.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD))) == 1 << 20
    attribute = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    handle = value(d.cuPointerGetAttribute(attribute, value(d.cuMemAllocAsync(1, 0))))
    assert int(handle) == int(pool)


# ---- host memory


def test_pinned_memory_is_the_same_for_host_and_device(
    d: Any, context: Any, launch: Run, kernel: Any
) -> None:
    address = value(d.cuMemHostAlloc(128, 0))
    assert type(address) is int
    assert int(value(d.cuMemHostGetDevicePointer(address, 0))) == address
    launch(kernel(fill), address, 4, threads=32)
    d.cuCtxSynchronize()
    assert list((ctypes.c_int * 32).from_address(address)) == [4] * 32
    assert code(d.cuMemFree(address)) == "INVALID_VALUE"
    assert code(d.cuMemFreeHost(address)) == "SUCCESS"
    assert code(d.cuMemFreeHost(address)) == "INVALID_VALUE"


def test_registered_memory_is_reachable_for_kernels(d: Any, context: Any, launch: Run, kernel: Any) -> None:
    array = np.zeros(32, np.int32)
    function = kernel(fill)
    assert code(d.cuMemHostRegister(array, array.nbytes, 0)) == "SUCCESS"
    assert code(d.cuMemHostRegister(array.ctypes.data + 4, 4, 0)) == "HOST_MEMORY_ALREADY_REGISTERED"
    launch(function, array.ctypes.data, 12, threads=32)
    d.cuCtxSynchronize()
    assert array.tolist() == [12] * 32
    memory = d._state.context(context).memory(d._state.memory)
    index = (array.ctypes.data - memory.base) // 4
    assert memory.view(np.int32)[index] == 12  # the view reaches it too
    assert code(d.cuMemHostUnregister(array)) == "SUCCESS"
    assert code(d.cuMemHostUnregister(array)) == "HOST_MEMORY_NOT_REGISTERED"
    launch(function, array.ctypes.data, 13, threads=32)
    assert code(d.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"


def test_managed_memory_is_reachable_everywhere(d: Any, context: Any, launch: Run, kernel: Any) -> None:
    pointer = value(d.cuMemAllocManaged(128, 1))
    ctypes.memset(int(pointer), 0, 128)
    for device in (0, 1):
        value(d.cuCtxCreate(None, 0, device))
        launch(kernel(fill), pointer, 20 + device, threads=32)
        d.cuCtxSynchronize()
        assert ctypes.c_int.from_address(int(pointer)).value == 20 + device
    location = d.CUmemLocation()
    location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert code(d.cuMemPrefetchAsync(pointer, 128, location, 0, 0)) == "SUCCESS"
    assert code(d.cuMemPrefetchAsync(pointer, 129, location, 0, 0)) == "INVALID_VALUE"
    assert code(d.cuMemAllocManaged(128, 0)) == "INVALID_VALUE"


# ---- pointers


def test_pointer_attributes(d: Any, context: Any) -> None:
    kinds = d.CUpointer_attribute

    def ask(pointer: Any, name: str) -> Any:
        return d.cuPointerGetAttribute(getattr(kinds, f"CU_POINTER_ATTRIBUTE_{name}"), pointer)

    device, pinned = int(value(d.cuMemAlloc(1000))), value(d.cuMemHostAlloc(1000, 0))
    assert int(value(ask(device, "CONTEXT"))) == int(context)
    assert value(ask(device, "MEMORY_TYPE")) == 2
    assert value(ask(pinned, "MEMORY_TYPE")) == 1
    assert int(value(ask(device + 10, "RANGE_START_ADDR"))) == device
    assert value(ask(device, "RANGE_SIZE")) == 1000
    assert value(ask(device, "DEVICE_ORDINAL")) == 0
    assert value(ask(device, "IS_MANAGED")) is False
    assert value(ask(pinned, "HOST_POINTER")) == pinned
    assert code(ask(device, "HOST_POINTER")) == "INVALID_VALUE"
    assert value(ask(device, "BUFFER_ID")) != value(ask(pinned, "BUFFER_ID"))


def test_several_pointer_attributes_at_once(d: Any, context: Any) -> None:
    kinds = d.CUpointer_attribute
    wanted = [kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    pointer = value(d.cuMemAlloc(1000))
    assert value(d.cuPointerGetAttributes(2, wanted, pointer)) == [2, 1000]
    assert value(d.cuPointerGetAttributes(2, wanted, np.zeros(4).ctypes.data)) == [0, 0]


# ---- peers


def test_kernels_reach_another_device_only_when_enabled(d: Any, kernel: Any, launch: Run) -> None:
    here = value(d.cuCtxCreate(None, 0, 0))
    there = value(d.cuCtxCreate(None, 0, 1))
    pointer = value(d.cuMemAlloc(128))
    elsewhere = value(d.cuCtxCreate(None, 0, 1))
    others = value(d.cuMemAlloc(128))
    d.cuCtxSetCurrent(here)
    memory = d._state.context(here).memory(d._state.memory)

    def reachable() -> list[int]:
        return [int(start) for start in memory.spans()[0]]

    assert reachable() == []
    assert code(d.cuCtxEnablePeerAccess(there, 0)) == "SUCCESS"
    assert reachable() == [int(pointer)]
    launch(kernel(fill), pointer, 3, threads=32)
    assert read_ints(d, pointer, 32) == [3] * 32
    d.cuCtxDisablePeerAccess(there)
    assert reachable() == []
    assert "only after cuCtxEnablePeerAccess" in memory.describe(int(pointer))
    assert int(others) != int(pointer)
    assert int(elsewhere) != int(there)
    launch(kernel(fill), pointer, 3, threads=32)
    assert code(d.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"


def test_pools_are_opened_to_another_device(d: Any) -> None:
    here = value(d.cuCtxCreate(None, 0, 0))
    there = value(d.cuCtxCreate(None, 0, 1))
    pointer = value(d.cuMemAllocAsync(128, 0))
    d.cuCtxSetCurrent(here)
    d.cuCtxEnablePeerAccess(there, 0)  # is not for pools
    memory = d._state.context(here).memory(d._state.memory)
    assert memory.spans()[0].tolist() == []
    description = d.CUmemAccessDesc()
    description.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    description.location.id = 0
    description.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    pool = value(d.cuDeviceGetDefaultMemPool(1))
    assert code(d.cuMemPoolSetAccess(pool, [description], 1)) == "SUCCESS"
    assert memory.spans()[0].tolist() == [int(pointer)]
    assert int(value(d.cuMemPoolGetAccess(pool, description.location))) == 3


def test_memory_stays_reachable_in_other_contexts_of_the_device(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    pointer = value(d.cuMemAlloc(128))
    value(d.cuCtxCreate(None, 0, 0))
    launch(kernel(fill), pointer, 9, threads=32)
    assert read_ints(d, pointer, 32) == [9] * 32
    assert value(d.cuModuleLoadData(ptx("unused")))
