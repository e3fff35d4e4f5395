"""Loads and stores (PTX ISA 9.7.9.8 and following)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.memory import Access
from gpufleet.virtual.interpreter.slots import Source

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group

Base = tuple[Source, int]
"""Where the address comes from, and the constant offset."""


def load(access: Access, base: Base, destinations: Sequence[Source]) -> Operation:
    """Read one element, or a vector's, for every active lane."""
    (slot, cast), offset = base
    locate = access.locate
    if cast is None and len(destinations) == 1 and destinations[0][1] is None:
        destination = destinations[0][0]

        def load_one(group: Group) -> None:
            registers = group.registers
            registers[destination] = group.spread(locate(group, registers[slot], offset).load())

        return load_one

    def load_several(group: Group) -> None:
        registers = group.registers
        addresses = registers[slot] if cast is None else cast(registers[slot])
        place = locate(group, addresses, offset)
        values = [group.spread(place.load(element)) for element in range(len(destinations))]
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
            place.store(group.picked(value), element)

    return run
