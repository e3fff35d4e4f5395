"""One reserved range of host addresses, of which pages are made usable and unusable again.

Reserving costs nothing but addresses. Reserved pages cannot be touched: the process would fault.
Committed pages read as zero at first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

PAGE = mmap.PAGESIZE
LARGEST_ITEM = 16
"""Bytes of the largest element a view may have: the range starts and ends at a multiple of it."""


class AddressSpace:
    """A reserved range that knows how to commit its pages and how to look like a NumPy array.

    It lives until `release`, or until neither it nor a view of it is left.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.base = _system.reserve(size)
        # A view keeps this buffer alive, so the addresses are never given back under a view.
        self._buffer = (ctypes.c_char * size).from_address(self.base)
        self._release = weakref.finalize(self._buffer, _system.release, self.base, size)
        self._release.atexit = False
        self._views: dict[Any, NDArray[Any]] = {}

    def commit(self, address: int, size: int) -> bool:
        """Make whole pages readable and writable; False where the system has no memory left for them."""
        return _system.commit(address, size)

    def decommit(self, address: int, size: int) -> None:
        """Give the memory of whole pages back to the system and make touching them a fault."""
        _system.decommit(address, size)

    def contains(self, address: int, size: int = 0) -> bool:
        """Say whether any of `size` bytes (at least one) from `address` on lies in the range."""
        return address < self.base + self.size and address + max(size, 1) > self.base

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return the whole range as an array of `dtype`; most of its elements must not be touched."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = np.frombuffer(memoryview(self._buffer), dtype)
        return view

    def release(self) -> None:
        """Give all addresses back. No view may be touched afterwards."""
        self._views.clear()
        self._release()


class _System(Protocol):
    def reserve(self, size: int) -> int: ...
    def release(self, address: int, size: int) -> None: ...
    def commit(self, address: int, size: int) -> bool: ...
    def decommit(self, address: int, size: int) -> None: ...


class _Posix:
    """`mmap` and `mprotect`."""

    _NOTHING = 0
    _READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
    _NO_RESERVE = 0x4000
    """MAP_NORESERVE of Linux, which the mmap module names from Python 3.13 on only."""
    _DONT_NEED = 4
    """MADV_DONTNEED of Linux: private anonymous pages read as zero afterwards."""
    _FIXED = 0x10
    """MAP_FIXED: replace what is mapped there."""
    _HUGE_PAGES = 14
    """MADV_HUGEPAGE of Linux: giving 256 MiB back takes 1 ms instead of 80."""
    _HUGE = 4 << 20
    """From this size on some of an allocation fills huge pages of 2 MiB."""
    _FAILED = ctypes.c_void_p(-1).value

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._mmap = library.mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._munmap = library.munmap
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._mprotect = library.mprotect
        self._mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._madvise = library.madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def reserve(self, size: int) -> int:
        address = self._map(None, size)
        if address == self._FAILED:
            raise OSError(ctypes.get_errno(), f"{size} bytes of addresses: {os.strerror(ctypes.get_errno())}")
        return address

    def _map(self, address: int | None, size: int, extra_flags: int = 0) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | self._NO_RESERVE | extra_flags
        return int(self._mmap(address, size, self._NOTHING, flags, -1, 0) or 0)

    def release(self, address: int, size: int) -> None:
        self._munmap(address, size)

    def commit(self, address: int, size: int) -> bool:
        if self._mprotect(address, size, self._READ_WRITE):
            return False
        if size >= self._HUGE:
            self._madvise(address, size, self._HUGE_PAGES)
        return True

    def decommit(self, address: int, size: int) -> None:
        # A new mapping in place of the old one: its advice goes too, so that it joins its neighbours.
        if self._map(address, size, self._FIXED) == self._FAILED:
            self._madvise(address, size, self._DONT_NEED)
            self._mprotect(address, size, self._NOTHING)


class _Windows:
    """`VirtualAlloc`. Written from its documentation; not tested."""

    _COMMIT, _RESERVE = 0x1000, 0x2000
    _DECOMMIT, _RELEASE = 0x4000, 0x8000
    _NO_ACCESS, _READ_WRITE = 0x01, 0x04

    def __init__(self) -> None:
        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined, unused-ignore]
        self._alloc = kernel32.VirtualAlloc
        self._alloc.restype = ctypes.c_void_p
        self._alloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32]
        self._free = kernel32.VirtualFree
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32]

    def reserve(self, size: int) -> int:
        address = self._alloc(None, size, self._RESERVE, self._NO_ACCESS)
        if not address:
            raise OSError(f"Windows does not reserve {size} bytes of addresses")
        return int(address)

    def release(self, address: int, size: int) -> None:
        self._free(address, 0, self._RELEASE)

    def commit(self, address: int, size: int) -> bool:
        return bool(self._alloc(address, size, self._COMMIT, self._READ_WRITE))

    def decommit(self, address: int, size: int) -> None:
        self._free(address, size, self._DECOMMIT)


_system: _System = _Windows() if sys.platform == "win32" else _Posix()
