"""Integer arithmetic (PTX ISA 9.7.1 and 9.7.2).

Every function takes arrays of the type that the table of instructions gives and returns one of the
result's type. NumPy wraps around silently on arrays, as PTX does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.values import DTYPES, SIGNED_OF_SIZE, UNSIGNED_OF_SIZE, Array
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import SIGNED, SIZES, WIDER

INTEGER_TYPES = frozenset({"u16", "u32", "u64", "s16", "s32", "s64"})


def add(operation: Operation) -> Compute:
    """Return d = a + b."""
    return _saturated(_exact_add, operation.type) if "sat" in operation else np.add


def sub(operation: Operation) -> Compute:
    """Return d = a - b."""
    return _saturated(_exact_sub, operation.type) if "sat" in operation else np.subtract


def mul(operation: Operation) -> Compute:
    """Return the low half of a * b, the high half, or all of it."""
    part = operation.get("part")
    if part == "wide":
        return _wide(operation.type)
    return _high_of(operation.type) if part == "hi" else np.multiply


def mad(operation: Operation) -> Compute:
    """Return d = a * b + c."""
    multiply = mul(operation)
    if "sat" in operation:
        saturating = _saturated(_exact_add, operation.type)
        return lambda a, b, c: saturating(multiply(a, b), c)
    return lambda a, b, c: multiply(a, b) + c


def mul24(operation: Operation) -> Compute:
    """Return bits 0-31 or 16-47 of a product of 24-bit numbers."""
    wide = DTYPES[WIDER[operation.type]]
    result = DTYPES[operation.type]
    shift = wide.type(0 if operation.get("part") == "lo" else 16)
    unused = 8 if operation.type in SIGNED else 0
    low = DTYPES["u32"].type(0xFFFFFF)

    def low_24(value: Array) -> Array:
        if unused:
            return ((value << value.dtype.type(8)) >> value.dtype.type(8)).astype(wide)
        return (value & low).astype(wide)

    return lambda a, b: ((low_24(a) * low_24(b)) >> shift).astype(result)


def mad24(operation: Operation) -> Compute:
    """Return d = a * b + c of 24-bit a and b."""
    multiply = mul24(operation)
    if "sat" in operation:
        saturating = _saturated(_exact_add, operation.type)
        return lambda a, b, c: saturating(multiply(a, b), c)
    return lambda a, b, c: multiply(a, b) + c


def sad(operation: Operation) -> Compute:
    """Return d = c + |a - b|."""
    return lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b))


def div(operation: Operation) -> Compute:
    """Return a / b, rounded towards zero; a division by zero gives all ones, as GPUs do."""
    if operation.type not in SIGNED:
        return _divide_unsigned

    def divide(a: Array, b: Array) -> Array:
        quotient = _divide_unsigned(_magnitude(a), _magnitude(b)).view(a.dtype)
        return np.where(b == 0, a.dtype.type(-1), np.where((a < 0) != (b < 0), -quotient, quotient))

    return divide


def rem(operation: Operation) -> Compute:
    """Return the remainder, with the sign of a; a division by zero gives all ones (H200)."""
    if operation.type not in SIGNED:
        return _remainder_unsigned

    def remainder(a: Array, b: Array) -> Array:
        rest = _remainder_unsigned(_magnitude(a), _magnitude(b)).view(a.dtype)
        return np.where((a < 0) & (b != 0), -rest, rest)

    return remainder


def minimum(operation: Operation) -> Compute:
    """Return the smaller of a and b."""
    return _or_zero(operation, np.minimum)


def maximum(operation: Operation) -> Compute:
    """Return the larger of a and b."""
    return _or_zero(operation, np.maximum)


def _or_zero(operation: Operation, choose: Compute) -> Compute:
    """Add `.relu`: negative results become 0."""
    if "relu" not in operation:
        return choose
    zero = DTYPES[operation.type].type(0)
    return lambda a, b: np.maximum(choose(a, b), zero)


def absolute(operation: Operation) -> Compute:
    """Return |a|; the most negative number stays."""
    return np.abs


def negative(operation: Operation) -> Compute:
    """Return -a."""
    return np.negative


# ------------------------------------------------------------------------------- carry chains


def add_carry(operation: Operation, reads: bool) -> Compute:
    """Return (a + b + carry, carry out); the last source is the carry in where it is read."""
    unsigned = UNSIGNED_OF_SIZE[SIZES[operation.type]]

    def compute(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array]:
        x, y = a.view(unsigned), b.view(unsigned)
        total = x + y
        out = total < x
        if reads and carry is not None:
            total = total + carry
            out = out | (carry & (total == 0))
        return total.view(a.dtype), out

    return compute


def subtract_borrow(operation: Operation, reads: bool) -> Compute:
    """Return (a - b - borrow, borrow out); the last source is the borrow in where it is read."""
    unsigned = UNSIGNED_OF_SIZE[SIZES[operation.type]]

    def compute(a: Array, b: Array, borrow: Array | None = None) -> tuple[Array, Array]:
        x, y = a.view(unsigned), b.view(unsigned)
        total = x - y
        out = x < y
        if reads and borrow is not None:
            out = out | (borrow & (total == 0))
            total = total - borrow
        return total.view(a.dtype), out

    return compute


def multiply_add_carry(operation: Operation, reads: bool) -> Compute:
    """Return (a * b + c + carry, carry out)."""
    multiply = mul(operation)
    add_up = add_carry(operation, reads)
    return lambda a, b, c, carry=None: add_up(multiply(a, b), c, carry)


CARRY_CHAINS: dict[str, Callable[[Operation, bool], Compute]] = {
    "add": add_carry,
    "addc": add_carry,
    "sub": subtract_borrow,
    "subc": subtract_borrow,
    "mad": multiply_add_carry,
    "madc": multiply_add_carry,
}
"""Instructions that read or write the condition code register; the name's c says that they read it."""


