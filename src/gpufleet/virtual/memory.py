"""All memory that a virtual driver hands out: one region, an arena for each device and one for the host."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from gpufleet.virtual.address_space import PAGE, AddressSpace
from gpufleet.virtual.arena import Arena, whole_pages
from gpufleet.virtual.interrupts import InterruptsDeferred
from gpufleet.virtual.spans import Allocation, SpanIndex

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context

LEAST_ADDRESSES = 32 << 30
"""Addresses of an arena, if it needs no more; reserving them costs nothing."""
ADDRESSES_PER_BYTE = 4
"""How much larger an arena is than its memory, so that fragments do not keep a device from being filled."""
FAR = 1 << 30
"""An address so many bytes from every allocation is not explained by one."""


class Memory:
    """The region, and what is allocated in it.

    Attributes
    ----------
    lock : RLock
        The driver's lock; the methods that are called without it say so.
    arenas : list of Arena
        One for each device.
    host : Arena
        Pinned and managed memory.
    registered : SpanIndex
        Host memory of the caller's that was page-locked in place; it lies outside of the region.
    planned : SpanIndex
        Memory of graphs, which is allocated only while they say so.
    """

    def __init__(self, lock: AbstractContextManager[bool], capacities: list[int]) -> None:
        self.lock = lock
        self.registered = SpanIndex()
        self.planned = SpanIndex()
        self.pool_access_version = 0
        """Counts changes of which devices may use which pool."""
        capacities = [physical_memory(), *capacities]
        self.space, sizes = _reserve([_addresses(capacity) for capacity in capacities])
        starts = list(itertools.accumulate(sizes, initial=self.space.base))
        self.host, *self.arenas = (
            Arena(self.space, start, size, capacity, ordinal)
            for ordinal, start, size, capacity in zip(
                range(-1, len(sizes) - 1), starts, sizes, capacities, strict=False
            )
        )
        self._arena_starts = starts
        self._arena_by_number = [None, self.host, *self.arenas, None]

    def allocate(self, arena: Arena, size: int, kind: str, context: Context) -> Allocation | None:
        """Return zeroed memory that belongs to `context`, or None if the arena has not enough."""
        with InterruptsDeferred(), self.lock:
            return arena.allocate(size, kind, context.home)

    def withdraw(self, allocation: Allocation) -> Callable[[], None]:
        """End an allocation's use; return what gives its pages back once nobody is touching them."""
        with InterruptsDeferred(), self.lock:
            arena = self._arena(allocation.start)
            assert arena is not None
            arena.withdraw(allocation)
        return lambda: self._reclaim(arena, allocation)

    def _reclaim(self, arena: Arena, allocation: Allocation) -> None:
        arena.decommit(allocation)  # takes 10 ms a GiB, and nobody else has these addresses: no lock
        with InterruptsDeferred(), self.lock:
            arena.reclaim(allocation)

    def at(self, address: int) -> Allocation | None:
        """Return the allocation that starts at an address."""
        index = self._index(address)
        return index.at(address)

    def find(self, address: int, size: int = 1) -> Allocation | None:
        """Return the allocation that holds all of `size` bytes from `address` on."""
        return self._index(address).find(address, size)

    def holds(self, address: int, size: int) -> bool:
        """Say whether any of these bytes lies in the region, where touching what is not allocated faults."""
        return self.space.contains(address, size)

    def knows(self, address: int, size: int) -> bool:
        """Say whether bytes that lie in no allocation begin in registered memory or touch the region."""
        return self.space.contains(address, size) or self.registered.find(address) is not None

    def owned_by(self, context: Context) -> Iterator[Allocation]:
        """Yield what a context allocated or registered; memory of a pool belongs to no context."""
        for index in self._indices():
            for allocation in index:
                if allocation.context is context and allocation.pool is None:
                    yield allocation

    def describe(self, address: int, context: Context | None = None) -> str:
        """Say in words what lies nearest to an address, as seen by a kernel of `context`."""
        index = self._index(address)
        freed = index.freed(address) if index.find(address) is None else None
        if freed is not None:
            return f"in memory that was freed ({freed[1] - freed[0]} bytes at {freed[0]:#x})"
        found = [near for each in self._indices() if (near := each.nearest(address)) is not None]
        distance, nearest = min(found, key=lambda near: near[0], default=(FAR, None))
        if nearest is None or distance >= FAR:
            return "not near any memory that the driver knows"
        if not distance:
            return f"in {nearest}{_unreachable(nearest, context)}"
        where = "before the start of" if address < nearest.start else "past the end of"
        return f"{distance} byte{'s' if distance > 1 else ''} {where} {nearest}"

    def release(self) -> None:
        """Give all memory and all addresses back; nothing of this object may be used afterwards."""
        self.space.release()

    def _indices(self) -> Iterator[SpanIndex]:
        yield from (self.host.index, self.registered, *(arena.index for arena in self.arenas))

    def _index(self, address: int) -> SpanIndex:
        arena = self._arena(address)
        return self.registered if arena is None else arena.index

    def _arena(self, address: int) -> Arena | None:
        number = bisect.bisect(self._arena_starts, address)
        return self._arena_by_number[number]


def physical_memory() -> int:
    """Return the bytes of memory this process may use: the machine's, or its control group's limit."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        machine = _windows_memory()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine


def _windows_memory() -> int:
    """GlobalMemoryStatusEx; written from its documentation, not tested."""
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((f"amount{index}", ctypes.c_uint64) for index in range(7)),
        ]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined, unused-ignore]
    return int(status.amount0)


def _addresses(capacity: int) -> int:
    return whole_pages(max(LEAST_ADDRESSES, capacity * ADDRESSES_PER_BYTE))


def _reserve(sizes: list[int]) -> tuple[AddressSpace, list[int]]:
    """Reserve all arenas at once; smaller ones where the process may not have so many addresses."""
    while True:
        try:
            return AddressSpace(sum(sizes)), sizes
        except OSError:
            if min(sizes) <= 64 * PAGE:
                raise
            sizes = [whole_pages(size // 2) for size in sizes]


def _unreachable(allocation: Allocation, context: Context | None) -> str:
    if context is None or allocation.is_host or allocation.ordinal == context.device.ordinal:
        return ""
    return f", which device {context.device.ordinal} reaches only after cuCtxEnablePeerAccess"
