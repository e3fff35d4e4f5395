"""Which parts of a range of addresses are free? Placement only: no memory is touched here."""

from __future__ import annotations

import bisect
from collections import deque

QUARANTINE = 64
"""How many freed blocks rest before their addresses are used again, so that a stale pointer faults."""


class Ranges:
    """First fit over the free parts of one range; neighbours that are free merge.

    The lowest part that is large enough is taken, which keeps the addresses in use, and with them the
    system's page tables, together.
    """

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._ends = [end]
        self._resting: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> int | None:
        """Return the start of `size` addresses that are taken from now on; None if nothing is so large."""
        start = self._fit(size)
        while start is None and self._resting:
            self._put_back(*self._resting.popleft())
            start = self._fit(size)
        return start

    def give(self, start: int, size: int) -> None:
        """Return addresses that `take` gave; they rest before they are taken again."""
        self._resting.append((start, start + size))
        if len(self._resting) > QUARANTINE:
            self._put_back(*self._resting.popleft())

    def _fit(self, size: int) -> int | None:
        for index, start in enumerate(self._starts):
            if self._ends[index] - start >= size:
                if self._ends[index] - start == size:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + size
                return start
        return None

    def _put_back(self, start: int, end: int) -> None:
        index = bisect.bisect(self._starts, start)
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
