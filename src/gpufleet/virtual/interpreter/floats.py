"""Floating-point arithmetic (PTX ISA 9.7.3).

Single precision results that are NaN become the canonical one, 0x7fffffff (PTX ISA 9.7.3); double
precision keeps what the CPU gives. `.ftz` turns subnormal inputs and results into zeros of the same
sign, `.sat` clamps to [0, 1] with NaN becoming 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpufleet.virtual.interpreter import exact, rounding
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.values import UNSIGNED_OF_SIZE, Array
from gpufleet.virtual.ptx.operations import Operation

FLOAT_TYPES = frozenset({"f32", "f64"})

CANONICAL_NAN = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
_FLOAT_MIN = np.float32(2.0**-126)


def add(operation: Operation) -> Compute:
    """Return a + b."""
    return _arithmetic(operation, np.add, rounding.add_f32, exact.add)


def sub(operation: Operation) -> Compute:
    """Return a - b."""
    return _arithmetic(
        operation,
        np.subtract,
        lambda a, b, mode: rounding.add_f32(a, -b, mode),
        exact.sub,
    )


def mul(operation: Operation) -> Compute:
    """Return a * b."""
    return _arithmetic(operation, np.multiply, rounding.mul_f32, exact.mul)


def fma(operation: Operation) -> Compute:
    """Return a * b + c, rounded once."""
    return _arithmetic(operation, None, rounding.fma_f32, exact.fma)


def div(operation: Operation) -> Compute:
    """Return a / b; .approx and .full may be less exact than this (PTX ISA 9.7.3.8)."""
    if "approx" in operation:
        return _dressed(operation, _divide_approximately)
    return _arithmetic(operation, np.divide, rounding.div_f32, exact.div)


def rcp(operation: Operation) -> Compute:
    """Return 1 / a."""
    if operation.type == "f64" and "approx" in operation:
        return lambda a: _high_word(1.0 / _flush_f64(a))
    one = np.ones(1, np.float64 if operation.type == "f64" else np.float32)
    divide = _arithmetic(operation, np.divide, rounding.div_f32, exact.div)
    return lambda a: divide(one, a)


def sqrt(operation: Operation) -> Compute:
    """Return the square root of a."""
    return _arithmetic(operation, np.sqrt, rounding.sqrt_f32, exact.sqrt)


def minimum(operation: Operation) -> Compute:
    """Return the smaller of a and b (and c)."""
    return _extremum(operation, smaller)


def maximum(operation: Operation) -> Compute:
    """Return the larger of a and b (and c)."""
    return _extremum(operation, larger)


def absolute(operation: Operation) -> Compute:
    """Return |a|; a NaN of single precision becomes the canonical one, one of double stays (H200)."""
    return _flushed(operation, np.abs)


def negative(operation: Operation) -> Compute:
    """Return -a; NaNs as `absolute` has them."""
    return _flushed(operation, np.negative)


def copysign(operation: Operation) -> Compute:
    """Return |b| with the sign of a."""
    return lambda a, b: np.copysign(b, a)


def testp(operation: Operation) -> Compute:
    """Return whether a has the property."""
    smallest = np.finfo(np.float64 if operation.type == "f64" else np.float32).tiny
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        # Zero counts as normal (H200).
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= smallest) | (a == 0)),
        "subnormal": lambda a: (np.abs(a) < smallest) & (a != 0),
    }
    return tests[operation.get("property")]


# ------------------------------------------------------------------------------ approximations


def rsqrt(operation: Operation) -> Compute:
    """Return 1 / sqrt(a)."""
    if operation.type == "f64":
        if "ftz" in operation:
            return lambda a: _high_word(1.0 / np.sqrt(_flush_f64(a)))
        return lambda a: 1.0 / np.sqrt(a)
    return _dressed(operation, lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32))


def sin(operation: Operation) -> Compute:
    """Return the sine of a."""
    return _dressed(operation, _through_double(np.sin))


def cos(operation: Operation) -> Compute:
    """Return the cosine of a."""
    return _dressed(operation, _through_double(np.cos))


def lg2(operation: Operation) -> Compute:
    """Return the binary logarithm of a."""
    return _dressed(operation, _through_double(np.log2))


def ex2(operation: Operation) -> Compute:
    """Return 2 to the power of a."""
    return _dressed(operation, _through_double(np.exp2))


def tanh(operation: Operation) -> Compute:
    """Return the hyperbolic tangent of a."""
    return _dressed(operation, _through_double(np.tanh))


# ------------------------------------------------------------------------------------- helpers


def canonical(result: Array) -> Array:
    """Replace NaN in a fresh float32 result by the canonical one. One pass finds out whether there is any."""
    if result.size == 1:
        if result[0] != result[0]:
            result[0] = CANONICAL_NAN
        return result
    largest = np.maximum.reduce(result)
    if largest != largest:
        result[np.isnan(result)] = CANONICAL_NAN
    return result


def flush(value: Array) -> Array:
    """Turn subnormal float32 into zeros of the same sign."""
    small = (np.abs(value) < _FLOAT_MIN) & (value != 0)
    if not small.any():
        return value
    return np.where(small, np.copysign(np.float32(0), value), value)


def saturate(value: Array) -> Array:
    """Clamp to [0, 1]; NaN and -0 become +0."""
    one, zero = value.dtype.type(1), value.dtype.type(0)
    return np.where(value > 0, np.minimum(value, one), zero)


def _arithmetic(
    operation: Operation,
    nearest: Callable[..., Array] | None,
    directed_f32: Callable[..., Array],
    directed_f64: Callable[..., float],
) -> Compute:
    mode = operation.get("rounding", "rn")
    if operation.type == "f64":
        if mode != "rn":
            return exact.over_lanes(directed_f64, mode)
        return nearest if nearest is not None else rounding.fma_f64
    if mode == "rn" and nearest is not None:
        compute = nearest
    else:

        def compute(*sources: Array) -> Array:
            return directed_f32(*sources, mode)

    return _dressed(operation, compute)


def _dressed(operation: Operation, compute: Callable[..., Array]) -> Compute:
    """Add NaN, `.ftz` and `.sat` to a computation on float32."""
    ftz, sat = "ftz" in operation, "sat" in operation
    if not ftz and not sat:
        return _with_canonical_nan(compute)

    def run(*sources: Array) -> Array:
        if ftz:
            result = flush(canonical(compute(*[flush(source) for source in sources])))
        else:
            result = canonical(compute(*sources))
        return saturate(result) if sat else result

    return run


def _with_canonical_nan(compute: Callable[..., Array]) -> Compute:
    """Calls with two arguments are written out: a launch of few threads spends its time on calls."""
    if isinstance(compute, np.ufunc) and compute.nin == 2:
        return lambda a, b: canonical(compute(a, b))
    return lambda *sources: canonical(compute(*sources))


def _flushed(operation: Operation, compute: Callable[[Array], Array]) -> Compute:
    if operation.type == "f64":
        return lambda a: np.where(np.isnan(a), a, compute(a))
    if "ftz" in operation:
        return lambda a: canonical(compute(flush(a)))
    return lambda a: canonical(compute(a))


def smaller(a: Array, b: Array, passes_nan: bool) -> Array:
    """Return the smaller; of a NaN and a number the number, unless NaN is to pass."""
    return _settle_zeros((np.minimum if passes_nan else np.fmin)(a, b), a, b, np.bitwise_or)


def larger(a: Array, b: Array, passes_nan: bool) -> Array:
    """Return the larger; of a NaN and a number the number, unless NaN is to pass."""
    return _settle_zeros((np.maximum if passes_nan else np.fmax)(a, b), a, b, np.bitwise_and)


def _settle_zeros(result: Array, a: Array, b: Array, of_zeros: Callable[[Array, Array], Array]) -> Array:
    """-0 counts as smaller than +0; the CPU takes either."""
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return result
    word = UNSIGNED_OF_SIZE[a.dtype.itemsize]
    return np.where(zeros, of_zeros(a.view(word), b.view(word)).view(a.dtype), result)


def _extremum(operation: Operation, choose: Callable[[Array, Array, bool], Array]) -> Compute:
    passes_nan = "NaN" in operation
    if "xorsign" in operation:
        choose = by_magnitude(choose)

    def compute(a: Array, b: Array, c: Array | None = None) -> Array:
        result = choose(a, b, passes_nan)
        return result if c is None else choose(result, c, passes_nan)

    return compute if operation.type == "f64" else _dressed(operation, compute)


def by_magnitude(choose: Callable[[Array, Array, bool], Array]) -> Callable[[Array, Array, bool], Array]:
    """Compare |a| and |b|, and give the result the sign of a * b (.xorsign.abs)."""

    def compute(a: Array, b: Array, passes_nan: bool) -> Array:
        chosen = choose(np.abs(a), np.abs(b), passes_nan)
        return np.where(np.signbit(a) ^ np.signbit(b), -chosen, chosen)

    return compute


def _through_double(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Compute in double and round: better than the error that PTX allows, and the same on every CPU."""
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


def _divide_approximately(a: Array, b: Array) -> Array:
    """For 2**126 < |b| < 2**128 the hardware gives 0, or NaN for an infinite a (PTX ISA 9.7.3.8)."""
    quotient = a / b
    large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    if large.any():
        zero = np.copysign(np.float32(0), quotient)
        quotient = np.where(
            large, np.where(np.isinf(a), CANONICAL_NAN, np.where(np.isnan(a), a, zero)), quotient
        )
    return quotient


def _flush_f64(value: Array) -> Array:
    return np.where(np.abs(value) < 2.0**-1022, np.copysign(0.0, value), value)


def _high_word(value: Array) -> Array:
    """Keep the high 32 bits; the gross approximations have no others (PTX ISA 9.7.3.14)."""
    flushed = _flush_f64(value)
    kept = flushed.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    return np.where(np.isnan(value), np.nan, kept.view(np.float64))
