"""Double arithmetic with Python's integers: exact, rounded once in any direction, and slow.

For the few lanes whose exponents leave the range of error-free transformations, and for directed
rounding of doubles, which compilers do not emit by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from gpufleet.virtual.interpreter.values import Array

INVALID = -math.nan
"""What an invalid operation gives: a NaN with its sign set, as x86 and GPUs do (H200)."""
_SMALLEST = -1074
"""Exponent of the last bit of a subnormal double."""


def add(a: float, b: float, mode: str) -> float:
    """Return a + b."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    return _finish(Fraction(a) + Fraction(b), mode, _sum_sign(a, b, mode))


def mul(a: float, b: float, mode: str) -> float:
    """Return a * b."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return _finish(Fraction(a) * Fraction(b), mode, math.copysign(1, a) * math.copysign(1, b))


def fma(a: float, b: float, c: float, mode: str) -> float:
    """Return a * b + c."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    product_sign = math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))
    product = Fraction(a) * Fraction(b)
    sign = (
        _sum_sign(product_sign, c, mode)
        if product == 0
        else _sum_sign(math.copysign(1, product_sign), c, mode)
    )
    return _finish(product + Fraction(c), mode, sign)


def sub(a: float, b: float, mode: str) -> float:
    """Return a - b."""
    return b if math.isnan(b) and not math.isnan(a) else add(a, -b, mode)


def div(a: float, b: float, mode: str) -> float:
    """Return a / b."""
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b):
        return a if math.isnan(a) else b
    if (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return INVALID
    if math.isinf(a) or b == 0:
        return math.copysign(math.inf, sign)
    if math.isinf(b):
        return math.copysign(0.0, sign)
    return _finish(Fraction(a) / Fraction(b), mode, sign)


def sqrt(a: float, mode: str) -> float:
    """Return the square root of a."""
    if math.isnan(a):
        return a
    if a < 0:
        return INVALID
    if a == 0 or math.isinf(a):
        return a
    # An integer root of 120 bits and more decides every rounding, with a last bit for the remainder.
    mantissa, exponent = math.frexp(a)
    scaled, shift = int(math.ldexp(mantissa, 53)), exponent - 53
    up = 200 + (shift & 1)
    root = math.isqrt(scaled << up)
    inexact = root * root != scaled << up
    value = Fraction(2 * root + int(inexact), 2) * Fraction(2) ** ((shift - up) // 2)
    return _finish(value, mode, 1.0)


def over_lanes(function: Callable[..., float], mode: str) -> Callable[..., Array]:
    """Make a computation on arrays out of one on numbers."""

    def compute(*sources: Array) -> Array:
        lanes = zip(*(source.tolist() for source in np.broadcast_arrays(*sources)), strict=True)
        return np.array([function(*lane, mode) for lane in lanes], np.float64)

    return compute


def _sum_sign(a: float, b: float, mode: str) -> float:
    """Sign of a sum that is exactly zero: the common one, else plus, or minus when rounding down."""
    if math.copysign(1, a) == math.copysign(1, b):
        return math.copysign(1, a)
    return -1.0 if mode == "rm" else 1.0


def _finish(value: Fraction, mode: str, zero_sign: float) -> float:
    if value == 0:
        return math.copysign(0.0, zero_sign)
    negative = value < 0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    unit = max(exponent - 53, _SMALLEST)
    scaled = magnitude / Fraction(2) ** unit
    if scaled >= 1 << 53:
        unit += 1
        scaled /= 2
    whole, rest = divmod(scaled, 1)
    if _rounds_up(int(whole), rest, negative, mode):
        whole += 1
    try:
        result = math.ldexp(float(whole), unit)
    except OverflowError:
        result = math.inf
    if math.isinf(result) and (
        mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
    ):
        result = math.ldexp(float((1 << 53) - 1), 971)
    return -result if negative else result


def _rounds_up(whole: int, rest: Fraction, negative: bool, mode: str) -> bool:
    if mode == "rn":
        return rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    if mode == "rm":
        return negative and rest > 0
    if mode == "rp":
        return not negative and rest > 0
    return False
