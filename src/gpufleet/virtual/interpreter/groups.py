"""Lanes that stand at the same instruction, and how they part and meet again.

A group is a mask over a space plus one value per register. Parting copies the list of registers,
not their arrays; an operation on values then computes all slots of the space and lets those of
absent lanes be garbage. When groups meet, only registers that became different objects are merged.
A group with few lanes left moves into a space of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.code import merge
from gpufleet.virtual.interpreter.lanes import Space
from gpufleet.virtual.interpreter.values import LARGE, Array, expand, same

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.batch import Batch
    from gpufleet.virtual.interpreter.code import Block, Code, Frame

Path = tuple[int, ...]
_Merge = Callable[[list[Array], list[int]], Array]
"""Merges the values of several groups, of which those numbered differ from the root's."""


class Group:
    """Lanes of one space that execute together."""

    __slots__ = (
        "_active",
        "batch",
        "block",
        "code",
        "count",
        "frame_base",
        "mask",
        "origin",
        "path",
        "registers",
        "space",
        "stack",
        "turns",
    )

    def __init__(
        self, batch: Batch, space: Space, code: Code, registers: list[Array], mask: Array | None, count: int
    ) -> None:
        self.batch = batch
        self.space = space
        self.code = code
        self.block: Block = code.entry
        self.registers = registers
        self.mask = mask
        """Which slots of the space are ours; None for all."""
        self.count = count
        self.stack: tuple[Frame, ...] = ()
        """Callers, outermost first."""
        self.path: Path = ()
        """Where the callers stand: what orders groups before the block does."""
        self.frame_base = 0
        """Where this function's local variables begin in the lanes' local memory."""
        self.turns = 0
        """Backward branches taken since the scheduler last chose."""
        self.origin: dict[int, tuple[Array, Array]] | None = None
        """In a smaller space: for each register the root's array it was taken from, and what was taken."""
        self._active: Array | None = None

    @property
    def active(self) -> Array:
        """Slots of the lanes in the group, ascending."""
        if self._active is None:
            order = self.batch.geometry.order[: self.space.size]
            self._active = order if self.mask is None else np.flatnonzero(self.mask)
        return self._active

    @property
    def lanes(self) -> Array:
        """The batch's numbers of the lanes in the group, ascending."""
        lanes = self.space.lanes
        return lanes if self.mask is None else lanes.take(self.active, mode="wrap")

    def picked(self, value: Array) -> Array:
        """Turn one element per slot into one per lane of the group; uniform values stay."""
        if self.mask is None or value.size == 1:
            return value
        return value.take(self.active, mode="wrap")

    def spread(self, value: Array) -> Array:
        """Turn one element per lane of the group into one per slot; uniform values stay."""
        if self.mask is None or value.size == 1:
            return value
        whole = np.zeros(self.space.size, value.dtype)
        whole[self.active] = value
        return whole

    @property
    def key(self) -> Path:
        """Orders groups: callers first, then the block."""
        return (*self.path, self.block.index)

    def narrowed(self, mask: Array | None, count: int) -> Group:
        """Return a group of fewer lanes that shares this one's list of registers."""
        group = Group(self.batch, self.space, self.code, self.registers, mask, count)
        group.block = self.block
        group.stack = self.stack
        group.path = self.path
        group.frame_base = self.frame_base
        group.origin = self.origin
        return group

    def restricted(self, condition: Array) -> Group | None:
        """Return the lanes for which the condition holds, sharing our registers; None if there are none."""
        mask = condition if self.mask is None else self.mask & condition
        count = int(np.count_nonzero(mask))
        if count == self.count:
            return self
        return self.narrowed(mask, count) if count else None

    def split(self, condition: Array) -> tuple[Group | None, Group | None]:
        """Part into the lanes for which the condition holds and the others."""
        if condition.size == 1:
            return (self, None) if condition[0] else (None, self)
        mask = condition if self.mask is None else self.mask & condition
        count = int(np.count_nonzero(mask))
        if count == self.count:
            return self, None
        if count == 0:
            return None, self
        rest = ~condition if self.mask is None else np.greater(self.mask, condition)
        chosen = self.narrowed(mask, count)
        chosen.registers = self.registers.copy()
        self.mask, self.count, self._active = rest, self.count - count, None
        return chosen, self

    def leave_idle_slots(self, worth: float) -> None:
        """Move to a space of our own if fewer than this part of the slots are ours."""
        if self.space.size >= LARGE and self.count < worth * self.space.size:
            self._compact()

    def _compact(self) -> None:
        active = self.active
        old = self.registers
        from_root = self.space.is_root
        origin: dict[int, tuple[Array, Array]] = {}
        fresh = self.batch.template(self.code).copy()
        for index in self.block.live:
            value = old[index]
            fresh[index] = taken = value if value.shape[0] == 1 else value.take(active, 0, mode="wrap")
            if from_root:
                origin[index] = value, taken
            elif self.origin is not None:
                known = self.origin.get(index)
                if known is not None and known[1] is value:
                    origin[index] = known[0], taken
        self.stack = tuple(frame.compacted(active) for frame in self.stack)
        self.space = Space(self.batch, self.space.lanes.take(active, mode="wrap"))
        self.registers = fresh
        self.mask = self._active = None
        self.origin = origin


