"""Calls that Python makes at a bad moment: finalizers in the middle of another call.

Python may run a finalizer, and with it a cuMemFree, between any two instructions of a thread: while the
thread holds the driver's lock, or runs a kernel that this very call would wait for. Such a call is carried
out afterwards, and answered with success at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.state import State


class DeferredCalls:
    """Calls that wait until their thread is out of the driver."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._calls: deque[tuple[list[Context], Callable[[], Any]]] = deque()
        self._janitor: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], Any]) -> None:
        """Keep a call, and the stack of contexts that it was made with."""
        self._calls.append((list(self._state.thread.stack), call))

    def run(self) -> None:
        """Carry out what was kept: here if no work runs, else, where it may have to wait, on a thread.

        A call that only happened to be the next must not wait for kernels.
        """
        if not self._calls or self._state.thread.in_deferred or self._state.scheduler.is_inside():
            return
        if not self._state.is_busy():
            self._run_all()
        elif self._janitor is None or not self._janitor.is_alive():
            self._janitor = threading.Thread(
                target=self._run_all, name="gpufleet virtual janitor", daemon=True
            )
            self._janitor.start()

    def join(self, timeout: float) -> None:
        """Wait for the thread, if there is one."""
        janitor = self._janitor
        if janitor is not None and janitor is not threading.current_thread():
            janitor.join(timeout)

    def _run_all(self) -> None:
        thread = self._state.thread
        own_stack, thread.in_deferred = thread.stack, True
        try:
            while self._calls:
                try:
                    thread.stack, call = self._calls.popleft()
                except IndexError:  # another thread was faster
                    return
                call()
        finally:
            thread.stack, thread.in_deferred = own_stack, False
