"""Launches: both forms of parameters, and what is refused."""

from __future__ import annotations

import ctypes
import enum
import struct
from typing import Any

import numpy as np
import pytest
from virtual_fakes import code, value

MIXED = b""".version 8.0
.target sm_75
.address_size 64
.visible .entry mixed(.param .u8 a, .param .f64 b, .param .u16 c, .param .align 8 .b8 d[12], .param .u64 e)
{ ret; }
.visible .entry none() { ret; }
.visible .entry fixed() .reqntid 64 { ret; }
.visible .entry small() .maxntid 64 { ret; }
"""
EXPECTED = struct.pack("<B7xdH6x3i4xQ", 200, 2.5, 65_535, 1, 2, 3, 0xDEADBEEF)[:48]


class Three(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("z", ctypes.c_int)]


class Colour(enum.Enum):
    RED = 7


@pytest.fixture
def functions(d: Any, context: Any) -> Any:
    module = value(d.cuModuleLoadData(MIXED))
    return {
        name: value(d.cuModuleGetFunction(module, name.encode()))
        for name in ("mixed", "none", "fixed", "small")
    }


def run(
    d: Any, function: Any, params: Any = 0, extra: Any = 0, *, grid: Any = (1, 1, 1), block: Any = (1, 1, 1)
) -> str:
    answer = code(d.cuLaunchKernel(function, *grid, *block, 0, 0, params, extra))
    d.cuCtxSynchronize()
    return answer


def parameters(engine: Any) -> bytes:
    return bytes(engine.launches[-1][1].parameters)


def test_a_tuple_of_values_and_types(d: Any, engine: Any, functions: Any) -> None:
    values = (200, 2.5, 65_535, Three(1, 2, 3), 0xDEADBEEF)
    types = (ctypes.c_uint8, ctypes.c_double, ctypes.c_uint16, None, ctypes.c_void_p)
    assert run(d, functions["mixed"], (values, types)) == "SUCCESS"
    assert parameters(engine) == EXPECTED


def test_a_tuple_of_ctypes_and_handles(d: Any, engine: Any, functions: Any) -> None:
    pointer = d.CUdeviceptr(0xDEADBEEF)
    values = (ctypes.c_uint8(200), ctypes.c_float(2.5), ctypes.c_uint16(65_535), Three(1, 2, 3), pointer)
    types = (ctypes.c_uint8, ctypes.c_double, ctypes.c_uint16, None, None)
    assert run(d, functions["mixed"], (values, types)) == "SUCCESS"
    assert parameters(engine) == EXPECTED


@pytest.mark.parametrize("kind", ["address", "ctypes", "numpy"])
def test_an_array_of_pointers(d: Any, engine: Any, functions: Any, kind: str) -> None:
    numbers = ctypes.c_uint8(200), ctypes.c_double(2.5), ctypes.c_uint16(65_535)
    held = (*numbers, Three(1, 2, 3), ctypes.c_uint64(0xDEADBEEF))
    pointers = (ctypes.c_void_p * 5)(*(ctypes.addressof(each) for each in held))
    array = np.frombuffer(pointers, np.uint64)
    given = {"address": ctypes.addressof(pointers), "ctypes": pointers, "numpy": array}[kind]
    assert run(d, functions["mixed"], given) == "SUCCESS"
    assert parameters(engine) == EXPECTED


@pytest.mark.parametrize("kind", ["address", "ctypes", "numpy"])
def test_one_buffer(d: Any, engine: Any, functions: Any, kind: str) -> None:
    buffer = ctypes.create_string_buffer(EXPECTED, len(EXPECTED))
    size = ctypes.c_size_t(len(EXPECTED))
    array = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(buffer), 0)
    given = {"address": ctypes.addressof(array), "ctypes": array, "numpy": np.frombuffer(array, np.uint64)}[
        kind
    ]
    assert run(d, functions["mixed"], 0, given) == "SUCCESS"
    assert parameters(engine) == EXPECTED
    assert run(d, functions["mixed"], None, given) == "SUCCESS"


def test_kernels_without_parameters(d: Any, engine: Any, functions: Any) -> None:
    for nothing in (0, None, ((), ())):
        assert run(d, functions["none"], nothing, 0) == "SUCCESS"
        assert parameters(engine) == b""


