"""Where a function's values live: the numbering of slots and the array type each is stored as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpufleet.virtual.interpreter.values import (
    DTYPES,
    UNSIGNED_OF_SIZE,
    Array,
    Cast,
    constant,
    reader,
    writer,
)
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.flow import registers_of
from gpufleet.virtual.ptx.scalars import SIZES
from gpufleet.virtual.ptx.syntax import (
    Body,
    Discard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Symbol,
)

Source = tuple[int, Cast | None]
"""A slot and what makes its value the type that is wanted."""


class Slots:
    """Hands out slots, and says how to read and write operands."""

    def __init__(self, body: Body, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses
        self._stored = _storage(body)
        self.template: list[Array] = [np.zeros(1, dtype) for dtype in self._stored]
        self.registers = len(self._stored)
        self._constants: dict[tuple[str, int], int] = {}
        self._launch: dict[tuple[str, int], int] = {}
        self._blocks: dict[str, int] = {}
        self.launch_slots: list[tuple[int, np.dtype[Any], int]] = []
        self.carry = self.add(np.zeros(1, np.bool_))
        """The condition code register that add.cc and its like write."""
        self.discarded = self.add(np.zeros(1, np.bool_))
        """Takes results that nothing reads."""

    def add(self, value: Array) -> int:
        """Make a slot with this initial value."""
        self.template.append(value)
        return len(self.template) - 1

    def constant(self, bits: int, type: str) -> int:
        """Return the slot of a constant."""
        key = type, bits
        if key not in self._constants:
            self._constants[key] = self.add(constant(bits, type))
        return self._constants[key]

    def launch_parameter(self, type: str, offset: int) -> int:
        """Return the slot that a launch fills from its parameter space."""
        key = type, offset
        if key not in self._launch:
            slot = self._launch[key] = self.add(np.zeros(1, DTYPES[type]))
            self.launch_slots.append((slot, DTYPES[type], offset))
        return self._launch[key]

    def parameter_block(self, name: str, size: int) -> int:
        """Return the slot of a `.param` block that a call uses: `size` bytes per lane."""
        if name not in self._blocks:
            self._blocks[name] = self.add(np.zeros((1, size), np.uint8))
        return self._blocks[name]

    @property
    def blocks(self) -> Mapping[str, int]:
        """Slots of the `.param` blocks by name."""
        return self._blocks

    def stored(self, register: Register) -> np.dtype[Any]:
        """Return the array type that a register is held as."""
        return self._stored[register.index]

    def source(self, operand: Operand, type: str, line: int) -> Source:
        """Return how to read an operand as `type`."""
        if isinstance(operand, Register):
            return operand.index, reader(self._stored[operand.index], type)
        if isinstance(operand, Immediate):
            return self.constant(operand.bits, type), None
        if isinstance(operand, Negated):
            return operand.register.index, np.logical_not
        if isinstance(operand, Symbol) and (
            SIZES[type] == 8 or (SIZES[type] == 4 and operand.space == "shared")
        ):
            return self.constant(self.address(operand, line), type), None
        raise unsupported(f"{_describe(operand)} as a source of type .{type}", line)

    def destination(self, operand: Operand, type: str, line: int) -> Source:
        """Return where a result of `type` goes; a discarded one goes to a slot that nothing reads."""
        if isinstance(operand, Register):
            return operand.index, writer(self._stored[operand.index], type)
        if isinstance(operand, Discard):
            return self.discarded, None
        raise unsupported(f"{_describe(operand)} as a destination", line)

    def address(self, symbol: Symbol, line: int) -> int:
        """Return the address of a variable or function, other than in local or parameter space."""
        found = self._addresses.get(symbol.name)
        if found is None:
            raise unsupported(f"the address of {symbol.name!r} here", line)
        return found + symbol.offset


def _describe(operand: Operand) -> str:
    return f"a {type(operand).__name__.lower()}"


def _storage(body: Body) -> list[np.dtype[Any]]:
    """Choose how each register is held.

    Floats that are only ever floats are held as such, everything else as unsigned bits. Both are
    always right, a view turns one into the other; the choice saves the view (0.2 us).
    """
    votes: Counter[int] = Counter()
    for instruction in body.instructions:
        for index, weight in _votes(instruction):
            votes[index] += weight
    chosen = []
    for register in body.registers:
        if register.type == "pred":
            chosen.append(DTYPES["pred"])
            continue
        size = SIZES[register.type]
        if size > 8:
            chosen.append(DTYPES["b128"])
            continue
        is_float = size in (4, 8) and (register.type in ("f32", "f64") or votes[register.index] > 0)
        chosen.append(DTYPES[f"f{8 * size}"] if is_float else UNSIGNED_OF_SIZE[size])
    return chosen


def _votes(instruction: Instruction) -> list[tuple[int, int]]:
    found = []
    for shape, operand in zip(instruction.operation.shapes or (), instruction.operands, strict=False):
        if shape.kind == "value" and shape.type not in ("pred", "b32", "b64"):
            weight = 1 if shape.type in ("f32", "f64") else -1
            found += [(register.index, weight) for register in registers_of(operand)]
        elif shape.kind == "address":
            found += [(register.index, -1) for register in registers_of(operand)]
    return found
