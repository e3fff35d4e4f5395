"""What CUDA C++ means, in plain Python and NumPy; written without a look at the interpreter."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def unsigned(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def divide(a: int, b: int) -> int:
    """Division of C: towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def remainder(a: int, b: int) -> int:
    return a - b * divide(a, b)


def f32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def f32_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def f32_from_bits(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def f64_from_bits(bits: int) -> float:
    return float(np.array([bits], np.uint64).view(np.float64)[0])


def round_fraction(value: Fraction, mode: str, precision: int, smallest: int, largest: int) -> float:
    """Round an exact value: `precision` bits, last bit not below 2**smallest, exponent not above largest."""
    if value == 0:
        return 0.0
    negative, magnitude = value < 0, abs(value)
    unit = smallest
    while magnitude / Fraction(2) ** unit >= 2**precision:
        unit += max(1, (int(magnitude / Fraction(2) ** unit)).bit_length() - precision)
    scaled = magnitude / Fraction(2) ** unit
    whole = math.floor(scaled)
    rest = scaled - whole
    away = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    result = Fraction(whole + away) * Fraction(2) ** unit
    if result >= Fraction(2) ** largest:
        inward = mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
        biggest = float(Fraction(2) ** largest - Fraction(2) ** (largest - precision))
        return math.copysign(biggest if inward else math.inf, -1 if negative else 1)
    return -float(result) if negative else float(result)


def round_f32(value: Fraction, mode: str = "rn") -> float:
    return round_fraction(value, mode, 24, -149, 128)


def round_f64(value: Fraction, mode: str = "rn") -> float:
    return round_fraction(value, mode, 53, -1074, 1024)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Element by element, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    flat = [
        round_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a.flat, b.flat, c.flat, strict=True)
    ]
    return np.array(flat, np.float32).reshape(a.shape)
