"""Modules: images of every kind, kernels, variables, and the logs that say what is wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_fakes import Latch, code, ptx, read_ints, value

from gpufleet.virtual.ptx import PtxError

FATBINS = Path(__file__).parents[1] / "data/fatbins"


@pytest.fixture(autouse=True)
def _context(context: Any) -> None:
    """Every test has a current context."""


# ---- images


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "array", "address"])
@pytest.mark.parametrize("name", ["ptx", "default.fatbin", "none.fatbin", "size.fatbin", "speed.fatbin"])
def test_images_in_every_form(d: Any, kind: str, name: str) -> None:
    data = ptx("saxpy") if name == "ptx" else (FATBINS / name).read_bytes()
    array = np.frombuffer(bytearray(data), np.uint8)
    image = {"bytes": data, "bytearray": bytearray(data), "array": array, "address": array.ctypes.data}[kind]
    module = value(d.cuModuleLoadData(image))
    assert value(d.cuModuleGetFunctionCount(module)) >= 1


def test_a_fatbin_behind_the_structure_that_nvcc_leaves(d: Any) -> None:
    fatbin = ctypes.create_string_buffer((FATBINS / "default.fatbin").read_bytes())
    wrapper = (ctypes.c_uint64 * 3)(0x1_466243B1, ctypes.addressof(fatbin), 0)
    assert code(d.cuModuleLoadFatBinary(ctypes.addressof(wrapper))) == "SUCCESS"
    assert code(d.cuModuleLoadData(bytes(wrapper))) == "SUCCESS"


def test_files(d: Any, tmp_path: Path) -> None:
    file = tmp_path / "k.ptx"
    file.write_bytes(ptx("k").rstrip(b"\0"))
    assert code(d.cuModuleLoad(str(file).encode())) == "SUCCESS"
    assert code(d.cuModuleLoad(str(tmp_path / "none").encode())) == "FILE_NOT_FOUND"
    assert "No such file" in d.last_error_log
    assert code(d.cuModuleLoad(str(tmp_path).encode())) == "FILE_NOT_FOUND"


@pytest.mark.parametrize(
    ("image", "answer", "text"),
    [
        (b"not a module", "INVALID_IMAGE", "the image is no PTX, fatbin or cubin"),
        (b"\x7fELF" + bytes(60), "INVALID_IMAGE", "no PTX, fatbin or cubin"),
        (b".version 8.0\n.target sm_75\n.address_size 64\nnonsense", "INVALID_PTX", "line 4"),
        (ptx("k", target="sm_100"), "INVALID_PTX", "compile it for sm_90 or an older one"),
        (ptx("k", target="sm_80a"), "INVALID_PTX", "the PTX is for sm_80a"),
        (0, "INVALID_VALUE", "the image is NULL"),
    ],
)
def test_bad_images_are_explained(d: Any, image: Any, answer: str, text: str) -> None:
    assert code(d.cuModuleLoadData(image)) == answer
    assert text in d.last_error_log


def test_a_cubin_is_for_real_devices(d: Any) -> None:
    assert code(d.cuModuleLoadData((FATBINS / "abi7.cubin").read_bytes())) == "NO_BINARY_FOR_GPU"
    assert "build it with PTX" in d.last_error_log


def test_a_fatbin_without_ptx_names_what_it_holds(d: Any) -> None:
    from gpufleet import fatbin

    image = (FATBINS / "family.fatbin").read_bytes()
    has_fitting_ptx = any(entry.kind == "ptx" and entry.arch <= 90 for entry in fatbin.read(image))
    assert not has_fitting_ptx
    assert code(d.cuModuleLoadData(image)) == "NO_BINARY_FOR_GPU"
    assert "machine code for sm_" in d.last_error_log or "PTX for sm_" in d.last_error_log


@pytest.mark.parametrize("cut", [20, 100, 500])
def test_a_truncated_fatbin(d: Any, cut: int) -> None:
    image = (FATBINS / "default.fatbin").read_bytes()
    assert code(d.cuModuleLoadData(image[:-cut])) == "INVALID_IMAGE"
    assert "cut short" in d.last_error_log


@pytest.mark.parametrize(
    ("capability", "target", "features", "expected"),
    [
        ((9, 0), 75, "", True),
        ((9, 0), 100, "", False),
        ((9, 0), 90, "a", True),
        ((10, 0), 90, "a", False),
        ((10, 3), 100, "f", True),
        ((12, 0), 100, "f", False),
        ((12, 1), 120, "", True),
    ],
)
def test_which_targets_a_device_accepts(
    capability: tuple[int, int], target: int, features: str, expected: bool
) -> None:
    from gpufleet.virtual.images import accepts

    assert accepts(capability, target, features) is expected


# ---- logs


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "address"])
def test_the_error_log_buffer(d: Any, kind: str) -> None:
    options = d.CUjit_option
    log = bytes(bytearray(200)) if kind == "bytes" else bytearray(200)
    keep = (ctypes.c_char * 200).from_buffer(log) if kind == "address" else None
    given = ctypes.addressof(keep) if keep is not None else log
    names = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    bad = b".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k() { bogus.u32 %r1; }\0"
    assert code(d.cuModuleLoadDataEx(bad, 2, names, [given, 200])) == "INVALID_PTX"
    text = bytes(log).partition(b"\0")[0].decode()
    assert "bogus" in text
    assert "line 4" in text
    assert text == d.last_error_log


def test_a_short_log_buffer_is_not_overrun(d: Any) -> None:
    options = d.CUjit_option
    log = bytearray(b"x" * 20)
    names = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    d.cuModuleLoadDataEx(b"garbage\0", 2, names, [log, 10])
    assert log[9:] == b"\0" + b"x" * 10


def test_the_logs_of_a_load_that_succeeds(d: Any) -> None:
    options = d.CUjit_option
    errors, info = bytearray(b"x" * 20), bytearray(b"x" * 20)
    names = [
        options.CU_JIT_ERROR_LOG_BUFFER,
        options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        options.CU_JIT_INFO_LOG_BUFFER,
        options.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
    ]
    assert code(d.cuModuleLoadDataEx(ptx("k"), 4, names, [errors, 20, info, 20])) == "SUCCESS"
    assert errors[0] == 0
    assert info.startswith(b"gpufleet: loaded")
    assert code(d.cuModuleLoadDataEx(ptx("k"), 0, None, None)) == "SUCCESS"


def test_a_kernel_the_engine_does_not_know_is_refused_and_others_run(d: Any, engine: Any) -> None:
    engine.bodies["exotic"] = PtxError("NOT_SUPPORTED", "unsupported PTX: wgmma.fence", 12)
    module = value(d.cuModuleLoadData(ptx("fill", "exotic")))
    assert code(d.cuModuleGetFunction(module, b"exotic")) == "NOT_SUPPORTED"
    assert d.last_error_log == "kernel 'exotic': line 12: unsupported PTX: wgmma.fence"
    assert code(d.cuModuleGetFunction(module, b"fill")) == "SUCCESS"
    enumerated = value(d.cuModuleEnumerateFunctions(2, module))
    assert [value(d.cuFuncGetName(function)) for function in enumerated] == [b"fill", b"exotic"]
    arguments = ((0, 0), (ctypes.c_void_p, ctypes.c_int))
    assert code(d.cuLaunchKernel(enumerated[1], 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)) == "NOT_SUPPORTED"


# ---- kernels


def test_names_that_are_not_there_come_with_those_that_are(d: Any) -> None:
    module = value(d.cuModuleLoadData(ptx("fill", "spin", variables=".global .u32 counter;")))
    assert code(d.cuModuleGetFunction(module, b"fil")) == "NOT_FOUND"
    assert d.last_error_log == "the module has no kernel 'fil'; it has: fill, spin"
    assert code(d.cuModuleGetGlobal(module, b"count")) == "NOT_FOUND"
    assert d.last_error_log == "the module has no variable 'count'; it has: counter"


def test_the_same_kernel_has_the_same_handle(d: Any) -> None:
    module = value(d.cuModuleLoadData(ptx("fill")))
    first, second = (value(d.cuModuleGetFunction(module, b"fill")) for _ in range(2))
    assert int(first) == int(second)
    assert int(value(d.cuFuncGetModule(first))) == int(module)


def test_kernels_become_executable_when_they_are_needed(d: Any) -> None:
    states = d.CUfunctionLoadingState
    (function,) = value(d.cuModuleEnumerateFunctions(1, value(d.cuModuleLoadData(ptx("fill")))))
    assert value(d.cuFuncIsLoaded(function)) == states.CU_FUNCTION_LOADING_STATE_UNLOADED
    d.cuFuncLoad(function)
    assert value(d.cuFuncIsLoaded(function)) == states.CU_FUNCTION_LOADING_STATE_LOADED


def test_parameters_and_attributes(d: Any) -> None:
    text = b""".version 8.0
