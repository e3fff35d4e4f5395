"""Does a context still exist, and how is what lives in it freed?"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpufleet.errors import GpufleetError, StickyError

if TYPE_CHECKING:
    from gpufleet.driver import Driver


class Lifetime:
    """What finalizers know of a context.

    They must not hold the `Context`: `weakref.finalize` keeps what it is given alive, and a context that
    something inside it keeps alive is never found to be forgotten.

    Attributes
    ----------
    driver : Driver
    is_gone : bool
        Whether the context was destroyed, or our retain of it released.
    lock : RLock
        Held while the context is closed and while what is in it is made or freed, so that the driver
        cannot reuse a handle meanwhile. Reentrant, since a finalizer may run while its thread holds it.
    main_stream : callable or None
        Frees the context's main stream, once.
    leftovers : callable or None
        Frees what would outlive the context, given the driver.
    spare_events : deque
        Events without timing that nobody has any more, to be recorded anew.
    most_spare_events : int
        How many are kept.
    """

    def __init__(self, driver: Driver, description: str) -> None:
        self.driver = driver
        self.is_gone = False
        self.lock = threading.RLock()
        self.main_stream: Callable[[], Any] | None = None
        self.leftovers: Callable[[Driver], None] | None = None
        self.spare_events: deque[Any] = deque()
        self.most_spare_events = 256
        self._description = description
        self._forgotten: deque[Callable[[], object]] = deque()

    def if_alive(self, release: Callable[[], object]) -> None:
        """Call what frees something in the context, if that still exists."""
        if self.driver.is_forked:  # a thread that is not in this process may have held the lock
            return
        with self.lock:
            self._release(release)
        if self._forgotten:
            self.free_forgotten()

    def free_later(self, release: Callable[[], object]) -> None:
        """Do as `if_alive`, for a finalizer: if another thread holds the lock, that one calls it.

        A finalizer that waited would, on a thread that holds another context's lock, wait for a thread
        that may wait for this one.
        """
        self._forgotten.append(release)
        self.free_forgotten()

    def free_forgotten(self) -> None:
        """Free what finalizers could not, if the lock can be had at once."""
        while self._forgotten and self.lock.acquire(blocking=False):
            try:
                self._release(self._forgotten.popleft())
            except (IndexError, GpufleetError):  # another thread was faster; a finalizer has nobody to tell
                continue
            finally:
                self.lock.release()

    def retire_event(self, event: Any) -> None:
        """Keep an event without timing for `Stream.record`, or destroy it. Finalizers call it too."""
        if len(self.spare_events) < self.most_spare_events:
            self.spare_events.append(event)
        else:
            self.free_later(lambda: self.driver.cuEventDestroy(event))

    def destroy_spare_events(self) -> None:
        """Destroy the events that are kept, in a context that lives on."""
        while self.spare_events:
            self.driver.cuEventDestroy(self.spare_events.pop())

    def _release(self, release: Callable[[], object]) -> None:
        if self.is_gone or self.driver.is_lost:
            return
        try:
            release()
        except StickyError:  # freed with everything else when the process ends
            return

    def __repr__(self) -> str:
        return self._description
