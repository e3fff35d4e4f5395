"""Conversions to and from floats of 8 bits and tf32, and `cvt.pack` (PTX ISA 9.7.9.21 and 22)."""

from __future__ import annotations

from collections.abc import Sequence

from gpufleet.virtual.jit.arithmetic import Emitter
from gpufleet.virtual.jit.text import Code, constant, float_constant, vector
from gpufleet.virtual.ptx.operations import Operation

_MANTISSA = {"e4m3": 3, "e5m2": 2}
_SMALLEST_EXPONENT = {"e4m3": -6, "e5m2": -14}
_LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B}
_NAN = 0x7F


def special(op: Operation) -> Emitter | None:
    """Return what emits a conversion that is none between two ordinary numbers."""
    target, source, *_ = op.types
    if "pack" in op:
        return _pack
    if target == "tf32":
        return _to_tf32
    if target.removesuffix("x2") in _MANTISSA:
        return _to_bytes
    return _from_bytes if source.removesuffix("x2") in _MANTISSA else None


def _to_bytes(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Two floats to two bytes, the first to the high one; what is too large becomes the largest."""
    format = op.types[0].removesuffix("x2")
    i16, i32, d = vector("i16", n), vector("i32", n), vector("double", n)
    if op.types[1] == "f16x2":
        bits = vector("i32", n)
        high = c.let(f"lshr {bits} {a[0]}, {constant('i32', 16, n)}")
        parts = [
            c.let(f"bitcast {i16} {c.let(f'trunc {i32} {x} to {i16}')} to {vector('half', n)}")
            for x in (high, a[0])
        ]
        wide = [c.let(f"fpext {vector('half', n)} {x} to {d}") for x in parts]
    else:
        wide = [c.let(f"fpext {vector('float', n)} {x} to {d}") for x in a]
    codes = [_narrow(c, format, n, x, "relu" in op) for x in wide]
    upper = c.let(f"shl {i16} {codes[0]}, {constant('i16', 8, n)}")
    return c.let(f"or {i16} {upper}, {codes[1]}")


def _narrow(c: Code, format: str, n: int, value: str, relu: bool) -> str:
    """One double to the bits of a format, as i16: rounded by adding and taking away a power of two."""
    mantissa, smallest = _MANTISSA[format], _SMALLEST_EXPONENT[format]
    d, i, i1, i16 = vector("double", n), vector("i64", n), vector("i1", n), vector("i16", n)

    def const(number: int) -> str:
        return constant("i64", number, n)

    magnitude = c.intrinsic("fabs", d, (d, value))
    bits = c.let(f"bitcast {d} {magnitude} to {i}")
    exponent = c.let(f"lshr {i} {bits}, {const(52)}")
    exponent = c.intrinsic("umax", i, (i, exponent), (i, const(1023 + smallest)))
    exponent = c.intrinsic("umin", i, (i, exponent), (i, const(1023 + 20)))
    power = c.let(f"shl {i} {c.let(f'add {i} {exponent}, {const(52 - mantissa)}')}, {const(52)}")
    anchor = c.let(f"bitcast {i} {c.let(f'or {i} {power}, {const(1 << 51)}')} to {d}")
    nearest = c.let(f"fsub {d} {c.let(f'fadd {d} {magnitude}, {anchor}')}, {anchor}")
    rounded = c.let(f"bitcast {d} {nearest} to {i}")
    top = c.let(f"lshr {i} {rounded}, {const(52 - mantissa)}")
    normal = c.let(f"sub {i} {top}, {const((1023 + smallest - 1) << mantissa)}")
    scaled = c.let(f"fmul {d} {nearest}, {float_constant('double', 2.0 ** (mantissa - smallest), n)}")
    subnormal = c.intrinsic("fptoui.sat", i, (d, scaled))
    small = c.let(f"fcmp olt {d} {nearest}, {float_constant('double', 2.0**smallest, n)}")
    code = c.let(f"select {i1} {small}, {i} {subnormal}, {i} {normal}")
    code = c.intrinsic("umin", i, (i, code), (i, const(_LARGEST[format])))
    large = c.let(f"fcmp oge {d} {magnitude}, {float_constant('double', 2.0**17, n)}")
    code = c.let(f"select {i1} {large}, {i} {const(_LARGEST[format])}, {i} {code}")
    negative = c.let(f"icmp slt {i} {c.let(f'bitcast {d} {value} to {i}')}, {const(0)}")
    turned = const(0) if relu else c.let(f"or {i} {code}, {const(0x80)}")
    code = c.let(f"select {i1} {negative}, {i} {turned}, {i} {code}")
    nan = c.let(f"fcmp uno {d} {value}, {value}")
    code = c.let(f"select {i1} {nan}, {i} {const(_NAN)}, {i} {code}")
    return c.let(f"trunc {i} {code} to {i16}")


def _from_bytes(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Two bytes to two halves: those of e5m2 are the upper half of a half."""
    format = op.types[1].removesuffix("x2")
    i16, i32, half, i1 = vector("i16", n), vector("i32", n), vector("half", n), vector("i1", n)

    def const(number: int) -> str:
        return constant("i16", number, n)

    results = []
    for shift in (8, 0):
        byte = c.let(f"lshr {i16} {a[0]}, {const(shift)}") if shift else a[0]
        magnitude = c.let(f"and {i16} {byte}, {const(0x7F)}")
        if format == "e5m2":
            bits = c.let(f"shl {i16} {magnitude}, {const(8)}")
        else:
            small = c.let(f"bitcast {i16} {c.let(f'shl {i16} {magnitude}, {const(7)}')} to {half}")
            value = c.let(f"fmul {half} {small}, {constant('half', 0x5C00, n)}")
            bits = c.let(f"bitcast {half} {value} to {i16}")
        sign = c.let(f"shl {i16} {c.let(f'and {i16} {byte}, {const(0x80)}')}, {const(8)}")
        if "relu" in op:
            positive = c.let(f"icmp eq {i16} {sign}, {const(0)}")
            bits = c.let(f"select {i1} {positive}, {i16} {bits}, {i16} {const(0)}")
        else:
            bits = c.let(f"or {i16} {bits}, {sign}")
        nan = c.let(f"icmp ugt {i16} {magnitude}, {const(0x7C if format == 'e5m2' else 0x7E)}")
        bits = c.let(f"select {i1} {nan}, {i16} {const(0x7FFF)}, {i16} {bits}")
        results.append(c.let(f"zext {i16} {bits} to {i32}"))
    upper = c.let(f"shl {i32} {results[0]}, {constant('i32', 16, n)}")
    return c.let(f"or {i32} {upper}, {results[1]}")


def _to_tf32(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Round to ten bits of mantissa."""
    f, i, i1 = vector("float", n), vector("i32", n), vector("i1", n)

    def const(number: int) -> str:
        return constant("i32", number, n)

    bits = c.let(f"bitcast {f} {a[0]} to {i}")
    mode = op.get("rounding")
    rounded = bits
    if mode == "rna":
        rounded = c.let(f"add {i} {bits}, {const(0x1000)}")
    elif mode == "rn":
        odd = c.let(f"and {i} {c.let(f'lshr {i} {bits}, {const(13)}')}, {const(1)}")
        rounded = c.let(f"add {i} {c.let(f'add {i} {bits}, {const(0xFFF)}')}, {odd}")
    result = c.let(f"and {i} {rounded}, {const(0xFFFFE000)}")
    magnitude = c.let(f"and {i} {bits}, {const(0x7FFFFFFF)}")
    infinite = c.let(f"icmp eq {i} {magnitude}, {const(0x7F800000)}")
    result = c.let(f"select {i1} {infinite}, {i} {bits}, {i} {result}")
    if "relu" in op:
        negative = c.let(f"icmp slt {i} {bits}, {const(0)}")
        result = c.let(f"select {i1} {negative}, {i} {const(0)}, {i} {result}")
    nan = c.let(f"icmp ugt {i} {magnitude}, {const(0x7F800000)}")
    # NaNs as an H200 has them: .rna only drops bits, also those that make a NaN.
    dropped = c.let(f"and {i} {bits}, {const(0xFFFFE000)}") if mode == "rna" else const(0x7FFFE000)
    return c.let(f"select {i1} {nan}, {i} {dropped}, {i} {result}")


def _pack(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """a and b saturated to a small type, side by side, above them what c has."""
    signed, size = op.types[0][0] == "s", int(op.types[0][1:])
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if signed else (0, (1 << size) - 1)
    i = vector("i32", n)
    parts = []
    for value in a[:2]:
        value = c.intrinsic("smax", i, (i, value), (i, constant("i32", low, n)))
        value = c.intrinsic("smin", i, (i, value), (i, constant("i32", high, n)))
        parts.append(c.let(f"and {i} {value}, {constant('i32', (1 << size) - 1, n)}"))
    upper = c.let(f"shl {i} {parts[0]}, {constant('i32', size, n)}")
    both = c.let(f"or {i} {upper}, {parts[1]}")
    if len(a) < 3:
        return both
    rest = c.let(f"shl {i} {a[2]}, {constant('i32', 2 * size, n)}")
    return c.let(f"or {i} {both}, {rest}")
