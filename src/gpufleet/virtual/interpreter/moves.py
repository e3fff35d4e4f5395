"""Moves between registers, with packing and unpacking (PTX ISA 9.7.9.3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.specials import Special
from gpufleet.virtual.interpreter.values import DTYPES, Array

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group


def pack(destination: Source, parts: Sequence[Source], part_type: str, type: str) -> Operation:
    """Put several values side by side, the first in the low bits."""
    if type == "b128":
        return _pack_rows(destination, parts)
    slot, write = destination
    dtype = DTYPES[type]
    step = dtype.type(8 * DTYPES[part_type].itemsize)

    def run(group: Group) -> None:
        registers = group.registers
        whole: Array | None = None
        for source, cast in reversed(parts):
            value = registers[source] if cast is None else cast(registers[source])
            part = value.astype(dtype)
            whole = part if whole is None else (whole << step) | part
        assert whole is not None
        registers[slot] = whole if write is None else write(whole)

    return run


def _pack_rows(destination: Source, parts: Sequence[Source]) -> Operation:
    """The same for 128 bits, with which NumPy does not shift."""
    slot, write = destination

    def run(group: Group) -> None:
        registers = group.registers
        values = [registers[source] if cast is None else cast(registers[source]) for source, cast in parts]
        whole = np.stack(np.broadcast_arrays(*values), axis=1).view(np.complex128).reshape(-1)
        registers[slot] = whole if write is None else write(whole)

    return run


def unpack(destinations: Sequence[Source], source: Source, part_type: str) -> Operation:
    """Take a value apart, the low bits first."""
    slot, cast = source
    part_dtype = DTYPES[part_type]
    bits = 8 * part_dtype.itemsize

    def run(group: Group) -> None:
        registers = group.registers
        value = registers[slot] if cast is None else cast(registers[slot])
        if value.dtype.itemsize > 8:
            parts = value.view(part_dtype).reshape(value.size, -1)
            for number, (destination, write) in enumerate(destinations):
                part = np.ascontiguousarray(parts[:, number])
                registers[destination] = part if write is None else write(part)
            return
        for number, (destination, write) in enumerate(destinations):
            part = (value >> value.dtype.type(number * bits)).astype(part_dtype)
            registers[destination] = part if write is None else write(part)

    return run


def read_special(destination: Source, special: Special, type: str) -> Operation:
    """Move a special register, cut to the size of the type as ptxas does."""
    slot, write = destination
    dtype = DTYPES[type]

    def run(group: Group) -> None:
        value = special(group)
        if value.dtype != dtype:
            value = value.astype(dtype)
        group.registers[slot] = value if write is None else write(value)

    return run


def frame_address(slot: int, offset: int) -> Operation:
    """Compute the address of a local variable of the current activation."""

    def run(group: Group) -> None:
        group.registers[slot] = np.array([group.frame_base + offset], np.uint64)

    return run


def load_block(destinations: Sequence[Source], block: int, offset: int, type: str) -> Operation:
    """Read values out of a call's parameter block."""
    dtype = DTYPES[type]
    size = dtype.itemsize

    def run(group: Group) -> None:
        registers = group.registers
        rows = registers[block]
        for number, (destination, write) in enumerate(destinations):
            start = offset + number * size
            value = np.ascontiguousarray(rows[:, start : start + size]).view(dtype).reshape(-1)
            registers[destination] = value if write is None else write(value)

    return run


def store_block(sources: Sequence[Source], block: int, offset: int) -> Operation:
    """Write values into a call's parameter block."""

    def run(group: Group) -> None:
        registers = group.registers
        for number, (source, cast) in enumerate(sources):
            value = registers[source] if cast is None else cast(registers[source])
            size = value.dtype.itemsize
            start = offset + number * size
            registers[block] = _with_part(registers[block], as_rows(value), start, size)

    return run


def as_rows(value: Array) -> Array:
    """Return the bytes of each element as a row."""
    return np.ascontiguousarray(value).view(np.uint8).reshape(value.size, -1)


def _with_part(rows: Array, part: Array, start: int, size: int) -> Array:
    if rows.shape[1] == size:
        return part
    rows = np.repeat(rows, len(part), axis=0) if len(rows) < len(part) else rows.copy()
    rows[:, start : start + size] = part
    return rows