# ------------------------------------------------------------------------------- dot products


def dp4a(operation: Operation) -> Compute:
    """Return c plus the dot product of four bytes."""
    first, second = (np.int8 if type == "s32" else np.uint8 for type in operation.types)

    def compute(a: Array, b: Array, c: Array) -> Array:
        products = _parts(a, first).astype(np.int32) * _parts(b, second).astype(np.int32)
        return c + products.sum(axis=1, dtype=np.int32).view(np.uint32)

    return compute


def dp2a(operation: Operation) -> Compute:
    """Return c plus the dot product of two 16-bit halves with the low or high two bytes of b."""
    first = np.int16 if operation.types[0] == "s32" else np.uint16
    second = np.int8 if operation.types[1] == "s32" else np.uint8
    start = 0 if operation.get("part") == "lo" else 2

    def compute(a: Array, b: Array, c: Array) -> Array:
        products = _parts(a, first).astype(np.int32) * _parts(b, second)[:, start : start + 2].astype(
            np.int32
        )
        return c + products.sum(axis=1, dtype=np.int32).view(np.uint32)

    return compute


# ------------------------------------------------------------------------------------ helpers


def _parts(value: Array, dtype: type[Any]) -> Array:
    return np.ascontiguousarray(value).view(dtype).reshape(value.size, -1)


def _exact_add(a: Array, b: Array) -> Array:
    return a.astype(np.int64) + b.astype(np.int64)


def _exact_sub(a: Array, b: Array) -> Array:
    return a.astype(np.int64) - b.astype(np.int64)


def _saturated(exact: Callable[[Array, Array], Array], type: str) -> Compute:
    """PTX saturates s32 only (PTX ISA 9.7.1.1)."""
    limits = np.iinfo(DTYPES[type])
    return lambda a, b: np.clip(exact(a, b), limits.min, limits.max).astype(DTYPES[type])


def _magnitude(value: Array) -> Array:
    return np.abs(value).view(UNSIGNED_OF_SIZE[value.dtype.itemsize])


def _divide_unsigned(a: Array, b: Array) -> Array:
    if b.all():
        return a // b
    return np.where(b == 0, a.dtype.type(np.iinfo(a.dtype).max), a // np.where(b == 0, b.dtype.type(1), b))


def _remainder_unsigned(a: Array, b: Array) -> Array:
    if b.all():
        return a % b
    ones = a.dtype.type(np.iinfo(a.dtype).max)
    return np.where(b == 0, ones, a % np.where(b == 0, b.dtype.type(1), b))


def _wide(type: str) -> Compute:
    if type not in WIDER:
        return np.multiply
    dtype = DTYPES[WIDER[type]]

    def multiply(a: Array, b: Array) -> Array:
        return a.astype(dtype) * b.astype(dtype)

    return multiply


def _high_of(type: str) -> Compute:
    size = SIZES[type]
    if size == 8:
        return high_signed if type in SIGNED else high_unsigned
    wide = (SIGNED_OF_SIZE if type in SIGNED else UNSIGNED_OF_SIZE)[2 * size]
    dtype = DTYPES[type]
    shift = wide.type(8 * size)
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> shift).astype(dtype)


def high_unsigned(a: Array, b: Array) -> Array:
    """Return the high 64 bits of the product of two u64, from four products of halves."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & mask, a >> shift, b & mask, b >> shift
    middle = a_high * b_low + ((a_low * b_low) >> shift)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> shift) + (other >> shift)


def high_signed(a: Array, b: Array) -> Array:
    """Return the high 64 bits of the product of two s64."""
    high = high_unsigned(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - np.where(a < 0, b, np.int64(0)) - np.where(b < 0, a, np.int64(0))
