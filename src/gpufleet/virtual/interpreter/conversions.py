"""Conversions between types (PTX ISA 9.7.9.21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpufleet.virtual.interpreter import rounding
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.floats import canonical, flush, saturate
from gpufleet.virtual.interpreter.values import DTYPES, Array
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import is_float

_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def cvt(operation: Operation) -> Compute:
    """Return a converted from the second type to the first."""
    if (
        len(operation.types) != 2
        or "relu" in operation
        or operation.shapes is None
        or len(operation.shapes) != 2
    ):
        raise unsupported(operation.text)
    target, source = operation.types
    for type in (target, source):
        if is_float(type) and type not in ("f32", "f64"):
            raise unsupported(operation.text)
    if is_float(target):
        return _float_to_float(operation) if is_float(source) else _integer_to_float(operation)
    return _float_to_integer(operation) if is_float(source) else _integer_to_integer(operation)


def _integer_to_integer(operation: Operation) -> Compute:
    target = DTYPES[operation.types[0]]
    if "sat" not in operation:
        return lambda a: a.astype(target)
    low, high = _common_limits(target, DTYPES[operation.types[1]])
    return lambda a: np.clip(a, low, high).astype(target)


def _common_limits(target: np.dtype[Any], source: np.dtype[Any]) -> tuple[Any, Any]:
    """Limits of the target, as numbers of the source type."""
    wanted, given = np.iinfo(target), np.iinfo(source)
    return source.type(max(wanted.min, given.min)), source.type(min(wanted.max, given.max))


def _float_to_integer(operation: Operation) -> Compute:
    """Values beyond the target's range become its limits, NaN becomes 0 (PTX ISA 9.7.9.21)."""
    target = DTYPES[operation.types[0]]
    limits = np.iinfo(target)
    if "integral" not in operation:
        raise unsupported(f"{operation.text} without a rounding to integers")
    to_integral = _INTEGRAL[operation.get("integral")]
    ftz = "ftz" in operation
    # The limits as doubles: the upper one of 64 bits rounds up to a power of two, past the range.
    low, high = float(limits.min), float(limits.max)

    def convert(a: Array) -> Array:
        whole = to_integral(flush(a) if ftz else a).astype(np.float64)
        inside = (whole >= low) & (whole <= high) if limits.max < 1 << 53 else (whole >= low) & (whole < high)
        result = np.where(inside, whole, 0.0).astype(target)
        if inside.all():
            return result
        result = np.where(whole < low, target.type(limits.min), result)
        return np.where((whole >= high) & ~inside, target.type(limits.max), result)

    return convert


def _integer_to_float(operation: Operation) -> Compute:
    target, source = operation.types
    mode = operation.get("rounding", "rn")
    dtype = DTYPES[target]
    narrow = DTYPES[source].itemsize <= 4
    if mode == "rn" or (narrow and target == "f64"):
        convert: Compute = lambda a: a.astype(dtype)  # noqa: E731
    elif narrow:
        convert = lambda a: rounding.directed_f32(a.astype(np.float64), np.zeros(1), mode)  # noqa: E731
    else:
        convert = _directed_from_64(target, mode)
    return (lambda a: saturate(convert(a))) if "sat" in operation else convert


def _directed_from_64(target: str, mode: str) -> Compute:
    """Split 64 bits into two doubles that hold them exactly."""

    def convert(a: Array) -> Array:
        high = (a >> a.dtype.type(32)).astype(np.float64) * 2.0**32
        low = (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64)
        value, error = rounding.two_sum(high, low)
        if target == "f32":
            return rounding.directed_f32(value, error, mode)
        return rounding.moved(value, np.sign(error), mode)

    return convert


def _float_to_float(operation: Operation) -> Compute:
    target, source = operation.types
    steps: list[Callable[[Array], Array]] = []
    if "ftz" in operation and source == "f32":
        steps.append(flush)
    if "integral" in operation:
        steps.append(_INTEGRAL[operation.get("integral")])
    if target == "f64" and source == "f32":
        steps.append(lambda a: a.astype(np.float64))
    if target == "f32" and source == "f64":
        mode = operation.get("rounding", "rn")
        steps.append(
            lambda a: rounding.directed_f32(a, np.zeros(1), mode) if mode != "rn" else a.astype(np.float32)
        )
        if "ftz" in operation:
            steps.append(flush)
    if "sat" in operation:
        steps.append(saturate)
    if target == "f32":
        # A copy: the result may be the source's own array, which must not be written to.
        steps.append(lambda a: canonical(a.copy()) if source == "f32" else canonical(a))

    def convert(a: Array) -> Array:
        for step in steps:
            a = step(a)
        return a

    return convert
