"""One piece of work, and what it waits for."""

from __future__ import annotations

from _thread import LockType
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpufleet.virtual.interrupts import on_main_thread

if TYPE_CHECKING:
    from gpufleet.virtual.spans import Allocation

BLOCKED, READY, RUNNING, DONE = range(4)


class Operation:
    """One piece of work in a stream.

    Attributes
    ----------
    device : int
        Whose workers take it.
    action : callable or None
        What it does. None makes it a marker, which ends as soon as what is before it.
    mark : callable or None
        Called once when it ends, with the driver's lock held; must be short.
    on_worker : bool
        Whether only a worker may run it, never a thread that waits.
    brief : bool
        Whether it is expected to take no more than about a millisecond. The main thread runs no other,
        so that Ctrl-C reaches it.
    uses : tuple of Allocation
        Memory that is to know of the operation (`Allocation.users`) once it has been entered.
    blockers : int
        How many of the predecessors have not ended.
    """

    __slots__ = (
        "action", "blockers", "brief", "device", "followers", "mark", "on_worker", "predecessors", "state",
        "uses", "waiters",
    )  # fmt: skip

    def __init__(
        self,
        device: int,
        action: Callable[[], None] | None = None,
        *,
        mark: Callable[[], object] | None = None,
        on_worker: bool = False,
        brief: bool = True,
        uses: tuple[Allocation, ...] = (),
    ) -> None:
        self.device = device
        self.action = action
        self.mark = mark
        self.on_worker = on_worker
        self.brief = brief
        self.uses = uses
        self.state = BLOCKED
        self.blockers = 0
        self.predecessors: list[Operation] = []
        self.followers: list[Operation] = []
        self.waiters: list[LockType] = []

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state == DONE

    def may_run_here(self) -> bool:
        """Say whether the calling thread, which waits, may run it."""
        return not self.on_worker and (self.brief or not on_main_thread())


def unfinished_ancestors(target: Operation) -> set[Operation]:
    """Return the operation and all that must end before it."""
    found = {target}
    pending = [target]
    while pending:
        for predecessor in pending.pop().predecessors:
            if predecessor.state != DONE and predecessor not in found:
                found.add(predecessor)
                pending.append(predecessor)
    return found