def join(group: Group, other: Group) -> None:
    """Take the lanes of another group of the same space and at the same place into this one."""
    assert other.mask is not None
    assert group.mask is not None
    merge(group.registers, other.registers, group.block.live, other.mask)
    if group.stack is not other.stack:
        group.stack = tuple(
            a if a is b else a.joined(b, other.mask) for a, b in zip(group.stack, other.stack, strict=True)
        )
    group.count += other.count
    group.mask = None if group.count == group.space.size else group.mask | other.mask
    group._active = None


def gather(groups: list[Group]) -> Group:
    """Bring groups of different spaces, all at the same place, together."""
    if len(groups) == 1:
        return groups[0]
    batch = groups[0].batch
    total = sum(group.count for group in groups)
    root = next((group for group in groups if group.space.is_root), None)
    if root is not None or total * 4 >= batch.root.size or batch.root.size < LARGE:
        return _gather_in_root(groups, root, total)
    return _gather_in_new_space(groups, total)


def _gather_in_root(groups: list[Group], root: Group | None, total: int) -> Group:
    batch = groups[0].batch
    mask = np.zeros(batch.root.size, np.bool_)
    places = []
    for group in groups:
        lanes = group.lanes
        mask[lanes] = True
        places.append(lanes)
    result = groups[0].narrowed(None if total == batch.root.size else mask, total)
    result.space = batch.root
    result.origin = None

    def combine(values: list[Array], changed: list[int]) -> Array:
        if root is not None:
            base = values[groups.index(root)]
        else:
            base = np.zeros((1, *values[0].shape[1:]), values[0].dtype)
        merged = expand(base, batch.root.size)
        for number in changed:
            group, value = groups[number], values[number]
            merged[places[number]] = (
                value if value.shape[0] == 1 or group.mask is None else value.take(group.active, 0)
            )
        return merged

    _merge_all(groups, result, root, combine)
    return result


def _gather_in_new_space(groups: list[Group], total: int) -> Group:
    batch = groups[0].batch
    lanes = np.concatenate([group.lanes for group in groups])
    order = lanes.argsort(kind="stable")
    result = groups[0].narrowed(None, total)
    result.space = Space(batch, lanes.take(order, mode="wrap"))
    result.origin = None

    def combine(values: list[Array], changed: list[int]) -> Array:
        parts = []
        for group, value in zip(groups, values, strict=True):
            if value.shape[0] == 1:
                parts.append(np.repeat(value, group.count, axis=0))
            else:
                parts.append(value if group.mask is None else value.take(group.active, 0, mode="wrap"))
        return np.concatenate(parts).take(order, 0, mode="wrap")

    _merge_all(groups, result, None, combine)
    return result


def _merge_all(groups: list[Group], result: Group, root: Group | None, combine: _Merge) -> None:
    """Merge the live registers of groups and of their callers into a new group."""
    fresh = result.batch.template(result.code).copy()
    everyone = list(range(len(groups)))
    for index in result.block.live:
        values = [group.registers[index] for group in groups]
        changed = everyone
        if root is not None:
            mine = root.registers[index]
            changed = [
                i for i in everyone if groups[i] is not root and not _untouched(groups[i], index, mine)
            ]
            if not changed:
                fresh[index] = mine
                continue
        elif all(same(values[0], value) for value in values[1:]):
            fresh[index] = values[0]
            continue
        fresh[index] = combine(values, changed)
    result.registers = fresh
    stack = []
    for frames in zip(*(group.stack for group in groups), strict=True):
        first = frames[0]
        if all(frame is first for frame in frames) and all(g.space is groups[0].space for g in groups):
            stack.append(first)
            continue
        registers = result.batch.template(first.code).copy()
        for index in first.live:
            values = [frame.registers[index] for frame in frames]
            if all(same(values[0], value) for value in values[1:]):
                registers[index] = values[0]
            else:
                registers[index] = combine(values, [i for i in everyone if groups[i] is not root])
        stack.append(first.with_registers(registers))
    result.stack = tuple(stack)


def _untouched(group: Group, index: int, root_value: Array) -> bool:
    """Say whether a register still is what it was when its lanes left the root's space."""
    value = group.registers[index]
    if same(value, root_value):
        return True
    known = group.origin.get(index) if group.origin is not None else None
    return known is not None and known[0] is root_value and known[1] is value
