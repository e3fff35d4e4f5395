"""Which allocation is at this address? An index of disjoint allocations."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.operations import Operation
    from gpufleet.virtual.placements import Placements

Spans = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""First and one-past-last addresses of allocations, sorted."""

REMEMBERED = 64
"""How many freed allocations an index remembers, to explain a fault."""

_numbers = itertools.count(1)


class Allocation:
    """Bytes that a caller of the driver may use.

    Attributes
    ----------
    start, size : int
    kind : str
        "device", "variable" (of a module), "pinned", "managed" or "registered".
    context : Context
        Where it was made; it dies with that context.
    ordinal : int
        The device whose memory it is; for host memory that of its context.
    pool : Pool or None
        The pool it came from.
    placements : Placements or None
        Of managed memory, what was advised.
    is_freed : bool
        Whether a free is on its way to it in a stream.
    flags : int
        What the caller asked for.
    number : int
        Different for each allocation of the process.
    reserved : int
        Addresses set aside for it, with its guard page.
    sync_memops : bool
        What CU_POINTER_ATTRIBUTE_SYNC_MEMOPS says.
    users : list of Operation
        Copies and fills that streams of other contexts were given, and that may not have ended.
    """

    __slots__ = (
        "context", "flags", "is_freed", "kind", "number", "ordinal", "placements", "pool", "reserved", "size",
        "start", "sync_memops", "users",
    )  # fmt: skip

    def __init__(self, start: int, size: int, kind: str, context: Context, ordinal: int) -> None:
        self.start = start
        self.size = size
        self.kind = kind
        self.context = context
        self.ordinal = ordinal
        self.pool: Any = None
        self.placements: Placements | None = None
        self.is_freed = False
        self.flags = 0
        self.number = next(_numbers)
        self.reserved = size
        self.sync_memops = kind == "managed"
        self.users: list[Operation] = []

    def note(self, operation: Operation) -> None:
        """Note an operation that has been entered and uses the memory; the driver's lock is held."""
        self.users = [each for each in self.users if not each.done]
        self.users.append(operation)

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.start + self.size

    @property
    def is_host(self) -> bool:
        """Whether the host may touch it too."""
        return self.kind in ("pinned", "managed", "registered")

    def __str__(self) -> str:
        where = "" if self.kind == "registered" else f" of device {self.ordinal}"
        return f"the {self.size}-byte {self.kind} allocation at {self.start:#x}{where}"


class SpanIndex:
    """Disjoint allocations, sorted by address."""

    def __init__(self) -> None:
        self.version = 0
        """Counts changes, so that a snapshot can be told from an outdated one."""
        self._starts = array("Q")
        self._ends = array("Q")
        self._allocations: dict[int, Allocation] = {}
        self._freed: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(list(self._allocations.values()))

    def add(self, allocation: Allocation) -> None:
        """Enter an allocation that overlaps no other."""
        index = bisect.bisect(self._starts, allocation.start)
        self._starts.insert(index, allocation.start)
        self._ends.insert(index, allocation.end)
        self._allocations[allocation.start] = allocation
        self.version += 1

    def remove(self, allocation: Allocation) -> None:
        """Take an allocation out."""
        index = bisect.bisect_left(self._starts, allocation.start)
        del self._starts[index], self._ends[index], self._allocations[allocation.start]
        self._freed.append((allocation.start, allocation.end))
        self.version += 1

    def at(self, start: int) -> Allocation | None:
        """Return the allocation that starts at this address."""
        return self._allocations.get(start)

    def find(self, address: int, size: int = 1) -> Allocation | None:
        """Return the allocation that holds all of `size` bytes from `address` on."""
        index = bisect.bisect(self._starts, address) - 1
        if index < 0 or address + size > self._ends[index]:
            return None
        return self._allocations[self._starts[index]]

    def overlaps(self, address: int, size: int) -> bool:
        """Say whether any of these bytes is in an allocation."""
        index = bisect.bisect_left(self._starts, address + size) - 1
        return index >= 0 and self._ends[index] > address

    def snapshot(self) -> Spans:
        """Return the spans of all allocations, as they are now."""
        return np.array(self._starts, np.uint64), np.array(self._ends, np.uint64)

    def snapshot_where(self, condition: Callable[[Allocation], bool]) -> Spans:
        """Return the spans of the allocations that satisfy a condition."""
        chosen = [self._allocations[start] for start in self._starts if condition(self._allocations[start])]
        starts = np.array([allocation.start for allocation in chosen], np.uint64)
        return starts, np.array([allocation.end for allocation in chosen], np.uint64)

    def nearest(self, address: int) -> tuple[int, Allocation] | None:
        """Return the allocation nearest to an address, and how many bytes lie between (0: inside)."""
        index = bisect.bisect(self._starts, address) - 1
        found = [self._allocations[self._starts[i]] for i in (index, index + 1) if 0 <= i < len(self._starts)]
        distances = [(max(a.start - address, address - a.end + 1, 0), a.start, a) for a in found]
        return min(distances)[0::2] if distances else None

    def freed(self, address: int) -> tuple[int, int] | None:
        """Return first and end address of the freed allocation that an address was in, if remembered."""
        for start, end in reversed(self._freed):
            if start <= address < end:
                return start, end
        return None
