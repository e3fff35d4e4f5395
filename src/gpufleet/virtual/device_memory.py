"""The memory that kernels of one context may touch: what an engine sees of the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpufleet.virtual.spans import Allocation, Spans

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.memory import Memory


class ContextMemory:
    """The region's allocations that one context may reach (`gpufleet.virtual.engine.DeviceMemory`).

    These are all allocations of its own device, pinned and managed memory, what the contexts made to which
    it enabled peer access, and pools that were opened to its device (cuMemPoolSetAccess).
    """

    def __init__(self, memory: Memory, context: Context) -> None:
        self.base = memory.space.base
        self._memory = memory
        self._context = context.home
        self._key: tuple[Any, ...] = ()
        self._spans: Spans = (np.empty(0, np.uint64), np.empty(0, np.uint64))

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return the whole region as an array of `dtype`."""
        return self._memory.space.view(dtype)

    def spans(self) -> Spans:
        """Return first and one-past-last addresses of what may be touched now."""
        with self._memory.lock:
            key = self._version()
            if key != self._key:
                self._spans = _merged(self._parts())
                self._key = key
            return self._spans

    def reaches(self, allocation: Allocation) -> bool:
        """Say whether the context's kernels may touch an allocation."""
        return (
            allocation.is_host
            or allocation.ordinal == self._context.device.ordinal
            or self._reaches(allocation)
        )

    def describe(self, address: int) -> str:
        """Say in words what lies nearest to an address."""
        with self._memory.lock:
            return self._memory.describe(address, self._context)

    def _version(self) -> tuple[Any, ...]:
        memory, context = self._memory, self._context
        own, host = memory.arenas[context.device.ordinal], memory.host
        if not context.peers and not memory.pool_access_version:
            return own.index.version, host.index.version
        versions = [arena.index.version for arena in memory.arenas]
        return host.index.version, context.peer_version, memory.pool_access_version, *versions

    def _parts(self) -> Iterable[Spans]:
        memory, context = self._memory, self._context
        yield memory.host.index.snapshot()
        for arena in memory.arenas:
            if arena.ordinal == context.device.ordinal:
                yield arena.index.snapshot()
            elif context.peers or memory.pool_access_version:
                yield arena.index.snapshot_where(self._reaches)

    def _reaches(self, allocation: Allocation) -> bool:
        """Whether memory of another device may be touched."""
        context = self._context
        if allocation.pool is not None:
            return context.device.ordinal in allocation.pool.accessible_from
        return allocation.context in context.peers


class WideMemory(ContextMemory):
    """The same, and host memory that was registered, wherever it lies.

    The view starts at the lowest address that Linux maps (vm.mmap_min_addr) and spans all addresses
    of a process.
    """

    _LOWEST = 1 << 16
    _SIZE = (1 << 47) - (1 << 16)
    _views: dict[Any, NDArray[Any]] = {}  # noqa: RUF012 - the same addresses for every driver

    def __init__(self, memory: Memory, context: Context) -> None:
        super().__init__(memory, context)
        self.base = self._LOWEST

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return all addresses of the process as an array of `dtype`."""
        view = self._views.get(dtype)
        if view is None:
            buffer = (ctypes.c_char * self._SIZE).from_address(self._LOWEST)
            view = self._views[dtype] = np.frombuffer(memoryview(buffer), dtype)
        return view

    def _version(self) -> tuple[Any, ...]:
        return *super()._version(), self._memory.registered.version

    def _parts(self) -> Iterable[Spans]:
        yield from super()._parts()
        yield self._memory.registered.snapshot()


def _merged(parts: Iterable[Spans]) -> Spans:
    """All spans in one pair of sorted arrays."""
    pieces = [part for part in parts if len(part[0])]
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    starts = np.concatenate([piece[0] for piece in pieces])
    ends = np.concatenate([piece[1] for piece in pieces])
    order = np.argsort(starts)
    return starts[order], ends[order]
