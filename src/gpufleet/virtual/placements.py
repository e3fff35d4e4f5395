"""Where the parts of managed memory should be, as callers have advised: remembered, without effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

HOST = -1
"""CU_DEVICE_CPU."""
NOWHERE = -2
"""CU_DEVICE_INVALID."""


@dataclass(frozen=True)
class Placement:
    """What was said of some bytes: device ordinals, HOST or NOWHERE."""

    read_mostly: bool = False
    preferred: int = NOWHERE
    accessed_by: frozenset[int] = frozenset()
    prefetched: int = NOWHERE


class Placements:
    """The placements of one allocation's bytes."""

    def __init__(self, size: int) -> None:
        self._parts = [(0, size, Placement())]

    def change(self, start: int, end: int, **said: Any) -> None:
        """Say something of the bytes from `start` to `end`."""
        self._parts = [
            (low, high, replace(placement, **said) if start <= low and high <= end else placement)
            for low, high, placement in self._cut(start, end)
        ]

    def access(self, start: int, end: int, device: int, is_given: bool) -> None:
        """Let a device be one that accesses the bytes from `start` to `end`, or not."""
        changed = []
        for low, high, placement in self._cut(start, end):
            if start <= low and high <= end:
                others = placement.accessed_by - {device}
                placement = replace(placement, accessed_by=others | {device} if is_given else others)
            changed.append((low, high, placement))
        self._parts = changed

    def common(self, start: int, end: int) -> Placement:
        """Return what holds for all bytes from `start` to `end`."""
        found = [placement for low, high, placement in self._parts if low < end and high > start]
        first = found[0]
        return Placement(
            all(each.read_mostly for each in found),
            first.preferred if all(each.preferred == first.preferred for each in found) else NOWHERE,
            frozenset.intersection(*(each.accessed_by for each in found)),
            first.prefetched if all(each.prefetched == first.prefetched for each in found) else NOWHERE,
        )

    def _cut(self, start: int, end: int) -> Iterator[tuple[int, int, Placement]]:
        """Yield the parts, none of which reaches over `start` or `end`."""
        for low, high, placement in self._parts:
            edges = [low, *(edge for edge in (start, end) if low < edge < high), high]
            yield from ((left, right, placement) for left, right in itertools.pairwise(edges))
