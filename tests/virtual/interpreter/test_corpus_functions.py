"""The mathematical functions that the compiler inlines, against Python's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from machine import TARGETS, Device

targets = pytest.mark.parametrize("target", TARGETS)
VALUES = [0.001, 0.1, 0.5, 0.999, 1.0, 1.5, 2.0, 3.0, 3.14159, 7.25, 10.5, 20.0, 100.5]


@targets
def test_single_precision_functions(target: int) -> None:
    device = Device.corpus("fmath", target)
    x = np.array([*VALUES, 2e5], np.float32)  # the last needs the long reduction of sin and cos
    out = device.memory.alloc(4 * len(x))
    device.launch("fmath", (1, 1, 1), (32, 1, 1), device.memory.upload(x), out, len(x))
    result = device.memory.download(out, np.float32, len(x))
    for value, found in zip(x.tolist(), result.tolist(), strict=True):
        expected = sum(fmath_of(value))
        if math.isinf(found) or expected > 3e38:
            assert found == math.inf
        else:
            assert found == pytest.approx(expected, rel=3e-5, abs=2e-4)


def fmath_of(a: float) -> list[float]:
    bits = int(np.array([a], np.float32).view(np.uint32)[0])
    flipped = float(np.array([bits ^ 1], np.uint32).view(np.float32)[0])
    exponential = math.exp(a) if a < 80 else math.inf
    power = 2.0**a if a < 127 else math.inf
    return [
        *(2 * exponential, 2 * math.sin(a), math.cos(a), a**1.7, 2 * math.log(a), math.sqrt(a), 1 / a),
        *(math.tanh(a), math.erf(a), math.floor(a), math.fmod(a, 3), a * a + 1, 1 / math.sqrt(a)),
        *(math.atan2(a, 2), min(a, 1), max(a, 2), a, float(np.rint(a)), math.trunc(a), math.ceil(a)),
        *(a / 3, -a, power, math.log2(a), 0.0, flipped, min(a, 1)),
        *(int(a), int(a), int(a), float(np.rint(a))),
    ]


@targets
def test_double_precision_functions(target: int) -> None:
    device = Device.corpus("dmath", target)
    x = np.array([*VALUES, 1e10])
    out = device.memory.alloc(8 * len(x))
    device.launch("dmath", (1, 1, 1), (32, 1, 1), device.memory.upload(x), out, len(x))
    result = device.memory.download(out, np.float64, len(x))
    for value, found in zip(x.tolist(), result.tolist(), strict=True):
        expected: Any = sum(dmath_of(value))
        if math.isinf(expected):
            assert found == math.inf
        else:
            assert found == pytest.approx(expected, rel=1e-14)


def dmath_of(a: float) -> list[float]:
    return [
        *(math.exp(a) if a < 700 else math.inf, math.sin(a), math.cos(a), a**1.7, math.log(a)),
        *(math.sqrt(a), 1 / a, math.tanh(a), math.erf(a), math.floor(a), math.fmod(a, 3), a * a + 1),
        *(1 / math.sqrt(a), math.atan2(a, 2), min(a, 1), abs(a), math.ldexp(a, 3), float(np.rint(a))),
        *(a ** (1 / 3), math.hypot(a, 1)),
    ]
