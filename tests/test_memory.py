"""Device buffers and copies."""

from __future__ import annotations

import array
import gc
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.compiler import compile_source
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch


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
    context.trim_memory()
    before = context.memory_info()[0]
    buffer = context.alloc(8 << 20)
    assert context.memory_info()[0] < before
    buffer.close()
    buffer.close()
    context.trim_memory()
    assert context.memory_info()[0] == before
    with pytest.raises(gf.ContextClosed, match="was closed"):
        buffer.copy_from(b"1")


def test_forgotten_buffer_is_freed_with_a_warning_in_any_thread(context: gf.Context) -> None:
    context.alloc(4).close()
    context.trim_memory()
    before = context.memory_info()[0]
    holder = [context.alloc(8 << 20)]
    with pytest.warns(ResourceWarning, match="never freed"):
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        gc.collect()
    context.trim_memory()
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


SOURCE = r"""
extern "C" __global__ void ends(const int *data, int n, int *out) { out[0] = data[0]; out[1] = data[n - 1]; }
extern "C" __global__ void fill(int *data, int value) { data[threadIdx.x] = value; }
"""


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_source(SOURCE, arch=75, target="ptx").code


@pytest.fixture
def program(image: bytes, driver: Driver) -> gf.Program:
    return gf.Program.from_image(image, driver=driver)


def in_use(context: gf.Context) -> int:
    """Return the bytes of the context's pool that are not free, or on their way to be."""
    return context.heap.pool_bytes()[0]


def test_buffer_dropped_after_leaving_its_context_is_freed(context: gf.Context) -> None:
    with context:
        buffer = context.alloc(1 << 20)
    before = in_use(context)
    with pytest.warns(ResourceWarning, match="never freed"):
        del buffer
        gc.collect()
    assert in_use(context) <= before - (1 << 20)


def test_buffer_in_a_cycle_is_freed_by_whatever_thread_collects_it(context: gf.Context) -> None:
    class Node:
        pass

    node = Node()
    node.__dict__.update(me=node, buffer=context.alloc(1 << 20))
    before = in_use(context)
    with pytest.warns(ResourceWarning, match="never freed"):
        del node
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    assert in_use(context) <= before - (1 << 20)
    assert int(context.driver.cuCtxGetCurrent()) == 0


def test_buffer_dropped_while_a_kernel_uses_it_is_freed_after_the_kernel(
    program: gf.Program, context: gf.Context
) -> None:
    kernel = program.kernel("fill")
    kernel.load(context)
    stream, result = context.stream(), context.alloc(128)
    buffer = context.alloc(128)
    with Latch(stream) as latch:
        kernel.launch(1, 32, buffer, 7, stream=stream)
        result.copy_from(buffer, stream=stream)
        address = buffer.address
        buffer.close()  # returns at once, and does not disturb the kernel, which has not even begun
        others = [context.alloc(128) for _ in range(8)]
        assert address not in [other.address for other in others], "it was handed out while it was in use"
        latch.open()
        stream.synchronize()
    assert result.to_numpy("i4").tolist() == [7] * 32
    for thing in (*others, result, stream):
        thing.close()


def test_buffer_used_by_several_streams_is_freed_after_all_of_them(
    program: gf.Program, context: gf.Context
) -> None:
    kernel = program.kernel("fill")
    kernel.load(context)
    streams = [context.stream() for _ in range(3)]
    buffer = context.alloc(1 << 20)
    with Latch(streams[1]) as latch:
        for stream in streams:
            kernel.launch(1, 32, buffer, 7, stream=stream)
        address = buffer.address
        buffer.close()
        streams[0].synchronize()
        streams[2].synchronize()
        other = context.alloc(1 << 20)
        assert other.address != address
        latch.open()
    context.synchronize()
    for thing in (other, *streams):
        thing.close()


def test_forgotten_buffer_of_several_streams_is_freed_by_the_next_call(
    program: gf.Program, context: gf.Context
) -> None:
    kernel = program.kernel("fill")
    streams = [context.stream() for _ in range(2)]
    holder = [context.alloc(1 << 20)]
    for stream in streams:
        kernel.launch(1, 32, holder[0], 7, stream=stream)
    with pytest.warns(ResourceWarning, match="never freed"):
        holder.clear()
        gc.collect()
    context.trim_memory()
    assert context.heap.pool_bytes() == (0, 0)
    assert context.heap.live == {}
    for stream in streams:
        stream.close()


