"""Which slots a group still needs: what is merged when groups meet, and taken along when one moves."""

from __future__ import annotations

from collections.abc import Mapping

from gpufleet.virtual.interpreter.segments import Segment
from gpufleet.virtual.interpreter.slots import Slots
from gpufleet.virtual.ptx.flow import reads_and_writes
from gpufleet.virtual.ptx.syntax import Address, Body, CallTarget, Function, Instruction, Kernel, Symbol

_READS_CARRY = frozenset({"addc", "subc", "madc"})


def live_slots(
    body: Body, function: Function, slots: Slots, segments: list[Segment]
) -> list[tuple[int, ...]]:
    """Return for each segment the slots that may be read from there on before they are written."""
    effects = [_effects(instruction, function, slots) for instruction in body.instructions]
    uses: list[int] = []
    kills: list[int] = []
    for segment in segments:
        use = kill = 0
        for reads, writes in effects[segment.start : segment.stop]:
            use |= reads & ~kill
            kill |= writes
        uses.append(use)
        kills.append(kill)
    live = list(uses)
    changed = True
    while changed:
        changed = False
        for segment in reversed(segments):
            out = 0
            for successor in segment.successors:
                out |= live[successor]
            value = uses[segment.index] | (out & ~kills[segment.index])
            if value != live[segment.index]:
                live[segment.index] = value
                changed = True
    return [_members(mask) for mask in live]


def _members(mask: int) -> tuple[int, ...]:
    members = []
    while mask:
        lowest = mask & -mask
        members.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(members)


def _effects(instruction: Instruction, function: Function, slots: Slots) -> tuple[int, int]:
    """Return the slots an instruction reads, and those whose old value ends, as bit masks."""
    read_registers, written_registers = reads_and_writes(instruction)
    reads, writes = set(read_registers), set(written_registers)
    _parameter_effects(instruction, function, slots.blocks, reads, writes)
    operation = instruction.operation
    if operation.name in _READS_CARRY:
        reads.add(slots.carry)
    if "cc" in operation:
        writes.add(slots.carry)
    if instruction.guard is not None:
        # The old value survives where the guard does not hold.
        reads |= writes
        writes = set()
    return _mask(reads), _mask(writes)


def _parameter_effects(
    instruction: Instruction, function: Function, blocks: Mapping[str, int], reads: set[int], writes: set[int]
) -> None:
    """Parameter blocks of calls are slots too; only calls replace them whole."""
    if instruction.opcode == "ret" and not isinstance(function, Kernel):
        reads.update(blocks[result.name] for result in function.results if result.name in blocks)
        return
    for operand in instruction.operands:
        if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.name in blocks:
            reads.add(blocks[operand.base.name])
        elif isinstance(operand, CallTarget):
            reads.update(
                blocks[a.name] for a in operand.arguments if isinstance(a, Symbol) and a.name in blocks
            )
            writes.update(
                blocks[r.name] for r in operand.results if isinstance(r, Symbol) and r.name in blocks
            )


def _mask(members: set[int]) -> int:
    mask = 0
    for member in members:
        mask |= 1 << member
    return mask
