"""Pinned buffers, and the pool behind them."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest

import gpufleet as gf
import gpufleet.registration as registration
from gpufleet.device import Device
from gpufleet.driver import Driver
from gpufleet.pinned_memory import pool_of, size_class
from latches import Latch


def test_memory_is_a_numpy_array_of_bytes(context: gf.Context) -> None:
    with gf.pinned(1000, context=context) as pinned:
        assert pinned.array.shape == (1000,)
        assert pinned.array.dtype == np.uint8
        pinned.array[:] = 7
        assert np.asarray(pinned).tolist() == [7] * 1000
        assert pinned.array.ctypes.data == pinned.address


def test_copy_of_an_array_has_its_type_and_shape(context: gf.Context) -> None:
    data = np.arange(24, dtype="f4").reshape(2, 3, 4)[:, ::-1]
    with gf.pinned(data, context=context) as pinned:
        assert pinned.nbytes == data.nbytes
        assert pinned.array.dtype == data.dtype
        assert (pinned.array == data).all()
    with gf.pinned(np.empty((0, 3)), context=context) as empty:
        assert empty.array.shape == (0, 3)
        assert empty.nbytes == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the buffer protocol in Python is of 3.12")
def test_buffer_protocol(context: gf.Context) -> None:
    with gf.pinned(b"abcd", context=context) as pinned, gf.pinned(4, context=context) as other:
        view = memoryview(other)  # type: ignore[arg-type]
        view[:] = b"wxyz"
        assert other.array.tobytes() == b"wxyz"
        assert bytes(memoryview(pinned)) == b"abcd"  # type: ignore[arg-type]
        del view


def test_it_is_copied_from_and_to(context: gf.Context) -> None:
    with (
        gf.pinned(4096, context=context) as pinned,
        context.alloc(4096) as buffer,
        context.stream() as stream,
    ):
        pinned.array[:] = 9
        buffer.copy_from(pinned)
        pinned.array[:] = 0
        buffer.copy_to(pinned)
        assert (pinned.array == 9).all()
        buffer.fill(4)
        transfer = buffer.copy_to(pinned, stream=stream)
        assert transfer is not None
        assert (transfer.result() == 4).all()


def test_block_is_handed_out_again_only_after_the_work_that_uses_it(context: gf.Context) -> None:
    with context.stream() as stream, context.alloc(1 << 16) as buffer:
        pinned = gf.pinned(1 << 16, context=context)
        pinned.array[:] = 5
        address = pinned.address
        with Latch(stream) as latch:
            buffer.copy_from(pinned, stream=stream)
            pinned.close()
            with gf.pinned(1 << 16, context=context) as other:
                assert other.address != address
                other.array[:] = 6
            latch.open()
        assert (buffer.to_numpy() == 5).all()
        addresses = set()
        buffers = [gf.pinned(1 << 16, context=context) for _ in range(2)]
        for each in buffers:
            addresses.add(each.address)
            each.close()
        assert address in addresses


def test_forgotten_buffer_goes_back_to_the_pool_after_its_work(context: gf.Context) -> None:
    with context.stream() as stream, context.alloc(1 << 16) as buffer:
        pinned = gf.pinned(1 << 16, context=context)
        pinned.array[:] = 5
        address = pinned.address
        with Latch(stream):
            buffer.copy_from(pinned.array, stream=stream)
            del pinned
            gc.collect()
            with gf.pinned(1 << 16, context=context) as other:
                assert other.address != address
        assert (buffer.to_numpy() == 5).all()


def test_array_does_not_go_through_the_buffer_protocol(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python 3.12 it did, and `__buffer__` came back for the array until the stack was full."""
    with gf.pinned(64, context=context) as pinned, context.alloc_managed(64) as managed:
        for owner in (pinned, managed):
            calls: list[int] = []
            monkeypatch.setattr(type(owner), "__buffer__", lambda *_, calls=calls: calls.append(1))
            assert owner.array.shape == (64,)
            assert not calls


def test_view_keeps_the_memory(context: gf.Context) -> None:
    array = gf.pinned(1 << 16, context=context).array[10:20]
    array[:] = 3
    gc.collect()
    with gf.pinned(1 << 16, context=context) as other:
        other.array[:] = 4
    assert array.tolist() == [3] * 10


def test_memory_stays_valid_when_its_context_is_closed(device: Device) -> None:
    context = device.create_context()
    gf.trim_pinned(context.driver)  # of what another context has locked
    pinned = gf.pinned(4096, context=context)
    pinned.array[:] = 8
    assert pinned.is_locked
    context.close()
    assert not pinned.is_locked
    assert (pinned.array == 8).all()
    pinned.close()
    other = device.create_context()
    with gf.pinned(4096, context=other) as again:
        assert again.is_locked
    other.close()


def test_primary_context_gives_its_locks_back(device: Device) -> None:
    first, second = device.retain_primary_context(), device.retain_primary_context()
    gf.pinned(4096, context=first).close()
    kept = gf.pinned(8192, context=first)
    first.close()
    with gf.pinned(4096, context=second) as pinned, second.alloc(4096) as buffer:
        pinned.array[:] = 1
        buffer.copy_from(pinned)
        assert buffer.to_numpy().all()
    kept.close()
    second.close()


