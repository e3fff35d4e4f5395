"""What the decoding of all instructions of one function has in common: how operands are read and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from gpufleet.virtual.interpreter.code import Block, Code, End, Operation
from gpufleet.virtual.interpreter.control import Condition, condition
from gpufleet.virtual.interpreter.moves import frame_address, read_special
from gpufleet.virtual.interpreter.segments import segments
from gpufleet.virtual.interpreter.slots import Slots, Source
from gpufleet.virtual.interpreter.specials import special
from gpufleet.virtual.interpreter.values import DTYPES, Array, reader
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.flow import reads_and_writes
from gpufleet.virtual.ptx.layout import local_layout
from gpufleet.virtual.ptx.operations import OperandShape
from gpufleet.virtual.ptx.syntax import (
    Function,
    Instruction,
    Kernel,
    Module,
    Operand,
    Pair,
    Parameter,
    Register,
    Special,
    Symbol,
    Vector,
)

Handler = Callable[["Decoder", Instruction], list[Operation]]
"""Turns an instruction into operations."""
EndHandler = Callable[["Decoder", Instruction, Block, "Block | None"], End]
"""Turns an instruction that ends a block into how the block is left; gets the block and the next one."""


class Linker(Protocol):
    """What a function's decoder asks about the rest of the program."""

    module: Module
    lock: threading.Lock
    """Held while an atomic operation is carried out."""

    def code(self, function: Function) -> Code:
        """Return the decoded function, which may still be in the making if it is recursive."""
        ...

    def candidates(self) -> list[Function]:
        """Return the functions that an indirect call may reach."""
        ...


def _sign_extended(address: Array) -> Array:
    """Addresses in 32 bits wrap around when an offset is added: `sub %r1, 0, 4; ld.shared [%r1+8]`."""
    return address.view(np.int32).astype(np.int64).view(np.uint64)


class Decoder:
    """Holds one function while it is decoded, and answers how its operands are reached."""

    def __init__(self, linker: Linker, function: Function, code: Code, addresses: Mapping[str, int]) -> None:
        self.linker = linker
        self.function = function
        self.body = function.body
        self.code = code
        self.is_kernel = isinstance(function, Kernel)
        self.slots = Slots(self.body, addresses)
        self.locals, code.frame_bytes = local_layout(function)
        self.segments, self._first = segments(self.body)
        code.blocks = [Block(segment.index) for segment in self.segments]
        self._before: list[Operation] = []
        self._frame_slots: dict[int, int] = {}
        self._read_registers: set[int] | None = None
        if not self.is_kernel:
            code.parameter_slots = tuple(self._place(p) for p in function.parameters)
            code.result_slots = tuple(self._place(p) for p in function.results)
        for variable in self.body.variables.values():
            if variable.space == "param":
                self.slots.parameter_block(variable.name, variable.size)

    def _place(self, parameter: Parameter) -> int:
        if not parameter.register:
            return self.slots.parameter_block(parameter.name, parameter.size)
        return next(r.index for r in self.body.registers if r.name == parameter.name)

    def source(self, operand: Operand, type: str, instruction: Instruction) -> Source:
        """Return how to read an operand; a special register is read before, by `take_before`."""
        if isinstance(operand, Special):
            slot = self.slots.add(np.zeros(1, DTYPES[type]))
            self._before.append(read_special((slot, None), special(operand.name, instruction.line), type))
            return slot, None
        return self.slots.source(operand, type, instruction.line)

    def take_before(self) -> list[Operation]:
        """Return what must be carried out before the instruction whose sources were asked for."""
        before, self._before = self._before, []
        return before

    def destinations(self, operand: Operand, shape: OperandShape, instruction: Instruction) -> list[Source]:
        """Return where the results go: one, or two for a pair."""
        line = instruction.line
        if isinstance(operand, Pair):
            first = self.slots.destination(operand.first, shape.type, line)
            return [first, self.slots.destination(operand.second, "pred", line)]
        return [self.slots.destination(operand, shape.type, line)]

    def elements(self, operand: Operand) -> list[Operand]:
        """Return a vector's elements, or the operand alone."""
        return list(operand.elements) if isinstance(operand, Vector) else [operand]

    def address(
        self, base: Register | Symbol | None, instruction: Instruction
    ) -> tuple[Source, list[Operation]]:
        """Return how to read a base address, and what computes it first."""
        if isinstance(base, Register):
            stored = self.slots.stored(base)
            return (base.index, _sign_extended if stored.itemsize == 4 else reader(stored, "u64")), []
        if base is None:
            return (self.slots.constant(0, "u64"), None), []
        if base.space == "local":
            offset = self.locals[base.name] + base.offset
            slot = self._frame_slots.get(offset)
            if slot is None:
                slot = self._frame_slots[offset] = self.slots.add(np.zeros(1, np.uint64))
            return (slot, None), [frame_address(slot, offset)]
        if base.space == "param":
            return (self.slots.constant(self.kernel_parameter(base, instruction), "u64"), None), []
        return (self.slots.constant(self.slots.address(base, instruction.line), "u64"), None), []

    def kernel_parameter(self, symbol: Symbol, instruction: Instruction) -> int:
        """Return the offset of a kernel's parameter."""
        if self.is_kernel:
            for parameter in self.function.parameters:
                if parameter.name == symbol.name:
                    return parameter.offset + symbol.offset
        raise unsupported(f"the address of parameter {symbol.name!r} of a function", instruction.line)

    def is_read(self, operand: Operand) -> bool:
        """Say whether any instruction of the function reads a register."""
        if self._read_registers is None:
            self._read_registers = set().union(*(reads_and_writes(i)[0] for i in self.body.instructions))
        return not isinstance(operand, Register) or operand.index in self._read_registers

    def target(self, block: int) -> Block:
        """Return where a label leads."""
        return self.code.blocks[self._first[block]]

    def condition(self, instruction: Instruction) -> Condition:
        """Return how to read an instruction's guard."""
        assert instruction.guard is not None
        return condition(instruction.guard.index, instruction.guard_negated)

    def written(self, instruction: Instruction) -> list[int]:
        """Return the slots that an instruction writes."""
        written = sorted(reads_and_writes(instruction)[1])
        if "cc" in instruction.operation:
            written.append(self.slots.carry)
        for operand in instruction.operands:
            base = getattr(operand, "base", None)
            if isinstance(base, Symbol) and base.name in self.slots.blocks:
                written.append(self.slots.blocks[base.name])
        return written
