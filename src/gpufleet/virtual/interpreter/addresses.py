"""What is known about an array of addresses, and about the device's memory.

Compilers reach many places through one base register with different offsets, so what was found out
about an array of addresses is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpufleet.virtual.engine import DeviceMemory
from gpufleet.virtual.interpreter.lanes import Geometry
from gpufleet.virtual.interpreter.values import Array

_LONGEST_STRIDE = 1 << 12


class AddressInfo:
    """What is known about an array of addresses: their bounds, alignment and distances."""

    __slots__ = ("_based", "_geometry", "_relative", "addresses", "bits", "high", "low", "stride")

    def __init__(self, addresses: Array, geometry: Geometry) -> None:
        self.addresses = addresses
        self._geometry = geometry
        self._relative: dict[int, Array] = {}
        self._based: dict[tuple[int, str], Array] = {}
        self.stride = self._find_stride()
        """Not 0: each address lies this many bytes after the one before it."""
        if self.stride:
            self.low, self.high = int(addresses[0]), int(addresses[-1])
            bits = self.low | self.stride
        else:
            self.low = int(np.minimum.reduce(addresses))
            self.high = int(np.maximum.reduce(addresses))
            bits = int(np.bitwise_or.reduce(addresses))
        self.bits = bits
        """Those below an alignment are 0 if and only if all addresses are so aligned."""

    def _find_stride(self) -> int:
        """Compare with an arithmetic progression: one pass where the bounds alone take three."""
        addresses = self.addresses
        count = len(addresses)
        if count < 4:
            return 0
        first = int(addresses[0])
        stride = int(addresses[1]) - first
        if not 0 < stride <= _LONGEST_STRIDE or int(addresses[-1]) - first != (count - 1) * stride:
            return 0
        expected = self._geometry.progression(stride)[:count] + addresses[0]
        return stride if np.equal(addresses, expected).all() else 0

    def relative(self, shift: int) -> Array:
        """Return the distances from the lowest address, in elements of 2**shift bytes."""
        found = self._relative.get(shift)
        if found is None:
            if self.stride:
                found = self._geometry.progression(self.stride >> shift)[: len(self.addresses)]
            else:
                found = (self.addresses - np.uint64(self.low)) >> np.uint64(shift)
            found = self._relative[shift] = found.view(np.int64)
        return found

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

    def end_of(self, address: int) -> int:
        """Return where the allocation that an address lies in ends; 0 if it lies in none."""
        return self._last[1] if self.contains(address, address + 1) else 0

    def inside(self, addresses: Array, size: int) -> Array:
        """Say for each address whether `size` bytes from there lie in one allocation."""
        starts, ends = self.memory.spans()
        if len(starts) == 0:
            return np.zeros(len(addresses), np.bool_)
        index = np.searchsorted(starts, addresses, "right")
        end = ends[np.maximum(index, 1) - 1]
        # As room that is left, because address + size may wrap around.
        return (index > 0) & (addresses < end) & (end - addresses >= np.uint64(size))
