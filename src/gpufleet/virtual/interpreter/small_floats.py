"""Conversions to and from floats of 8 bits and tf32, and `cvt.pack` (PTX ISA 9.7.9.21 and 22)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpufleet.virtual.interpreter import halves
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.ptx.operations import Operation

BYTES = frozenset({"e4m3", "e5m2"})
_MANTISSA = {"e4m3": 3, "e5m2": 2}
_SMALLEST_EXPONENT = {"e4m3": -6, "e5m2": -14}
_LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B}
_NAN = 0x7F
"""The one that conversions give, in both formats."""


def _decoded(format: str) -> Array:
    """Return the value of every byte."""
    bits = np.arange(256)
    mantissa, smallest = _MANTISSA[format], _SMALLEST_EXPONENT[format]
    fraction = bits & ((1 << mantissa) - 1)
    exponent = (bits & 0x7F) >> mantissa
    normal = np.ldexp(1.0 + fraction / (1 << mantissa), exponent + smallest - 1)
    value = np.where(exponent == 0, np.ldexp(fraction / (1 << mantissa), smallest), normal)
    if format == "e5m2":
        value = np.where((bits & 0x7F) == 0x7C, np.inf, value)
    value = np.where((bits & 0x7F) > (0x7E if format == "e4m3" else 0x7C), np.nan, value)
    return np.where(bits & 0x80, -value, value).astype(np.float64)


_VALUES = {format: _decoded(format) for format in BYTES}


def to_bytes(operation: Operation) -> Compute:
    """Return two floats as bytes, the first one in the high byte; what is too large becomes the largest."""
    target, source = operation.types
    format = target.removesuffix("x2")
    relu = "relu" in operation

    def narrow(value: Array) -> Array:
        magnitude = np.abs(value)
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, _SMALLEST_EXPONENT[format])
        unit = np.ldexp(1.0, exponent - _MANTISSA[format])
        with np.errstate(invalid="ignore"):
            nearest = np.rint(magnitude / unit) * unit
        values = _VALUES[format][: _LARGEST[format] + 1]
        code = np.minimum(np.searchsorted(values, np.nan_to_num(nearest, posinf=np.inf)), _LARGEST[format])
        code = np.where(np.signbit(value), 0 if relu else code | 0x80, code)
        return np.where(np.isnan(value), _NAN, code).astype(np.uint16)

    if source == "f32":
        eight = np.uint16(8)
        return lambda a, b: (narrow(a.astype(np.float64)) << eight) | narrow(b.astype(np.float64))

    def from_halves(a: Array) -> Array:
        low, high = (narrow(halves.widen(half, "f16").astype(np.float64)) for half in _split(a))
        return (high << np.uint16(8)) | low

    return from_halves


def from_bytes(operation: Operation) -> Compute:
    """Return two bytes as halves, which hold every value of theirs."""
    format = operation.types[1].removesuffix("x2")
    table = _VALUES[format].astype(np.float16).view(np.uint16)
    table = np.where(np.isnan(_VALUES[format]), halves.CANONICAL_NAN, table)
    if "relu" in operation:
        table = np.where((np.arange(256) & 0x80 != 0) & ~np.isnan(_VALUES[format]), np.uint16(0), table)
    wide = table.astype(np.uint32)

    def convert(a: Array) -> Array:
        return (wide[a >> np.uint16(8)] << np.uint32(16)) | wide[a & np.uint16(0xFF)]

    return convert


def to_tf32(operation: Operation) -> Compute:
    """Return a single precision number rounded to ten bits of mantissa."""
    mode, relu = operation.get("rounding"), "relu" in operation
    kept = np.uint32(0xFFFFE000)

    def convert(a: Array) -> Array:
        bits = a.view(np.uint32)
        if mode == "rna":
            rounded = bits + np.uint32(0x1000)
        elif mode == "rn":
            rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        else:
            rounded = bits
        result = np.where(np.isinf(a), bits, rounded & kept)
        if relu:
            result = np.where(np.signbit(a), np.uint32(0), result)
        # NaNs as an H200 has them: .rna only drops bits, also those that make a NaN.
        nan = bits & kept if mode == "rna" else np.uint32(0x7FFFE000)
        return np.where(np.isnan(a), nan, result)

    return convert


def pack(operation: Operation) -> Compute:
    """Return a and b saturated to a small type, side by side, above them what c has."""
    signed, size = operation.types[0][0] == "s", int(operation.types[0][1:])
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if signed else (0, (1 << size) - 1)
    mask = np.uint32((1 << size) - 1)

    def saturated(value: Array) -> Array:
        return np.clip(value, low, high).astype(np.int32).view(np.uint32) & mask

    def compute(a: Array, b: Array, c: Array | None = None) -> Array:
        both = (saturated(a) << np.uint32(size)) | saturated(b)
        return both if c is None else both | (c << np.uint32(2 * size))

    return compute


def _split(pair: Array) -> tuple[Array, Array]:
    return pair.astype(np.uint16), (pair >> np.uint32(16)).astype(np.uint16)


def special(operation: Operation) -> Callable[[Operation], Compute] | None:
    """Return what makes a conversion that is none between two ordinary numbers."""
    target, source, *_ = operation.types
    if "pack" in operation:
        return pack
    if target == "tf32":
        return to_tf32
    if target.removesuffix("x2") in BYTES:
        return to_bytes
    if source.removesuffix("x2") in BYTES:
        return from_bytes
    return None
