"""`malloc` and `free` in kernels: one heap per module, in a variable that the module's loading made.

The heap is a chain of blocks, each with a header of 16 bytes: its size with the header, and whether it
is in use. A heap of zeros is one that nobody has used yet. Both engines call this with the address of the
heap; addresses are the host's own.
"""

from __future__ import annotations

import ctypes
import threading

_HEADER = 16
_ALIGNMENT = 16
_lock = threading.Lock()


class KernelHeap:
    """The heap at an address."""

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes, a multiple of 16; 0 if there is no room, or for no bytes."""
        if not 0 < size <= self._size:
            return 0
        need = -(-size // _ALIGNMENT) * _ALIGNMENT + _HEADER
        with _lock:
            place = 0
            while place < self._size:
                room, used = self._block(place)
                if not used:
                    room = self._joined(place, room)
                    if room >= need:
                        self._use(place, need, room)
                        return self._address + place + _HEADER
                place += room
        return 0

    def release(self, address: int) -> bool:
        """Give memory back; False if the address is not one that `allocate` returned."""
        if address == 0:
            return True
        wanted = address - self._address - _HEADER
        with _lock:
            place = 0
            while 0 <= place <= wanted and place < self._size:
                room, used = self._block(place)
                if place == wanted:
                    if used:
                        self._write(place, room, 0)
                    return used
                place += room
        return False

    def _joined(self, place: int, room: int) -> int:
        """Join a free block with those behind it."""
        while place + room < self._size:
            more, used = self._block(place + room)
            if used:
                break
            room += more
        self._write(place, room, 0)
        return room

    def _use(self, place: int, need: int, room: int) -> None:
        if room - need > _HEADER:
            self._write(place + need, room - need, 0)
            room = need
        self._write(place, room, 1)

    def _block(self, place: int) -> tuple[int, bool]:
        """Return a block's size and whether it is in use."""
        words = (ctypes.c_uint64 * 2).from_address(self._address + place)
        size = int(words[0])
        # What a kernel has overwritten must not lead outside, or round and round.
        if not _HEADER <= size <= self._size - place:
            size = self._size - place
        return size, words[1] == 1

    def _write(self, place: int, size: int, used: int) -> None:
        words = (ctypes.c_uint64 * 2).from_address(self._address + place)
        words[0], words[1] = size, used
