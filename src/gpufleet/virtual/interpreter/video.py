"""The video instructions (PTX ISA 9.7.17): bytes and halves of words, alone and several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.video import mask_of, picks, places_of

_Exact = Callable[[Array, Array], Array]
"""Computes on 64-bit integers that hold the operands exactly."""

_OPERATIONS: dict[str, _Exact] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
    # Rounded away from zero where the sum is not negative, towards minus infinity where it is.
    "vavrg": lambda a, b: np.where(a + b >= 0, a + b + 1, a + b) >> 1,
}
_RELATIONS: dict[str, _Exact] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def computation(operation: Operation, selectors: Sequence[str]) -> Callable[..., Array]:
    """Return what a video instruction computes from its sources.

    `selectors` are those of the destination and of the first two sources, empty where there are none.
    """
    if operation.name[-1] in "24":
        return _packed(operation, int(operation.name[-1]), selectors)
    if operation.name == "vmad":
        return _multiply_add(operation, selectors)
    return _scalar(operation, selectors)


# --------------------------------------------------------------------------------- one at a time


def _scalar(operation: Operation, selectors: Sequence[str]) -> Callable[..., Array]:
    """One byte, half or word of each source, then an optional second operation or merge with c."""
    name = operation.name
    is_set = name == "vset"
    a_type, b_type = operation.types if is_set else operation.types[1:]
    signed = not is_set and operation.types[0] == "s32"
    target, a_part, b_part = selectors

    def compute(a: Array, b: Array, c: Array | None = None) -> Array:
        first, second = _part(a, a_type, a_part), _part(b, b_type, b_part)
        if is_set:
            result = _RELATIONS[operation.get("compare")](first, second).astype(np.int64)
        elif name in ("vshl", "vshr"):
            result = _shifted(operation, first, second)
        else:
            result = _OPERATIONS[name](first, second)
        if "sat" in operation and not _overflows(operation, selectors):
            result = _clamped(result, _width(target), signed)
        return _finished(operation, result, c, target, signed or is_set)

    return compute


def _shifted(operation: Operation, value: Array, amount: Array) -> Array:
    """Shift by up to 32 places; the result has 34 bits before it is saturated (H200)."""
    amount = amount & 31 if operation.get("wrapping") == "wrap" else np.minimum(amount, 32)
    if operation.name == "vshr":
        return value >> amount
    return ((value << amount) << 30) >> 30


def _overflows(operation: Operation, selectors: Sequence[str]) -> bool:
    """The sum of two unsigned words wraps around in spite of .sat (H200); differences do not."""
    return operation.name == "vadd" and set(operation.types) == {"u32"} and not any(selectors)


def _multiply_add(operation: Operation, selectors: Sequence[str]) -> Callable[..., Array]:
    _, a_type, b_type = operation.types
    signed = "s32" in (a_type, b_type)
    scale = int(operation.get("scale", "shr0")[3:])

    def compute(a: Array, b: Array, c: Array) -> Array:
        # Products of words do not fit 64 bits, and are rare: Python's integers hold them.
        first = _part(a, a_type, selectors[1]).astype(object)
        second = _part(b, b_type, selectors[2]).astype(object)
        addend = _part(c, "s32", "").astype(object)
        total = first * second + addend + int("po" in operation)
        if not signed:
            # c is signed nevertheless, and what a shift brings in are zeros (H200).
            total = (total & _WORD) >> scale if scale else total
        total = total >> scale if signed else total
        if "sat" in operation:
            low, high = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
            total = np.clip(total, low, high)
        return np.array([int(value) & 0xFFFFFFFF for value in np.atleast_1d(total)], np.uint32)

    return compute


def _finished(operation: Operation, result: Array, c: Array | None, target: str, signed: bool) -> Array:
    second = operation.get("second")
    if second:
        assert c is not None
        other = _part(c, "s32" if signed else "u32", "")
        cut = _part(result.astype(np.uint32), "s32" if signed else "u32", "")
        result = {"add": np.add, "min": np.minimum, "max": np.maximum}[second](cut, other)
    bits = result.astype(np.uint32)
    if not target or c is None or second:
        return bits
    width = _width(target)
    mask = np.uint32(((1 << width) - 1) << (width * int(target[1])))
    return ((bits << np.uint32(width * int(target[1]))) & mask) | (c & ~mask)


def _part(value: Array, type: str, selector: str) -> Array:
    """Extract a byte, a half or the whole word, extended to 64 bits."""
    width = _width(selector)
    place = int(selector[1]) if selector else 0
    bits = value.view(np.uint32) >> np.uint32(width * place)
    dtype: Any = np.dtype(f"{'i' if type[0] == 's' else 'u'}{width // 8}")
    return bits.astype(f"u{width // 8}").view(dtype).astype(np.int64)


def _width(selector: str) -> int:
    return {"": 32, "b": 8, "h": 16}[selector[:1]]


def _clamped(value: Array, width: int, signed: bool) -> Array:
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    return np.clip(value, low, high)


# --------------------------------------------------------------------------------- several at once


_WORD = (1 << 64) - 1


def _packed(operation: Operation, count: int, selectors: Sequence[str]) -> Callable[..., Array]:
    name = operation.name[:-1]
    is_set = name == "vset"
    a_type, b_type = operation.types if is_set else operation.types[1:]
    signed = not is_set and operation.types[0] == "s32"
    width = 32 // count
    targets = mask_of(selectors[0], count)
    a_places, b_places = picks(selectors[1], count, 0), picks(selectors[2], count, count)

    def compute(a: Array, b: Array, c: Array) -> Array:
        lanes = [_part(source, "u32", part) for source in (a, b) for part in places_of(count)]
        total = c.astype(np.int64)
        merged = np.zeros(1, np.uint32)
        for lane in range(count):
            first = _extended(lanes[a_places[lane]], a_type, width)
            second = _extended(lanes[b_places[lane]], b_type, width)
            if is_set:
                result = _RELATIONS[operation.get("compare")](first, second).astype(np.int64)
            else:
                result = _OPERATIONS[name](first, second)
            if "sat" in operation:
                result = _clamped(result, width, signed)
            mask = np.uint32(((1 << width) - 1) << (width * lane))
            if targets[lane]:
                total = total + result
                merged = merged | ((result.astype(np.uint32) << np.uint32(width * lane)) & mask)
            else:
                merged = merged | (c & mask)
        return total.astype(np.uint32) if "add" in operation else merged

    return compute


def _extended(value: Array, type: str, width: int) -> Array:
    return ((value ^ (1 << (width - 1))) - (1 << (width - 1))) if type[0] == "s" else value
