"""Numbers for the objects that a driver hands out."""

from __future__ import annotations

import itertools

_numbers = itertools.count(0x7E00_0000_1000, 0x40)


def new_handle() -> int:
    """Return a number that no other object of any virtual driver of this process has."""
    return next(_numbers)
