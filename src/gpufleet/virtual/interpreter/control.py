"""How a group leaves a block: branches, returns, the ends of threads, calls (PTX ISA 9.7.12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.code import Block, End
from gpufleet.virtual.interpreter.faults import fault
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.interpreter.scheduler import Scheduler
    from gpufleet.virtual.ptx.syntax import Instruction

_WORTH_IN_LOOP = 0.75
_WORTH_ELSEWHERE = 0.25
"""Part of a space's slots below which a group moves to a smaller space. Loops repay the move sooner."""

Condition = Callable[["Group"], Array]


def condition(predicate: int, negated: bool) -> Condition:
    """Return how to read a guard."""
    if negated:
        return lambda group: ~group.registers[predicate]
    return lambda group: group.registers[predicate]


def jump(source: Block, target: Block) -> End:
    """Go on at one block."""
    if target.index <= source.index:

        def jump_back(group: Group, scheduler: Scheduler) -> Group:
            group.block = target
            scheduler.looped(group)
            return group

        return jump_back

    def jump_on(group: Group, scheduler: Scheduler) -> Group:
        group.block = target
        return group

    return jump_on


def branch(source: Block, holds: Condition, target: Block, otherwise: Block) -> End:
    """Go on at one block where the condition holds, else at another."""
    lower, higher = (target, otherwise) if target.index < otherwise.index else (otherwise, target)
    back = lower.index <= source.index

    def end(group: Group, scheduler: Scheduler) -> Group:
        taken, rest = group.split(holds(group))
        if taken is not None:
            taken.block = target
        if rest is not None:
            rest.block = otherwise
        if taken is None or rest is None:
            group = taken or rest  # type: ignore[assignment]
            if back and group.block is lower:
                scheduler.looped(group)
            return group
        first, second = (taken, rest) if target is lower else (rest, taken)
        second.turns = 0
        second.leave_idle_slots(_WORTH_ELSEWHERE)
        scheduler.add(second)
        if back:
            scheduler.looped(first)
            first.leave_idle_slots(_WORTH_IN_LOOP)
        else:
            first.leave_idle_slots(_WORTH_IN_LOOP if higher.is_exit else _WORTH_ELSEWHERE)
        return first

    return end


def choose(source: Block, index: Source, targets: Sequence[Block], instruction: Instruction) -> End:
    """Go on at the block that a number picks from a table."""
    slot, cast = index

    def end(group: Group, scheduler: Scheduler) -> Group | None:
        numbers = group.registers[slot] if cast is None else cast(group.registers[slot])
        rest: Group | None = group
        for number in np.unique(numbers if numbers.size == 1 else numbers[group.active]):
            assert rest is not None
            part, rest = rest.split(numbers == number)
            assert part is not None
            if number >= len(targets):
                what = f"branch to number {number} of a table of {len(targets)}"
                raise fault("ILLEGAL_INSTRUCTION", what, part, instruction, int(part.active[0]))
            part.block = targets[number]
            part.turns += part.block.index <= source.index
            part.leave_idle_slots(_WORTH_ELSEWHERE)
            scheduler.add(part)
        return None

    return end


def finish(group: Group, scheduler: Scheduler) -> Group | None:
    """End the threads."""
    group.batch.end(group)
    return None


def leave() -> End:
    """Return to the caller."""

    def end(group: Group, scheduler: Scheduler) -> Group:
        frame = group.stack[-1]
        registers = frame.registers.copy()
        for inside, outside in frame.results:
            registers[outside] = group.registers[inside]
        group.registers = registers
        group.stack = group.stack[:-1]
        group.path = group.path[:-2]
        group.code = frame.code
        group.block = frame.resume
        group.frame_base = frame.frame_base
        group.origin = None
        return group

    return end


def guarded(holds: Condition, end: End, otherwise: Block) -> End:
    """Leave the block for the lanes where the condition holds; the others fall through."""

    def run(group: Group, scheduler: Scheduler) -> Group | None:
        taken, rest = group.split(holds(group))
        if rest is not None:
            rest.block = otherwise
        if taken is None:
            return rest
        if rest is None:
            return end(taken, scheduler)
        gone = end(taken, scheduler)
        if gone is not None:
            scheduler.add(gone)
        rest.leave_idle_slots(_WORTH_IN_LOOP)
        return rest

    return run
