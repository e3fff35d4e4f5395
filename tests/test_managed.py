"""Managed memory. On real devices at most 64 MiB of it are in use in all."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver
from gpufleet.errors import CudaError

SIZE = 1 << 20


@pytest.fixture
def program(context: gf.Context) -> gf.Program:
    source = 'extern "C" __global__ void add(int *data) { data[threadIdx.x] += 1; }'
    return gf.Program.from_source(source, driver=context.driver)


@pytest.fixture
def not_concurrent(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the devices be such as share nothing at the same time."""
    original = Device.attribute

    def attribute(self: Device, name: str) -> int:
        return 0 if name == "concurrent_managed_access" else original(self, name)

    monkeypatch.setattr(Device, "attribute", attribute)


def test_host_and_kernel_use_it_at_the_same_address(program: gf.Program, context: gf.Context) -> None:
    with context.alloc_managed(SIZE) as buffer:
        numbers = buffer.view("i4")
        numbers[:32] = range(32)
        program.kernel("add").launch(1, 32, buffer, stream=context.main_stream)
        context.synchronize()
        assert numbers[:32].tolist() == list(range(1, 33))
        assert numbers.ctypes.data == buffer.address


def test_it_is_copied_from_and_to_like_a_host_array(context: gf.Context) -> None:
    with context.alloc_managed(SIZE) as managed, context.alloc(SIZE) as buffer, context.stream() as stream:
        managed.array[:] = 6
        buffer.copy_from(managed.array, stream=stream)
        stream.synchronize()
        managed.array[:] = 0
        buffer.copy_to(managed.array)
        assert (managed.array == 6).all()


def test_prefetch_and_advice(device: Device, context: gf.Context) -> None:
    with context.alloc_managed(SIZE) as buffer, context.stream() as stream:
        buffer.array[:] = 3
        for advice in ("read_mostly", "preferred_location", "accessed_by"):
            buffer.advise(advice, device)
        buffer.advise("preferred_location", "host", offset=4096, nbytes=4096)
        buffer.prefetch(device)
        transfer = buffer.prefetch("host", stream=stream)
        assert transfer is not None
        transfer.synchronize()
        for advice in ("not_read_mostly", "no_preferred_location", "not_accessed_by"):
            buffer.advise(advice, device)
        assert (buffer.array == 3).all()


def test_what_makes_no_sense_is_refused(device: Device, context: gf.Context) -> None:
    with context.alloc_managed(SIZE) as buffer:
        with pytest.raises(ValueError, match="there is no advice 'read'"):
            buffer.advise("read", device)
        with pytest.raises(ValueError, match="'moon' is no place for"):
            buffer.prefetch("moon")
        with pytest.raises(ValueError, match="are not in a buffer of 1048576 bytes"):
            buffer.prefetch(device, offset=4096, nbytes=SIZE)
    with pytest.raises(ValueError, match="expected 1 or more"):
        context.alloc_managed(0)


def test_more_than_the_device_has_free_is_refused(context: gf.Context) -> None:
    free, _ = context.memory_info()
    with pytest.raises(CudaError, match="do not fit: device 0 has") as caught:
        context.alloc_managed(free + 1)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"


def test_view_keeps_it_and_forgetting_frees_it_with_a_warning(context: gf.Context) -> None:
    buffer = context.alloc_managed(SIZE)
    view = buffer.array
    del buffer
    gc.collect()
    view[:] = 1
    with pytest.warns(ResourceWarning, match="managed bytes of"):
        del view
        gc.collect()


def test_closed_buffer_says_so(program: gf.Program, context: gf.Context) -> None:
    buffer = context.alloc_managed(SIZE)
    buffer.close()
    buffer.close()
    with pytest.raises(gf.ContextClosed, match="was closed"):
        _ = buffer.array
    with pytest.raises(gf.ContextClosed, match="was closed"):
        program.kernel("add").launch(1, 32, buffer, stream=context.main_stream)


def test_it_is_freed_with_its_context(device: Device) -> None:
    for make in (device.create_context, device.retain_primary_context):
        context = make()
        buffer = context.alloc_managed(SIZE)
        context.close()
        buffer.close()
        assert buffer.is_closed


@pytest.mark.usefixtures("not_concurrent")
def test_host_and_kernel_take_turns_where_they_must(program: gf.Program, context: gf.Context) -> None:
    kernel = program.kernel("add")
    with context.alloc_managed(SIZE) as buffer:
        with pytest.raises(gf.WrongContext, match=r"use `with buffer\.on_host\(\) as array`"):
            _ = buffer.array
        with pytest.raises(gf.WrongContext, match="is not the host's now"):
            np.asarray(buffer)
        with buffer.on_host() as array:
            array.view("i4")[:32] = range(32)
            with pytest.raises(gf.WrongContext, match="cannot be used by a kernel inside"):
                kernel.launch(1, 32, buffer, stream=context.main_stream)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        del array
        kernel.launch(1, 32, buffer, stream=context.main_stream)
        with buffer.on_host() as array:  # waits for the kernel
            assert array.view("i4")[:32].tolist() == list(range(1, 33))
        del array


@pytest.mark.usefixtures("not_concurrent")
def test_prefetch_and_advice_say_that_they_have_no_effect(device: Device, context: gf.Context) -> None:
    with context.alloc_managed(SIZE) as buffer:
        with pytest.warns(gf.ManagedMemoryWarning, match="prefetch had no effect"):
            buffer.prefetch(device)
        with pytest.warns(gf.ManagedMemoryWarning, match="advise had no effect"):
            buffer.advise("read_mostly")


def test_places_and_streams_of_another_driver_are_refused(context: gf.Context, virtual: Driver) -> None:
    other = Device(0, virtual).create_context()
    with context.alloc_managed(64) as managed, other.stream() as stream:
        for where in (other.device, None, "mars"):
            with pytest.raises(ValueError, match="is no place for"):
                managed.prefetch(where)  # type: ignore[arg-type]
        with pytest.raises(gf.WrongContext, match="of another driver"):
            managed.prefetch("host", stream=stream)
        with pytest.raises(TypeError, match="integer"):
            managed.prefetch("host", offset=1.5)  # type: ignore[arg-type]
    other.close()
