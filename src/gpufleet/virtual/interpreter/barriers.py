"""Barriers of the block (PTX ISA 9.7.13.1).

A barrier opens for a block when every thread of it that has not ended has come (what hardware since
sm_70 does), or, with a thread count, when enough whole warps have: a warp counts as 32 threads once
all its remaining lanes are there. Lanes that have come are set aside until nothing else can run;
then all blocks whose barrier is complete go on together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.code import Block, End
from gpufleet.virtual.interpreter.faults import deadlock, fault
from gpufleet.virtual.interpreter.lanes import WARP
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array, Cast

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.batch import Batch
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.interpreter.scheduler import Scheduler
    from gpufleet.virtual.ptx.syntax import Instruction

MOST_BARRIERS = 16


@dataclass(frozen=True)
class Reduction:
    """What `bar.red` computes over the threads of a barrier."""

    kind: str
    """popc, and, or."""
    predicate: Source
    destination: int
    write: Cast | None


@dataclass
class _Waiting:
    group: Group
    number: int
    threads: int
    """How many are waited for; 0: all of the block."""
    reduction: Reduction | None
    instruction: Instruction


class Barriers:
    """Who waits at which barrier of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._waiting: list[_Waiting] = []
        self._arrived: dict[int, Array] = {}
        """Lanes that came by `bar.arrive`, which does not wait."""

    def wait(
        self, group: Group, number: int, threads: int, reduction: Reduction | None, instruction: Instruction
    ) -> None:
        """Set a group aside until its barrier opens."""
        self._waiting.append(_Waiting(group, number, threads, reduction, instruction))

    def arrive(self, group: Group, number: int) -> None:
        """Count lanes that do not wait."""
        lanes = self._arrived.get(number)
        if lanes is None:
            lanes = self._arrived[number] = np.zeros(self._batch.geometry.lanes, np.bool_)
        lanes[group.lanes] = True

    def release(self, scheduler: Scheduler) -> None:
        """Let the blocks go on whose barriers are complete."""
        if not self._waiting:
            return
        for number in sorted({entry.number for entry in self._waiting}):
            here = [entry for entry in self._waiting if entry.number == number]
            opened = self._complete_blocks(number, here)
            if not opened.any():
                continue
            self._waiting = [entry for entry in self._waiting if entry.number != number]
            counts = self._reduce(here)
            for entry in here:
                self._open(entry, opened, counts, scheduler)
            if number in self._arrived:
                self._arrived[number] &= ~opened.take(self._batch.geometry.block_of)

    def refuse_deadlock(self) -> None:
        """Raise for barriers that can never open."""
        if not self._waiting:
            return
        entry = self._waiting[0]
        group, batch = entry.group, self._batch
        block = int(batch.geometry.block_of[group.lanes[0]])
        first = block * batch.geometry.threads
        alive = int(np.count_nonzero(batch.alive_mask()[first : first + batch.geometry.threads]))
        here = sum(
            int(np.count_nonzero(batch.geometry.block_of[other.group.lanes] == block))
            for other in self._waiting
            if other.number == entry.number
        )
        wanted = entry.threads or alive
        why = f"{here} threads of the block wait at barrier {entry.number} for {wanted}, no others can come"
        raise deadlock(group, entry.instruction, why)

    # --------------------------------------------------------------------------------- decisions

    def _complete_blocks(self, number: int, here: list[_Waiting]) -> Array:
        """Say for each block of the batch whether its barrier may open."""
        geometry = self._batch.geometry
        present = np.zeros(geometry.lanes, np.bool_)
        for entry in here:
            present[entry.group.lanes] = True
        waits = present.copy()
        if number in self._arrived:
            present |= self._arrived[number]
        missing = self._batch.alive_mask() & ~present
        warps = geometry.blocks * geometry.warps
        warp_of = geometry.warp_slot // WARP
        complete = np.bincount(warp_of[missing], minlength=warps) == 0
        complete &= np.bincount(warp_of[present], minlength=warps) > 0
        arrived = WARP * complete.reshape(geometry.blocks, -1).sum(axis=1)
        missing_in_block = np.bincount(geometry.block_of[missing], minlength=geometry.blocks)
        wanted = np.zeros(geometry.blocks, np.int64)
        for entry in here:
            np.maximum.at(wanted, geometry.block_of[entry.group.lanes], entry.threads)
        waiting_in_block = np.bincount(geometry.block_of[waits], minlength=geometry.blocks)
        # Warps that have ended cannot come any more; without them the barrier would never open.
        everyone = (missing_in_block == 0) & (wanted <= WARP * geometry.warps)
        enough = everyone | ((wanted > 0) & (arrived >= wanted))
        return (waiting_in_block > 0) & enough

    def _reduce(self, here: list[_Waiting]) -> tuple[Array, Array] | None:
        """Count in each block the threads that take part in a reduction, and those whose predicate holds."""
        geometry = self._batch.geometry
        entries = [entry for entry in here if entry.reduction is not None]
        if not entries:
            return None
        participants = np.zeros(geometry.blocks, np.int64)
        holding = np.zeros(geometry.blocks, np.int64)
        for entry in entries:
            assert entry.reduction is not None
            group = entry.group
            slot, cast = entry.reduction.predicate
            value = group.registers[slot] if cast is None else cast(group.registers[slot])
            blocks = geometry.block_of[group.lanes]
            held = np.broadcast_to(value, group.space.size)[group.active]
            participants += np.bincount(blocks, minlength=geometry.blocks)
            holding += np.bincount(blocks[held], minlength=geometry.blocks)
        return participants, holding

    def _open(
        self, entry: _Waiting, opened: Array, counts: tuple[Array, Array] | None, scheduler: Scheduler
    ) -> None:
        group = entry.group
        going, staying = group.split(opened.take(group.space.block_of))
        if staying is not None:
            self._waiting.append(
                _Waiting(staying, entry.number, entry.threads, entry.reduction, entry.instruction)
            )
        if going is not None:
            if entry.reduction is not None and counts is not None:
                _deliver(going, entry.reduction, counts)
            scheduler.add(going)


