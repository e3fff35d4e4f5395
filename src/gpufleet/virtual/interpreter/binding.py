"""Ties a computation on arrays to the slots that it reads and writes.

Every arity has a variant without casts, since a launch of few threads spends its time here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array, Cast, select

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group

Compute = Callable[..., Any]
"""Takes one array per source, returns the result, or a tuple of results for several destinations."""


def bind(compute: Compute, destinations: Sequence[Source], sources: Sequence[Source]) -> Operation:
    """Make the operation that computes from sources to destinations."""
    if len(destinations) != 1:
        return _bind_several(compute, destinations, sources)
    destination, write = destinations[0]
    if write is None and all(cast is None for _, cast in sources) and len(sources) in _PLAIN:
        return _PLAIN[len(sources)](compute, destination, *(slot for slot, _ in sources))
    return _bind_with_casts(compute, destination, write, sources)


def _plain_1(compute: Compute, destination: int, a: int) -> Operation:
    def run(group: Group) -> None:
        registers = group.registers
        registers[destination] = compute(registers[a])

    return run


def _plain_2(compute: Compute, destination: int, a: int, b: int) -> Operation:
    def run(group: Group) -> None:
        registers = group.registers
        registers[destination] = compute(registers[a], registers[b])

    return run


def _plain_3(compute: Compute, destination: int, a: int, b: int, c: int) -> Operation:
    def run(group: Group) -> None:
        registers = group.registers
        registers[destination] = compute(registers[a], registers[b], registers[c])

    return run


_PLAIN: dict[int, Callable[..., Operation]] = {1: _plain_1, 2: _plain_2, 3: _plain_3}


def _identity(value: Array) -> Array:
    return value


def _bind_with_casts(
    compute: Compute, destination: int, write: Cast | None, sources: Sequence[Source]
) -> Operation:
    reads = [(slot, cast or _identity) for slot, cast in sources]
    convert = write or _identity

    def run(group: Group) -> None:
        registers = group.registers
        registers[destination] = convert(compute(*[cast(registers[slot]) for slot, cast in reads]))

    return run


def _bind_several(compute: Compute, destinations: Sequence[Source], sources: Sequence[Source]) -> Operation:
    reads = [(slot, cast or _identity) for slot, cast in sources]
    writes = [(slot, cast or _identity) for slot, cast in destinations]

    def run(group: Group) -> None:
        registers = group.registers
        results = compute(*[cast(registers[slot]) for slot, cast in reads])
        for (slot, cast), result in zip(writes, results, strict=True):
            registers[slot] = cast(result)

    return run


def copy(destination: int, write: Cast | None, source: Source) -> Operation:
    """Make a move; arrays are never written to, so it shares them."""
    slot, read = source
    if read is None and write is None:

        def share(group: Group) -> None:
            registers = group.registers
            registers[destination] = registers[slot]

        return share
    return _bind_with_casts(_identity, destination, write, [source])


def guard(operation: Operation, predicate: int, negated: bool, destinations: Sequence[int]) -> Operation:
    """Carry an operation out only for the lanes whose predicate holds (PTX ISA 9.3)."""

    def run(group: Group) -> None:
        registers = group.registers
        condition = registers[predicate]
        if condition.size == 1:
            if condition[0] != negated:
                operation(group)
            return
        if negated:
            condition = ~condition
        part = group.restricted(condition)
        if part is None:
            return
        if part is group:
            operation(group)
            return
        before = [registers[slot] for slot in destinations]
        operation(part)
        for slot, old in zip(destinations, before, strict=True):
            new = registers[slot]
            if new is not old:
                registers[slot] = select(condition, new, old)

    return run