.target sm_75
.address_size 64
.visible .entry k(.param .u16 a, .param .align 8 .b8 b[12], .param .u64 c) .maxntid 128, 2, 1 {
    .shared .align 4 .b8 s[4096];
    .local .align 4 .b8 l[64];
    .reg .u32 %r<3>;
    mov.u32 %r1, s;
    ret;
}
"""
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(text)), b"k"))
    assert [value(d.cuFuncGetParamInfo(function, index)) for index in range(3)] == [(0, 2), (8, 12), (24, 8)]
    assert code(d.cuFuncGetParamInfo(function, 3)) == "INVALID_VALUE"
    assert value(d.cuFuncGetParamCount(function)) == 3

    def ask(name: str) -> int:
        return int(
            value(
                d.cuFuncGetAttribute(getattr(d.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), function)
            )
        )

    assert ask("MAX_THREADS_PER_BLOCK") == 256
    assert ask("SHARED_SIZE_BYTES") == 4096
    assert ask("LOCAL_SIZE_BYTES") == 64
    assert ask("PTX_VERSION") == 75
    assert ask("BINARY_VERSION") == 90
    assert ask("MAX_DYNAMIC_SHARED_SIZE_BYTES") == 49_152 - 4096
    assert 1 <= ask("NUM_REGS") <= 255


def test_more_shared_memory_is_allowed_on_demand(d: Any, launch: Callable[..., str]) -> None:
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("fill"))), b"fill"))
    attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    arguments = ((int(value(d.cuMemAlloc(128))), 0), (ctypes.c_void_p, ctypes.c_int))
    big = lambda: code(d.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 100_000, 0, arguments, 0))  # noqa: E731
    assert big() == "INVALID_VALUE"
    assert code(d.cuFuncSetAttribute(function, attribute, 232_449)) == "INVALID_VALUE"
    assert code(d.cuFuncSetAttribute(function, attribute, 232_448)) == "SUCCESS"
    assert big() == "SUCCESS"
    registers = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    assert code(d.cuFuncSetAttribute(function, registers, 1)) == "INVALID_VALUE"


def test_unloading_waits_and_ends_the_kernels(d: Any, engine: Any, launch: Callable[..., str]) -> None:
    latch = engine.bodies["k"] = Latch()
    module = value(d.cuModuleLoadData(ptx("k")))
    function = value(d.cuModuleGetFunction(module, b"k"))
    launch(function)
    latch.wait_until_entered()
    latch.open()
    assert code(d.cuModuleUnload(module)) == "SUCCESS"
    assert launch(function) == "INVALID_HANDLE"
    assert code(d.cuModuleUnload(module)) == "INVALID_HANDLE"


# ---- variables


def test_variables_have_memory_values_and_addresses_of_each_other(d: Any, engine: Any) -> None:
    free = value(d.cuMemGetInfo())
    variables = """