def _deliver(group: Group, reduction: Reduction, counts: tuple[Array, Array]) -> None:
    participants, holding = counts
    result: Array
    if reduction.kind == "popc":
        result = holding.astype(np.uint32)
    elif reduction.kind == "or":
        result = holding > 0
    else:
        result = holding == participants
    value = result.take(group.space.block_of)
    group.registers[reduction.destination] = value if reduction.write is None else reduction.write(value)


def barrier(
    number: Source,
    threads: Source | None,
    reduction: Reduction | None,
    arrives: bool,
    resume: Block,
    instruction: Instruction,
) -> End:
    """Wait at a barrier, or only arrive there."""

    def end(group: Group, scheduler: Scheduler) -> Group | None:
        which = _uniform(group, number, "the number of a barrier", instruction)
        if which >= MOST_BARRIERS:
            what = f"barrier {which} of {MOST_BARRIERS}"
            raise fault("ILLEGAL_INSTRUCTION", what, group, instruction, int(group.active[0]))
        count = (
            0 if threads is None else _uniform(group, threads, "the thread count of a barrier", instruction)
        )
        if count % WARP:
            what = f"a barrier for {count} threads, which is not a multiple of {WARP}"
            raise fault("ILLEGAL_INSTRUCTION", what, group, instruction, int(group.active[0]))
        group.block = resume
        if arrives:
            scheduler.barriers.arrive(group, which)
            return group
        if reduction is None and count == 0 and group.count == group.batch.alive:
            return group
        scheduler.barriers.wait(group, which, count, reduction, instruction)
        return None

    return end


def _uniform(group: Group, source: Source, what: str, instruction: Instruction) -> int:
    slot, cast = source
    value = group.registers[slot] if cast is None else cast(group.registers[slot])
    if value.size > 1:
        value = value[group.active]
        if (value != value[0]).any():
            raise fault(
                "ILLEGAL_INSTRUCTION",
                f"{what} differs between threads",
                group,
                instruction,
                int(group.active[0]),
            )
    return int(value[0])
