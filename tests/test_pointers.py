"""Device memory as an argument: buffers, and what other libraries have."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.compiler import compile_source
from gpufleet.device import Device
from gpufleet.driver import Driver

SOURCE = r"""
extern "C" __global__ void countdown(int *out, int n) { out[threadIdx.x] = n - threadIdx.x; }
extern "C" __global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }
extern "C" __global__ void is_null(const int *p, int *out) { *out = p == 0; }
"""
EXPECTED = list(range(32, 0, -1))


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_source(SOURCE, arch=75, target="ptx").code


@pytest.fixture
def program(image: bytes, driver: Driver) -> gf.Program:
    return gf.Program.from_image(image, driver=driver)


@pytest.fixture
def buffer(context: gf.Context) -> Iterator[gf.DeviceBuffer]:
    with context.alloc(128) as made:
        yield made


def ints(buffer: gf.DeviceBuffer) -> list[int]:
    return [int(value) for value in buffer.to_numpy("i4")]


class Interface:
    """Memory as CuPy, Numba and PyTorch show theirs."""

    def __init__(self, address: int, **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (32,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
            **more,
        }


class Raising:
    """A tensor that PyTorch does not hand out, since it requires grad."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")


class Capsule:
    """Memory that is shown by DLPack alone."""

    def __init__(self, address: int, byte_offset: int = 0, device_type: int = 2) -> None:
        self.device_type = device_type
        self.asked_for: Any = None
        self.shape = (ctypes.c_int64 * 1)(32)
        shape = ctypes.addressof(self.shape)
        # DLTensor (data, device, ndim, dtype, shape, strides, byte_offset), its manager, and no deleter
        words = (address, device_type, 1 | 0x012000 << 32, shape, 0, byte_offset, 0, 0)
        self.tensor = (ctypes.c_uint64 * len(words))(*words)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device_type, 0)

    def __dlpack__(self, stream: Any = None) -> Any:
        self.asked_for = stream
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_array_interface(program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer) -> None:
    program.kernel("countdown").launch(1, 32, Interface(buffer.address), 32, stream=context.main_stream)

    assert ints(buffer) == EXPECTED


def test_dlpack_with_its_offset(program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer) -> None:
    array = Capsule(buffer.address - 4096, byte_offset=4096)

    program.kernel("countdown").launch(1, 32, array, 32, stream=context.main_stream)

    assert ints(buffer) == EXPECTED
    assert array.asked_for == context.main_stream.address, "the producer orders its work before this stream"


def test_handle_of_the_bindings(program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer) -> None:
    from cuda.bindings.driver import CUdeviceptr

    program.kernel("countdown").launch(1, 32, CUdeviceptr(buffer.address), 32, stream=context.main_stream)

    assert ints(buffer) == EXPECTED


def test_none_is_null(program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer) -> None:
    kernel = program.kernel("is_null")

    kernel.launch(1, 1, None, buffer, stream=context.main_stream)
    assert ints(buffer)[0] == 1
    kernel.launch(1, 1, buffer, buffer, stream=context.main_stream)
    assert ints(buffer)[0] == 0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Interface(0), r"its data pointer is null: pass None where a null pointer is meant"),
        (Interface(4096, mask=object()), "it has a mask"),
        (Raising(), "requires grad"),
        (Capsule(0), "its data pointer is null"),
    ],
)
def test_array_that_is_none_for_a_kernel(
    program: gf.Program, context: gf.Context, value: Any, why: str
) -> None:
    with pytest.raises(gf.KernelArgumentError, match=rf"parameter 0 of kernel 'countdown' .*{why}"):
        program.kernel("countdown").launch(1, 32, value, 32, stream=context.main_stream)


@pytest.mark.parametrize("value", [np.zeros(32, "i4"), Capsule(4096, device_type=1)])
def test_host_array_is_refused_with_the_way_out(program: gf.Program, context: gf.Context, value: Any) -> None:
    with pytest.raises(gf.KernelArgumentError, match=r"expected memory of the GPU: .*context\.alloc"):
        program.kernel("countdown").launch(1, 32, value, 32, stream=context.main_stream)


