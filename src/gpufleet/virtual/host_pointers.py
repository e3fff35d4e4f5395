"""What callers pass where C has a pointer: an address, or an object with the buffer protocol."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np


def host_address(pointer: Any) -> int:
    """Return the address that a pointer argument means, as the bindings take it; None is 0.

    An object with the buffer protocol must be contiguous and stay alive as long as the address is used.
    """
    if isinstance(pointer, int):
        return pointer
    if pointer is None:
        return 0
    if hasattr(type(pointer), "__int__") and hasattr(pointer, "getPtr"):
        return int(pointer)
    return _buffer_address(pointer)


def read_bytes(address: int, size: int) -> bytes:
    """Return a copy of host memory."""
    return ctypes.string_at(address, size)


def write_bytes(address: int, data: bytes) -> None:
    """Overwrite host memory."""
    ctypes.memmove(address, data, len(data))


def mapped_bytes(address: int, size: int) -> int:
    """Return how many of `size` bytes from `address` on are mapped; all, where the system does not say."""
    if sys.platform != "linux":
        return size
    end = address + size
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.partition(" ")[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            address = int(stop, 16)
            if address >= end:
                return size
        elif int(start, 16) > address:
            break
    return max(size - (end - address), 0)


def read_pointers(address: int, count: int) -> list[int]:
    """Return an array of pointers."""
    return list((ctypes.c_uint64 * count).from_address(address))


def _buffer_address(buffer: Any) -> int:
    try:
        view = memoryview(buffer)
    except TypeError:
        expected = "an address, None, or an object with the buffer protocol"
        raise TypeError(f"a pointer argument is a {type(buffer).__name__}: expected {expected}") from None
    if not view.contiguous:
        raise BufferError("a buffer passed as a pointer must be contiguous")
    return int(np.frombuffer(view.cast("B") if view.nbytes else b"\0", np.uint8).ctypes.data)
