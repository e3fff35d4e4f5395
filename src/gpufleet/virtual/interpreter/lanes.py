"""Which threads of the grid are executed together, and where each stands.

A *batch* is a run of whole blocks. Its lanes are numbered block by block, thread by thread, x
fastest. A *space* is an ascending selection of a batch's lanes; arrays of values have one element
per slot of a space. The root space holds all lanes; smaller ones hold what is left of a loop that
most lanes have left, or a rarely taken side of a branch.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.engine import Dim3
from gpufleet.virtual.interpreter.values import Array

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.batch import Batch

WARP = 32


class Geometry:
    """What depends on the block's shape and the number of blocks only; shared by the batches of a launch."""

    def __init__(self, block: Dim3, blocks: int) -> None:
        self.block = block
        self.blocks = blocks
        self.threads = block[0] * block[1] * block[2]
        """Threads of a block."""
        self.lanes = self.threads * blocks
        self.warps = -(-self.threads // WARP)
        """Warps of a block; the last may have fewer than 32 lanes."""
        self.whole_warps = self.threads % WARP == 0
        self._progressions: dict[int, Array] = {}
        self.shuffles: dict[tuple[str, int, int], tuple[Array, Array]] = {}
        """Sources of shuffles whose operands are the same for all lanes, by those (see warp.py)."""

    @cached_property
    def order(self) -> Array:
        """The lanes' numbers."""
        return np.arange(self.lanes)

    def progression(self, step: int) -> Array:
        """Return 0, step, 2 * step, ... for all lanes, as u64; remembered, do not write to it."""
        found = self._progressions.get(step)
        if found is None:
            if len(self._progressions) >= 16:
                self._progressions.clear()
            found = self._progressions[step] = np.arange(self.lanes, dtype=np.uint64) * np.uint64(step)
        return found

    @cached_property
    def thread(self) -> Array:
        """Number of each lane's thread in its block."""
        return np.tile(np.arange(self.threads, dtype=np.uint32), self.blocks)

    @cached_property
    def block_of(self) -> Array:
        """Number of each lane's block in the batch."""
        return np.repeat(np.arange(self.blocks), self.threads)

    @cached_property
    def tid(self) -> tuple[Array, Array, Array]:
        """The three coordinates of each lane's thread; uniform where the block is flat."""
        x, y, _ = self.block
        numbers = np.arange(self.threads, dtype=np.uint32)
        coordinates = numbers % x, numbers // x % y, numbers // (x * y)
        zero = np.zeros(1, np.uint32)
        return tuple(
            np.tile(c, self.blocks) if n > 1 else zero for c, n in zip(coordinates, self.block, strict=True)
        )  # type: ignore[return-value]

    @cached_property
    def lane_id(self) -> Array:
        """Number of each lane in its warp."""
        return self.thread & np.uint32(WARP - 1)

    @cached_property
    def warp_slot(self) -> Array:
        """Place of each lane among all warps of the batch, where every warp has 32 places."""
        if self.whole_warps:
            return self.order
        return self.block_of * (self.warps * WARP) + self.thread


class Space:
    """An ascending selection of a batch's lanes."""

    __slots__ = ("_cache", "batch", "is_root", "lanes", "size")

    def __init__(self, batch: Batch, lanes: Array, is_root: bool = False) -> None:
        self.batch = batch
        self.lanes = lanes
        self.size = len(lanes)
        self.is_root = is_root
        self._cache: dict[str, Array] = {}

    def pick(self, name: str, whole: Array) -> Array:
        """Return this space's part of an array over all lanes, remembered under a name."""
        if self.is_root or whole.size == 1:
            return whole
        found = self._cache.get(name)
        if found is None:
            found = self._cache[name] = whole.take(self.lanes, mode="wrap")
        return found

    @property
    def block_of(self) -> Array:
        """Number of each slot's block in the batch."""
        return self.pick("block_of", self.batch.geometry.block_of)
