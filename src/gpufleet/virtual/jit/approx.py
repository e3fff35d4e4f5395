"""The `.approx` instructions as polynomials on whole vectors.

PTX ISA states an error bound for each; the bound, and the largest error measured here over the
tests' arguments, stand in each docstring. Special values are as the tables of the PTX ISA say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpufleet.virtual.jit.text import Code, constant, float_constant, vector


def _fma(c: Code, t: str, a: str, b: str, d: str) -> str:
    return c.intrinsic("fma", t, (t, a), (t, b), (t, d))


def _polynomial(c: Code, element: str, n: int, x: str, coefficients: Sequence[float]) -> str:
    """Highest power first."""
    t = vector(element, n)
    value = float_constant(element, coefficients[0], n)
    for coefficient in coefficients[1:]:
        value = _fma(c, t, value, x, float_constant(element, coefficient, n))
    return value


def _select(c: Code, n: int, condition: str, a: str, b: str) -> str:
    t = vector("float", n)
    return c.let(f"select {vector('i1', n)} {condition}, {t} {a}, {t} {b}")


def _float(value: float, n: int) -> str:
    return float_constant("float", value, n)


def exp2(c: Code, n: int, x: str) -> str:
    """2^x: relative error at most 2^-22 (measured 2^-23)."""
    t, i = vector("float", n), vector("i32", n)
    low = c.intrinsic("maximumnum", t, (t, x), (t, _float(-252.0, n)))
    y = c.intrinsic("minimumnum", t, (t, low), (t, _float(252.0, n)))
    whole = c.intrinsic("roundeven", t, (t, y))
    fraction = c.let(f"fsub {t} {y}, {whole}")
    coefficients = [math.log(2) ** k / math.factorial(k) for k in range(7, -1, -1)]
    value = _polynomial(c, "float", n, fraction, coefficients)
    exponent = c.let(f"fptosi {t} {whole} to {i}")
    half = c.let(f"ashr {i} {exponent}, {constant('i32', 1, n)}")
    rest = c.let(f"sub {i} {exponent}, {half}")
    for part in (half, rest):
        biased = c.let(f"add {i} {part}, {constant('i32', 127, n)}")
        scale = c.let(f"bitcast {i} {c.let(f'shl {i} {biased}, {_twentythree(n)}')} to {t}")
        value = c.let(f"fmul {t} {value}, {scale}")
    nan = c.let(f"fcmp uno {t} {x}, {x}")
    return _select(c, n, nan, x, value)


def _twentythree(n: int) -> str:
    return constant("i32", 23, n)


def log2(c: Code, n: int, x: str) -> str:
    """log2(x): absolute error at most 2^-22.6, relative outside [0.5, 2] (measured 2^-23)."""
    t, i = vector("float", n), vector("i32", n)
    tiny = c.let(f"fcmp olt {t} {x}, {_float(2.0**-126, n)}")
    scaled = c.let(f"fmul {t} {x}, {_float(2.0**24, n)}")
    y = _select(c, n, tiny, scaled, x)
    bits = c.let(f"bitcast {t} {y} to {i}")
    # Exponent and mantissa such that the mantissa lies in [sqrt(1/2), sqrt(2)).
    shifted = c.let(f"sub {i} {bits}, {constant('i32', 0x3F3504F3, n)}")
    exponent = c.let(f"ashr {i} {shifted}, {_twentythree(n)}")
    mantissa_bits = c.let(f"sub {i} {bits}, {c.let(f'shl {i} {exponent}, {_twentythree(n)}')}")
    m = c.let(f"bitcast {i} {mantissa_bits} to {t}")
    up = c.let(f"fsub {t} {m}, {_float(1.0, n)}")
    down = c.let(f"fadd {t} {m}, {_float(1.0, n)}")
    s = c.let(f"fdiv {t} {up}, {down}")
    square = c.let(f"fmul {t} {s}, {s}")
    scale = 2 / math.log(2)
    series = _polynomial(c, "float", n, square, [scale / k for k in (9, 7, 5, 3, 1)])
    e = c.let(f"sitofp {i} {exponent} to {t}")
    bias = _select(c, n, tiny, _float(-24.0, n), _float(0.0, n))
    value = _fma(c, t, series, s, c.let(f"fadd {t} {e}, {bias}"))
    for condition, result in (
        (f"fcmp oeq {t} {x}, {_float(0.0, n)}", constant("float", 0xFF800000, n)),
        (f"fcmp ult {t} {x}, {_float(0.0, n)}", constant("float", 0x7FFFFFFF, n)),
        (f"fcmp oeq {t} {x}, {constant('float', 0x7F800000, n)}", constant("float", 0x7F800000, n)),
    ):
        value = _select(c, n, c.let(condition), result, value)
    return value


def _reduce(c: Code, n: int, x: str) -> tuple[str, str]:
    """x as r + quadrant * pi/2 with |r| <= pi/4: r as float, the quadrant modulo 4 as i32."""
    f, d = vector("float", n), vector("double", n)
    wide = c.let(f"fpext {f} {x} to {d}")
    turns = c.let(f"fmul {d} {wide}, {float_constant('double', 2 / math.pi, n)}")
    k = c.intrinsic("roundeven", d, (d, turns))
    r = _fma(c, d, k, float_constant("double", -math.pi / 2, n), wide)
    r = _fma(c, d, k, float_constant("double", -6.123233995736766e-17, n), r)
    quarter = c.intrinsic("floor", d, (d, c.let(f"fmul {d} {k}, {float_constant('double', 0.25, n)}")))
    rest = _fma(c, d, quarter, float_constant("double", -4.0, n), k)
    quadrant = c.intrinsic("fptosi.sat", vector("i32", n), (d, rest))
    return c.let(f"fptrunc {d} {r} to {f}"), quadrant


def _sine_or_cosine(c: Code, n: int, x: str, first: int) -> str:
    t, i, i1 = vector("float", n), vector("i32", n), vector("i1", n)
    r, quadrant = _reduce(c, n, x)
    if first:
        quadrant = c.let(f"add {i} {quadrant}, {constant('i32', first, n)}")
    square = c.let(f"fmul {t} {r}, {r}")
    tail = _polynomial(c, "float", n, square, [1 / 362880, -1 / 5040, 1 / 120, -1 / 6])
    sine = _fma(c, t, c.let(f"fmul {t} {tail}, {square}"), r, r)
    cosine = _polynomial(c, "float", n, square, [1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0])
    odd = c.let(f"trunc {i} {quadrant} to {i1}")
    value = _select(c, n, odd, cosine, sine)
    flip = c.let(f"shl {i} {c.let(f'and {i} {quadrant}, {_two(n)}')}, {constant('i32', 30, n)}")
    bits = c.let(f"xor {i} {c.let(f'bitcast {t} {value} to {i}')}, {flip}")
    return c.let(f"bitcast {i} {bits} to {t}")


def _two(n: int) -> str:
    return constant("i32", 2, n)


def sine(c: Code, n: int, x: str) -> str:
    """sin(x): absolute error at most 2^-20.5 in [-pi, pi] (measured 2^-24); -0 stays -0."""
    return _sine_or_cosine(c, n, x, 0)


def cosine(c: Code, n: int, x: str) -> str:
    """cos(x): absolute error at most 2^-20.5 in [-pi, pi] (measured 2^-24)."""
    return _sine_or_cosine(c, n, x, 1)


def inverse_root(c: Code, n: int, x: str) -> str:
    """1/sqrt(x): relative error at most 2^-22.9 (a rounded root and a rounded quotient)."""
    t = vector("float", n)
    root = c.intrinsic("sqrt", t, (t, x))
    return c.let(f"fdiv {t} {_float(1.0, n)}, {root}")


def inverse_root_double(c: Code, n: int, x: str) -> str:
    """The same in double."""
    t = vector("double", n)
    root = c.intrinsic("sqrt", t, (t, x))
    return c.let(f"fdiv {t} {float_constant('double', 1.0, n)}, {root}")


def tanh(c: Code, n: int, x: str) -> str:
    """tanh(x): relative error at most 2^-11 (measured 2^-20)."""
    t = vector("float", n)
    magnitude = c.intrinsic("fabs", t, (t, x))
    square = c.let(f"fmul {t} {x}, {x}")
    series = [21844 / 6081075, -1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0]
    near = _polynomial(c, "float", n, square, series)
    near = c.let(f"fmul {t} {near}, {x}")
    power = exp2(c, n, c.let(f"fmul {t} {magnitude}, {_float(2 / math.log(2), n)}"))
    quotient = c.let(f"fdiv {t} {_float(2.0, n)}, {c.let(f'fadd {t} {power}, {_float(1.0, n)}')}")
    far = c.intrinsic("copysign", t, (t, c.let(f"fsub {t} {_float(1.0, n)}, {quotient}")), (t, x))
    small = c.let(f"fcmp olt {t} {magnitude}, {_float(0.5, n)}")
    return _select(c, n, small, near, far)


def high_word(c: Code, n: int, x: str) -> str:
    """A double without its low 32 bits, no subnormal: all that rcp.approx and rsqrt.approx read and write."""
    d, i = vector("double", n), vector("i64", n)
    bits = c.let(f"bitcast {d} {x} to {i}")
    kept = c.let(f"and {i} {bits}, {constant('i64', -1 << 32, n)}")
    magnitude = c.let(f"and {i} {bits}, {constant('i64', (1 << 63) - 1, n)}")
    tiny = c.let(f"icmp ult {i} {magnitude}, {constant('i64', 1 << 52, n)}")
    sign = c.let(f"and {i} {bits}, {constant('i64', 1 << 63, n)}")
    kept = c.let(f"select {vector('i1', n)} {tiny}, {i} {sign}, {i} {kept}")
    return c.let(f"bitcast {i} {kept} to {d}")
