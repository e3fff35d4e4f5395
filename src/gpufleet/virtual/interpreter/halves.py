"""16-bit floats, f16 and bf16, alone and in pairs (PTX ISA 9.7.4).

They are held as their bits. Arithmetic goes through doubles, as a value and its exact error, and is
rounded once from there. A pair is computed as two columns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpufleet.virtual.interpreter import floats, rounding
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.ptx.operations import Operation

HALF_TYPES = frozenset({"f16", "f16x2", "bf16", "bf16x2"})

CANONICAL_NAN = np.uint16(0x7FFF)
OUT_OF_BOUNDS = np.uint16(0xFFFF)
"""The NaN that tensor copies put where a tensor has ended; `.oob` makes it a zero."""
_SIGN, _MAGNITUDE = np.uint16(0x8000), np.uint16(0x7FFF)
_SMALLEST_NORMAL = {"f16": np.uint16(0x0400), "bf16": np.uint16(0x0080)}
_INFINITY = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}
_ONE = {"f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}

_Exact = Callable[..., tuple[Array, Array]]
"""Takes doubles, returns a result as the rounded double and its error."""


def widen(bits: Array, base: str) -> Array:
    """Return the values as float32, which holds both formats exactly."""
    if base == "f16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(value: Array, error: Array | None, base: str, mode: str = "rn") -> Array:
    """Round value + error (doubles) to the bits of a format."""
    if error is None:
        error = np.zeros(1)
    if base == "f16":
        bits = rounding.rounded(value, error, mode, np.float16).view(np.uint16)
    else:
        bits = _to_bfloat(value, error, mode)
    return np.where(np.isnan(value), CANONICAL_NAN, bits)


def _to_bfloat(value: Array, error: Array, mode: str) -> Array:
    """Cut to float32 with a last bit that says whether anything was lost; then 16 bits are rounded off."""
    cut = rounding.rounded(value, error, "rz", np.float32)
    inexact = (cut.astype(np.float64) != value) | (error != 0)
    bits = cut.view(np.uint32) | (inexact & np.isfinite(cut)).astype(np.uint32)
    low = bits & np.uint32(0xFFFF)
    high = bits >> np.uint32(16)
    negative = (bits >> np.uint32(31)).astype(np.bool_)
    up = {
        "rn": (low > 0x8000) | ((low == 0x8000) & ((high & np.uint32(1)) == 1)),
        "rz": np.zeros(1, np.bool_),
        "rm": negative & (low != 0),
        "rp": ~negative & (low != 0),
    }[mode]
    return (high + up).astype(np.uint16)


def add(operation: Operation) -> Compute:
    """Return a + b."""
    return _arithmetic(operation, rounding.two_sum)


def sub(operation: Operation) -> Compute:
    """Return a - b."""
    return _arithmetic(operation, lambda a, b: rounding.two_sum(a, -b))


def mul(operation: Operation) -> Compute:
    """Return a * b, which a double holds exactly."""
    return _arithmetic(operation, lambda a, b: (a * b, np.zeros(1)))


def fma(operation: Operation) -> Compute:
    """Return a * b + c, rounded once."""
    return _arithmetic(operation, lambda a, b, c: rounding.two_sum(a * b, c))


def ex2(operation: Operation) -> Compute:
    """Return 2 to the power of a."""
    return _arithmetic(operation, lambda a: (np.exp2(a), np.zeros(1)))


def tanh(operation: Operation) -> Compute:
    """Return the hyperbolic tangent of a."""
    return _arithmetic(operation, lambda a: (np.tanh(a), np.zeros(1)))


def negative(operation: Operation) -> Compute:
    """Return -a."""
    return _on_bits(operation, lambda bits: bits ^ _SIGN)


def absolute(operation: Operation) -> Compute:
    """Return |a|."""
    return _on_bits(operation, lambda bits: bits & _MAGNITUDE)


def minimum(operation: Operation) -> Compute:
    """Return the smaller of a and b."""
    return _extremum(operation, floats.smaller)


def maximum(operation: Operation) -> Compute:
    """Return the larger of a and b."""
    return _extremum(operation, floats.larger)


def comparison(operation: Operation, type: str, test: Callable[[Array, Array], Array]) -> Compute:
    """Return whether a comparison of the values holds; two columns for a pair."""
    base, columns = _format(type)
    prepare = _flusher(operation, base)

    def compare(a: Array, b: Array) -> Array:
        return test(widen(prepare(columns(a)), base), widen(prepare(columns(b)), base))

    return compare


def is_negative(bits: Array, base: str) -> Array:
    """Say where numbers have a minus sign, also -0; NaNs are none."""
    return ((bits & _SIGN) != 0) & ((bits & _MAGNITUDE) <= _INFINITY[base])


def one(type: str) -> int:
    """Return the bits of 1.0, in both places of a pair."""
    base, _ = _format(type)
    bits = int(_ONE[base])
    return bits | bits << 16 if type.endswith("x2") else bits


# ------------------------------------------------------------------------------------- helpers


def _format(type: str) -> tuple[str, Callable[[Array], Array]]:
    """Return the format of the numbers and what lays pairs out in two columns."""
    if type.endswith("x2"):
        return type[:-2], lambda value: np.ascontiguousarray(value).view(np.uint16).reshape(-1, 2)
    return type, lambda value: value


def _packed(bits: Array) -> Array:
    """Put two columns side by side again."""
    if bits.ndim == 1:
        return bits
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)


def _flusher(operation: Operation, base: str) -> Callable[[Array], Array]:
    if "ftz" not in operation:
        return lambda bits: bits
    smallest = _SMALLEST_NORMAL[base]
    return lambda bits: np.where((bits & _MAGNITUDE) < smallest, bits & _SIGN, bits)


def _arithmetic(operation: Operation, exact: _Exact) -> Compute:
    base, columns = _format(operation.type)
    flush = _flusher(operation, base)
    sat, relu = "sat" in operation, "relu" in operation
    oob = "oob" in operation

    def compute(*sources: Array) -> Array:
        numbers = [widen(flush(columns(source)), base).astype(np.float64) for source in sources]
        bits = flush(narrow(*exact(*numbers), base))
        if sat:
            value = widen(bits, base)
            bits = np.where(value > 0, np.where(value < 1, bits, _ONE[base]), np.uint16(0))
        if relu:
            bits = np.where(is_negative(bits, base), np.uint16(0), bits)
        if oob:
            outside = (columns(sources[0]) == OUT_OF_BOUNDS) | (columns(sources[1]) == OUT_OF_BOUNDS)
            bits = np.where(outside, np.uint16(0), bits)
        return _packed(bits)

    return compute


def _on_bits(operation: Operation, change: Callable[[Array], Array]) -> Compute:
    base, columns = _format(operation.type)
    flush = _flusher(operation, base)

    def compute(a: Array) -> Array:
        bits = flush(columns(a))
        nan = (bits & _MAGNITUDE) > _INFINITY[base]
        return _packed(np.where(nan, CANONICAL_NAN, change(bits)))

    return compute


def _extremum(operation: Operation, choose: Callable[[Array, Array, bool], Array]) -> Compute:
    if "xorsign" in operation:
        choose = floats.by_magnitude(choose)
    base, columns = _format(operation.type)
    flush = _flusher(operation, base)
    passes_nan = "NaN" in operation

    def compute(a: Array, b: Array) -> Array:
        first, second = (widen(flush(columns(source)), base) for source in (a, b))
        chosen = choose(first, second, passes_nan)
        return _packed(narrow(chosen.astype(np.float64), None, base))

    return compute
