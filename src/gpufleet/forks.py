"""What has to be made anew in a forked child?"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something with threads or locks, of which a forked child has only the copies."""

    def after_fork(self) -> None:
        """Forget, in the child, what belongs to threads that are not in this process."""


def watch_forks(thing: Forkable) -> None:
    """Call `thing.after_fork()` in every child that is forked while it exists."""
    global _watching
    _watched.add(thing)
    if not _watching and hasattr(os, "register_at_fork"):
        _watching = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for thing in list(_watched):
        thing.after_fork()


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_watching = False