def test_memory_freed_in_a_stream_is_there_for_it_at_once(context: gf.Context) -> None:
    stream = context.stream()
    with Latch(stream):
        first = context.alloc(1 << 20, stream=stream)
        first.fill(1, stream=stream)
        first.close()
        second = context.alloc(1 << 20, stream=stream)
        second.fill(2, stream=stream)
    assert (second.to_numpy() == 2).all()
    second.close()
    stream.close()


def test_memory_allocated_in_a_busy_stream_is_waited_for_by_others(context: gf.Context) -> None:
    stream, other = context.stream(), context.stream()
    with Latch(stream) as latch:
        buffer = context.alloc(4096, stream=stream)
        buffer.fill(5, stream=stream)
        buffer.fill(6, stream=other)
        assert not other.query(), "the other stream waits for the allocation"
        latch.open()
        other.synchronize()
    stream.synchronize()
    assert (buffer.to_numpy() == 6).all()
    for thing in (buffer, stream, other):
        thing.close()


def test_frees_can_be_held_back(context: gf.Context) -> None:
    buffers = [context.alloc(4096) for _ in range(3)]
    before = in_use(context)
    with context.heap.frees_held():
        for buffer in buffers:
            buffer.close()
        assert in_use(context) == before
    context.trim_memory()
    assert context.heap.pool_bytes() == (0, 0)


def test_another_librarys_stream_may_end_before_the_buffer(program: gf.Program, context: gf.Context) -> None:
    class Foreign:
        def __init__(self, address: int) -> None:
            self.address = address

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.address)

    with context:
        handle = context.driver.cuStreamCreate(1)
    buffer = context.alloc(128)
    with context:
        program.kernel("fill").launch(1, 32, buffer, 3, stream=Foreign(int(handle)))
    context.driver.cuStreamDestroy(handle)
    context.synchronize()
    assert buffer.to_numpy("i4").tolist() == [3] * 32
    buffer.close()


def test_closing_a_context_frees_the_memory_of_its_pool(device: Device) -> None:
    for make in (device.create_context, device.retain_primary_context):
        context = make()
        buffers = [context.alloc(1 << 20) for _ in range(4)]
        buffers[0].close()
        context.close()
        for buffer in buffers:
            buffer.close()
            assert buffer.is_closed


@pytest.mark.parametrize("nbytes", [1 << 10, 200 << 10, 1 << 20])
def test_copy_in_is_seen_by_a_kernel_on_a_stream_that_does_not_wait(
    program: gf.Program, context: gf.Context, nbytes: int
) -> None:
    kernel, stream = program.kernel("ends"), context.stream()
    count = nbytes // 4
    with context.alloc(nbytes) as data, context.alloc(8) as out:
        for number in range(200 if not context.driver.is_virtual else 50):
            data.copy_from(np.full(count, number, "i4"))
            kernel.launch(1, 1, data, count, out, stream=stream)
            stream.synchronize()
            assert out.to_numpy("i4").tolist() == [number, number]
    stream.close()


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_source_of_an_asynchronous_copy_may_be_dropped_and_overwritten(
    context: gf.Context, nbytes: int
) -> None:
    with context.stream() as stream, context.alloc(nbytes) as buffer:
        array = np.full(nbytes, 3, "u1")
        with Latch(stream):
            buffer.copy_from(array, stream=stream)
            array[:] = 4
            del array
            gc.collect()
        assert (buffer.to_numpy() == 3).all()


def test_array_read_on_a_stream_cannot_be_read_before_it_is_complete(context: gf.Context) -> None:
    with context.stream() as stream, context.alloc(1 << 20) as buffer:
        buffer.fill(9)
        with Latch(stream) as latch:
            transfer = buffer.to_numpy("u1", stream=stream)
            assert isinstance(transfer, gf.Transfer)
            assert not transfer.query()
            latch.open()
            assert (transfer.result() == 9).all()
        transfer.close()
        transfer.close()
        assert transfer.query()


@pytest.mark.parametrize("wait", ["transfer", "stream", "event", "context", "query", "later stream"])
def test_array_of_a_copy_out_is_complete_after_any_wait(context: gf.Context, wait: str) -> None:
    with context.stream() as stream, context.stream() as later, context.alloc(1 << 16) as buffer:
        buffer.fill(9)
        array = np.zeros(1 << 16, "u1")
        transfer = buffer.copy_to(array, stream=stream)
        assert transfer is not None
        event = stream.record()
        later.wait(transfer)
        {
            "transfer": transfer.synchronize,
            "stream": stream.synchronize,
            "event": event.synchronize,
            "context": context.synchronize,
            "query": lambda: [None for _ in iter(stream.query, True)],
            "later stream": later.synchronize,
        }[wait]()
        assert (array == 9).all()
        event.close()


