"""Registration: page-locking the caller's own arrays, in place."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import numpy as np
import pytest

import gpufleet as gf
import gpufleet.registration as registration
from gpufleet.device import Device
from gpufleet.driver import Driver
from gpufleet.errors import CudaError
from gpufleet.registration import is_known, locks_of


def is_locked(context: gf.Context, array: np.ndarray) -> bool:  # type: ignore[type-arg]
    return is_known(context.driver, array.ctypes.data, array.nbytes)


def test_array_is_locked_within_the_block(context: gf.Context) -> None:
    array = np.arange(100_000, dtype="i4")
    assert not is_locked(context, array)
    with gf.registered(array, context=context) as handle:
        assert is_locked(context, array)
        assert not handle.read_only
        assert not handle.is_closed
    assert handle.is_closed
    handle.close()
    assert not is_locked(context, array)


@pytest.mark.parametrize(("start", "size"), [(1, 4096), (13, 999_983), (4095, 2)])
def test_unaligned_array_is_locked(context: gf.Context, start: int, size: int) -> None:
    array = np.zeros(1 << 20, "u1")[start : start + size]
    with gf.registered(array, context=context), context.alloc(size) as buffer:
        assert is_locked(context, array)
        buffer.fill(3)
        buffer.copy_to(array)
        assert (array == 3).all()


def test_pieces_are_bounded_and_copies_cross_them(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "PIECE", 64 << 10)
    data = np.random.default_rng(5).integers(0, 255, 1_000_003, "u1")
    array = data.copy()
    with (
        gf.registered(array, context=context),
        context.alloc(array.nbytes) as buffer,
        context.stream() as stream,
    ):
        assert len(locks_of(context.driver).cuts) >= 15
        for chosen in (None, stream):
            buffer.fill(0)
            buffer.copy_from(array, stream=chosen)
            stream.synchronize()
            assert (buffer.to_numpy() == data).all()
            array[:] = 0
            buffer.copy_to(array, stream=chosen)
            stream.synchronize()
            assert (array == data).all()
        rows = array[:1_000_000].reshape(1000, 1000)[:, 100:900]
        buffer.copy_from(rows)
        assert (buffer.to_numpy()[: rows.size].reshape(rows.shape) == rows).all()
    assert locks_of(context.driver).cuts == []


def test_failure_in_a_later_piece_unlocks_the_earlier_ones(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "PIECE", 64 << 10)
    array = np.zeros(1 << 20, "u1")
    driver, original = context.driver, context.driver.cuMemHostRegister
    done = []

    def failing(*given: object) -> None:
        if len(done) == 5:
            raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemHostRegister")
        done.append(given)
        original(*given)

    monkeypatch.setattr(driver, "cuMemHostRegister", failing)
    with pytest.raises(ValueError, match=r"1048576 bytes at .* cannot be page-locked .*OUT_OF_MEMORY"):
        gf.registered(array, context=context)
    monkeypatch.undo()
    assert not is_known(driver, array.ctypes.data, 1)
    with gf.registered(array, context=context):
        assert is_locked(context, array)


def test_nested_registration_is_counted(context: gf.Context) -> None:
    array = np.zeros(1 << 20, "u1")
    with gf.registered(array, context=context):
        with gf.registered(array, context=context), gf.registered(array[100:2000], context=context):
            assert is_locked(context, array)
        assert is_locked(context, array)
    assert not is_locked(context, array)
    outer = gf.registered(array, context=context)
    inner = gf.registered(array, context=context)
    outer.close()
    assert is_locked(context, array)
    inner.close()
    assert not is_locked(context, array)


def test_whole_after_its_part_is_refused_with_the_way_out(context: gf.Context) -> None:
    array = np.zeros(1 << 20, "u1")
    with gf.registered(array[: 1 << 19], context=context):
        with pytest.raises(ValueError, match="register the whole array once, before its parts"):
            gf.registered(array, context=context)
    assert not is_known(context.driver, array.ctypes.data, 1)


def test_pinned_memory_is_locked_already(context: gf.Context) -> None:
    with gf.pinned(4096, context=context) as pinned:
        gf.registered(pinned.array, context=context).close()
        assert is_locked(context, pinned.array)


def test_memory_that_another_library_locked_is_accepted_and_left_alone(context: gf.Context) -> None:
    array = np.zeros(1 << 16, "u1")
    with context:
        context.driver.cuMemHostRegister(array.ctypes.data, array.nbytes, 1)
    gf.registered(array, context=context).close()
    assert is_locked(context, array)
    context.driver.cuMemHostUnregister(array.ctypes.data)


def test_read_only_array_is_locked_for_reading(context: gf.Context) -> None:
    if not context.device.attribute("read_only_host_register_supported"):
        pytest.skip("this device cannot")
    array = np.arange(1 << 16, dtype="u1")
    array.flags.writeable = False
    with gf.registered(array, context=context) as handle, context.alloc(array.nbytes) as buffer:
        assert handle.read_only
        buffer.copy_from(array, stream=context.main_stream)
        assert (buffer.to_numpy() == array).all()


@pytest.mark.parametrize("mode", ["r", "c"])
def test_memory_mapped_file_is_locked(context: gf.Context, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "data"
    np.arange(1 << 16, dtype="i4").tofile(path)
    mapped = np.memmap(path, "i4", mode=mode)  # type: ignore[call-overload]
    with gf.registered(mapped, context=context) as handle, context.alloc(mapped.nbytes) as buffer:
        assert handle.read_only is (mode == "r")
        buffer.copy_from(mapped)
        assert (buffer.to_numpy("i4") == np.arange(1 << 16)).all()
    del mapped


@pytest.mark.gpu
def test_file_mapped_for_writing_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Virtual devices lock nothing, so they take it."""
    context = Device(0, "nvidia").create_context()
    path = tmp_path / "data"
    np.arange(1 << 16, dtype="i4").tofile(path)
    mapped = np.memmap(path, "i4", mode="r+")
    try:
        with gf.registered(mapped, context=context):
            pass  # a file system in memory
    except ValueError as error:
        assert "registered(array, read_only=True)" in str(error)  # noqa: PT017
        gf.registered(mapped, context=context, read_only=True).close()
    context.close()


