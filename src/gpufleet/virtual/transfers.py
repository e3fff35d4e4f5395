"""Moving and filling bytes: which memory is whose, and what must still hold when it is done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.operations import Operation

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.memory import Memory
    from gpufleet.virtual.spans import Allocation

GIL_RELEASE_BYTES = 64 << 10
"""Below this, other threads gain less from a released GIL than taking it again costs (5 us are 64 KiB)."""


class Side:
    """One end of a copy: `rows` times `width` bytes, `pitch` bytes apart, from `address` on.

    Attributes
    ----------
    must_be_known : bool
        Whether the caller passed it as a device pointer; otherwise any host memory will do.
    allocation : Allocation or None
        Where all of it lies, after `locate`; None for host memory that the driver does not know (pageable).
    extent : int
        Bytes from the first to the last.
    """

    __slots__ = ("address", "allocation", "extent", "must_be_known", "pitch", "rows", "width")

    def __init__(
        self, address: int, width: int, rows: int = 1, pitch: int = 0, *, must_be_known: bool = False
    ) -> None:
        if width < 0 or rows < 0:
            raise OverflowError("can't convert negative value to size_t")  # as cuda.bindings does
        self.address = address
        self.width = width
        self.rows = rows
        self.pitch = pitch
        self.must_be_known = must_be_known
        self.allocation: Allocation | None = None
        self.extent = (rows - 1) * pitch + width

    @property
    def is_pageable(self) -> bool:
        """Whether it is host memory that no device may touch by itself."""
        return self.allocation is None

    @property
    def is_device(self) -> bool:
        """Whether only devices may touch it."""
        return self.allocation is not None and not self.allocation.is_host


def locate(memory: Memory, context: Context, *sides: Side, for_graph: bool = False) -> None:
    """Find the allocations of sides, for a copy or fill in `context`.

    Refuses what lies partly or not at all in an allocation, and memory of a pool that is not open to the
    context's device, as driver 580 does. `for_graph`, memory will do that a graph allocates when it is
    launched. Host memory that the driver does not know is taken as it is.
    """
    with memory.lock:
        for side in sides:
            address, extent = side.address, side.extent
            known = memory.find(address, extent)
            if known is None and for_graph:
                known = memory.planned.find(address, extent)
            side.allocation = known
            if known is None:
                is_host = not side.must_be_known and address and not memory.knows(address, extent)
                if not is_host:
                    where = memory.describe(address)
                    raise Refusal("INVALID_VALUE", f"{extent} bytes at {address:#x}: {where}")
            elif known.pool is not None and context.device.ordinal not in known.pool.accessible_from:
                raise Refusal("INVALID_VALUE", f"{known} is of a pool that is not open to the device")


def transfer(context: Context, action: Callable[[], None], *sides: Side) -> Operation:
    """Return the operation of a copy or fill in `context`, whose sides are located.

    Memory of other contexts is to know of it: a free and the end of a context wait for the work of their
    own device, and for this by `Allocation.users`.
    """
    used = (side.allocation for side in sides)
    others = tuple(each for each in used if each is not None and each.context is not context)
    return Operation(context.device.ordinal, action, uses=others)


def move(memory: Memory, to: Side, source: Side) -> None:
    """Copy now; fault if memory that was there when the copy was issued is not there any more."""
    _check_alive(memory, to, source)
    if to.rows > 1 and not to.width == to.pitch == source.pitch:
        _rows(to)[...] = _rows(source)
    elif (size := to.rows * to.width) < GIL_RELEASE_BYTES:
        _memmove_with_gil(to.address, source.address, size)
    else:
        ctypes.memmove(to.address, source.address, size)


def fill(memory: Memory, side: Side, value: int, item: int) -> None:
    """Set every `item` bytes (1, 2 or 4) to `value` now."""
    _check_alive(memory, side)
    if side.rows == 1 or side.pitch == side.width:
        _bytes(side.address, side.rows * side.width).view(f"u{item}")[...] = value
    else:
        pattern = np.full(side.width // item, value, f"u{item}").view(np.uint8)
        _rows(side)[...] = pattern


def _check_alive(memory: Memory, *sides: Side) -> None:
    with memory.lock:
        for side in sides:
            known = side.allocation
            if known is not None and memory.find(side.address, side.extent) is not known:
                text = f"a copy that uses {side.address:#x} came to run after {known} was freed"
                raise KernelFault("ILLEGAL_ADDRESS", text)


def _bytes(address: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


def _rows(side: Side) -> NDArray[np.uint8]:
    flat = _bytes(side.address, side.extent)
    strides = (side.pitch or side.width, 1)
    return np.lib.stride_tricks.as_strided(flat, (side.rows, side.width), strides)


_memmove_with_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""`ctypes.memmove` without giving the GIL away."""
