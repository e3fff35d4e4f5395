"""The ready operations of a device, and the worker threads that take them."""

from __future__ import annotations

import threading
from _thread import LockType
from collections import deque

from gpufleet.virtual.operations import READY, Operation


class Queue:
    """The ready operations of one device, and its workers."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.ready: deque[Operation] = deque()
        self.waiting = 0
        """Operations in `ready` that nobody has taken; the rest are leftovers of helping threads."""
        self.coming = 0
        """Workers that were woken or hired and have not looked for work yet."""
        self.workers: set[threading.Thread] = set()
        self.parked: list[LockType] = []
        """A locked lock of each worker without work; releasing it wakes the worker."""

    def take(self) -> Operation | None:
        """Return the oldest operation that nobody has taken."""
        while self.ready:
            operation = self.ready.popleft()
            if operation.state == READY:
                self.waiting -= 1
                return operation
        return None

    def wake(self) -> bool:
        """Wake a worker, if one is without work."""
        if not self.parked:
            return False
        self.coming += 1
        self.parked.pop().release()
        return True

    def is_takeable(self, operation: Operation) -> bool:
        """Say whether a worker of this device may go on with an operation."""
        return operation.device == self.ordinal
