"""Packed types: two numbers in one register, each computed by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gpufleet.virtual.interpreter import floats, halves, integers
from gpufleet.virtual.interpreter.binding import Compute
from gpufleet.virtual.interpreter.values import DTYPES, Array
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.operations import Operation

PACKED = {"f32x2": "f32", "u16x2": "u16", "s16x2": "s16"}
"""Packed types and what they are made of; those of 16-bit floats are in halves.py."""

_MAKERS: dict[str, dict[str, Callable[[Operation], Compute]]] = {
    "f32": {"add": floats.add, "sub": floats.sub, "mul": floats.mul, "fma": floats.fma},
    "u16": {"add": integers.add, "min": integers.minimum, "max": integers.maximum},
    "s16": {"add": integers.add, "min": integers.minimum, "max": integers.maximum},
}


def packed(operation: Operation) -> Compute:
    """Return an operation on the low and the high numbers of packed operands."""
    part = PACKED[operation.type]
    maker = _MAKERS[part].get(operation.name)
    if maker is None or "sat" in operation:
        raise unsupported(operation.text)
    compute = maker(replace(operation, types=(part,)))
    dtype, whole = DTYPES[part], DTYPES[operation.type]

    def run(*sources: Array) -> Array:
        columns = [np.ascontiguousarray(source).view(dtype).reshape(-1, 2) for source in sources]
        halves_of_it = [compute(*[np.ascontiguousarray(c[:, side]) for c in columns]) for side in (0, 1)]
        return np.stack(halves_of_it, axis=1).view(whole).reshape(-1)

    return run


def mixed(operation: Operation) -> Compute:
    """Return single precision arithmetic whose first operands are 16-bit floats (PTX ISA 9.7.5)."""
    makers = {"add": (1, floats.add), "sub": (1, floats.sub), "fma": (2, floats.fma)}
    narrow = operation.types[1]
    if operation.name not in makers or narrow not in ("f16", "bf16"):
        raise unsupported(operation.text)
    count, maker = makers[operation.name]
    compute = maker(replace(operation, types=("f32",)))

    def run(*sources: Array) -> Array:
        wide = [halves.widen(source, narrow) for source in sources[:count]]
        return compute(*wide, *sources[count:])

    return run
