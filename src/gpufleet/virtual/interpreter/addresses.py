"""What is known about an array of addresses, and about the device's memory.

Compilers reach many places through one base register with different offsets, so what was found out
about an array of addresses is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpufleet.virtual.engine import DeviceMemory
from gpufleet.virtual.interpreter.values import Array


class AddressInfo:
    """What is known about an array of addresses."""

    __slots__ = ("_based", "_contiguous", "_relative", "addresses", "bits", "high", "low")

    def __init__(self, addresses: Array) -> None:
        self.addresses = addresses
        self.low = int(np.minimum.reduce(addresses))
        self.high = int(np.maximum.reduce(addresses))
        self.bits = int(np.bitwise_or.reduce(addresses))
        """All bits that are 1 in some address: tells the alignment of all."""
        self._relative: dict[int, Array] = {}
        self._contiguous: dict[int, bool] = {}
        self._based: dict[tuple[int, str], Array] = {}

    def relative(self, shift: int) -> Array:
        """Return the distances from the lowest address, in elements."""
        found = self._relative.get(shift)
        if found is None:
            found = (self.addresses - np.uint64(self.low)) >> np.uint64(shift)
            found = self._relative[shift] = found.view(np.int64)
        return found

    def is_contiguous(self, shift: int, order: Array) -> bool:
        """Say whether the addresses are one element after the other, in the order of the lanes."""
        known = self._contiguous.get(shift)
        if known is None:
            count = len(self.addresses)
            known = self.high - self.low == (count - 1) << shift
            known = known and int(self.addresses[0]) == self.low and int(self.addresses[-1]) == self.high
            known = known and bool(np.equal(self.relative(shift), order[:count]).all())
            self._contiguous[shift] = known
        return known

    def based(self, shift: int, space: str, bases: Array | None) -> Array:
        """Return the elements' indices, given where each lane's part of shared or local memory begins."""
        if bases is None:
            return self.relative(shift)
        found = self._based.get((shift, space))
        if found is None:
            found = self._based[shift, space] = self.relative(shift) + bases
        return found


class GlobalMemory:
    """The device's memory during one launch."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.base = memory.base
        self._views: dict[Any, Array] = {}
        self._starts: Array | None = None
        self._last = (1, 0)
        """The allocation that the latest access was in."""

    def view(self, dtype: np.dtype[Any]) -> Array:
        """Return the whole region as an array."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = self.memory.view(dtype)
        return found

    def contains(self, low: int, high: int) -> bool:
        """Say whether the bytes from `low` to `high` (exclusive) lie in one allocation."""
        starts, ends = self.memory.spans()
        if starts is self._starts:
            first, last = self._last
            if first <= low and high <= last:
                return True
        if not 0 <= low < high < 1 << 64:
            return False
        index = int(np.searchsorted(starts, np.uint64(low), "right")) - 1
        if index < 0 or high > int(ends[index]):
            return False
        self._starts = starts
        self._last = int(starts[index]), int(ends[index])
        return True

    def inside(self, addresses: Array, size: int) -> Array:
        """Say for each address whether `size` bytes from there lie in one allocation."""
        starts, ends = self.memory.spans()
        if len(starts) == 0:
            return np.zeros(len(addresses), np.bool_)
        index = np.searchsorted(starts, addresses, "right")
        end = ends[np.maximum(index, 1) - 1]
        # As room that is left, because address + size may wrap around.
        return (index > 0) & (addresses < end) & (end - addresses >= np.uint64(size))
