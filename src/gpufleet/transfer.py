"""When is an asynchronous copy complete, and what did it bring?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from gpufleet.awaiting import until
from gpufleet.graph import refuse_to_wait
from gpufleet.stream import Event, is_ready, wait

if TYPE_CHECKING:
    from gpufleet.context import Context


class BlockingCopyWarning(UserWarning):
    """An asynchronous copy made its caller wait; the message says why, and what helps."""


class Transfer:
    """An asynchronous copy. Returned by `copy_from`, `copy_to` and `to_numpy` where `stream` is given.

    A stream may wait for it as for an event: ``other.wait(transfer)``.

    A copy from a device into ordinary (pageable) memory is staged through pinned memory, and its last
    step, from there to its target, is done by whichever comes first: `query`, `synchronize` or `result`
    of this object, or any later wait of gpufleet (`synchronize`, or a `query` that answers yes) of a
    stream, event or context, once the copy's place in its stream is reached.

    Attributes
    ----------
    event : Event
        Behind the copy in its stream.
    """

    def __init__(self, event: Event, value: Any = None, finish: Callable[[], None] | None = None) -> None:
        self.event = event
        self._value = value
        self._finish = finish
        self._lock = threading.RLock()  # signal handlers and finalizers may enter it again
        if finish is not None:
            event.is_held = True  # closing it must not give its handle to another recording
            event.context.driver.unfinished.append(self)

    @property
    def context(self) -> Context:
        """The context of the stream that copies."""
        return self.event.context

    def query(self) -> bool:
        """Return whether the copy is complete."""
        return self.advance()

    def synchronize(self) -> None:
        """Wait until the copy is complete; Ctrl-C interrupts the wait, not the copy."""
        if self._finish is None and self.event.is_closed:
            return
        refuse_to_wait(self.event, "be waited for")
        driver = self.context.driver
        wait(driver, "cuEventQuery", "cuEventSynchronize", self.event.handle)
        if self.event.mark is not None:
            driver.launches.finished(self.context.address, *self.event.mark)
        self.advance()

    def result(self) -> Any:
        """Wait until the copy is complete, and return its target (None for a copy to a device)."""
        self.synchronize()
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        """Return, in an asyncio task, what `result` does; the event loop goes on meanwhile."""
        yield from until(self.advance)
        return self._value

    def advance(self) -> bool:
        """Do the last step if its time has come; return whether the copy is complete."""
        if self._finish is None and self.event.is_closed:
            return True
        refuse_to_wait(self.event, "be asked whether it is reached")
        with self._lock:
            if not is_ready(self.context.driver, "cuEventQuery", self.event.handle):
                return False
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
                self._forget()
                self.event.let_go()
        return True

    def _forget(self) -> None:
        try:
            self.context.driver.unfinished.remove(self)
        except ValueError:  # a reset has emptied it
            return

    def close(self) -> None:
        """Wait until the copy is complete, and destroy its event. Closing twice is no error."""
        if not self.event.is_closed:
            if not self.context.driver.is_lost:
                self.synchronize()
            self.event.close()

    def __repr__(self) -> str:
        return f"<Transfer with {self.event!r}>"
