"""To which stream does this launch go: the one given, another library's, or the current context's own?"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from gpufleet import heap
from gpufleet.current import context_of, current_context
from gpufleet.driver import Driver, DriverLike, get_driver
from gpufleet.errors import WrongContext
from gpufleet.foreign_stream import ForeignStream, address_of
from gpufleet.stream import DEFAULT_STREAMS, Stream

if TYPE_CHECKING:
    from gpufleet.context import Context


class Queue(heap.Queue, Protocol):
    """What a launch needs of a stream.

    The `key` is its address, but for default streams, which all contexts have.
    """

    @property
    def address(self) -> int:
        """The address of the stream."""

    @property
    def must_enter(self) -> bool:
        """Whether its context must be current while work is put into it, and is not."""

    def has_work(self) -> None:
        """Note, of a foreign one, that work was put into it."""

    def hold(self, *objects: Any) -> Any:
        """Keep objects until the work queued so far is complete."""

    def check_open(self) -> None:
        """Raise `ContextClosed` if it can take no more work."""


def main_queue(driver: Driver | None, kernel: str) -> Queue:
    """Return the current context's main stream, for a launch of `kernel`.

    Raises
    ------
    WrongContext
        If no context is current on this thread.
    """
    context = current_context(driver)
    if context is None:
        raise WrongContext(
            f"kernel {kernel!r} was launched without stream=, but no context is current on thread "
            f"{threading.current_thread().name!r}: enter one with `with context:`, or give stream="
        )
    return context.main_stream


def as_stream(stream: Any, driver: DriverLike = None) -> Stream:
    """Wrap another library's stream, an object with `__cuda_stream__` as CuPy, PyTorch and cuda.core have.

    The wrapper keeps the object alive, and never destroys the stream. Launches, copies, fills and waits
    take the object itself as well, where its context is the buffer's or the launch's.

    A default stream (0, 1 or 2) is that of the context that is current on this thread.

    Raises
    ------
    TypeError
        If it has no such method.
    WrongContext
        If it is a default stream and no context is current.
    """
    if isinstance(stream, Stream):
        return stream
    chosen = None if driver is None else get_driver(driver)
    address = address_of(stream)
    return ForeignStream(_context_of_stream(address, chosen), address, stream)


def _context_of_stream(address: int, driver: Driver | None) -> Context:
    current = current_context(driver)
    if address in DEFAULT_STREAMS:
        if current is None:
            raise WrongContext(
                f"stream {address} is the default stream of whatever context is current, but on thread "
                f"{threading.current_thread().name!r} none is: enter one with `with context:`"
            )
        return current
    chosen = current.driver if current is not None else get_driver(driver)
    return context_of(chosen, chosen.cuStreamGetCtx(address))
