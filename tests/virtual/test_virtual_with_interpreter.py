"""The driver and the interpreter together: kernels reach what the driver says, and faults explain it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from virtual_fakes import code, read_ints, value

from gpufleet.virtual import VirtualDriver

KERNELS = b""".version 8.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 counter = 5;
.visible .entry fill(.param .u64 p, .param .u32 v) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [v];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
.visible .entry count(.param .u64 p, .param .u32 v) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u32 %r1, [v];
    mov.u64 %rd1, counter;
    atom.global.add.u32 %r2, [%rd1], %r1;
    ret;
}
.visible .entry tally(.param .u64 p, .param .u32 v) {
    .reg .b32 %r<5>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [v];
    mov.u32 %r2, %tid.x;
    and.b32 %r3, %r2, 3;
    mul.wide.u32 %rd2, %r3, 4;
    add.s64 %rd3, %rd1, %rd2;
    red.global.add.u32 [%rd3], %r1;
    atom.global.add.u32 %r4, [%rd3+16], %r1;
    red.global.max.u32 [%rd3+32], %r2;
    ret;
}
"""


@pytest.fixture
def d() -> Iterator[Any]:
    driver = VirtualDriver(devices=2, memory=64 << 20, visible_devices=None)
    driver.cuInit(0)
    yield driver
    driver.reset()


@pytest.fixture
def context(d: Any) -> Any:
    return value(d.cuCtxCreate(None, 0, 0))


@pytest.fixture
def run(d: Any, context: Any) -> Callable[..., str]:
    module = value(d.cuModuleLoadData(KERNELS))

    def call(pointer: Any, number: int, name: bytes = b"fill", threads: int = 32) -> str:
        function = value(d.cuModuleGetFunction(module, name))
        arguments = ((int(pointer), number), (ctypes.c_void_p, ctypes.c_int))
        launch = code(d.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, arguments, 0))
        return code(d.cuCtxSynchronize()) if launch == "SUCCESS" else launch

    return call


def test_device_pinned_and_managed_memory(d: Any, run: Callable[..., str]) -> None:
    for pointer in (
        value(d.cuMemAlloc(128)),
        value(d.cuMemAllocAsync(128, 0)),
        value(d.cuMemHostAlloc(128, 0)),
        value(d.cuMemAllocManaged(128, 1)),
    ):
        assert run(pointer, 9) == "SUCCESS"
        assert read_ints(d, pointer, 32) == [9] * 32


def test_registered_memory(d: Any, run: Callable[..., str]) -> None:
    array, pointer = np.zeros(32, np.int32), value(d.cuMemAlloc(128))
    assert run(pointer, 3) == "SUCCESS"
    d.cuMemHostRegister(array, array.nbytes, 0)
    assert run(array.ctypes.data, 4) == "SUCCESS"
    assert run(pointer, 5) == "SUCCESS"
    d.cuMemHostUnregister(array)
    assert run(pointer, 6) == "SUCCESS"
    assert array.tolist() == [4] * 32
    assert read_ints(d, pointer, 32) == [6] * 32
    assert run(array.ctypes.data, 7) == "ILLEGAL_ADDRESS"


def test_atomics_while_host_memory_is_registered(d: Any, run: Callable[..., str]) -> None:
    array, pointer = np.zeros(32, np.int32), value(d.cuMemAlloc(128))
    d.cuMemsetD8(pointer, 0, 128)
    d.cuMemHostRegister(array, array.nbytes, 0)
    assert run(pointer, 2, b"tally") == "SUCCESS"
    assert run(array.ctypes.data, 3, b"tally") == "SUCCESS"
    d.cuMemHostUnregister(array)
    assert read_ints(d, pointer, 12) == [16] * 8 + [28, 29, 30, 31]
    assert array.tolist() == [24] * 8 + [28, 29, 30, 31] + [0] * 20


def test_peers(d: Any, run: Callable[..., str], context: Any) -> None:
    there = value(d.cuCtxCreate(None, 0, 1))
    pointer = value(d.cuMemAlloc(128))
    d.cuCtxSetCurrent(context)
    d.cuCtxEnablePeerAccess(there, 0)
    assert run(pointer, 8) == "SUCCESS"
    assert read_ints(d, pointer, 32) == [8] * 32
    d.cuCtxDisablePeerAccess(there)
    assert run(pointer, 8) == "ILLEGAL_ADDRESS"
    assert "cuCtxEnablePeerAccess" in str(d.fault)


def test_variables(d: Any, run: Callable[..., str]) -> None:
    assert run(0, 2, b"count") == "SUCCESS"
    (module,) = d._state.modules.values()
    assert read_ints(d, value(d.cuModuleGetGlobal(module.handle, b"counter"))[0], 1) == [69]


@pytest.mark.parametrize("size", [124, 100])
def test_a_store_past_the_end_names_kernel_thread_and_allocation(
    d: Any, run: Callable[..., str], size: int
) -> None:
    pointer = value(d.cuMemAlloc(size))
    assert run(pointer, 1) == "ILLEGAL_ADDRESS"
    text = str(d.fault)
    assert "fill" in text
    assert f"{size}-byte device allocation at {int(pointer):#x}" in text


def test_use_after_free_is_explained(d: Any, run: Callable[..., str]) -> None:
    pointer = value(d.cuMemAlloc(4096))
    d.cuMemFree(pointer)
    assert run(pointer, 1) == "ILLEGAL_ADDRESS"
    assert "memory that was freed" in str(d.fault)


def test_a_misaligned_store(d: Any, run: Callable[..., str]) -> None:
    assert run(int(value(d.cuMemAlloc(4096))) + 2, 1) == "MISALIGNED_ADDRESS"