.visible .global .align 4 .b8 table[16] = {1, 0, 0, 0, 2, 0, 0, 0};
.visible .const .align 4 .u32 limit = 77;
.visible .global .align 8 .u64 pointer = table;
"""
    module = value(d.cuModuleLoadData(ptx("fill", variables=variables)))
    table, size = value(d.cuModuleGetGlobal(module, b"table"))
    assert size == 16
    assert read_ints(d, table, 4) == [1, 2, 0, 0]
    assert read_ints(d, value(d.cuModuleGetGlobal(module, b"limit"))[0], 1) == [77]
    address = (ctypes.c_uint64 * 1)()
    d.cuMemcpyDtoH(ctypes.addressof(address), value(d.cuModuleGetGlobal(module, b"pointer"))[0], 8)
    assert address[0] == int(table)
    d.cuModuleGetFunction(module, b"fill")
    assert engine.symbols["table"] == int(table)
    assert sorted(engine.symbols) == ["limit", "pointer", "table"]
    d.cuModuleUnload(module)
    assert value(d.cuMemGetInfo()) == free


def test_variables_that_do_not_fit(d: Any) -> None:
    free = value(d.cuMemGetInfo())
    text = ptx("fill", variables=".global .align 4 .b8 small[4];\n.global .align 4 .b8 large[100000000];")
    assert code(d.cuModuleLoadData(text)) == "OUT_OF_MEMORY"
    assert "'large'" in d.last_error_log
    assert value(d.cuMemGetInfo()) == free


# ---- libraries


def test_a_library_is_loaded_into_each_context_that_uses_it(d: Any, launch: Callable[..., str]) -> None:
    image = ptx("fill", variables=".visible .global .u32 counter;")
    library = value(d.cuLibraryLoadData(image, None, None, 0, None, None, 0))
    assert value(d.cuLibraryGetKernelCount(library)) == 1
    kernel = value(d.cuLibraryGetKernel(library, b"fill"))
    assert code(d.cuLibraryGetKernel(library, b"nope")) == "NOT_FOUND"
    assert value(d.cuKernelGetName(kernel)) == b"fill"
    assert int(value(d.cuKernelGetLibrary(kernel))) == int(library)
    assert value(d.cuKernelGetParamInfo(kernel, 1)) == (8, 4)
    first, here = value(d.cuKernelGetFunction(kernel)), value(d.cuLibraryGetGlobal(library, b"counter"))
    value(d.cuCtxCreate(None, 0, 1))
    second, there = value(d.cuKernelGetFunction(kernel)), value(d.cuLibraryGetGlobal(library, b"counter"))
    assert int(first) != int(second)
    assert int(here[0]) != int(there[0])
    pointer = value(d.cuMemAlloc(128))
    assert launch(kernel, pointer, 6, threads=32) == "SUCCESS"
    assert read_ints(d, pointer, 32) == [6] * 32
    assert code(d.cuLibraryUnload(library)) == "SUCCESS"
    assert launch(kernel, pointer, 6, threads=32) == "INVALID_HANDLE"
    assert launch(second, pointer, 6, threads=32) == "INVALID_HANDLE"


# ---- occupancy


def test_occupancy(d: Any) -> None:
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("fill"))), b"fill"))
    blocks = d.cuOccupancyMaxActiveBlocksPerMultiprocessor
    assert value(blocks(function, 1024, 0)) == 2
    assert value(blocks(function, 32, 0)) == 32
    assert value(blocks(function, 32, 100_000)) == 2
    assert value(blocks(function, 2048, 0)) == 0
    assert code(blocks(function, 0, 0)) == "INVALID_VALUE"
    grid, size = value(d.cuOccupancyMaxPotentialBlockSize(function, 0, 0, 0))
    assert size == 1024
    assert grid == 2 * d._state.devices[0].multiprocessors
    assert value(d.cuOccupancyAvailableDynamicSMemPerBlock(function, 2, 128)) == 115_712
