"""`alloca`, `stacksave` and `stackrestore` (PTX ISA 9.7.16) as ordinary instructions.

A thread's local memory begins with an area for `alloca`, below the frames of its functions. How much of
it is used stands in the area's first word, for functions that are called, and in a register of each
function that allocates. So engines need to know nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.flow import basic_blocks, leaders
from gpufleet.virtual.ptx.operations import operation
from gpufleet.virtual.ptx.syntax import (
    Address,
    BasicBlock,
    Body,
    Function,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Operand,
    Register,
    Targets,
)

AREA = 16 << 10
"""Bytes per thread. The whole stack of a thread has 1 KiB on a GPU, unless cuCtxSetLimit changes it."""
_FIRST = 16
"""Where the first allocation begins: behind the word that says how much is used, and aligned."""
_ALIGNMENT = 16
"""Of allocations that ask for less; a GPU promises 8."""


def give_stacks(functions: Iterable[Function]) -> None:
    """Prepare the kernels of a module in which any function uses `alloca`, and those functions."""
    functions = list(functions)
    if not any(map(_allocates, functions)):
        return
    for function in functions:
        if function.build is None:
            continue
        if isinstance(function, Kernel):
            function.local_area = AREA
        if isinstance(function, Kernel) or _allocates(function):
            function.build = _with_stack(function.build, isinstance(function, Kernel))


def _allocates(function: Function) -> bool:
    return any(name.startswith(("alloca.", "stacksave.", "stackrestore.")) for name in function.names_used)


def _with_stack(build: Callable[[], Body], is_kernel: bool) -> Callable[[], Body]:
    return lambda: _Rewriter(build(), is_kernel).body()


class _Rewriter:
    """Copies a body, with other instructions in the place of those on the stack."""

    def __init__(self, body: Body, is_kernel: bool) -> None:
        self._body = body
        self._is_kernel = is_kernel
        self._registers = list(body.registers)
        self._top = self._register("%stack", "b64")
        self._entry = self._register("%stack.entry", "b64")
        self._place = self._register("%stack.place", "b64")
        self._over = self._register("%stack.over", "pred")
        self._instructions: list[Instruction] = []

    def body(self) -> Body:
        """Return the copy."""
        old = self._body
        self._begin(old.instructions[0])
        starts: dict[int, int] = {}
        for block in old.blocks:
            starts[len(self._instructions)] = block.index
            for instruction in old.instructions[block.start : block.stop]:
                self._append(instruction)
        places = {index: start for start, index in starts.items()}
        cuts = leaders(self._instructions, [places[b.index] for b in old.blocks])
        number = {start: index for index, start in enumerate(cuts)}
        for instruction in self._instructions:
            instruction.operands = tuple(_moved(o, places, number) for o in instruction.operands)
        labels = {places[b.index]: list(b.labels) for b in old.blocks if b.labels}
        blocks: list[BasicBlock] = basic_blocks(self._instructions, cuts, labels)
        return Body(self._instructions, self._registers, old.variables, blocks)

    def _register(self, name: str, type: str) -> Register:
        self._registers.append(Register(name, type, len(self._registers)))
        return self._registers[-1]

    def _begin(self, first: Instruction) -> None:
        if self._is_kernel:
            self._emit(first, "mov.u64", self._top, _number(_FIRST))
            self._emit(first, "st.local.u64", Address(None, 0), self._top)
        else:
            self._emit(first, "ld.local.u64", self._top, Address(None, 0))
            self._emit(first, "mov.u64", self._entry, self._top)

    def _append(self, instruction: Instruction) -> None:
        name = instruction.opcode
        if name == "alloca":
            self._allocate(instruction)
        elif name == "stacksave":
            self._emit(instruction, "mov.u64", instruction.operands[0], self._top)
        elif name == "stackrestore":
            self._emit(instruction, "mov.u64", self._top, instruction.operands[0])
            self._emit(instruction, "st.local.u64", Address(None, 0), self._top)
        elif name == "ret" and not self._is_kernel:
            self._emit(instruction, "st.local.u64", Address(None, 0), self._entry)
            self._instructions.append(instruction)
        else:
            self._instructions.append(_copy(instruction))

    def _allocate(self, instruction: Instruction) -> None:
        if instruction.operation.type != "u64":
            raise unsupported(instruction.operation.text, instruction.line)
        place, size, *more = instruction.operands
        align = max(more[0].bits if more and isinstance(more[0], Immediate) else 0, _ALIGNMENT)
        self._emit(instruction, "add.u64", self._place, self._top, _number(align - 1))
        self._emit(instruction, "and.b64", self._place, self._place, _number(-align))
        self._emit(instruction, "add.u64", self._top, self._place, size)
        self._emit(instruction, "mov.u64", place, self._place)
        self._emit(instruction, "st.local.u64", Address(None, 0), self._top)
        self._emit(instruction, "setp.gt.u64", self._over, self._top, _number(AREA))
        self._instructions.append(
            Instruction(operation("trap"), (), self._over, False, instruction.line, instruction.source)
        )

    def _emit(self, like: Instruction, text: str, *operands: Operand) -> None:
        """Append an instruction under the guard of the one that it stands for."""
        self._instructions.append(
            Instruction(operation(text), operands, like.guard, like.guard_negated, like.line, like.source)
        )


def _copy(instruction: Instruction) -> Instruction:
    return Instruction(
        instruction.operation,
        instruction.operands,
        instruction.guard,
        instruction.guard_negated,
        instruction.line,
        instruction.source,
    )


def _number(value: int) -> Immediate:
    return Immediate(value & ((1 << 64) - 1), "u64")


def _moved(operand: Operand, places: dict[int, int], number: dict[int, int]) -> Operand:
    if isinstance(operand, Label):
        return Label(operand.name, number[places[operand.block]])
    if isinstance(operand, Targets):
        return Targets(tuple(Label(t.name, number[places[t.block]]) for t in operand.labels))
    return operand
