"""How does an asyncio task wait for a device, while its event loop goes on?"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio

SPIN_SECONDS = 0.0003
"""How long a loop asks in every turn, from the latest wait on: most short kernels end within it."""
NAP_SECONDS = 0.001
"""How long it goes on without asking, after that. A selector's timers are no finer."""
WORK_PER_NAP = 0.2
"""At most this part of a loop's time goes into asking, however many tasks wait."""


def until(is_ready: Callable[[], bool]) -> Generator[Any, None, None]:
    """Wait until `is_ready` answers yes; what it raises is raised here.

    It is asked in the thread of the running event loop. A thread of its own would ask for events that the
    loop's tasks are just closing, would not survive a fork, and would be there when the interpreter ends.

    Raises
    ------
    RuntimeError
        If no event loop of asyncio runs in this thread.
    """
    if is_ready():
        return
    import asyncio  # 30 ms, for those who use it

    loop = asyncio.get_running_loop()
    known = _pollers.get(loop)
    poller = None if known is None else known()
    if poller is None:
        poller = Poller()
        _pollers[loop] = weakref.ref(poller)
    yield from poller.add(is_ready, loop)


class Poller:
    """Asks for all that the tasks of one event loop wait for, in turn."""

    def __init__(self) -> None:
        self._waits: list[Wait] = []
        self._next: asyncio.Handle | None = None
        self._spin_until = 0.0

    def add(self, is_ready: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that is done when `is_ready` answers yes. Cancel it to wait no more."""
        wait = Wait(is_ready, loop.create_future())
        self._waits.append(wait)
        self._spin_until = time.perf_counter() + SPIN_SECONDS
        if self._next is not None:
            self._next.cancel()
        self._next = loop.call_soon(self._ask_all, loop)
        return wait.future

    def _ask_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = None
        began = time.perf_counter()
        try:
            self._waits = [wait for wait in self._waits if not wait.is_over()]
        finally:  # also if Ctrl-C ends the loop in here: it may be run again
            if self._waits:
                self._schedule(loop, began, time.perf_counter())

    def _schedule(self, loop: asyncio.AbstractEventLoop, began: float, now: float) -> None:
        if now < self._spin_until:
            self._next = loop.call_soon(self._ask_all, loop)
        else:
            nap = max(NAP_SECONDS, (now - began) / WORK_PER_NAP)
            self._next = loop.call_later(nap, self._ask_all, loop)


class Wait(NamedTuple):
    """What one task waits for, and the future that it awaits."""

    is_ready: Callable[[], bool]
    future: asyncio.Future[None]

    def is_over(self) -> bool:
        """Ask, unless the task was cancelled; tell the task if it has not to wait any more."""
        future = self.future
        if future.done():
            return True
        try:
            is_ready = self.is_ready()
        except Exception as error:
            future.set_exception(error)
            return True
        if is_ready:
            future.set_result(None)
        return is_ready


_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Poller]] = (
    weakref.WeakKeyDictionary()
)
"""A loop keeps its poller, as long as that is to be called: one kept here would keep the loop, and with it
all that the tasks of a loop that was closed under them wait for."""
