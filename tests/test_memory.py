"""Device buffers and copies."""

from __future__ import annotations

import array
import gc
import threading

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", [("a", "i4"), ("b", "f8")]])
def test_round_trip(context: gf.Context, dtype: object) -> None:
    data = np.frombuffer(np.random.default_rng(1).bytes(48 * 100), np.dtype(dtype))
    with context.alloc(data.nbytes) as buffer:
        buffer.copy_from(data)
        back = np.empty_like(data)
        buffer.copy_to(back)
        assert back.tobytes() == data.tobytes()
        assert buffer.to_numpy(data.dtype).tobytes() == data.tobytes()


def test_round_trip_of_other_buffers(context: gf.Context) -> None:
    with context.alloc(8) as buffer:
        buffer.copy_from(b"12345678")
        target = bytearray(8)
        buffer.copy_to(target)
        assert target == b"12345678"
        numbers = array.array("i", [0, 0])
        buffer.copy_to(numbers)
        assert numbers.tobytes() == b"12345678"


def test_offset_places_and_reads_a_part(context: gf.Context) -> None:
    with context.alloc(16) as buffer:
        buffer.fill(0)
        buffer.copy_from(np.full(4, 7, "u1"), offset=3)
        part = np.empty(6, "u1")
        buffer.copy_to(part, offset=2)
        assert part.tolist() == [0, 7, 7, 7, 7, 0]


@pytest.mark.parametrize(("offset", "size"), [(0, 17), (1, 16), (-1, 4), (17, 0)])
def test_copies_past_the_buffer_are_refused(context: gf.Context, offset: int, size: int) -> None:
    with context.alloc(16) as buffer:
        with pytest.raises(ValueError, match="the buffer has 16 bytes"):
            buffer.copy_from(np.zeros(size, "u1"), offset=offset)
        with pytest.raises(ValueError, match="the buffer has 16 bytes"):
            buffer.copy_to(np.zeros(size, "u1"), offset=offset)


def test_empty_copies_do_nothing(context: gf.Context) -> None:
    with context.alloc(4) as buffer:
        buffer.copy_from(np.empty(0, "f4"))
        buffer.copy_to(np.empty(0, "f4"))


def test_unusable_arrays_are_refused_with_a_reason(context: gf.Context) -> None:
    with context.alloc(1024) as buffer:
        with pytest.raises(ValueError, match="not C-contiguous"):
            buffer.copy_from(np.zeros((8, 8), "f4").T[::2])
        with pytest.raises(TypeError, match="Python objects"):
            buffer.copy_from(np.array([object()]))
        with pytest.raises(TypeError, match="expected a host array"):
            buffer.copy_from(buffer)
        with pytest.raises(TypeError, match="expected a host array, got int"):
            buffer.copy_to(3)
        readonly = np.zeros(4)
        readonly.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            buffer.copy_to(readonly)
        with pytest.raises(ValueError, match="read-only"):
            buffer.copy_to(b"1234")


@pytest.mark.parametrize("size", [0, -1])
def test_empty_allocation_is_refused(context: gf.Context, size: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        context.alloc(size)


def test_blocking_copy_waits_for_work_of_the_main_stream(context: gf.Context) -> None:
    with context.alloc(1 << 20) as buffer:
        data = np.random.default_rng(2).integers(0, 255, 1 << 20, "u1")
        for _ in range(20):
            context.driver.cuMemsetD8Async(buffer.address, 1, buffer.nbytes, context.main_stream.handle)
            buffer.copy_from(data)
            assert (buffer.to_numpy() == data).all()


def test_close_frees_and_use_after_it_says_so(context: gf.Context) -> None:
    context.alloc(4).close()
    before = context.memory_info()[0]
    buffer = context.alloc(8 << 20)
    assert context.memory_info()[0] < before
    buffer.close()
    buffer.close()
    assert context.memory_info()[0] == before
    with pytest.raises(gf.ContextClosed, match="was closed"):
        buffer.copy_from(b"1")


def test_forgotten_buffer_is_freed_with_a_warning_in_any_thread(context: gf.Context) -> None:
    before = context.memory_info()[0]
    holder = [context.alloc(8 << 20)]
    with pytest.warns(ResourceWarning, match="never freed"):
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        gc.collect()
    assert context.memory_info()[0] == before


def test_stream_of_another_device_is_refused_naming_both(two_devices: list[Device]) -> None:
    contexts = [device.create_context() for device in two_devices]
    buffer, stream = contexts[0].alloc(4), contexts[1].stream()
    with pytest.raises(gf.WrongContext, match="device 1, the buffer of device 0"):
        buffer.copy_from(b"1234", stream=stream)
    for thing in (buffer, stream, *contexts):
        thing.close()


def test_buffer_serves_every_context_of_its_device(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    buffer, stream = context.alloc(4), other.stream()
    event = buffer.copy_from(b"abcd", stream=stream)
    assert event is not None
    event.synchronize()
    assert buffer.to_numpy().tobytes() == b"abcd"
    for thing in (event, buffer, stream, other):
        thing.close()
