"""mbarrier objects (PTX ISA 9.7.13.15): what is counted in eight bytes of shared memory, and how.

The layout is our own, programs must not look inside: from bit 0 the arrivals that are pending in this
phase, from bit 20 those that each phase expects, from bit 40 the pending transactions (22 bits, signed),
and in bit 62 the parity of the phase. A phase is complete when nothing is pending.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpufleet.virtual.interpreter.values import Array

Change = Callable[[Array, Array], Array]
"""Takes the objects and the operand, returns the objects as they are then."""

_COUNT = np.uint64((1 << 20) - 1)
_EXPECTED = np.uint64(20)
_TRANSACTIONS = np.uint64(40)
_TRANSACTION_BITS = np.uint64((1 << 22) - 1)
_PHASE = np.uint64(62)
_ONE = np.uint64(1)


def phase(word: Array) -> Array:
    """Return the parity of the phase that is not complete yet."""
    return (word >> _PHASE) & _ONE


def pending(word: Array) -> Array:
    """Return how many arrivals the phase waits for."""
    return word & _COUNT


def initialized(count: Array) -> Array:
    """Return a new object that expects so many arrivals."""
    return count | count << _EXPECTED


def arrive(word: Array, count: Array) -> Array:
    """Count arrivals."""
    return _completed(_with_pending(word, pending(word) - count))


def arrive_and_expect(word: Array, bytes: Array) -> Array:
    """Expect transactions, then count one arrival."""
    return arrive(expect(word, bytes), _ONE)


def drop(word: Array, count: Array) -> Array:
    """Count arrivals, and expect so many fewer from the next phase on."""
    expected = ((word >> _EXPECTED) & _COUNT) - count
    word = (word & ~(_COUNT << _EXPECTED)) | (expected & _COUNT) << _EXPECTED
    return arrive(word, count)


def drop_and_expect(word: Array, bytes: Array) -> Array:
    """Expect transactions, then count one arrival that is the last of its thread."""
    return drop(expect(word, bytes), _ONE)


def expect(word: Array, bytes: Array) -> Array:
    """Wait for so many bytes more."""
    return _with_transactions(word, _transactions(word) + bytes)


def complete(word: Array, bytes: Array) -> Array:
    """So many bytes have come."""
    return _completed(_with_transactions(word, _transactions(word) - bytes))


def _transactions(word: Array) -> Array:
    return (word >> _TRANSACTIONS) & _TRANSACTION_BITS


def _with_transactions(word: Array, value: Array) -> Array:
    cleared = word & ~(_TRANSACTION_BITS << _TRANSACTIONS)
    return cleared | (value & _TRANSACTION_BITS) << _TRANSACTIONS


def _with_pending(word: Array, value: Array) -> Array:
    return (word & ~_COUNT) | (value & _COUNT)


def _completed(word: Array) -> Array:
    """Begin the next phase where nothing is pending."""
    done = (pending(word) == 0) & (_transactions(word) == 0)
    following = _with_pending(word, (word >> _EXPECTED) & _COUNT) ^ (_ONE << _PHASE)
    return np.where(done, following, word)


ARRIVALS: dict[tuple[str, bool], Change] = {
    ("arrive", False): arrive,
    ("arrive", True): arrive_and_expect,
    ("arrive_drop", False): drop,
    ("arrive_drop", True): drop_and_expect,
}
"""By the action, and whether transactions are expected too."""
