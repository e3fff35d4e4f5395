"""A function's syntax tree to blocks of closures over slots.

`Decoder` holds what all instructions of one function share and answers how to read and write
operands. What each instruction becomes is looked up by its opcode: in arithmetic.py for those that
only turn values into values, else in the handlers of decode_memory, decode_warp and decode_control.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from gpufleet.virtual.interpreter import integers
from gpufleet.virtual.interpreter.arithmetic import computation
from gpufleet.virtual.interpreter.binding import bind, guard
from gpufleet.virtual.interpreter.code import Block, Code, End, Operation
from gpufleet.virtual.interpreter.liveness import live_slots
from gpufleet.virtual.interpreter.moves import frame_address
from gpufleet.virtual.interpreter.segments import Segment, ends_segment, is_meeting, segments
from gpufleet.virtual.interpreter.slots import Slots, Source
from gpufleet.virtual.interpreter.specials import POLLING
from gpufleet.virtual.interpreter.values import Array, reader
from gpufleet.virtual.ptx.errors import unsupported
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
    Raw,
    Register,
    Special,
    Symbol,
    Vector,
)

Handler = Callable[["Decoder", Instruction], list[Operation]]
"""Turns an instruction into operations."""
EndHandler = Callable[["Decoder", Instruction, Block, "Block | None"], End]
"""Turns an instruction that ends a block into how the block is left; gets the block and the next one."""

_POLLING_LOADS = frozenset({"volatile", "relaxed", "acquire", "mmio"})


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


class Decoder:
    """Decodes one function."""

    def __init__(self, linker: Linker, function: Function, code: Code, addresses: Mapping[str, int]) -> None:
        self.linker = linker
        self.function = function
        self.body = function.body
        self.code = code
        self.is_kernel = isinstance(function, Kernel)
        self.slots = Slots(self.body, addresses)
        self.locals, code.frame_bytes = local_layout(function)
        self._frame_slots: dict[int, int] = {}
        self._read_registers: set[int] | None = None
        if not self.is_kernel:
            code.parameter_slots = tuple(self._place(p) for p in function.parameters)
            code.result_slots = tuple(self._place(p) for p in function.results)
        for variable in self.body.variables.values():
            if variable.space == "param":
                self.slots.parameter_block(variable.name, variable.size)

    def decode(self) -> None:
        """Fill in the code."""
        found, self._first = segments(self.body)
        code = self.code
        code.blocks = [Block(segment.index) for segment in found]
        for segment in found:
            self._decode_segment(segment)
        code.template = self.slots.template
        code.launch_slots = self.slots.launch_slots
        for block, live in zip(
            code.blocks, live_slots(self.body, self.function, self.slots, found), strict=True
        ):
            block.live = live

    def _place(self, parameter: Parameter) -> int:
        if not parameter.register:
            return self.slots.parameter_block(parameter.name, parameter.size)
        return next(r.index for r in self.body.registers if r.name == parameter.name)

    def _decode_segment(self, segment: Segment) -> None:
        from gpufleet.virtual.interpreter import control

        block = self.code.blocks[segment.index]
        instructions = self.body.instructions[segment.start : segment.stop]
        following = self.code.blocks[segment.index + 1] if segment.index + 1 < len(self.code.blocks) else None
        block.first = instructions[0]
        block.polls = any(map(_polls, instructions))
        if is_meeting(instructions[0]) and instructions[0].guard is None:
            block.meeting = self._meeting(instructions[0])
        *before, last = instructions
        if not ends_segment(last):
            before = instructions
        operations: list[Operation] = []
        for instruction in before:
            operations += self._operations(instruction)
        block.operations = tuple(operations)
        if ends_segment(last):
            block.end = self._end(last, block, following)
        else:
            block.end = control.finish if following is None else control.jump(block, following)
        block.is_exit = not operations and block.end is control.finish

    def _operations(self, instruction: Instruction) -> list[Operation]:
        check_shape(instruction)
        handler = _handlers().get(instruction.opcode)
        found = handler(self, instruction) if handler is not None else [self._arithmetic(instruction)]
        if instruction.guard is None or not found:
            return found
        # Address computations before the last operation do no harm for other lanes.
        last = guard(
            found[-1], instruction.guard.index, instruction.guard_negated, self._written(instruction)
        )
        return [*found[:-1], last]

    def _end(self, instruction: Instruction, block: Block, following: Block | None) -> End:
        from gpufleet.virtual.interpreter import control, decode_control

        check_shape(instruction)
        end = decode_control.ENDS[instruction.opcode](self, instruction, block, following)
        if instruction.guard is None or instruction.opcode == "bra":
            return end
        assert following is not None
        return control.guarded(self.condition(instruction), end, following)

    def _meeting(self, instruction: Instruction) -> Callable[..., Array | None]:
        from gpufleet.virtual.interpreter import decode_warp

        return decode_warp.meeting(self, instruction)

    def _arithmetic(self, instruction: Instruction) -> Operation:
        operation, operands = instruction.operation, instruction.operands
        shapes = operation.shapes or ()
        sources = [
            self.source(o, s.type, instruction) for o, s in zip(operands[1:], shapes[1:], strict=False)
        ]
        carry = self._carry_chain(instruction, sources)
        if carry is not None:
            return carry
        destinations = self.destinations(operands[0], shapes[0], instruction)
        return bind(computation(operation, len(destinations) > 1), destinations, sources)

    def _carry_chain(self, instruction: Instruction, sources: list[Source]) -> Operation | None:
        operation = instruction.operation
        reads = operation.name in ("addc", "subc", "madc")
        if not reads and "cc" not in operation:
            return None
        compute = integers.CARRY_CHAINS[operation.name](operation, reads)
        destinations = self.destinations(instruction.operands[0], (operation.shapes or ())[0], instruction)
        keeps = self.slots.carry if "cc" in operation else self.slots.discarded
        if reads:
            sources = [*sources, (self.slots.carry, None)]
        return bind(compute, [*destinations, (keeps, None)], sources)

    # ---------------------------------------------------------------------------- for handlers

    def source(self, operand: Operand, type: str, instruction: Instruction) -> Source:
        """Return how to read an operand."""
        if isinstance(operand, (Special, Vector)):
            raise unsupported(f"{type_name(operand)} in {instruction}", instruction.line)
        return self.slots.source(operand, type, instruction.line)

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
            return (base.index, reader(self.slots.stored(base), "u64")), []
        if base is None:
            return (self.slots.constant(0, "u64"), None), []
        if base.space == "local":
            offset = self.locals[base.name] + base.offset
            slot = self._frame_slots.setdefault(offset, self.slots.add(np.zeros(1, np.uint64)))
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
            from gpufleet.virtual.ptx.flow import reads_and_writes

            self._read_registers = set().union(*(reads_and_writes(i)[0] for i in self.body.instructions))
        return not isinstance(operand, Register) or operand.index in self._read_registers

    def target(self, block: int) -> Block:
        """Return where a label leads."""
        return self.code.blocks[self._first[block]]

    def condition(self, instruction: Instruction) -> Callable[..., Array]:
        """Return how to read an instruction's guard."""
        from gpufleet.virtual.interpreter.control import condition

        assert instruction.guard is not None
        return condition(instruction.guard.index, instruction.guard_negated)

    def _written(self, instruction: Instruction) -> list[int]:
        from gpufleet.virtual.ptx.flow import reads_and_writes

        written = sorted(reads_and_writes(instruction)[1])
        if "cc" in instruction.operation:
            written.append(self.slots.carry)
        for operand in instruction.operands:
            base = getattr(operand, "base", None)
            if isinstance(base, Symbol) and base.name in self.slots.blocks:
                written.append(self.slots.blocks[base.name])
        return written


def check_shape(instruction: Instruction) -> None:
    """Refuse what the table of instructions does not list."""
    operation = instruction.operation
    if operation.shapes is None or any(isinstance(operand, Raw) for operand in instruction.operands):
        raise unsupported(operation.text, instruction.line)


def type_name(operand: Operand) -> str:
    """Return what kind of operand this is, for messages."""
    return f"a {type(operand).__name__.lower()} operand"


def _polls(instruction: Instruction) -> bool:
    operation = instruction.operation
    if operation.name in ("atom", "nanosleep"):
        return True
    if operation.name == "ld":
        return operation.get("semantics") in _POLLING_LOADS
    return any(isinstance(o, Special) and o.name in POLLING for o in instruction.operands)


def _handlers() -> Mapping[str, Handler]:
    from gpufleet.virtual.interpreter import decode_memory, decode_warp

    return decode_memory.HANDLERS | decode_warp.HANDLERS