def test_kernels_use_it_in_place(context: gf.Context) -> None:
    kernel = gf.Program.from_source(
        'extern "C" __global__ void add(int *data) { data[threadIdx.x] += 1; }', driver=context.driver
    ).kernel("add")
    with gf.pinned(np.arange(32, dtype="i4"), context=context) as pinned:
        kernel.launch(1, 32, pinned, stream=context.main_stream)
        context.synchronize()
        assert pinned.array.tolist() == list(range(1, 33))
    with pytest.raises(gf.ContextClosed, match="was closed"):
        kernel.launch(1, 32, pinned, stream=context.main_stream)


def test_closed_buffer_says_so(context: gf.Context) -> None:
    pinned = gf.pinned(16, context=context)
    pinned.close()
    pinned.close()
    assert pinned.is_closed
    with pytest.raises(gf.ContextClosed, match="this pinned buffer was closed"):
        _ = pinned.array


def test_without_a_context_it_is_locked_in_one_of_its_own(driver: Driver) -> None:
    with gf.pinned(4096, driver=driver) as pinned:
        assert pinned.is_locked
        assert int(driver.cuCtxGetCurrent()) == 0
    gf.trim_pinned(driver)
    assert pool_of(driver).locked_bytes == 0


def test_no_context_is_made_on_a_device_that_nobody_uses(two_devices: list[Device]) -> None:
    first, second = two_devices
    driver = first.driver
    if int(driver.cuDevicePrimaryCtxGetState(first.handle)[1]):
        pytest.skip("something uses the first device")
    context = second.retain_primary_context()
    gf.pinned(4096, driver=driver).close()
    with context:
        gf.pinned(4096, driver=driver).close()
    assert not int(driver.cuDevicePrimaryCtxGetState(first.handle)[1])
    gf.trim_pinned(driver)
    context.close()


def test_memory_is_locked_in_bounded_pieces(context: gf.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "PIECE", 1 << 20)
    sizes: list[int] = []
    original = context.driver.cuMemHostRegister
    monkeypatch.setattr(
        context.driver, "cuMemHostRegister", lambda *given: sizes.append(given[1]) or original(*given)
    )
    with gf.pinned(4 << 20, context=context) as pinned, context.alloc(4 << 20) as buffer:
        assert sum(sizes) == 4 << 20
        assert max(sizes) <= 1 << 20
        pinned.array[:] = np.arange(4 << 20, dtype="u4").astype("u1")
        buffer.copy_from(pinned)
        assert (buffer.to_numpy() == pinned.array).all()
    gf.trim_pinned(context.driver)
    assert registration.locks_of(context.driver).cuts == []


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 65536), (65537, 131072), (64 << 20, 64 << 20), ((64 << 20) + 1, 128 << 20)]
)
def test_size_classes(nbytes: int, size: int) -> None:
    assert size_class(nbytes) == size


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_buffer_is_refused(context: gf.Context, nbytes: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        gf.pinned(nbytes, context=context)


def test_python_objects_are_refused(context: gf.Context) -> None:
    with pytest.raises(TypeError, match="Python objects"):
        gf.pinned(np.array([object()]), context=context)


def test_closing_after_a_fault_raises_nothing(virtual: Driver) -> None:
    context = Device(0, virtual).create_context()
    pinned, buffer = gf.pinned(4096, context=context), context.alloc(4096)
    transfer = buffer.copy_from(pinned, stream=context.main_stream)
    assert transfer is not None
    virtual.failure(virtual.raw.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, "cuCtxSynchronize")
    for thing in (transfer, pinned, buffer):
        thing.close()
    with pytest.raises(gf.StickyError):
        gf.pinned(4096, context=context)
    context.close()


def test_threads_never_share_a_block(context: gf.Context) -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(30):
            with gf.pinned(1 << 16, context=context) as pinned:
                pinned.array[:] = number
                if not (pinned.array == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_not_handed_out_while_a_copy_reads_a_view_of_it(context: gf.Context) -> None:
    with context.stream() as stream, context.alloc(1000) as buffer, Latch(stream) as latch:
        for view in (lambda array: array, lambda array: array[::-1][::-1], memoryview):
            first = gf.pinned(1000, context=context)
            buffer.copy_from(view(first.array), stream=stream)
            first.close()
            with gf.pinned(1000, context=context) as second:
                assert second.address != first.address
        latch.open()


def test_view_that_outlives_its_closed_buffer_is_memory_still(context: gf.Context) -> None:
    pinned = gf.pinned(1000, context=context)
    view = pinned.array
    pinned.close()
    gf.trim_pinned(context.driver)
    view[:] = 1  # nobody's memory; the process must not crash
    assert view.sum() == 1000


def test_use_by_another_driver_is_the_use_of_ordinary_memory(context: gf.Context, virtual: Driver) -> None:
    other = Device(0, virtual).create_context()
    with other.stream() as stream, other.alloc(1000) as buffer:
        with gf.pinned(1000, context=context) as pinned:
            pinned.array[:] = 7
            buffer.copy_from(pinned, stream=stream)
        stream.synchronize()
        assert (buffer.to_numpy() == 7).all()
    other.close()


def test_closed_streams_are_forgotten(context: gf.Context) -> None:
    with context.alloc(16) as buffer, gf.pinned(16, context=context) as pinned:
        for _ in range(1000):
            with context.stream() as stream:
                buffer.copy_from(pinned, stream=stream)
        assert len(buffer.uses) < 500
        assert len(pinned.uses) < 500
