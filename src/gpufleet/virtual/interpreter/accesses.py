"""Loads and stores (PTX ISA 9.7.9.8 and following)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.memory import Access
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group

Base = tuple[Source, int]
"""Where the address comes from, and the constant offset."""


def spread(group: Group, value: Array) -> Array:
    """Turn one element per active lane into one per slot."""
    if group.mask is None or value.size == 1:
        return value
    whole = np.zeros(group.space.size, value.dtype)
    whole[group.active] = value
    return whole


def picked(group: Group, value: Array) -> Array:
    """Turn one element per slot into one per active lane; uniform values stay."""
    if group.mask is None or value.size == 1:
        return value
    return value.take(group.active, mode="wrap")


def load(access: Access, base: Base, destinations: Sequence[Source]) -> Operation:
    """Read one element, or a vector's, for every active lane."""
    (slot, cast), offset = base
    locate = access.locate
    if cast is None and len(destinations) == 1 and destinations[0][1] is None:
        destination = destinations[0][0]

        def load_one(group: Group) -> None:
            registers = group.registers
            registers[destination] = spread(group, locate(group, registers[slot], offset).load())

        return load_one

    def load_several(group: Group) -> None:
        registers = group.registers
        addresses = registers[slot] if cast is None else cast(registers[slot])
        place = locate(group, addresses, offset)
        values = [spread(group, place.load(element)) for element in range(len(destinations))]
        for (destination, write), value in zip(destinations, values, strict=True):
            registers[destination] = value if write is None else write(value)

    return load_several


def store(access: Access, base: Base, sources: Sequence[Source]) -> Operation:
    """Write one element, or a vector's, for every active lane."""
    (slot, cast), offset = base
    locate = access.locate

    def run(group: Group) -> None:
        registers = group.registers
        addresses = registers[slot] if cast is None else cast(registers[slot])
        place = locate(group, addresses, offset)
        for element, (source, read) in enumerate(sources):
            value = registers[source] if read is None else read(registers[source])
            place.store(picked(group, value), element)

    return run