@pytest.mark.parametrize(
    "wrong",
    [0, ((1, 2.0, 3, Three()), (ctypes.c_int, ctypes.c_double, ctypes.c_int, None)), (ctypes.c_void_p * 5)()],
)
def test_missing_parameters_are_refused(d: Any, functions: Any, wrong: Any) -> None:
    assert run(d, functions["mixed"], wrong) == "INVALID_VALUE"


def test_values_of_the_wrong_type_raise_as_in_the_bindings(d: Any, functions: Any) -> None:
    kinds = (ctypes.c_uint8, ctypes.c_double, ctypes.c_uint16, None, ctypes.c_void_p)
    with pytest.raises(TypeError, match="neither a structure nor has it getPtr"):
        run(d, functions["mixed"], ((1, 2.0, 3, "text", 0), kinds))
    with pytest.raises(TypeError, match="is no pointer"):
        run(d, functions["mixed"], ((1, 2.0, 3, Three(), "text"), kinds))
    with pytest.raises(TypeError, match="of the same length"):
        run(d, functions["mixed"], ((1, 2.0), kinds))
    with pytest.raises(TypeError, match="buffer protocol"):
        run(d, functions["mixed"], object())


@pytest.mark.parametrize(
    ("name", "block", "answer"),
    [
        ("none", (32, 32, 1), "SUCCESS"),
        ("none", (32, 33, 1), "INVALID_VALUE"),
        ("none", (1, 1, 64), "SUCCESS"),
        ("fixed", (64, 1, 1), "SUCCESS"),
        ("fixed", (32, 1, 1), "INVALID_VALUE"),
        ("small", (64, 1, 1), "SUCCESS"),
        ("small", (65, 1, 1), "INVALID_VALUE"),
    ],
)
def test_blocks(d: Any, functions: Any, name: str, block: tuple[int, int, int], answer: str) -> None:
    assert run(d, functions[name], block=block) == answer


def test_what_the_engine_is_told(d: Any, engine: Any, functions: Any) -> None:
    value(d.cuCtxCreate(None, 0, 1))
    module = value(d.cuModuleLoadData(MIXED))
    function = value(d.cuModuleGetFunction(module, b"none"))
    assert code(d.cuLaunchKernel(function, 2, 3, 4, 5, 6, 7, 100, 0, 0, 0)) == "SUCCESS"
    d.cuCtxSynchronize()
    launch = engine.launches[-1][1]
    assert (launch.grid, launch.block, launch.dynamic_shared) == ((2, 3, 4), (5, 6, 7), 100)
    assert (launch.device_ordinal, launch.clock_rate, launch.cooperative) == (1, 1_980_000, False)
    assert launch.multiprocessors == d._state.devices[1].multiprocessors


def test_cooperative_launches_fit_on_the_device(d: Any, engine: Any, functions: Any) -> None:
    most = 2 * d._state.devices[0].multiprocessors
    call = d.cuLaunchCooperativeKernel
    assert code(call(functions["none"], most, 1, 1, 1024, 1, 1, 0, 0, 0)) == "SUCCESS"
    assert (
        code(call(functions["none"], most + 1, 1, 1, 1024, 1, 1, 0, 0, 0)) == "COOPERATIVE_LAUNCH_TOO_LARGE"
    )
    d.cuCtxSynchronize()
    assert engine.launches[-1][1].cooperative


def test_launches_by_configuration(d: Any, engine: Any, functions: Any) -> None:
    config = d.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 4, 1, 1
    assert code(d.cuLaunchKernelEx(config, functions["none"], 0, 0)) == "SUCCESS"
    attribute = d.CUlaunchAttribute()
    attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config.attrs, config.numAttrs = [attribute], 1
    assert code(d.cuLaunchKernelEx(config, functions["none"], 0, 0)) == "SUCCESS"
    d.cuCtxSynchronize()
    assert [launch.cooperative for _, launch in engine.launches[-2:]] == [False, True]


def test_what_kernels_print_goes_to_standard_output(d: Any, engine: Any, functions: Any, capsys: Any) -> None:
    run(d, functions["none"])
    engine.launches[-1][1].output(b"hello\n")
    assert capsys.readouterr().out == "hello\n"
