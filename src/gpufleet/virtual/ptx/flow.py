"""Basic blocks, and which registers are still needed where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from functools import lru_cache

from gpufleet.virtual.ptx.syntax import (
    Address,
    BasicBlock,
    Body,
    CallTarget,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Selected,
    Targets,
    Vector,
)

ENDS_BLOCK = frozenset({"bra", "brx", "ret", "exit", "trap"})


def leaders(instructions: list[Instruction], labels: Iterable[int]) -> list[int]:
    """Return the indices at which blocks begin: the entry, labels, and what follows a branch."""
    found = {0, *labels}
    for index, instruction in enumerate(instructions[:-1]):
        if instruction.opcode in ENDS_BLOCK:
            found.add(index + 1)
    return sorted(index for index in found if index < len(instructions))


def continues(instruction: Instruction) -> bool:
    """Say whether the next instruction may follow this one."""
    return instruction.opcode not in ENDS_BLOCK or instruction.guard is not None


def basic_blocks(
    instructions: list[Instruction], starts: list[int], labels: dict[int, list[str]]
) -> list[BasicBlock]:
    """Cut instructions whose labels are resolved into blocks."""
    blocks = []
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else len(instructions)
        last = instructions[stop - 1]
        successors: list[int] = []
        for operand in last.operands:
            if isinstance(operand, Label):
                successors.append(operand.block)
            elif isinstance(operand, Targets):
                successors.extend(label.block for label in operand.labels)
        if continues(last) and index + 1 < len(starts):
            successors.append(index + 1)
        blocks.append(
            BasicBlock(index, start, stop, tuple(labels.get(start, ())), tuple(dict.fromkeys(successors)))
        )
    return blocks


def registers_of(operand: Operand) -> Iterator[Register]:
    """Yield every register in an operand."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from registers_of(element)
    elif isinstance(operand, (Negated, Selected)):
        yield operand.register
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, CallTarget):
        for element in (operand.target, *operand.results, *operand.arguments):
            yield from registers_of(element)


@lru_cache(maxsize=1 << 14)
def sources_of(instruction: Instruction) -> tuple[Operand, ...]:
    """Return the operands that are not destinations."""
    shapes = instruction.operation.shapes or ()
    return tuple(o for o, s in zip(instruction.operands, shapes, strict=False) if not s.destination)


@lru_cache(maxsize=1 << 14)
def reads_and_writes(instruction: Instruction) -> tuple[Set[int], Set[int]]:
    """Return the indices of the registers an instruction reads, and of those it writes.

    Kept, since every analysis of a kernel asks for each of its instructions again.
    """
    reads: set[int] = set()
    writes: set[int] = set()
    shapes = instruction.operation.shapes or ()
    for index, operand in enumerate(instruction.operands):
        if isinstance(operand, Register):
            (writes if index < len(shapes) and shapes[index].destination else reads).add(operand.index)
        elif isinstance(operand, CallTarget):
            for result in operand.results:
                writes.update(r.index for r in registers_of(result))
            for source in (operand.target, *operand.arguments):
                reads.update(r.index for r in registers_of(source))
        elif index < len(shapes) and shapes[index].destination:
            writes.update(r.index for r in registers_of(operand))
        else:
            reads.update(r.index for r in registers_of(operand))
    if instruction.guard is not None:
        reads.add(instruction.guard.index)
    return reads, writes


def live_in(body: Body) -> list[int]:
    """Return, for each block, the registers whose values may be read later, as a bit mask of indices.

    A guarded write does not end a register's life: the old value may survive it.
    """
    uses: list[int] = []
    kills: list[int] = []
    for block in body.blocks:
        use = kill = 0
        for instruction in body.instructions[block.start : block.stop]:
            reads, writes = reads_and_writes(instruction)
            for index in reads:
                use |= (1 << index) & ~kill
            if instruction.guard is None:
                for index in writes:
                    kill |= 1 << index
            else:
                for index in writes:
                    use |= (1 << index) & ~kill
        uses.append(use)
        kills.append(kill)
    live = list(uses)
    changed = True
    while changed:
        changed = False
        for block in reversed(body.blocks):
            out = 0
            for successor in block.successors:
                out |= live[successor]
            value = uses[block.index] | (out & ~kills[block.index])
            if value != live[block.index]:
                live[block.index] = value
                changed = True
    return live
