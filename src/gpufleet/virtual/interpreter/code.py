"""A function decoded once: blocks of closures over numbered slots.

A slot is a place in a group's list of values. The function's registers come first, then constants,
the launch's parameters, and the parameter blocks that calls use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpufleet.virtual.interpreter.values import Array, same, select

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.interpreter.scheduler import Scheduler
    from gpufleet.virtual.ptx.syntax import Instruction

Operation = Callable[["Group"], None]
"""Carries out one instruction for a group."""
End = Callable[["Group", "Scheduler"], "Group | None"]
"""Leaves a block: returns the group that goes on, or None when it has ended or waits."""


@dataclass(eq=False)
class Block:
    """Instructions that a group executes without looking at other groups."""

    index: int
    """Order in the function's text: the lowest runs first."""
    operations: tuple[Operation, ...] = ()
    end: End = None  # type: ignore[assignment]
    live: tuple[int, ...] = ()
    """Slots whose values may be read from here on."""
    meeting: Callable[[Group], Array | None] | None = None
    """For a `.sync` instruction of the warp: which slots' warps are not complete; None if all are."""
    polls: bool = False
    """Reads what other threads or the clock may change: a loop over it may be waiting for them."""
    first: Instruction | None = None
    is_exit: bool = False
    """Does nothing but end the threads."""


@dataclass(eq=False)
class Code:
    """A decoded function."""

    name: str
    number: int
    """Tells functions apart in the order of groups."""
    blocks: list[Block] = field(default_factory=list)
    template: list[Array] = field(default_factory=list)
    """Values of all slots before the first instruction."""
    launch_slots: list[tuple[int, np.dtype[Any], int]] = field(default_factory=list)
    """(slot, type, offset in the kernel's parameter space), filled in by each launch."""
    parameter_slots: tuple[int, ...] = ()
    result_slots: tuple[int, ...] = ()
    frame_bytes: int = 0
    """Local memory of one activation."""
    has_barriers: bool = False

    @property
    def entry(self) -> Block:
        """Where execution begins."""
        return self.blocks[0]


@dataclass(frozen=True)
class Frame:
    """A caller that waits for its callee."""

    code: Code
    registers: list[Array]
    resume: Block
    results: tuple[tuple[int, int], ...]
    """(slot of the callee, slot here) for every result."""
    frame_base: int

    @property
    def live(self) -> tuple[int, ...]:
        """Slots that are needed after the return."""
        return self.resume.live

    def with_registers(self, registers: list[Array]) -> Frame:
        """Return the same caller with other values."""
        return replace(self, registers=registers)

    def compacted(self, active: Array) -> Frame:
        """Return the same caller for some of the slots only."""
        registers = self.registers.copy()
        for index in self.live:
            value = registers[index]
            if value.shape[0] != 1:
                registers[index] = value.take(active, 0, mode="wrap")
        return self.with_registers(registers)

    def joined(self, other: Frame, mask: Array) -> Frame:
        """Return the same caller with the other's values where the mask holds."""
        registers = self.registers.copy()
        merge(registers, other.registers, self.live, mask)
        return self.with_registers(registers)


def merge(registers: list[Array], others: list[Array], live: Sequence[int], mask: Array) -> None:
    """Take other values where the mask holds, for the slots that are needed and differ."""
    for index in live:
        mine, theirs = registers[index], others[index]
        if mine is not theirs and not same(mine, theirs):
            registers[index] = select(mask, theirs, mine)
