"""What does one thread of an executor run, and in which context?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufleet.entries import thread_entries

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.crew import Desk
    from gpufleet.lease import Lease
    from gpufleet.pool import ContextPool


class Task(NamedTuple):
    """What `submit` was given, and the future that tells how it went."""

    number: int
    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


Outcome = tuple[Any, "BaseException | None"]
"""What a call returned, or what it raised."""


class Worker:
    """One thread: what it is to run next, what wakes it, and the context that it is inside.

    It stays inside from one task to the next, as long as there is a next: entering anew costs four driver
    calls, each of which releases the GIL, and made a task of `benchmarks/pool.py` 40 us dearer.
    """

    def __init__(self, desk: Desk, task: Task) -> None:
        self.desk = desk
        self.task: Task | None = task
        self._bell = threading.Lock()
        self._bell.acquire()
        self._lease: Lease | None = None
        self._context: Context | None = None
        self._depth = 0

    # Who submits calls these

    def wake(self) -> None:
        """Let `wait` return, once. Without a task given before, the thread ends."""
        self._bell.release()

    # The thread itself calls these

    def wait(self) -> Task | None:
        """Wait for `wake`; return the task given meanwhile."""
        self._bell.acquire()
        return self.take()

    def take(self) -> Task | None:
        """Return the task, and hold it no more: its arguments may be large."""
        task, self.task = self.task, None
        return task

    def call(
        self, pool: ContextPool, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Outcome:
        """Call `function` inside a context of this thread's device."""
        try:
            if self._lease is None:
                self._enter(pool)
            result = function(*arguments, **keywords)
        except BaseException as error:  # whatever it is: it is the caller's, and not this thread's
            return None, error
        return result, None

    def leave(self, outcome: Outcome) -> Outcome:
        """Give the context back; return the outcome, or what went wrong if nothing had before."""
        lease, self._lease, self._context = self._lease, None, None
        if lease is None:
            return outcome
        try:
            lease.__exit__(None, None, None)
        except BaseException as error:
            return outcome if outcome[1] is not None else (None, error)
        finally:
            del thread_entries()[self._depth :]  # what the task has pushed and not popped
        return outcome

    @property
    def is_displaced(self) -> bool:
        """Whether the task has left another context current than the one it was called in."""
        context = self._context
        if context is None:
            return False
        error, handle = context._get_current()
        return bool(error) or handle != context.handle or len(thread_entries()) != self._depth + 1

    def _enter(self, pool: ContextPool) -> None:
        self._depth = len(thread_entries())
        lease = pool.lease(self.desk.device)
        self._context = lease.__enter__()
        self._lease = lease
