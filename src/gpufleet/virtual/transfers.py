"""Moving and filling bytes: which memory is whose, and what must still hold when it is done."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.engine import KernelFault

if TYPE_CHECKING:
    from gpufleet.virtual.memory import Memory
    from gpufleet.virtual.spans import Allocation

GIL_RELEASE_BYTES = 64 << 10
"""Below this, other threads gain less from a released GIL than taking it again costs (5 us are 64 KiB)."""


class Side(NamedTuple):
    """One end of a copy: `rows` times `width` bytes, `pitch` bytes apart, from `address` on."""

    address: int
    width: int
    rows: int = 1
    pitch: int = 0
    must_be_known: bool = False
    """Whether the caller passed it as a device pointer; otherwise any host memory will do."""
    allocation: Allocation | None = None
    """Where all of it lies; None for host memory that the driver does not know (pageable)."""

    @property
    def extent(self) -> int:
        """Bytes from the first to the last."""
        return (self.rows - 1) * self.pitch + self.width

    @property
    def is_pageable(self) -> bool:
        """Whether it is host memory that no device may touch by itself."""
        return self.allocation is None

    @property
    def is_device(self) -> bool:
        """Whether only devices may touch it."""
        return self.allocation is not None and not self.allocation.is_host


def located(memory: Memory, side: Side) -> Side:
    """Return a side with its allocation; refuse what lies partly or not at all in one, as driver 580 does.

    Host memory that the driver does not know is taken as it is.
    """
    with memory.lock:
        allocation = memory.find(side.address, side.extent)
    if allocation is not None:
        return side._replace(allocation=allocation)
    if side.must_be_known or not side.address or memory.holds(side.address, side.extent):
        raise Refusal(
            "INVALID_VALUE", f"{side.extent} bytes at {side.address:#x}: {memory.describe(side.address)}"
        )
    return side


def move(memory: Memory, destination: Side, source: Side) -> None:
    """Copy now; fault if memory that was there when the copy was issued is not there any more."""
    _check_alive(memory, destination, "to")
    _check_alive(memory, source, "from")
    if destination.rows > 1 and not destination.width == destination.pitch == source.pitch:
        _rows(destination)[...] = _rows(source)
    elif (size := destination.rows * destination.width) < GIL_RELEASE_BYTES:
        _memmove_with_gil(destination.address, source.address, size)
    else:
        ctypes.memmove(destination.address, source.address, size)


def fill(memory: Memory, side: Side, value: int, item: int) -> None:
    """Set every `item` bytes (1, 2 or 4) to `value` now."""
    _check_alive(memory, side, "to")
    if side.rows == 1 or side.pitch == side.width:
        _bytes(side.address, side.rows * side.width).view(f"u{item}")[...] = value
    else:
        pattern = np.full(side.width // item, value, f"u{item}").view(np.uint8)
        _rows(side)[...] = pattern


def _check_alive(memory: Memory, side: Side, direction: str) -> None:
    if side.allocation is None:
        return
    with memory.lock:
        if memory.find(side.address, side.extent) is side.allocation:
            return
    raise KernelFault(
        "ILLEGAL_ADDRESS",
        f"a copy {direction} {side.address:#x} came to run after {side.allocation} was freed",
    )


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