def test_array_in_pieces_is_refused(context: gf.Context) -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        gf.registered(np.zeros((8, 8))[:, ::2], context=context)


def test_empty_array_needs_no_lock(context: gf.Context) -> None:
    gf.registered(np.empty(0), context=context).close()


def test_forgotten_registration_ends_with_a_warning(context: gf.Context) -> None:
    array = np.zeros(1 << 16, "u1")
    handle = gf.registered(array, context=context)
    with pytest.warns(ResourceWarning, match="stayed registered"):
        del handle
        gc.collect()
    assert not is_locked(context, array)


def test_lock_ends_with_its_context(device: Device) -> None:
    array = np.zeros(1 << 16, "u1")
    for make in (device.create_context, device.retain_primary_context):
        context = make()
        handle = gf.registered(array, context=context)
        context.close()
        assert handle.is_closed
        handle.close()
    other = device.create_context()
    with gf.registered(array, context=other):
        assert is_locked(other, array)
    other.close()


def test_it_takes_the_context_that_the_thread_is_in(context: gf.Context, driver: Driver) -> None:
    array = bytearray(1 << 16)
    with context:
        handle = gf.registered(array)
    assert locks_of(driver).all[-1].life is context.life
    handle.close()


def test_array_that_is_locked_for_reading_is_not_locked_for_writing(context: gf.Context) -> None:
    array = np.zeros(5000, "u1")
    with gf.registered(array, read_only=True, context=context):
        with pytest.raises(ValueError, match="locked already, for reading only"):
            gf.registered(array, context=context)
        with gf.registered(array, read_only=True, context=context) as again:
            assert again.read_only
    with gf.registered(array, context=context) as writable:
        assert not writable.read_only


@pytest.mark.parametrize("stops", [[(0, 50_000), (50_000, 100_000)], [(0, 30_000), (60_000, 100_000)]])
def test_copies_cross_from_one_registration_into_the_next(
    context: gf.Context, stops: list[tuple[int, int]]
) -> None:
    array = np.random.default_rng(1).integers(0, 255, 100_000, "u1")
    with contextlib.ExitStack() as stack, context.alloc(array.nbytes) as buffer, context.stream() as stream:
        for start, stop in stops:
            stack.enter_context(gf.registered(array[start:stop], context=context))
        buffer.copy_from(array, stream=stream).synchronize()
        assert (buffer.to_numpy() == array).all()
        expected = array.copy()
        array[:] = 0
        buffer.copy_to(array, stream=stream).synchronize()
        assert (array == expected).all()