def test_work_of_the_arrays_own_stream_comes_first(
    program: gf.Program, context: gf.Context, buffer: gf.DeviceBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = context.driver
    waits: list[Any] = []
    original = driver.cuStreamWaitEvent
    monkeypatch.setattr(driver, "cuStreamWaitEvent", lambda *given: waits.append(given) or original(*given))
    kernel = program.kernel("copy")
    with context.stream() as producer, context.stream() as stream, context.alloc(128) as copied:
        program.kernel("countdown").launch(1, 32, buffer, 32, stream=producer)
        for own in (producer.address, 1, None, stream.address):
            kernel.launch(1, 32, Interface(buffer.address, stream=own), copied, stream=stream)
        stream.synchronize()
        assert ints(copied) == EXPECTED
        assert len(waits) == 2, "for the producer's stream and for the default stream"
    assert int(driver.cuCtxGetCurrent()) == 0


def test_buffer_of_another_context_of_the_device(
    program: gf.Program, device: Device, context: gf.Context
) -> None:
    other = device.create_context()
    with other.alloc(128) as buffer:
        program.kernel("countdown").launch(1, 32, buffer, 32, stream=context.main_stream)
        context.synchronize()
        assert ints(buffer) == EXPECTED
    other.close()


def test_buffer_of_another_device_is_refused_naming_both(
    program: gf.Program, two_devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (device.create_context() for device in two_devices)
    kernel = program.kernel("countdown")
    kernel.load(here)
    with there.alloc(128) as buffer:
        for value in (buffer, Interface(buffer.address), Capsule(buffer.address)):
            with pytest.raises(gf.WrongContext) as caught:
                kernel.launch(1, 32, value, 32, stream=here.main_stream)
            assert f"cannot be used by a kernel in {here!r}" in str(caught.value)
            assert "over with buffer.copy_from, or open it with context.enable_peer_" in str(caught.value)
        with pytest.raises(gf.WrongContext, match=r"is memory of device 1 that device 0 has no access to"):
            kernel.launch(1, 32, buffer, 32, stream=here.main_stream)
    here.close()
    there.close()


def test_buffer_of_a_peer_with_access(program: gf.Program, two_devices: list[Device]) -> None:
    driver = two_devices[0].driver
    if not int(driver.cuDeviceCanAccessPeer(two_devices[0].handle, two_devices[1].handle)):
        pytest.skip("these devices are no peers")
    here, there = (device.create_context() for device in two_devices)
    with here:
        driver.cuCtxEnablePeerAccess(there.handle, 0)
    with there.alloc(128, allocator=gf.PlainAllocator()) as buffer:  # pools need more than that
        for value in (buffer, Interface(buffer.address)):
            buffer.fill(0)
            program.kernel("countdown").launch(1, 32, value, 32, stream=here.main_stream)
            here.synchronize()
            assert ints(buffer) == EXPECTED
    here.close()
    there.close()


def test_buffer_of_another_driver_is_refused(image: bytes, context: gf.Context, virtual: Driver) -> None:
    foreign = Device(0, virtual).create_context()
    kernel = gf.Program.from_image(image).kernel("countdown")

    with foreign.alloc(128) as buffer, pytest.raises(gf.WrongContext, match="cannot be used by a kernel in"):
        kernel.launch(1, 32, buffer, 32, stream=context.main_stream)
    foreign.close()


def test_address_that_no_driver_knows_is_refused_on_virtual_devices(image: bytes, virtual: Driver) -> None:
    context = Device(0, virtual).create_context()
    host = np.zeros(32, "i4")
    kernel = gf.Program.from_image(image).kernel("countdown")

    with pytest.raises(gf.WrongContext, match="the Interface with memory at 0x"):
        kernel.launch(1, 32, Interface(host.ctypes.data), 32, stream=context.main_stream)
    context.close()
