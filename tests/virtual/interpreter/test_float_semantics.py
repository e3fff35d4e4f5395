"""Floating-point instructions against exact arithmetic, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import f32_from_bits, f64_from_bits, round_f32, round_f64, signed
from snippet import run

NAN = 0x7FFFFFFF
F32_EDGES = [
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x40490FDB),
    *(0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x80FFFFFF, 0x01000000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001),
    *(0x4B800000, 0x4B800001, 0xCB7FFFFF, 0x33800000, 0x33800001, 0xB3FFFFFF, 0x5F800000),
]
F64_EDGES = [
    *(0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xBFF0000000000001, 0x400921FB54442D18),
    *(0x0000000000000001, 0x8000000000000003, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x0010000000000001),
    *(0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000001),
    *(0x4340000000000001, 0x3CA0000000000000, 0xBCA0000000000001, 0x5FE0000000000000, 0x1FF0000000000001),
    *(0x7FD0000000000001, 0x0020000000000001, 0x3CAFFFFFFFFFFFFF),
]
MODES = ("rn", "rz", "rm", "rp")


def floats32() -> st.SearchStrategy[int]:
    """Random bits, and numbers close enough to each other to cancel and to tie."""
    near = st.builds(
        lambda e, m, s: s << 31 | e << 23 | m << 11,
        st.integers(100, 150),
        st.integers(0, 4095),
        st.integers(0, 1),
    )
    return st.one_of(st.sampled_from(F32_EDGES), st.integers(0, 2**32 - 1), near)


def floats64() -> st.SearchStrategy[int]:
    near = st.builds(
        lambda e, m, s: s << 63 | e << 52 | m << 26,
        st.integers(970, 1070),
        st.integers(0, 2**26 - 1),
        st.integers(0, 1),
    )
    return st.one_of(st.sampled_from(F64_EDGES), st.integers(0, 2**64 - 1), near)


def exact(value: float) -> Fraction:
    return Fraction(value)


def sum_of(a: float, b: float, mode: str, round: Callable[[Fraction, str], float]) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    total = exact(a) + exact(b)
    if total == 0:
        if math.copysign(1, a) == math.copysign(1, b):
            return a
        return -0.0 if mode == "rm" else 0.0
    return signed_zero(round(total, mode), total)


def signed_zero(rounded: float, value: Fraction) -> float:
    return math.copysign(rounded, -1 if value < 0 else 1)


def product_of(a: float, b: float, mode: str, round: Callable[[Fraction, str], float]) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    sign = math.copysign(1, a) * math.copysign(1, b)
    return math.copysign(round(exact(a) * exact(b), mode), sign)


def fused(a: float, b: float, c: float, mode: str, round: Callable[[Fraction, str], float]) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    value = exact(a) * exact(b)
    total = value + exact(c)
    if total == 0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        if sign == math.copysign(1, c):
            return math.copysign(0.0, sign)
        return -0.0 if mode == "rm" else 0.0
    return signed_zero(round(total, mode), total)


def quotient(a: float, b: float, mode: str, round: Callable[[Fraction, str], float]) -> float:
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return math.nan
    if math.isinf(a) or b == 0:
        return math.copysign(math.inf, sign)
    if math.isinf(b) or a == 0:
        return math.copysign(0.0, sign)
    return math.copysign(round(exact(a) / exact(b), mode), sign)


def root(a: float, mode: str, round: Callable[[Fraction, str], float]) -> float:
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    value = exact(a)
    scale = 2 ** (2 * 700)
    whole = math.isqrt(value.numerator * value.denominator * scale)
    inexact = whole * whole != value.numerator * value.denominator * scale
    return round(Fraction(2 * whole + inexact, 2 * value.denominator * 2**700), mode)


OPERATIONS: dict[str, tuple[int, Callable[..., float]]] = {
    "add": (2, sum_of),
    "sub": (2, lambda a, b, mode, round: sum_of(a, -b, mode, round)),
    "mul": (2, product_of),
    "fma": (3, fused),
    "div": (2, quotient),
    "sqrt": (1, root),
    "rcp": (1, lambda a, mode, round: quotient(1.0, a, mode, round)),
}


def check(name: str, type: str, mode: str, rows: list[tuple[int, ...]]) -> None:
    from_bits, round = (f32_from_bits, round_f32) if type == "f32" else (f64_from_bits, round_f64)
    word: Any = np.uint32 if type == "f32" else np.uint64
    count, meaning = OPERATIONS[name]
    operands = ", ".join(f"%{letter}" for letter in "abc"[:count])
    columns = [np.array(column, word) for column in zip(*rows, strict=True)]
    bits = "b32" if type == "f32" else "b64"
    text = f"{name}.{mode}.{type} %d, {operands};"
    found = run(text, bits, *[(bits, column) for column in columns])
    for row, value in zip(rows, found.tolist(), strict=True):
        expected = meaning(*map(from_bits, row), mode, round)
        if math.isnan(expected):
            assert value == NAN if type == "f32" else math.isnan(from_bits(value)), f"{text} of {row}"
        else:
            assert value == bits_of(expected, type), (
                f"{text} of {[hex(v) for v in row]}: {from_bits(value)} {expected}"
            )


def bits_of(value: float, type: str) -> int:
    if type == "f32":
        return int(np.array([value], np.float64).astype(np.float32).view(np.uint32)[0])
    return int(np.array([value], np.float64).view(np.uint64)[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("type", ["f32", "f64"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_edges(name: str, type: str, mode: str) -> None:
    edges = F32_EDGES if type == "f32" else F64_EDGES
    rows = list(product(edges, repeat=OPERATIONS[name][0]))
    check(name, type, mode, rows[:: len(rows) // 2500 + 1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_numbers(data: st.DataObject) -> None:
    name, type = data.draw(st.sampled_from(sorted(OPERATIONS))), data.draw(st.sampled_from(["f32", "f64"]))
    numbers = floats32() if type == "f32" else floats64()
    rows = st.lists(st.tuples(*[numbers] * OPERATIONS[name][0]), min_size=1, max_size=40)
    check(name, type, data.draw(st.sampled_from(MODES)), data.draw(rows))


def test_a_fused_multiply_add_is_not_rounded_twice() -> None:
    """The exact sum lies just beside a tie of single precision that rounding to a double reaches."""
    a = np.array([0x3F800001, 0x3F800001, 0x00000003], np.uint32)
    b = np.array([0x3F800001, 0x3F800001, 0x3F000000], np.uint32)
    c = np.array([0x26800000, 0xA6800000, 0x00000001], np.uint32)
    check("fma", "f32", "rn", list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)))


@pytest.mark.parametrize("type", ["f32", "f64"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extrema(name: str, type: str) -> None:
    edges, from_bits = (F32_EDGES, f32_from_bits) if type == "f32" else (F64_EDGES, f64_from_bits)
    rows = list(product(edges, repeat=2))
    word: Any = np.uint32 if type == "f32" else np.uint64
    bits = "b32" if type == "f32" else "b64"
    a, b = (np.array(column, word) for column in zip(*rows, strict=True))
    found = run(f"{name}.{type} %d, %a, %b;", bits, (bits, a), (bits, b))
    for (x, y), value in zip(rows, found.tolist(), strict=True):
        p, q = from_bits(x), from_bits(y)
        if math.isnan(p) and math.isnan(q):
            assert math.isnan(from_bits(value))
            continue
        if math.isnan(p) or math.isnan(q):
            expected = q if math.isnan(p) else p
        else:
            key = lambda v: (v, math.copysign(1, v))  # noqa: E731
            expected = (min if name == "min" else max)(p, q, key=key)
        assert value == bits_of(expected, type), (name, p, q)


def test_a_nan_goes_through_min_when_asked() -> None:
    found = run(
        "min.NaN.f32 %d, %a, %b;", "b32", ("b32", [0x7FC00001, 0x3F800000]), ("b32", [0x3F800000, 0x40000000])
    )
    assert found.tolist() == [NAN, 0x3F800000]


def test_flush_to_zero_and_saturation() -> None:
    small, normal = 0x00000005, 0x3F800000
    assert run(
        "add.ftz.f32 %d, %a, %b;", "b32", ("b32", [small, 0x80000005]), ("b32", [small, 0x80000000])
    ).tolist() == [0, 0x80000000]
    assert run("add.f32 %d, %a, %b;", "b32", ("b32", [small]), ("b32", [small])).tolist() == [10]
    assert run("mul.ftz.f32 %d, %a, %b;", "b32", ("b32", [0x00800000]), ("b32", [0x3F000000])).tolist() == [0]
    sat = run(
        "add.sat.f32 %d, %a, %b;",
        "b32",
        ("b32", [normal, 0xBF800000, 0x7FC00000, 0x3E800000]),
        ("b32", [normal, 0, 0, 0]),
    )
    assert sat.tolist() == [normal, 0, 0, 0x3E800000]
    assert run("setp.eq.ftz.f32 %d, %a, %b;", "pred", ("b32", [small]), ("b32", [0])).tolist() == [True]
    assert run("abs.ftz.f32 %d, %a;", "b32", ("b32", [0x80000005])).tolist() == [0]


RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a < b or a > b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("type", ["f32", "f64"])
@pytest.mark.parametrize("relation", [*RELATIONS, *(f"{r}u" for r in RELATIONS), "num", "nan"])
def test_comparisons(relation: str, type: str) -> None:
    edges, from_bits = (F32_EDGES, f32_from_bits) if type == "f32" else (F64_EDGES, f64_from_bits)
    rows = list(product(edges, repeat=2))
    bits = "b32" if type == "f32" else "b64"
    word: Any = np.uint32 if type == "f32" else np.uint64
    a, b = (np.array(column, word) for column in zip(*rows, strict=True))
    found = run(f"setp.{relation}.{type} %d, %a, %b;", "pred", (bits, a), (bits, b))
    for (x, y), value in zip(rows, found.tolist(), strict=True):
        p, q = from_bits(x), from_bits(y)
        unordered = math.isnan(p) or math.isnan(q)
        if relation in ("num", "nan"):
            expected = unordered == (relation == "nan")
        elif relation in RELATIONS:
            expected = RELATIONS[relation](p, q)
        else:
            expected = unordered or RELATIONS[relation[:-1]](p, q)
        assert value == expected, (relation, p, q)


ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "rni": lambda v: int(round_half_even(v)),
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


def round_half_even(value: Fraction) -> int:
    return round(value)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("target", ["s32", "u32", "s64", "u64", "s16", "u16"])
def test_floats_to_integers(target: str, source: str, mode: str) -> None:
    from_bits = f32_from_bits if source == "f32" else f64_from_bits
    values = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        1e9,
        2147483647.0,
        2147483648.0,
        4294967295.0,
        -2147483649.0,
        9.3e18,
        1.9e19,
        32767.5,
    ]
    dtype: Any = np.float32 if source == "f32" else np.float64
    word: Any = np.uint32 if source == "f32" else np.uint64
    own = np.array(values + [-v for v in values], dtype).view(word).tolist()
    edges = [*(F32_EDGES if source == "f32" else F64_EDGES), *own]
    bits = "b32" if source == "f32" else "b64"
    found = run(f"cvt.{mode}.{target}.{source} %d, %a;", target, (bits, np.array(edges, word)))
    width = int(target[1:])
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if target[0] == "s" else (0, (1 << width) - 1)
    for edge, value in zip(edges, found.tolist(), strict=True):
        number = from_bits(edge)
        if math.isnan(number):
            top_bit = low or 1 << (width - 1)
            expected = top_bit if source == "f64" or width == 64 else 0  # as an H200 does
        elif math.isinf(number):
            expected = high if number > 0 else low
        else:
            expected = max(low, min(high, ROUNDINGS[mode](Fraction(number))))
        assert value == expected, (number, value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["f32", "f64"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64", "s16", "u8"])
def test_integers_to_floats(source: str, target: str, mode: str) -> None:
    width = int(source[1:])
    patterns = [
        0,
        1,
        2**width - 1,
        2 ** (width - 1),
        2 ** (width - 1) - 1,
        3 * 2 ** (width // 2) + 1,
        2**width // 3,
    ]
    patterns += [
        (2**24 + 1) % 2**width,
        (2**25 + 3) % 2**width,
        (2**53 + 1) % 2**width,
        (2**54 + 3) % 2**width,
    ]
    patterns += [(2**63 + 2**10) % 2**width, (2**63 - 513) % 2**width, (2**62 + 2**38 + 1) % 2**width]
    bits = f"b{max(width, 16)}"
    found = run(
        f"cvt.{mode}.{target}.{source} %d, %a;", "b32" if target == "f32" else "b64", (bits, patterns)
    )
    round = round_f32 if target == "f32" else round_f64
    for pattern, value in zip(patterns, found.tolist(), strict=True):
        number = signed(pattern, width) if source[0] == "s" else pattern
        assert value == bits_of(round(Fraction(number), mode), target), (number, mode)


@pytest.mark.parametrize("mode", MODES)
def test_doubles_to_floats(mode: str) -> None:
    ties = [0x36A0000000000000, 0x3690000000000001, 0x380FFFFFFFFFFFFF, 0x3FF0000010000000]
    largest = [0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 0x47EFFFFFEFFFFFFF]
    patterns = [*F64_EDGES, *ties, *largest]
    found = run(f"cvt.{mode}.f32.f64 %d, %a;", "b32", ("b64", np.array(patterns, np.uint64)))
    for pattern, value in zip(patterns, found.tolist(), strict=True):
        number = f64_from_bits(pattern)
        if math.isnan(number):
            # An H200 keeps the sign and the first bits of what a NaN carries.
            assert value == pattern >> 63 << 31 | 0x7FC00000 | pattern >> 29 & 0x3FFFFF
        elif not math.isfinite(number) or number == 0:
            assert value == bits_of(number, "f32")
        else:
            assert value == bits_of(
                signed_zero(round_f32(Fraction(number), mode), Fraction(number)), "f32"
            ), number


def test_rounding_to_integral_floats() -> None:
    values = np.array([0.5, 1.5, -0.5, -1.5, 2.5, 1e30, -0.0, np.inf], np.float32).view(np.uint32)
    for mode, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        found = run(f"cvt.{mode}.f32.f32 %d, %a;", "b32", ("b32", values))
        assert np.array_equal(found, function(values.view(np.float32)).view(np.uint32))
    saturated = run(
        "cvt.sat.f32.f32 %d, %a;", "b32", ("b32", [0x40000000, 0xBF800000, 0x7FC00000, 0x3F000000])
    )
    assert saturated.tolist() == [0x3F800000, 0, 0, 0x3F000000]


def test_signs_and_properties() -> None:
    one, nan, small = 0x3F800000, 0x7FC00001, 0x00000001
    assert run("copysign.f32 %d, %a, %b;", "b32", ("b32", [0x80000000]), ("b32", [one])).tolist() == [
        0xBF800000
    ]
    assert run("neg.f32 %d, %a;", "b32", ("b32", [one, 0])).tolist() == [0xBF800000, 0x80000000]
    values = ("b32", [one, nan, small, 0x7F800000, 0])
    for name, expected in {
        "finite": [1, 0, 1, 0, 1],
        "infinite": [0, 0, 0, 1, 0],
        "number": [1, 0, 1, 1, 1],
        "notanumber": [0, 1, 0, 0, 0],
        "normal": [1, 0, 0, 0, 1],
        "subnormal": [0, 0, 1, 0, 0],
    }.items():
        assert run(f"testp.{name}.f32 %d, %a;", "pred", values).astype(int).tolist() == expected


@pytest.mark.parametrize("name", ["min", "max"])
def test_the_smallest_and_the_largest_float_of_a_warp(name: str) -> None:
    values = np.random.default_rng(6).normal(size=64).astype(np.float32)
    values[3] = np.nan
    bits = ("b32", values.view(np.uint32))
    plain = run(f"redux.sync.{name}.f32 %d, %a, -1;", "b32", bits).view(np.float32)
    sizes = run(f"redux.sync.{name}.abs.f32 %d, %a, -1;", "b32", bits).view(np.float32)
    passing = run(f"redux.sync.{name}.NaN.f32 %d, %a, -1;", "b32", bits)
    some = run(
        f"""mov.b32 %d, 0; setp.ge.u32 %p1, %r0, 40; @!%p1 bra skip;
        redux.sync.{name}.NaN.f32 %d, %a, 0xffffff00; skip:""",
        "b32",
        bits,
    ).view(np.float32)
    choose = {"min": np.nanmin, "max": np.nanmax}[name]
    for warp in (slice(0, 32), slice(32, 64)):
        assert (plain[warp] == choose(values[warp])).all()
        assert (sizes[warp] == choose(np.abs(values[warp]))).all()
    assert (passing[:32] == NAN).all()
    assert (passing[32:].view(np.float32) == choose(values[32:])).all()
    assert not some[:40].any()
    assert (some[40:] == choose(values[40:])).all()


def test_loads_stores_and_selections_keep_the_payload_of_a_nan() -> None:
    payload = 0x7F812345
    assert run("mov.f32 %d, %a;", "b32", ("b32", [payload])).tolist() == [payload]
    assert run("selp.f32 %d, %a, %a, %p1;", "b32", ("b32", [payload])).tolist() == [payload]
    assert run(
        "mov.f32 %f1, %a; st.shared.f32 [s], %f1; ld.shared.f32 %d, [s];".replace(
            "st", ".shared .f32 s; st", 1
        ),
        "b32",
        ("b32", [payload]),
    ).tolist() == [payload]


APPROXIMATE: dict[str, tuple[Callable[[float], float], float]] = {
    "sin": (math.sin, 2**-20.5),
    "cos": (math.cos, 2**-20.5),
    "lg2": (lambda a: math.log2(a) if a > 0 else math.nan, 2**-22),
    "ex2": (lambda a: 2.0**a, 2**-22),
    "tanh": (math.tanh, 2**-10.9),
    "sqrt": (lambda a: math.sqrt(a) if a >= 0 else math.nan, 2**-22),
    "rsqrt": (lambda a: 1 / math.sqrt(a) if a > 0 else math.nan, 2**-22),
    "rcp": (lambda a: 1 / a, 2**-22),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_stay_within_the_error_that_ptx_states(name: str) -> None:
    function, bound = APPROXIMATE[name]
    values = np.linspace(-3.1, 3.1, 400, dtype=np.float32)
    found = run(f"{name}.approx.f32 %d, %a;", "f32", ("f32", values))
    for value, result in zip(values.tolist(), found.tolist(), strict=True):
        expected = function(value)
        if math.isnan(expected):
            assert math.isnan(result)
        else:
            assert abs(result - expected) <= bound * max(1.0, abs(expected))
