"""Comparisons and selections (PTX ISA 9.7.5 and 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpufleet.virtual.interpreter import halves
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.floats import flush
from gpufleet.virtual.interpreter.values import DTYPES, Array, select
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import is_float

_Test = Callable[[Array, Array], Array]

_ORDERED: dict[str, _Test] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_FLOAT: dict[str, _Test] = {
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_COMBINE: dict[str, _Test] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def setp(operation: Operation, pair: bool) -> Compute:
    """Return whether the comparison holds, combined with c; as a pair also whether it does not, combined.

    For two packed halves the pair is the results of the low and the high one.
    """
    test = _test(operation, operation.type)
    join = _join(operation)
    packed = operation.type.endswith("x2")
    if packed and not pair:
        raise unsupported(f"{operation.text} with one destination")

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
        holds = test(a, b)
        first, second = (holds[:, 0], holds[:, 1]) if packed else (holds, ~holds)
        return join(first, c), join(second, c)

    if pair:
        return compute
    return test if "boolean" not in operation else lambda a, b, c: join(test(a, b), c)


def set_value(operation: Operation) -> Compute:
    """Return all ones, or 1.0 for a float, where the comparison holds, else 0."""
    result, compared = operation.types
    test = _test(operation, compared)
    join = _join(operation)
    dtype = DTYPES[result]
    zero = dtype.type(0)
    if result in halves.HALF_TYPES:
        yes = dtype.type(halves.one(result))
    else:
        yes = dtype.type(1.0) if result == "f32" else np.array(-1, np.int64).astype(dtype)[()]
    if not compared.endswith("x2"):
        return lambda a, b, c=None: np.where(join(test(a, b), c), yes, zero)
    low = yes & dtype.type(0xFFFF)

    def compute(a: Array, b: Array, c: Array | None = None) -> Array:
        holds = test(a, b)
        low_part = np.where(join(holds[:, 0], c), low, zero)
        return low_part | np.where(join(holds[:, 1], c), yes ^ low, zero)

    return compute


def _join(operation: Operation) -> Callable[[Array, Array | None], Array]:
    """Return what combines a comparison with the predicate operand, if there is one."""
    combine = _COMBINE.get(operation.get("boolean"))

    def join(holds: Array, predicate: Array | None) -> Array:
        return holds if combine is None or predicate is None else combine(holds, predicate)

    return join


def selp(operation: Operation) -> Compute:
    """Return a where c holds, else b."""
    return lambda a, b, c: select(c, a, b)


def slct(operation: Operation) -> Compute:
    """Return a where c >= 0, else b; a NaN selects b."""
    ftz = "ftz" in operation
    return lambda a, b, c: select((flush(c) if ftz else c) >= 0, a, b)


def pred_and(operation: Operation) -> Compute:
    """Return a and b of predicates."""
    return np.logical_and


def pred_or(operation: Operation) -> Compute:
    """Return a or b of predicates."""
    return np.logical_or


def pred_xor(operation: Operation) -> Compute:
    """Return a or else b of predicates."""
    return np.logical_xor


def pred_not(operation: Operation) -> Compute:
    """Return not a of a predicate."""
    return np.logical_not


def _test(operation: Operation, type: str) -> _Test:
    relation = operation.get("compare")
    if is_float(type):
        test = _FLOAT.get(relation) or _ORDERED[relation]
        if type in halves.HALF_TYPES:
            return halves.comparison(operation, type, test)
        if "ftz" in operation:
            return lambda a, b: test(flush(a), flush(b))
        return test
    if relation == "ne":
        return np.not_equal
    if relation not in _ORDERED:
        raise unsupported(f"{operation.text} compares integers as floats")
    return _ORDERED[relation]