def test_closing_the_event_of_a_copy_out_does_not_complete_it(context: gf.Context) -> None:
    with context.stream() as stream, context.stream() as other, context.alloc(1 << 16) as buffer:
        buffer.fill(9)
        with Latch(stream):
            transfer = buffer.to_numpy("u1", stream=stream)
            transfer.event.close()
            other.record()  # of all events that are there to be recorded anew
            other.synchronize()
            assert not transfer.query()
        assert (transfer.result() == 9).all()


def test_streams_in_a_loop_leave_memory_flat(context: gf.Context) -> None:
    for _ in range(1000):
        context.stream().close()
    before = context.memory_info()[0]
    for _ in range(1000):
        context.stream().close()
    assert context.memory_info()[0] == before


def test_allocations_streams_and_events_in_a_loop_leave_nothing(context: gf.Context) -> None:
    """benchmarks/memory.py --leak is the same, 100,000 times."""
    assert leak_loop(context, 500) == 0
    gc.collect()
    before = len(gc.get_objects())
    assert leak_loop(context, 500) == 0
    gc.collect()
    assert len(gc.get_objects()) - before < 50


def leak_loop(context: gf.Context, rounds: int) -> int:
    """Return the bytes of device memory that are gone after `rounds` allocations, streams and events."""
    before = None
    for turn in range(rounds + 10):
        if turn == 10:  # by then the driver has what it keeps for itself
            context.trim_memory()
            before = context.memory_info()[0]
        with context.stream() as stream, context.alloc(4096, stream=stream) as buffer:
            buffer.fill(1, stream=stream)
            event = stream.record()
            context.main_stream.wait(event)
            event.close()
    context.trim_memory()
    assert before is not None
    return before - context.memory_info()[0]


def test_use_from_eight_threads_at_once(program: gf.Program, context: gf.Context) -> None:
    kernel, failures = program.kernel("fill"), []

    def work(number: int) -> None:
        try:
            with context.stream() as stream:
                for value in range(10):
                    with context.alloc(128, stream=stream) as buffer:
                        kernel.launch(1, 32, buffer, number * 100 + value, stream=stream)
                        got = buffer.to_numpy("i4", stream=stream).result()
                        assert got.tolist() == [number * 100 + value] * 32
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_streams_of_another_driver_are_refused(context: gf.Context, virtual: Driver) -> None:
    other = Device(0, virtual).create_context()
    with other.stream() as stream, context.alloc(4) as buffer:
        with pytest.raises(gf.WrongContext, match="of another device"):
            context.alloc(4, stream=stream)
        with pytest.raises(gf.WrongContext, match="of another driver"):
            buffer.used_on(stream)
    other.close()


@pytest.mark.parametrize("byte", [-1, 256, 300])
def test_what_is_no_byte_is_not_filled_in(context: gf.Context, byte: int) -> None:
    with context.alloc(4) as buffer, pytest.raises(ValueError, match="expected 0 to 255"):
        buffer.fill(byte)


def test_memory_is_freed_while_another_thread_closes_the_stream_that_used_it(
    device: Device, context: gf.Context
) -> None:
    other, failures = device.create_context(), []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except gf.CudaError as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(100):
            stream = (context if number % 2 else other).stream()
            buffers = [context.alloc(64) for _ in range(4)]
            for buffer in buffers:
                buffer.fill(1, stream=stream)
            closing = [threading.Thread(target=run, args=(each.close,)) for each in (*buffers[:2], stream)]
            for thread in closing:
                thread.start()
            with context.heap.frees_held():
                buffers[2].close()
            buffers[3].close()
            for thread in closing:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    context.trim_memory()
    assert (failures, context.heap.live, context.heap.pool_bytes()) == ([], {}, (0, 0))
    other.close()


def test_buffer_that_is_forgotten_while_a_kernel_uses_it_is_freed_after_the_kernel(
    program: gf.Program, context: gf.Context
) -> None:
    kernel = program.kernel("fill")
    kernel.load(context)
    with context.stream() as stream, context.alloc(128) as result:
        with Latch(stream):
            holder = [context.alloc(128)]
            kernel.launch(1, 32, holder[0], 7, stream=stream)
            result.copy_from(holder[0], stream=stream)
            address = holder[0].address
            with pytest.warns(ResourceWarning, match="never freed"):
                holder.clear()
                gc.collect()
            others = [context.alloc(128) for _ in range(8)]
            assert address not in [other.address for other in others], "handed out while it was in use"
        assert result.to_numpy("i4").tolist() == [7] * 32
        for other in others:
            other.close()
