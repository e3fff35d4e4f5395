"""The thread that compiles again what turned out to run for long.

It ends with the process in good order: LLVM's own data must not go away while it compiles, so the
exit waits for the kernel that is in work (a second at most) and drops the others.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import warnings
from collections.abc import Callable


class Optimiser:
    """Does one piece of work after the other, in the background."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name="gpufleet-virtual-optimiser", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Callable[[], None]) -> None:
        """Have something done soon."""
        self._work.put(work)

    def close(self) -> None:
        """Finish what is being done, and nothing more."""
        self._ending = True
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            if work is None or self._ending:
                return
            try:
                work()
            except Exception as error:
                warnings.warn(f"a kernel stays as it was first compiled: {error!r}", stacklevel=1)


_optimiser: Optimiser | None = None
_lock = threading.Lock()


def optimiser() -> Optimiser:
    """Return the process's optimiser."""
    global _optimiser
    with _lock:
        if _optimiser is None:
            _optimiser = Optimiser()
        return _optimiser


def _forget() -> None:
    """A forked child has no such thread; it starts its own."""
    global _optimiser, _lock
    if _optimiser is not None:
        atexit.unregister(_optimiser.close)
    _optimiser = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
