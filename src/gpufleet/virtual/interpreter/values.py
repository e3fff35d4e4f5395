"""How values of lanes are held: one NumPy array per register, or a single element for all lanes.

An array has one element per slot of a space of lanes, or exactly one where all lanes agree (a
*uniform* value). NumPy broadcasts the single element, so nothing else needs to know which it is.
Arrays are never written to after they were put into a register; so registers, groups of lanes and
caches share them freely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpufleet.virtual.ptx.scalars import SIGNED, SIZES

Array = NDArray[Any]
Cast = Callable[[Array], Array]

UNSIGNED_OF_SIZE: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
SIGNED_OF_SIZE: dict[int, np.dtype[Any]] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}

DTYPES: dict[str, np.dtype[Any]] = {
    name: SIGNED_OF_SIZE[size] if name in ("s8", "s16", "s32", "s64") else UNSIGNED_OF_SIZE[size]
    for name, size in SIZES.items()
    if size <= 8
} | {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "pred": np.dtype(np.bool_),
    "b128": np.dtype(np.complex128),
}
"""The array type of each PTX type. Packed types and 16-bit floats are held as their bits, 128 bits as the
only type of NumPy's that has so many; nothing computes with them."""

LARGE = 2048
"""Slots from which it pays to avoid NumPy's branching selection, and to leave idle lanes behind."""


def constant(bits: int, type: str) -> Array:
    """Make the uniform value with these bits."""
    dtype = DTYPES[type]
    if type == "pred":
        return np.array([bits != 0])
    if type == "b128":
        return np.array([bits & (1 << 64) - 1, bits >> 64], np.uint64).view(dtype)
    mask = (1 << 8 * dtype.itemsize) - 1
    return np.array([bits & mask], UNSIGNED_OF_SIZE[dtype.itemsize]).view(dtype)


def reader(stored: np.dtype[Any], type: str) -> Cast | None:
    """Return what turns a stored register into `type`, or None where it already is.

    A wider register gives its low bits (PTX ISA 9.4.1).
    """
    wanted = DTYPES[type]
    if stored == wanted:
        return None
    if stored.itemsize == wanted.itemsize:
        return lambda value: value.view(wanted)
    whole, part = UNSIGNED_OF_SIZE[stored.itemsize], UNSIGNED_OF_SIZE[wanted.itemsize]
    return lambda value: value.view(whole).astype(part).view(wanted)


def writer(stored: np.dtype[Any], type: str) -> Cast | None:
    """Return what turns a result of `type` into a stored register, or None where it already is.

    A wider register is filled with the sign for signed types, with zeros for others (PTX ISA 9.4.1).
    """
    given = DTYPES[type]
    if stored == given:
        return None
    if stored.itemsize == given.itemsize:
        return lambda value: value.view(stored)
    if type in SIGNED:
        whole = SIGNED_OF_SIZE[stored.itemsize]
        return lambda value: value.astype(whole).view(stored)
    part, whole = UNSIGNED_OF_SIZE[given.itemsize], UNSIGNED_OF_SIZE[stored.itemsize]
    return lambda value: value.view(part).astype(whole).view(stored)


def select(mask: Array, chosen: Array, other: Array) -> Array:
    """Return `chosen` where the mask holds and `other` elsewhere.

    np.where branches on every element, 100 us for 32 Ki random ones where bit operations take 37.
    """
    if mask.size == 1:
        return chosen if mask[0] else other
    if chosen.ndim > 1 or other.ndim > 1:
        return np.where(mask[:, None], chosen, other)
    if mask.size < LARGE or chosen.dtype.itemsize > 8:
        return np.where(mask, chosen, other)
    word = UNSIGNED_OF_SIZE[chosen.dtype.itemsize]
    bits = mask.view(np.uint8).astype(word)
    np.negative(bits, out=bits)
    background = other.view(word)
    bits &= chosen.view(word) ^ background
    bits ^= background
    return bits.view(chosen.dtype)


def expand(value: Array, count: int) -> Array:
    """Return one element per slot, freshly allocated, for writing to."""
    if value.shape[0] == count:
        return value.copy()
    return np.repeat(value, count, axis=0)


def same(a: Array, b: Array) -> bool:
    """Say whether two values are known to be equal: the same array, or equal uniform ones."""
    return a is b or (a.size == 1 and b.size == 1 and a.tobytes() == b.tobytes())
