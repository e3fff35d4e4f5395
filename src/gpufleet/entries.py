"""Which contexts has each thread entered, and what was current before?"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet.context import Context


class ContextWarning(UserWarning):
    """Something else changed this thread's context stack; gpufleet has put it right."""


Entry = tuple["Context", Any, bool]
"""One thread's being inside a context: the context, the handle that the driver said was current before,
and whether a `with` block entered, which then leaves by itself (else `push` did).

A plain tuple, since making a named one costs as much as a push through the bindings (0.25 us).
"""


class ThreadEntries(list[Entry]):
    """The entries of one thread, outermost first. Dies with its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.current_thread().name


def thread_entries() -> ThreadEntries:
    """Return the calling thread's entries."""
    return of_thread.entries


def all_entries() -> list[ThreadEntries]:
    """Return the entries of every living thread that has any note of its own."""
    found = (reference() for reference in list(_everyone.values()))
    return [entries for entries in found if entries is not None]


class _OfThread(threading.local):
    """Each thread finds its own `entries` here, made when it first looks."""

    def __init__(self) -> None:
        self.entries = entries = ThreadEntries()
        key = id(entries)
        _everyone[key] = weakref.ref(entries, lambda _: _everyone.pop(key, None))


_everyone: dict[int, weakref.ref[ThreadEntries]] = {}
of_thread = _OfThread()
"""For `Context`, to which the call of `thread_entries` is a twentieth of its time."""
