"""Conversions between types (PTX ISA 9.7.9.21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpufleet.virtual.interpreter import halves, rounding, small_floats
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.floats import canonical, flush, saturate
from gpufleet.virtual.interpreter.values import DTYPES, Array
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import is_float

_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def cvt(operation: Operation) -> Compute:
    """Return a converted from the second type to the first."""
    make = small_floats.special(operation)
    if make is not None:
        return make(operation)
    target, source = operation.types
    if target in halves.HALF_TYPES:
        return _to_half(operation)
    if "relu" in operation:
        raise unsupported(operation.text)
    if source in halves.HALF_TYPES:
        return _from_half(operation)
    if is_float(target):
        return _float_to_float(operation) if is_float(source) else _integer_to_float(operation)
    return _float_to_integer(operation) if is_float(source) else _integer_to_integer(operation)


def _integer_to_integer(operation: Operation) -> Compute:
    target = DTYPES[operation.types[0]]
    if "sat" not in operation:
        return lambda a: a.astype(target)
    low, high = _common_limits(target, DTYPES[operation.types[1]])
    return lambda a: np.clip(a, low, high).astype(target)


def _common_limits(target: np.dtype[Any], source: np.dtype[Any]) -> tuple[Any, Any]:
    """Limits of the target, as numbers of the source type."""
    wanted, given = np.iinfo(target), np.iinfo(source)
    return source.type(max(wanted.min, given.min)), source.type(min(wanted.max, given.max))


def _float_to_integer(operation: Operation) -> Compute:
    """Values beyond the target's range become its limits (PTX ISA 9.7.9.21).

    NaN becomes 0, or the highest bit alone where the source is f64 or the target has 64 bits (H200).
    """
    target = DTYPES[operation.types[0]]
    limits = np.iinfo(target)
    if "integral" not in operation:
        raise unsupported(f"{operation.text} without a rounding to integers")
    to_integral = _INTEGRAL[operation.get("integral")]
    ftz = "ftz" in operation
    has_64_bits = operation.types[1] == "f64" or target.itemsize == 8
    top_bit = limits.min or 1 << (limits.bits - 1)
    from_nan = target.type(top_bit if has_64_bits else 0)
    # The limits as doubles: the upper one of 64 bits rounds up to a power of two, past the range.
    low, high = float(limits.min), float(limits.max)

    def convert(a: Array) -> Array:
        whole = to_integral(flush(a) if ftz else a).astype(np.float64)
        inside = (whole >= low) & (whole <= high) if limits.max < 1 << 53 else (whole >= low) & (whole < high)
        result = np.where(inside, whole, 0.0).astype(target)
        if inside.all():
            return result
        result = np.where(whole < low, target.type(limits.min), result)
        result = np.where(np.isnan(whole), from_nan, result)
        return np.where((whole >= high) & ~inside, target.type(limits.max), result)

    return convert


def _integer_to_float(operation: Operation) -> Compute:
    target, source = operation.types
    mode = operation.get("rounding", "rn")
    dtype = DTYPES[target]
    narrow = DTYPES[source].itemsize <= 4
    if mode == "rn" or (narrow and target == "f64"):
        convert: Compute = lambda a: a.astype(dtype)  # noqa: E731
    elif narrow:
        convert = lambda a: rounding.rounded(a.astype(np.float64), np.zeros(1), mode, np.float32)  # noqa: E731
    else:
        convert = _directed_from_64(target, mode)
    return (lambda a: saturate(convert(a))) if "sat" in operation else convert


def _directed_from_64(target: str, mode: str) -> Compute:
    def convert(a: Array) -> Array:
        value, error = _split(a)
        if target == "f32":
            return rounding.rounded(value, error, mode, np.float32)
        return rounding.moved(value, np.sign(error), mode)

    return convert


def _split(value: Array) -> tuple[Array, Array]:
    """Return 64-bit integers as two doubles whose sum they are."""
    high = (value >> value.dtype.type(32)).astype(np.float64) * 2.0**32
    low = (value & value.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return rounding.two_sum(high, low)


def _float_to_float(operation: Operation) -> Compute:
    target, source = operation.types
    source = "f32" if source in halves.HALF_TYPES else source
    steps: list[Callable[[Array], Array]] = []
    if "ftz" in operation and source == "f32":
        steps.append(lambda a: canonical(flush(a).copy()))
    if "integral" in operation:
        steps.append(_INTEGRAL[operation.get("integral")])
    if target == "f64" and source == "f32":
        steps.append(lambda a: a.astype(np.float64))
    if target == "f32" and source == "f64":
        mode = operation.get("rounding", "rn")
        steps.append(
            lambda a: (
                rounding.rounded(a, np.zeros(1), mode, np.float32) if mode != "rn" else a.astype(np.float32)
            )
        )
        if "ftz" in operation:
            steps.append(flush)
    if "sat" in operation:
        steps.append(saturate)
    if target == "f32" and source == "f32":
        # A copy: the result may be the source's own array, which must not be written to.
        steps.append(lambda a: canonical(a.copy()))

    def convert(a: Array) -> Array:
        for step in steps:
            a = step(a)
        return a

    return convert


# ------------------------------------------------------------------------------- 16-bit floats


def _to_half(operation: Operation) -> Compute:
    """Round once to 16 bits; of two sources the first becomes the high half."""
    target, source = operation.types
    base = target.removesuffix("x2")
    mode = operation.get("rounding", "rn")
    integral = _INTEGRAL.get(operation.get("integral"), np.positive)
    ftz, sat, relu = ("ftz" in operation and source == "f32"), "sat" in operation, "relu" in operation

    def convert(a: Array) -> Array:
        if source in halves.HALF_TYPES:
            a = halves.widen(a, source)
        elif not is_float(source) and a.dtype.itemsize == 8:
            if sat:
                return halves.narrow(saturate(a.astype(np.float64)), None, base, mode)
            return halves.narrow(*_split(a), base, mode)
        value = integral(flush(a) if ftz else a).astype(np.float64)
        if sat:
            value = saturate(value)
        bits = halves.narrow(value, None, base, mode)
        if relu:
            bits = np.where(halves.is_negative(bits, base), np.uint16(0), bits)
        if source == "f64":
            bits = np.where(np.isnan(a), _payload(a, base), bits)
        return bits

    if not target.endswith("x2"):
        return convert
    high = np.uint32(16)
    return lambda a, b: (convert(a).astype(np.uint32) << high) | convert(b)


def _payload(value: Array, base: str) -> Array:
    """Return NaNs of double precision as halves: their sign and the first bits of what they carry (H200)."""
    bits = value.view(np.uint64)
    mantissa, exponent = (10, 0x7C00) if base == "f16" else (7, 0x7F80)
    carried = (bits >> np.uint64(52 - mantissa)) & np.uint64((1 << mantissa) - 1)
    quiet = np.uint16(exponent | 1 << (mantissa - 1))
    return carried.astype(np.uint16) | quiet | ((bits >> np.uint64(63)) << np.uint64(15)).astype(np.uint16)


def _from_half(operation: Operation) -> Compute:
    """Widen, which is exact, then convert from single precision."""
    target, source = operation.types
    convert: Callable[[Array], Array]
    if target == "f32":
        convert = canonical if source == "f16" else np.positive
    elif is_float(target):
        convert = _float_to_float(operation)
    else:
        convert = _float_to_integer(operation)
    if "sat" in operation and target == "f32":
        return lambda a: saturate(convert(halves.widen(a, source)))
    return lambda a: convert(halves.widen(a, source))
