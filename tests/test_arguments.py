"""How Python values become parameter bytes. What needs memory of a device is in test_pointers.py."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpufleet as gf
from gpufleet.frame import Frame, Layout
from gpufleet.signature import Signature, parse, read_ptx

QUEUE: Any = SimpleNamespace(context=None)
NATIVE = {1: "b", 2: "h", 4: "i", 8: "q"}


def layout_of(types: Any) -> Layout:
    """Lay parameters out as C does, which is what the driver's table says."""
    table, end = [], 0
    for each in types:
        alignment = min(each.size, 8) if each.kind != "bytes" else 4
        offset = -(-end // alignment) * alignment
        table.append((offset, each.size))
        end = offset + each.size
    return Layout("k", table, types, None)


def pack(signature: Signature, *values: Any) -> bytes:
    layout = layout_of(parse(signature))
    frame = Frame(layout)
    layout.pack(frame.memory, QUEUE, values)
    return bytes(frame.memory[: layout.size])


def pack_ptx(declared: str, value: Any) -> bytes:
    types = read_ptx(f".entry k(.param {declared} x)")["k"]
    layout = layout_of(types)
    frame = Frame(layout)
    layout.pack(frame.memory, QUEUE, (value,))
    return bytes(frame.memory[: layout.size])


def refused(signature: Signature, value: Any) -> str:
    with pytest.raises(gf.KernelArgumentError) as caught:
        pack(signature, value)
    return str(caught.value)


# Integers


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_python_int_fits_in_range_only(bits: int) -> None:
    for name, lowest, highest in (
        (f"int{bits}", -(1 << bits - 1), (1 << bits - 1) - 1),
        (f"uint{bits}", 0, (1 << bits) - 1),
    ):
        for value in (lowest, highest, 0, 1):
            assert pack(name, value) == value.to_bytes(bits // 8, "little", signed=value < 0)
        for value in (lowest - 1, highest + 1, 1 << 100, -(1 << 100)):
            assert f"expected an integer from {lowest} to {highest}" in refused(name, value)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_ptx_does_not_tell_the_sign_so_either_range_fits(bits: int) -> None:
    size = bits // 8

    assert pack_ptx(f".u{bits}", -1) == pack_ptx(f".u{bits}", (1 << bits) - 1) == b"\xff" * size
    assert pack_ptx(f".u{bits}", -(1 << bits - 1)) == bytes(size - 1) + b"\x80"
    for value in (1 << bits, -(1 << bits - 1) - 1):
        with pytest.raises(gf.KernelArgumentError, match=f"from {-(1 << bits - 1)} to {(1 << bits) - 1}"):
            pack_ptx(f".u{bits}", value)


def test_error_names_the_parameter_its_type_and_size_and_the_value() -> None:
    with pytest.raises(gf.KernelArgumentError) as caught:
        pack("float32, int16", 1.0, 99999)

    assert str(caught.value) == (
        "parameter 1 of kernel 'k' (int16, 2 bytes) got 99999: expected an integer from -32768 to 32767"
    )


def test_bool_fits_integers() -> None:
    assert pack("int32, uint8", True, False) == b"\1\0\0\0\0"
    assert pack("uint8", np.True_) == b"\1"


@pytest.mark.parametrize("scalar", [np.int32(-5), np.uint32(2**32 - 5), ctypes.c_int(-5), np.array(-5, "i4")])
def test_numpy_or_ctypes_integer_of_the_size_fits(scalar: Any) -> None:
    assert pack_ptx(".u32", scalar) == struct.pack("<i", -5)


@pytest.mark.parametrize(
    "value", [np.int16(1), np.int64(1), np.float32(1), ctypes.c_int64(1), np.array(1, "i8"), np.True_]
)
def test_numpy_or_ctypes_scalar_of_another_size_or_kind_is_refused(value: Any) -> None:
    assert "expected an integer of its size, such as numpy.int32(...)" in refused("int32", value)


def test_numpy_integer_must_have_the_sign_that_a_signature_says() -> None:
    assert "such as numpy.int32(...)" in refused("int32", np.uint32(1))
    assert "such as numpy.uint32(...)" in refused("uint32", np.int32(1))


def test_long_long_fits_as_long_does() -> None:
    assert pack("int64", np.longlong(-2)) == pack("int64", np.int64(-2)) == struct.pack("<q", -2)


@pytest.mark.parametrize("value", [1.0, "1", None, b"1234", [1], object(), np.zeros(3, "i4"), 1j])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    assert "parameter 0 of kernel 'k' (int32, 4 bytes) got " in refused("int32", value)


# Floating point


@given(st.floats(width=32))
def test_float_arrives_as_it_is(value: float) -> None:
    (single,) = struct.unpack("<f", pack("float32", value))
    (double,) = struct.unpack("<d", pack("float64", value))

    assert single == double == value or math.isnan(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_is_rounded_as_numpy_rounds_or_refused(value: float) -> None:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if np.isinf(rounded):
        assert "expected a float of a size below 3.40282e+38" in refused("float32", value)
    else:
        assert pack("float32", value) == rounded.tobytes()


def test_float16() -> None:
    assert pack("float16", 1.5) == np.float16(1.5).tobytes() == pack("float16", np.float16(1.5))
    assert pack("float16", 65519.0) == np.float16(65504).tobytes()
    assert "below 65520" in refused("float16", 65520.0)


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    for value in (0.0, -0.0, 1.0, -2.5, math.inf, 1.5 * 2.0**100):
        assert pack("bfloat16", value) == struct.pack("<f", value)[2:]
    assert pack("bfloat16", math.nan) == b"\xc0\x7f"
    assert "below 3.39618e+38" in refused("bfloat16", 3.4e38)


def test_bfloat16_rounds_once_and_ties_to_even() -> None:
    one = 0x3F80
    tie = 1 + 2**-8  # halfway between 1 and the next bfloat16

    def bits(value: float) -> int:
        return int.from_bytes(pack("bfloat16", value), "little")

    assert bits(tie) == one
    assert bits(math.nextafter(tie, 2)) == one + 1, "as a float32 it would be the tie"
    assert bits(math.nextafter(tie, 0)) == one
    assert bits(1 + 3 * 2**-8) == one + 2
    assert bits(math.nextafter(1 + 3 * 2**-8, 0)) == one + 1
    assert bits(-math.nextafter(tie, 2)) == (one + 1) | 0x8000


@pytest.mark.parametrize(
    ("name", "exact", "inexact"),
    [
        ("float16", 2048, 2049),
        ("bfloat16", -256, 257),
        ("float32", 2**24, 2**24 + 1),
        ("float64", -(2**53), 2**53 + 1),
    ],
)
def test_int_fits_a_float_that_holds_it_exactly(name: str, exact: int, inexact: int) -> None:
    assert pack(name, exact) == pack(name, float(exact))
    assert f"expected a float, or an int that {name} holds exactly" in refused(name, inexact)


def test_int_beyond_a_float_is_refused() -> None:
    assert pack("float32", 2**127) == struct.pack("<f", 2.0**127)
    assert "holds exactly" in refused("float32", 2**128)
    assert "holds exactly" in refused("float16", 2**16)
    assert "holds exactly" in refused("float64", 1 << 5000)


@pytest.mark.parametrize("value", [np.float32(0.1), ctypes.c_float(0.1), np.array(0.1, "f4")])
def test_numpy_or_ctypes_float_of_the_size_fits(value: Any) -> None:
    assert pack("float32", value) == struct.pack("<f", 0.1)


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.float16(0.1), np.int32(1), ctypes.c_double(1), np.array(1)]
)
def test_numpy_or_ctypes_scalar_that_is_not_that_float_is_refused(value: Any) -> None:
    assert "expected a float of its size, such as numpy.float32(...)" in refused("float32", value)


@pytest.mark.parametrize("value", [True, "1.0", None, 1j, [1.0]])
def test_what_is_no_float_is_refused(value: Any) -> None:
    assert "(float64, 8 bytes) got " in refused("float64", value)


# Pointers as numbers


def test_null_and_addresses_fit_pointers() -> None:
    assert pack("pointer", None) == bytes(8)
    assert pack("pointer", 0x7F0012345678) == (0x7F0012345678).to_bytes(8, "little")
    assert pack("pointer", np.uint64(5)) == pack("pointer", ctypes.c_void_p(5)) == pack("pointer", 5)
    assert "from 0 to 18446744073709551615" in refused("pointer", -1)
    assert "got numpy.float64 1.0: expected a device buffer, or numpy.uint64(...)" in refused(
        "pointer", np.float64(1)
    )


def test_handle_of_the_bindings_fits_a_pointer() -> None:
    from cuda.bindings.driver import CUdeviceptr

    assert pack("pointer", CUdeviceptr(0x1234)) == pack("pointer", 0x1234)


def test_ptx_writes_64_bit_integers_as_it_writes_pointers() -> None:
    assert pack_ptx(".u64", -1) == pack_ptx(".u64", 2**64 - 1) == b"\xff" * 8
    assert pack_ptx(".u64", np.int64(-1)) == b"\xff" * 8
    assert pack_ptx(".u64", None) == bytes(8)


@pytest.mark.parametrize(
    "value", [np.zeros(3), np.zeros(0), [1, 2], b"12345678", bytearray(8), memoryview(b"1")]
)
@pytest.mark.parametrize("declared", [".u64", ".u64 .ptr .align 1"])
def test_host_memory_is_refused_with_the_way_out(declared: str, value: Any) -> None:
    with pytest.raises(
        gf.KernelArgumentError, match=r"expected memory of the GPU: .*context\.alloc.*copy_from"
    ):
        pack_ptx(declared, value)


def test_float_is_no_pointer() -> None:
    assert "got 1.0: expected a device buffer, None, or an int" in refused("pointer", 1.0)


# Structures


class Pair(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("weight", ctypes.c_float))


PAIR = np.dtype([("number", "i4"), ("weight", "f4")])
EXPECTED = struct.pack("<if", 7, 2.5)


@pytest.mark.parametrize(
    "value",
    [
        EXPECTED,
        bytearray(EXPECTED),
        memoryview(EXPECTED),
        Pair(7, 2.5),
        np.array((7, 2.5), PAIR)[()],
        np.array((7, 2.5), PAIR),
        np.frombuffer(EXPECTED, np.complex64)[0],
        (ctypes.c_char * 8)(*EXPECTED),
    ],
)
def test_structure_of_the_exact_size_fits(value: Any) -> None:
    assert pack("bytes[8]", value) == pack([PAIR], value) == EXPECTED


def test_half_of_the_cuda_headers_is_a_structure_of_two_bytes() -> None:
    assert pack_ptx(".align 2 .b8", np.uint8(1)) == b"\1"
    with pytest.raises(gf.KernelArgumentError):
        pack_ptx(".align 2 .b8", 1)
    types = read_ptx(".entry k(.param .align 2 .b8 h[2])")["k"]
    layout = layout_of(types)
    frame = Frame(layout)
    layout.pack(frame.memory, QUEUE, (np.float16(1.5),))
    assert bytes(frame.memory[:2]) == np.float16(1.5).tobytes()


@pytest.mark.parametrize(
    "value", [EXPECTED[:-1], EXPECTED + b"\0", np.float32(1), 7, 2.5, None, np.zeros(2, "f4")]
)
def test_structure_of_another_size_or_kind_is_refused(value: Any) -> None:
    assert "expected a structure of exactly 8 bytes" in refused("bytes[8]", value)


def test_array_for_a_structure_is_refused_with_the_way_out() -> None:
    assert "array.tobytes()" in refused("bytes[8]", np.zeros(2, "f4"))


# Where only the size is known


def sizes_only(size: int, value: Any) -> bytes:
    layout = Layout("k", [(0, size)], None, None)
    frame = Frame(layout)
    layout.pack(frame.memory, QUEUE, (value,))
    return bytes(frame.memory[:size])


@pytest.mark.parametrize("value", [np.int32(5), np.float32(5), np.uint32(5), ctypes.c_float(5)])
def test_any_numpy_or_ctypes_scalar_of_the_size_fits(value: Any) -> None:
    assert sizes_only(4, value) == memoryview(value).tobytes()


def test_structure_and_null_fit_by_size() -> None:
    assert sizes_only(8, Pair(7, 2.5)) == EXPECTED
    assert sizes_only(8, None) == bytes(8)


@pytest.mark.parametrize("value", [5, 5.0, True, np.int64(5), np.int16(5), None])
def test_python_number_or_wrong_size_is_refused_with_the_way_out(value: Any) -> None:
    with pytest.raises(gf.KernelArgumentError, match=r"a NumPy scalar of exactly 4 bytes .*signature="):
        sizes_only(4, value)


def test_python_number_is_refused_also_where_a_pointer_would_fit() -> None:
    for value in (5, 5.0, True):
        with pytest.raises(gf.KernelArgumentError, match=r"exactly 8 bytes, or a device buffer"):
            sizes_only(8, value)


# Layout


@given(st.permutations(["int8", "int16", "int32", "int64", "float64", "pointer", "bytes[12]"]))
def test_every_order_puts_each_value_at_its_own_offset(names: list[str]) -> None:
    values: dict[str, Any] = {
        "int8": -8,
        "int16": -16,
        "int32": -32,
        "int64": -64,
        "float64": 0.5,
        "pointer": 1234,
        "bytes[12]": b"twelve bytes",
    }
    types = parse(names)
    layout = layout_of(types)

    packed = pack(names, *(values[name] for name in names))

    for offset, each in zip(layout.offsets, types, strict=True):
        alone = pack(str(each), values[str(each)])
        assert packed[offset : offset + each.size] == alone
    assert len(packed) == layout.offsets[-1] + types[-1].size, "no padding at the end"


def test_both_forms_point_at_the_same_values() -> None:
    layout = layout_of(parse("int8, float64, int32"))
    frame = Frame(layout)
    layout.pack(frame.memory, QUEUE, (-1, 0.5, 7))
    parameters, _ = frame.form("pointers")
    _, extra = frame.form("packed")

    addresses = (ctypes.c_uint64 * 3).from_address(parameters or 0)
    keys = (ctypes.c_uint64 * 5).from_address(extra)

    assert ctypes.c_int8.from_address(addresses[0]).value == -1
    assert ctypes.c_double.from_address(addresses[1]).value == 0.5
    assert ctypes.c_int32.from_address(addresses[2]).value == 7
    assert (keys[0], keys[2], keys[4]) == (1, 2, 0), "CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END"
    assert ctypes.c_size_t.from_address(keys[3]).value == 20
    assert ctypes.string_at(keys[1], 20) == bytes(frame.memory[:20])


def test_driver_and_signature_must_agree() -> None:
    table = [(0, 4), (8, 8)]

    with pytest.raises(gf.KernelArgumentError, match=r"takes 2 parameters .* its signature names 1"):
        Layout("k", table, parse("int32"), None)
    with pytest.raises(
        gf.KernelArgumentError, match=r"parameter 1 of kernel 'k' has 8 bytes .* int32, of 4 bytes"
    ):
        Layout("k", table, parse("int32, int32"), None)
    with pytest.raises(gf.ImageError, match=r"parameter 0 .* by its PTX it is u64, of 8 bytes"):
        Layout("k", table, None, read_ptx(".entry k(.param .u64 a, .param .u64 b)")["k"])


def test_signature_goes_before_what_the_ptx_says() -> None:
    layout = Layout("k", [(0, 4)], parse("float32"), read_ptx(".entry k(.param .b32 a)")["k"])
    frame = Frame(layout)

    layout.pack(frame.memory, QUEUE, (0.5,))

    assert bytes(frame.memory[:4]) == struct.pack("<f", 0.5)
