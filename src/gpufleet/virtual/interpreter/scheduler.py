"""Which group of lanes runs next: the one furthest behind.

Groups are ordered by where they stand, callers first, then the block in the order of the text. The
lowest runs, so lanes that parted at a branch meet again where their ways join, and none runs ahead
of a barrier that others have still to reach. Two rules keep this from hanging where threads wait
for each other: a group that keeps branching backwards lets the others go first for a while, and a
group that waits at a barrier or for its warp counts as not runnable.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING

from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.interpreter.barriers import Barriers
from gpufleet.virtual.interpreter.faults import deadlock
from gpufleet.virtual.interpreter.groups import Group, Path, gather, join

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.batch import Batch

_PATIENCE = 4096
_PATIENCE_POLLING = 8
"""Backward branches before others get a turn; a loop that reads what others may change is asked sooner."""
_TURN = 1024
"""Blocks that a favoured group may execute before the lowest runs again."""
_YIELD_EVERY = 16
"""A lone polling loop lets other Python threads run after so many turns: what it waits for may be theirs."""


class Scheduler:
    """Runs the groups of one batch to their end."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.barriers = Barriers(batch)
        self._pending: dict[Path, list[Group]] = {}
        self._order: list[Path] = []
        """A heap of the keys of pending groups."""
        self._waiting: dict[Path, list[Group]] = {}
        """Groups that wait for lanes of their warps."""
        self._favoured = 0
        """Blocks left of a turn out of order."""
        self._last_favoured: Path = ()

    def run(self, group: Group | None) -> None:
        """Execute until no lane is left; raises `KernelFault`."""
        cancelled = self.batch.launch.cancelled
        while group is not None:
            block = group.block
            if block.meeting is not None:
                group = self._meet(group)
                if group is None:
                    group = self._next()
                    continue
            for operation in block.operations:
                operation(group)
            group = block.end(group, self)
            if cancelled.is_set():
                raise KernelFault("LAUNCH_FAILED", f"kernel {self.batch.kernel_name} was cancelled")
            if group is None:
                self._favoured = 0
                group = self._next()
            elif self._order:
                group = self._arbitrate(group)
            elif group.turns >= _PATIENCE_POLLING:
                group = self._reconsider(group)

    def add(self, group: Group) -> None:
        """Put a group in line."""
        key = group.key
        line = self._pending.get(key)
        if line is None:
            self._pending[key] = [group]
            heapq.heappush(self._order, key)
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                self._pending[key] += waiting
            return
        for other in line:
            if other.space is group.space:
                join(other, group)
                return
        line.append(group)

    def looped(self, group: Group) -> None:
        """Note a backward branch."""
        group.turns += 1
        if group.turns % _YIELD_EVERY == 0 and group.block.polls:
            time.sleep(0)

    # ------------------------------------------------------------------------------------ choice

    def _next(self) -> Group | None:
        if not self._order:
            self._wake()
            if not self._order:
                self._refuse_deadlock()
                return None
        return self._take(heapq.heappop(self._order))

    def _take(self, key: Path) -> Group:
        groups = self._pending.pop(key)
        group = gather(groups)
        group.turns = 0
        return group

    def _arbitrate(self, group: Group) -> Group:
        """Decide between a group and those that are pending."""
        key = group.key
        if key in self._pending:
            turns = group.turns
            self.add(group)
            self._order.remove(key)
            heapq.heapify(self._order)
            group = self._take(key)
            group.turns = turns
            if not self._order:
                return group
        if self._favoured > 0:
            self._favoured -= 1
            return group
        if key < self._order[0]:
            if group.turns < (_PATIENCE_POLLING if group.block.polls else _PATIENCE):
                return group
            return self._favour_another(group)
        self.add(group)
        return self._take(heapq.heappop(self._order))

    def _reconsider(self, group: Group) -> Group:
        """A group alone in line has looped for long: what it waits for may be set behind an open barrier."""
        group.turns = 0
        self._wake()
        return self._arbitrate(group) if self._order else group

    def _favour_another(self, group: Group) -> Group:
        """Let a group further on have a turn, each in its turn."""
        self._wake()
        group.turns = 0
        later = [key for key in self._order if key > self._last_favoured]
        key = min(later) if later else min(self._order)
        self._order.remove(key)
        heapq.heapify(self._order)
        other = self._take(key)
        self.add(group)
        self._favoured = _TURN
        self._last_favoured = key
        return other

    # ----------------------------------------------------------------------------------- waiting

    def _meet(self, group: Group) -> Group | None:
        """Keep back the lanes whose warps are not complete at a `.sync` instruction."""
        meeting = group.block.meeting
        assert meeting is not None
        if group.count == self.batch.alive:
            return group
        incomplete = meeting(group)
        if incomplete is None:
            return group
        early, ready = group.split(incomplete)
        if early is not None:
            self._waiting.setdefault(early.key, []).append(early)
        return ready

    def _wake(self) -> None:
        """Open complete barriers, and look again at warps, whose missing lanes may have ended."""
        self.barriers.release(self)
        for key, groups in list(self._waiting.items()):
            merged = gather(groups)
            meeting = merged.block.meeting
            assert meeting is not None
            incomplete = meeting(merged)
            if incomplete is None or not incomplete[merged.active].all():
                del self._waiting[key]
                self.add(merged)
            else:
                self._waiting[key] = [merged]

    def _refuse_deadlock(self) -> None:
        """Nothing can run: raise if somebody waits."""
        self.barriers.refuse_deadlock()
        for groups in self._waiting.values():
            why = "lanes of the warp that the mask names never arrive"
            raise deadlock(groups[0], groups[0].block.first, why)
