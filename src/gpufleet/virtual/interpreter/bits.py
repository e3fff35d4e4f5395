"""Shifts, bit fields and bit counts (PTX ISA 9.7.1.14 and following, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.values import SIGNED_OF_SIZE, UNSIGNED_OF_SIZE, Array
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import SIGNED, SIZES

_REVERSED_BYTES = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)
_REVERSED_BYTES.flags.writeable = False


def bit_and(operation: Operation) -> Compute:
    """Return a & b."""
    return np.bitwise_and


def bit_or(operation: Operation) -> Compute:
    """Return a | b."""
    return np.bitwise_or


def bit_xor(operation: Operation) -> Compute:
    """Return a ^ b."""
    return np.bitwise_xor


def bit_not(operation: Operation) -> Compute:
    """Return ~a."""
    return np.invert


def cnot(operation: Operation) -> Compute:
    """Return 1 where a is 0, else 0."""
    return lambda a: (a == 0).astype(a.dtype)


def shl(operation: Operation) -> Compute:
    """Return a << b, 0 for b at or past the width."""
    width = 8 * SIZES[operation.type]
    dtype = UNSIGNED_OF_SIZE[width // 8]

    def shift(a: Array, b: Array) -> Array:
        if b.size == 1:
            count = int(b[0])
            return np.left_shift(a, dtype.type(count)) if count < width else np.zeros(1, dtype)
        clamped = np.minimum(b, np.uint32(width - 1)).astype(dtype)
        return np.where(b < width, a << clamped, dtype.type(0))

    return shift


def shr(operation: Operation) -> Compute:
    """Return a >> b; at or past the width the sign for signed types, else 0."""
    width = 8 * SIZES[operation.type]
    signed = operation.type in SIGNED
    dtype = (SIGNED_OF_SIZE if signed else UNSIGNED_OF_SIZE)[width // 8]

    def shift(a: Array, b: Array) -> Array:
        if b.size == 1:
            count = int(b[0])
            if count < width:
                return np.right_shift(a, dtype.type(count))
            return np.right_shift(a, dtype.type(width - 1)) if signed else np.zeros(1, dtype)
        clamped = np.minimum(b, np.uint32(width - 1)).astype(dtype)
        shifted = a >> clamped
        return shifted if signed else np.where(b < width, shifted, dtype.type(0))

    return shift


def shf(operation: Operation) -> Compute:
    """Return 32 of the 64 bits (b, a), shifted left or right by c."""
    left = operation.get("direction") == "l"
    wraps = operation.get("wrapping") == "wrap"

    def shift(a: Array, b: Array, c: Array) -> Array:
        count = (c & np.uint32(31) if wraps else np.minimum(c, np.uint32(32))).astype(np.uint64)
        pair = (b.astype(np.uint64) << np.uint64(32)) | a
        if left:
            # By 32 the low half is all that is left: a shift of the pair by 32, not by 64.
            return ((pair << count) >> np.uint64(32)).astype(np.uint32)
        return (pair >> count).astype(np.uint32)

    return shift


def popc(operation: Operation) -> Compute:
    """Return the number of 1 bits."""
    return lambda a: count_ones(a).astype(np.uint32)


def clz(operation: Operation) -> Compute:
    """Return the number of leading 0 bits."""
    width = np.uint32(8 * SIZES[operation.type])
    return lambda a: width - bit_length(a)


def bfind(operation: Operation) -> Compute:
    """Return the position of the highest bit that is not a sign bit, all ones if there is none."""
    width = 8 * SIZES[operation.type]
    signed = operation.type in SIGNED
    unsigned = UNSIGNED_OF_SIZE[width // 8]

    def find(a: Array) -> Array:
        bits = np.where(a < 0, ~a, a).view(unsigned) if signed else a
        position = bit_length(bits) - np.uint32(1)
        if "shiftamt" in operation:
            return np.where(bits == 0, position, np.uint32(width - 1) - position)
        return position

    return find


def brev(operation: Operation) -> Compute:
    """Return the bits in reverse order."""
    size = SIZES[operation.type]

    def reverse(a: Array) -> Array:
        swapped = a.view(np.uint8).reshape(-1, size)[:, ::-1]
        return np.ascontiguousarray(_REVERSED_BYTES[swapped]).view(a.dtype).reshape(-1)

    return reverse


def bfe(operation: Operation) -> Compute:
    """Return c bits of a from bit b, zero or sign extended."""
    within = _field_of(operation)
    width = 8 * SIZES[operation.type]
    signed = operation.type in SIGNED
    unsigned = UNSIGNED_OF_SIZE[width // 8]
    one, last = unsigned.type(1), np.uint32(width - 1)

    def extract(a: Array, b: Array, c: Array) -> Array:
        start, length = within(b), within(c)
        bits = a.view(unsigned)
        shifted = np.where(start < width, bits >> np.minimum(start, last).astype(unsigned), unsigned.type(0))
        mask = _low_bits(length, width, unsigned.type)
        field = shifted & mask
        if not signed:
            return field
        sign_at = np.minimum(start + length - np.uint32(1), last).astype(unsigned)
        negative = ((bits >> sign_at) & one).astype(np.bool_) & (length != 0)
        kept = np.where(start < width, np.minimum(length, np.uint32(width) - np.minimum(start, last)), 0)
        return np.where(negative, field | ~_low_bits(kept, width, unsigned.type), field).view(a.dtype)

    return extract


def bfi(operation: Operation) -> Compute:
    """Return b with the low d bits of a inserted at bit c."""
    within = _field_of(operation)
    width = 8 * SIZES[operation.type]
    unsigned = UNSIGNED_OF_SIZE[width // 8].type

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        start, length = within(c), within(d)
        at = np.minimum(start, np.uint32(width - 1)).astype(a.dtype)
        mask = np.where(start < width, _low_bits(length, width, unsigned) << at, unsigned(0))
        return (b & ~mask) | ((a << at) & mask)

    return insert


def _field_of(operation: Operation) -> Callable[[Array], Array]:
    """Return how positions and lengths are read: of 32 bits their low byte, of 64 bits all of them (H200)."""
    limit = np.uint32(0xFF)
    if SIZES[operation.type] == 4:
        return lambda value: value & limit
    return lambda value: np.minimum(value, limit)


def bmsk(operation: Operation) -> Compute:
    """Return a mask of b bits from bit a."""
    wraps = operation.get("wrapping") == "wrap"

    def mask(a: Array, b: Array) -> Array:
        if wraps:
            start, length = a & np.uint32(31), b & np.uint32(31)
        else:
            start, length = np.minimum(a, np.uint32(32)), np.minimum(b, np.uint32(32))
        low = _low_bits(length, 32, np.uint32).astype(np.uint64)
        return (low << start.astype(np.uint64)).astype(np.uint32)

    return mask


def szext(operation: Operation) -> Compute:
    """Return the low b bits of a, zero or sign extended."""
    wraps = operation.get("wrapping") == "wrap"
    signed = operation.type in SIGNED

    def extend(a: Array, b: Array) -> Array:
        length = b & np.uint32(31) if wraps else np.minimum(b, np.uint32(32))
        mask = _low_bits(length, 32, np.uint32)
        field = a.view(np.uint32) & mask
        if signed:
            sign = (field >> np.maximum(length, np.uint32(1)) - np.uint32(1)) & np.uint32(1)
            field = np.where((sign != 0) & (length != 0), field | ~mask, field)
        return field.view(a.dtype)

    return extend


def fns(operation: Operation) -> Compute:
    """Return the position of the c-th 1 bit of a, from bit b upwards, or downwards for a negative c."""

    def find(a: Array, b: Array, c: Array) -> Array:
        a, b, c = np.broadcast_arrays(a, b, c)
        found = [_nth_bit(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
        return np.array(found, np.uint32)

    return find


def _nth_bit(mask: int, base: int, offset: int) -> int:
    if offset == -(1 << 31):
        return 0  # what an H200 answers, whatever the other operands are
    if base > 31:
        return 0xFFFFFFFF
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    positions = range(base, 32) if offset > 0 else range(base, -1, -1)
    count = 0
    for position in positions:
        count += mask >> position & 1
        if count == abs(offset):
            return position
    return 0xFFFFFFFF


def lop3(operation: Operation) -> Compute:
    """Return the function of three bits that the table gives, and for a pair whether any bit is set."""
    combines = operation.get("boolean")

    def compute(a: Array, b: Array, c: Array, table: Array, predicate: Array | None = None) -> Any:
        result = np.zeros(1, np.uint32)
        bits = int(table[0])
        for index in range(8):
            if bits >> index & 1:
                term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
                result = result | term
        if predicate is None:
            return result
        some = result != 0
        return result, (some & predicate) if combines == "and" else (some | predicate)

    return compute


def prmt(operation: Operation) -> Compute:
    """Return four bytes picked from the eight of (b, a)."""
    mode = operation.get("permute")
    if mode:
        selectors = np.array(
            [sum(b << 4 * i for i, b in enumerate(row)) for row in _PERMUTATIONS[mode]], np.uint32
        )
        return lambda a, b, c: _permute(a, b, selectors[c & np.uint32(3)])
    return _permute


_PERMUTATIONS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "f4e": tuple((k, k + 1, k + 2, k + 3) for k in range(4)),
    "b4e": tuple((k, (k - 1) % 8, (k - 2) % 8, (k - 3) % 8) for k in range(4)),
    "rc8": tuple((k, k, k, k) for k in range(4)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}
"""Bytes picked for each value of the selector's low two bits, lowest byte first (PTX ISA, prmt)."""


