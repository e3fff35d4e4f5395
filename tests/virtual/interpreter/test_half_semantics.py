"""16-bit floats against exact arithmetic, and the kernel of the corpus that uses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from machine import TARGETS, Device
from reference import round_fraction
from snippet import run

NAN = 0x7FFF
EDGES = {
    "f16": [
        *(0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x0401, 0x3C00, 0x3C01, 0xBC00, 0x7BFF, 0xFBFF),
        *(0x7C00, 0xFC00, 0x7E01, 0x3555, 0x4248, 0x6400, 0xE401, 0x1400, 0x9401),
    ],
    "bf16": [
        *(0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0xBF80, 0x7F7F, 0xFF7F),
        *(0x7F80, 0xFF80, 0x7FC1, 0x3EAB, 0x4049, 0x4380, 0xC381, 0x3B80, 0xBB81),
    ],
}
OPERATIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma.rn": (3, lambda a, b, c: a * b + c),
}


def value_of(bits: int, base: str) -> float:
    if base == "f16":
        return float(np.array([bits], np.uint16).view(np.float16)[0])
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def bits_of(value: float, base: str) -> int:
    if base == "f16":
        with np.errstate(all="ignore"):
            return int(np.array([value]).astype(np.float16).view(np.uint16)[0])
    return int(np.array([value]).astype(np.float32).view(np.uint32)[0]) >> 16


def rounded(value: Fraction, base: str, mode: str = "rn") -> float:
    return round_fraction(value, mode, *((11, -24, 16) if base == "f16" else (8, -133, 128)))


def expected_of(meaning: Callable[..., Any], numbers: list[float], base: str) -> int:
    plain = meaning(*numbers)
    if not all(map(math.isfinite, numbers)):
        return NAN if math.isnan(plain) else bits_of(plain, base)
    exact = meaning(*map(Fraction, numbers))
    if exact == 0:
        return bits_of(plain, base)
    return bits_of(math.copysign(rounded(exact, base), exact), base)


@pytest.mark.parametrize("base", ["f16", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_alone_and_in_pairs(name: str, base: str) -> None:
    count, meaning = OPERATIONS[name]
    rows = list(product(EDGES[base], repeat=count))
    rng = np.random.default_rng(4)
    rows += [tuple(map(int, row)) for row in rng.integers(0, 1 << 16, (500, count))]
    rows = rows[:: len(rows) // 3000 + 1]
    columns = [np.array(column, np.uint16) for column in zip(*rows, strict=True)]
    operands = ", ".join(f"%{letter}" for letter in "abc"[:count])
    found = run(f"{name}.{base} %d, {operands};", "b16", *[("b16", column) for column in columns])
    expected = [expected_of(meaning, [value_of(v, base) for v in row], base) for row in rows]
    assert found.tolist() == expected
    pairs = [
        column.astype(np.uint32) | np.roll(column, 1).astype(np.uint32) << np.uint32(16) for column in columns
    ]
    packed = run(f"{name}.{base}x2 %d, {operands};", "b32", *[("b32", pair) for pair in pairs])
    assert (packed & 0xFFFF).tolist() == expected
    assert (packed >> 16).tolist() == np.roll(expected, 1).tolist()


@pytest.mark.parametrize("base", ["f16", "bf16"])
def test_extrema_signs_and_comparisons(base: str) -> None:
    rows = list(product(EDGES[base], repeat=2))
    a, b = (np.array(column, np.uint16) for column in zip(*rows, strict=True))
    sources = ("b16", a), ("b16", b)
    smaller, larger = (
        run(f"min.{base} %d, %a, %b;", "b16", *sources),
        run(f"max.{base} %d, %a, %b;", "b16", *sources),
    )
    less = run(f"setp.lt.{base} %d, %a, %b;", "pred", *sources)
    differ = run(f"setp.neu.{base} %d, %a, %b;", "pred", *sources)
    for (x, y), low, high, is_less, is_other in zip(rows, smaller, larger, less, differ, strict=True):
        p, q = value_of(x, base), value_of(y, base)
        assert is_less == (p < q)
        assert is_other == (p != q)
        numbers = [v for v in (p, q) if not math.isnan(v)]
        if not numbers:
            assert low == high == NAN
            continue
        ordered = sorted(numbers, key=lambda v: (v, math.copysign(1, v)))
        assert (low, high) == (bits_of(ordered[0], base), bits_of(ordered[-1], base))
    assert run(f"neg.{base} %d, %a;", "b16", ("b16", [0x1234, 0x8000])).tolist() == [0x9234, 0]
    assert run(f"abs.{base} %d, %a;", "b16", ("b16", [0x9234, 0x8000])).tolist() == [0x1234, 0]
    pair = run(f"setp.gt.{base}x2 %p1|%d, %a, %b;", "pred", ("b32", [0x3C003F80]), ("b32", [0x3F803C00]))
    assert pair.tolist() == [False]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("base", ["f16", "bf16"])
def test_narrowing(base: str, mode: str) -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate(
        [
            rng.standard_normal(200).astype(np.float32),
            np.array(
                [65504, 65519, 65520, 65536, 1e-8, 2**-24, 2**-25, 3 * 2**-25, 3e38, -3.4e38], np.float32
            ),
            np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-45], np.float32),
        ]
    )
    found = run(f"cvt.{mode}.{base}.f32 %d, %a;", "b16", ("f32", values))
    for value, bits in zip(values.tolist(), found.tolist(), strict=True):
        if not math.isfinite(value) or value == 0:
            assert bits == bits_of(value, base)
        else:
            assert bits == bits_of(math.copysign(rounded(Fraction(value), base, mode), value), base), value
    assert run(f"cvt.{mode}.{base}.f32 %d, %a;", "b16", ("f32", [np.nan])).tolist() == [NAN]


def test_widening_and_integers() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))]
    wide = run("cvt.f32.f16 %d, %a;", "f32", ("b16", finite))
    assert np.array_equal(wide, finite.view(np.float16).astype(np.float32))
    found = run("cvt.f32.bf16 %d, %a;", "b32", ("b16", bits[:2000]))
    assert found.tolist() == [int(v) << 16 for v in bits[:2000]]
    assert run("cvt.rzi.s32.f16 %d, %a;", "s32", ("b16", [0x3E00, 0xC100, 0x7C00, 0x7E00])).tolist() == [
        1,
        -2,
        2**31 - 1,
        0,
    ]
    assert run("cvt.rn.f16.s32 %d, %a;", "b16", ("s32", [2049, 2051, -1, 100000])).tolist() == [
        0x6800,
        0x6802,
        0xBC00,
        0x7C00,
    ]
    assert run("cvt.rn.f16.s64 %d, %a;", "b16", ("s64", [2049, -(2**62)])).tolist() == [0x6800, 0xFC00]
    pair = run("cvt.rn.f16x2.f32 %d, %a, %b;", "b32", ("f32", [1.0]), ("f32", [-2.0]))
    assert pair.tolist() == [0x3C00C000], "the first source is the high half"


def test_saturation_flushing_and_relu() -> None:
    assert run(
        "add.sat.f16 %d, %a, %b;", "b16", ("b16", [0x3C00, 0xBC00, 0x7E00]), ("b16", [0x3C00, 0, 0])
    ).tolist() == [0x3C00, 0, 0]
    assert run("mul.ftz.f16 %d, %a, %b;", "b16", ("b16", [0x0400]), ("b16", [0x3800])).tolist() == [0]
    relu = run(
        "fma.rn.relu.f16 %d, %a, %b, %c;",
        "b16",
        ("b16", [0xC000, 0x3C00]),
        ("b16", [0x3C00] * 2),
        ("b16", [0, 0]),
    )
    assert relu.tolist() == [0, 0x3C00]
    assert run("set.gt.f16.f16 %d, %a, %b;", "b16", ("b16", [0x3C00, 0]), ("b16", [0, 0])).tolist() == [
        0x3C00,
        0,
    ]
    assert run(
        "set.gt.f16x2.f16x2 %d, %a, %b;", "b32", ("b32", [0x3C000000]), ("b32", [0x00003C00])
    ).tolist() == [0x3C000000]


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus(target: int) -> None:
    device = Device.corpus("half", target)
    rng = np.random.default_rng(9)
    n = 50
    a, c = (rng.uniform(0.5, 2, n + 1).astype(np.float16) for _ in range(2))
    b = rng.uniform(-1, 1, (n, 2)).astype(np.float16)
    g = (rng.uniform(-3, 3, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    addresses = [device.memory.upload(v) for v in (a, b, c)]
    f = device.memory.alloc(4 * n)
    # One thread at a time: a thread writes the element that the next one reads.
    device.launch("half_k", (1, 1, 1), (1, 1, 1), *addresses, f, device.memory.upload(g), 1)

    def h(value: Any) -> Any:
        return np.float16(value)

    def fma(x: Any, y: Any, z: Any) -> Any:
        return h(float(x) * float(y) + float(z))

    first = h(a[0] + c[0])
    first = fma(first, first, a[0])
    first = h(h(first * a[0]) - c[0])
    z = fma(h(b[0, 0] * b[0, 0]), b[0, 0], h(b[0, 0] * b[0, 0]))
    results = device.memory.download(addresses[2], np.float16, 2)
    assert results[0] == max(first, z)
    bf = value_of(int(g[0]), "bf16")
    square = value_of(bits_of(rounded(Fraction(bf) * Fraction(bf), "bf16"), "bf16"), "bf16")
    total = value_of(bits_of(rounded(Fraction(square) + Fraction(bf), "bf16"), "bf16"), "bf16")
    f32 = np.float32
    expected = f32(f32(f32(first) + f32(bf)) + f32(total)) + f32(first > a[0]) + f32(h(np.sqrt(f32(first))))
    found = device.memory.download(f, np.float32, 1)[0]
    assert found == pytest.approx(expected, rel=1e-6) or (np.isnan(found) and np.isnan(expected))
    assert results[1] == h(found)


def test_packed_singles_and_integers_and_mixed_precision() -> None:
    one, two = 0x3F800000, 0x40000000
    fma = run(
        "fma.rn.f32x2 %d, %a, %b, %c;",
        "b64",
        ("b64", [two << 32 | one]),
        ("b64", [one << 32 | two]),
        ("b64", [one]),
    )
    assert fma.tolist() == [two << 32 | 0x40400000]
    assert run("add.u16x2 %d, %a, %b;", "b32", ("b32", [0xFFFF0001]), ("b32", [0x00020003])).tolist() == [
        0x00010004
    ]
    assert run("min.s16x2 %d, %a, %b;", "b32", ("b32", [0xFFFF0001]), ("b32", [0x00020000])).tolist() == [
        0xFFFF0000
    ]
    assert run("add.f32.f16 %d, %a, %b;", "f32", ("b16", [0x3C00]), ("f32", [0.1])).tolist() == [
        float(np.float32(1.1))
    ]
    assert run(
        "fma.rn.f32.bf16 %d, %a, %b, %c;", "f32", ("b16", [0x4040]), ("b16", [0x4000]), ("f32", [1.0])
    ).tolist() == [7]
