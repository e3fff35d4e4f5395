"""Results rounded once, to nearest or in a given direction.

NumPy rounds every operation to nearest. A result whose exact value needs more than one operation,
or another direction, is computed here as an unevaluated sum of two doubles, value plus error, and
rounded from that: the classical error-free transformations (Knuth's TwoSum, Dekker's TwoProduct,
Boldo and Melquiond's sum of three with round to odd). Lanes whose exponents are too extreme for
those are few, and go through Python's integers (exact.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpufleet.virtual.interpreter import exact
from gpufleet.virtual.interpreter.values import Array

_FLOAT_MIN = np.float32(2.0**-126)
_TIE = np.uint64(1 << 28)
_BELOW_FLOAT = np.uint64((1 << 29) - 1)
_SPLITTER = np.float64(2**27 + 1)
_SAFE_LOW, _SAFE_HIGH = 2.0**-900, 2.0**900


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b as the rounded sum and its exact error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def fma_f32(a: Array, b: Array, c: Array, mode: str) -> Array:
    """Return a * b + c of float32, rounded once. A product of two float32 is exact as a double."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    if mode == "rn":
        return _nearest_f32_of_sum(product, addend)
    return _directed_f32_of_sum(product, addend, mode)


def add_f32(a: Array, b: Array, mode: str) -> Array:
    """Return a + b of float32, rounded in a direction."""
    return _directed_f32_of_sum(a.astype(np.float64), b.astype(np.float64), mode)


def mul_f32(a: Array, b: Array, mode: str) -> Array:
    """Return a * b of float32, rounded in a direction."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return rounded(product, np.zeros(1), mode, np.float32)


def div_f32(a: Array, b: Array, mode: str) -> Array:
    """Return a / b of float32: the nearest quotient, moved if it lies on the wrong side."""
    quotient = a / b
    back = quotient.astype(np.float64) * b.astype(np.float64)
    missing = a.astype(np.float64) - back
    side = np.where(np.isfinite(quotient), np.sign(missing) * np.sign(b), 0.0)
    overflow = np.isinf(quotient) & np.isfinite(a) & (b != 0)
    side = np.where(overflow, -np.sign(quotient), side)
    return moved(quotient, side, mode)


def sqrt_f32(a: Array, mode: str) -> Array:
    """Return the square root of float32, rounded in a direction."""
    root = np.sqrt(a)
    back = root.astype(np.float64) * root.astype(np.float64)
    side = np.where(np.isfinite(root), np.sign(a.astype(np.float64) - back), 0.0)
    return moved(root, side, mode)


def rounded(value: Array, error: Array, mode: str, dtype: type[np.floating[Any]]) -> Array:
    """Round value + error (doubles, the error at most half a unit of the value) to a smaller type."""
    nearest = to_odd(value, error).astype(dtype)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    side = np.where(value == back, np.sign(error), np.sign(value - back))
    side = np.where(np.isinf(nearest) & np.isfinite(value), -np.sign(value), side)
    return moved(nearest, np.nan_to_num(side), mode)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float64, rounded once to nearest."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _two_product(a, b)
    total, rest = two_sum(c, low)
    head, tail = two_sum(high, total)
    result = head + to_odd(*two_sum(rest, tail))
    plain = high + c
    # An exact zero keeps the sign of the plain sum; the pieces may have lost it.
    result = np.where(result == 0, plain, result)
    unsafe = _is_extreme(high) | _is_extreme(c) | (np.abs(a) > _SAFE_HIGH) | (np.abs(b) > _SAFE_HIGH)
    unsafe |= (high == 0) & (a != 0) & (b != 0)
    if unsafe.any():
        result[unsafe] = _extreme_fma(a[unsafe], b[unsafe], c[unsafe])
    return result


def to_odd(value: Array, error: Array) -> Array:
    """Return value + error such that a second rounding cannot go wrong: inexact sums get an odd last bit."""
    bits = value.view(np.int64)
    wrong = (error != 0) & (bits & 1 == 0) & np.isfinite(value)
    step = np.where((error > 0) == (value > 0), 1, -1)
    return np.where(wrong, bits + step, bits).view(np.float64)


def moved(nearest: Array, side: Array, mode: str) -> Array:
    """Move results by one unit where the exact value lies on the given side (+1 above, -1 below) of them."""
    down, up = nearest.dtype.type(-np.inf), nearest.dtype.type(np.inf)
    if mode == "rn":
        return nearest
    if mode == "rm":
        return np.where(side < 0, np.nextafter(nearest, down), nearest)
    if mode == "rp":
        return np.where(side > 0, np.nextafter(nearest, up), nearest)
    inward = (np.signbit(nearest) & (side > 0)) | (~np.signbit(nearest) & (side < 0))
    return np.where(inward, np.nextafter(nearest, nearest.dtype.type(0)), nearest)


def _extreme_fma(a: Array, b: Array, c: Array) -> Array:
    result = a * b + c
    finite = np.isfinite(a) & np.isfinite(b)
    # The product may overflow where the infinite addend decides.
    result = np.where(finite & np.isinf(c), c, result)
    for i in np.flatnonzero(finite & np.isfinite(c)):
        result[i] = exact.fma(float(a[i]), float(b[i]), float(c[i]), "rn")
    return result


def _is_extreme(value: Array) -> Array:
    size = np.abs(value)
    return ~((size < _SAFE_HIGH) & ((size > _SAFE_LOW) | (size == 0)))


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _split(value: Array) -> tuple[Array, Array]:
    scaled = value * _SPLITTER
    high = scaled - (scaled - value)
    return high, value - high


def _nearest_f32_of_sum(a: Array, b: Array) -> Array:
    """Round a sum of two doubles to float32; rounding to a double first is wrong only at ties of float32.

    Those are doubles whose last 29 bits are 1 and zeros, and anything among float32's subnormals.
    """
    total = a + b
    result = total.astype(np.float32)
    candidates = (total.view(np.uint64) & _BELOW_FLOAT) == _TIE
    smallest = np.minimum.reduce(np.abs(result))
    if smallest < _FLOAT_MIN:
        candidates |= (np.abs(total) < _FLOAT_MIN) & (total != 0)
    if candidates.any():
        at = np.flatnonzero(candidates)
        value, error = two_sum(*(x if x.size == 1 else x[at] for x in (a, b)))
        if error.any():
            result[at] = to_odd(value, error).astype(np.float32)
    return result


def _directed_f32_of_sum(a: Array, b: Array, mode: str) -> Array:
    value, error = two_sum(a, b)
    result = rounded(value, error, mode, np.float32)
    if mode == "rm":
        # An exact zero out of different signs is negative when rounding down (IEEE 754, 6.3).
        zero = (value == 0) & (error == 0) & (np.signbit(a) | np.signbit(b))
        result = np.where(zero, np.float32(-0.0), result)
    return result