def _permute(a: Array, b: Array, c: Array) -> Array:
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(1, np.uint32)
    for place in range(4):
        selector = (c >> np.uint32(4 * place)) & np.uint32(0xF)
        byte = (pair >> ((selector & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32)
        byte = byte & np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        byte = np.where(selector & np.uint32(8), sign, byte)
        result = result | (byte << np.uint32(8 * place))
    return result


def _low_bits(length: Array, width: int, unsigned: Callable[[int], Array]) -> Array:
    """Return masks of that many low bits; all ones from the width on."""
    ones = unsigned((1 << width) - 1)
    some = (unsigned(1) << np.minimum(length, np.uint32(width - 1)).astype(ones.dtype)) - unsigned(1)
    return np.where(length < width, some, ones)


def bit_length(value: Array) -> Array:
    """Return the position of the highest 1 bit plus one, 0 for zero; unsigned types only."""
    if value.dtype.itemsize == 8:
        high = (value >> np.uint64(32)).astype(np.uint32)
        low = value.astype(np.uint32)
        return np.where(high != 0, bit_length(high) + np.uint32(32), bit_length(low))
    # A double holds 32 bits exactly; frexp's exponent is the length, 0 for zero.
    return np.frexp(value.astype(np.float64))[1].astype(np.uint32)


def _count_ones(value: Array) -> Array:
    """Twin of np.bitwise_count, which NumPy has from version 2."""
    counts = _ONES_IN_BYTE[value.view(np.uint8)].reshape(-1, value.dtype.itemsize)
    total: Array = counts.sum(axis=1, dtype=np.uint8)
    return total


_ONES_IN_BYTE = np.array([i.bit_count() for i in range(256)], np.uint8)
_ONES_IN_BYTE.flags.writeable = False
count_ones: Callable[[Array], Array] = getattr(np, "bitwise_count", _count_ones)
