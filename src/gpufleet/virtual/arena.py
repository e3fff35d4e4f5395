"""Where do the bytes of one device lie? A part of the address space with a limit to its use.

Nothing here locks or waits: whoever calls holds the driver's lock, except for `decommit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.virtual.address_space import PAGE, AddressSpace
from gpufleet.virtual.ranges import Ranges
from gpufleet.virtual.spans import Allocation, SpanIndex

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context

GUARDED = 16_384
"""Allocations beyond this many have no guard page behind them. A guard costs two of the 65,530 mappings
that Linux allows a process (vm.max_map_count); without it neighbours share one."""


class Arena:
    """The memory of one device, or of the host's pinned and managed memory.

    Attributes
    ----------
    ordinal : int
        Of the device; -1 for the host's.
    capacity, used : int
        Bytes there are and bytes in use; whole pages count.
    index : SpanIndex
        The allocations.
    """

    def __init__(self, space: AddressSpace, start: int, size: int, capacity: int, ordinal: int) -> None:
        self.ordinal = ordinal
        self.start = start
        self.end = start + size
        self.capacity = capacity
        self.used = 0
        self.index = SpanIndex()
        self._space = space
        self._ranges = Ranges(start, start + size)

    def allocate(self, size: int, kind: str, context: Context) -> Allocation | None:
        """Return usable, zeroed memory, followed by a page that faults; None if there is not enough."""
        pages = whole_pages(size)
        if not self.charge(pages):
            return None
        reserved = pages + (PAGE if len(self.index) < GUARDED else 0)
        start = self._ranges.take(reserved)
        if start is None or not self._space.commit(start, pages):
            self.refund(pages)
            if start is not None:
                self._ranges.give(start, reserved)
            return None
        ordinal = context.device.ordinal if self.ordinal < 0 else self.ordinal
        allocation = Allocation(start, size, kind, context, ordinal)
        allocation.reserved = reserved
        self.index.add(allocation)
        return allocation

    def withdraw(self, allocation: Allocation) -> None:
        """End an allocation's use. Its pages stay until `decommit`, for whoever is just touching them."""
        self.index.remove(allocation)
        self.refund(whole_pages(allocation.size))

    def decommit(self, allocation: Allocation) -> None:
        """Give a withdrawn allocation's memory back to the system."""
        self._space.decommit(allocation.start, whole_pages(allocation.size))

    def reclaim(self, allocation: Allocation) -> None:
        """Take a withdrawn allocation's addresses back."""
        self._ranges.give(allocation.start, allocation.reserved)

    def charge(self, size: int) -> bool:
        """Count bytes as used; False, and nothing counted, if there are not so many."""
        if size > self.capacity - self.used:
            return False
        self.used += size
        return True

    def refund(self, size: int) -> None:
        """Count bytes as free again."""
        self.used -= size

    def contains(self, address: int) -> bool:
        """Say whether the address is one of this arena's."""
        return self.start <= address < self.end


def whole_pages(size: int) -> int:
    """Return the bytes of the pages that `size` bytes take."""
    return -(-size // PAGE) * PAGE
