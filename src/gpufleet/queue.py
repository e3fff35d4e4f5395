"""To which stream does this launch go: the one given, another library's, or the current context's own?"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from gpufleet import heap
from gpufleet.current import context_of, current_context
from gpufleet.driver import Driver, get_driver
from gpufleet.errors import WrongContext

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.graph import Graph


class Queue(heap.Queue, Protocol):
    """What a launch needs of a stream: a `Stream`, or a `ForeignStream`.

    The `key` is its address, but for default streams, which all contexts have.
    """

    @property
    def address(self) -> int:
        """The address of the stream."""

    def has_work(self) -> None:
        """Note, of a foreign one, that work was put into it."""

    def check_open(self) -> None:
        """Raise `ContextClosed` if it can take no more work."""


class ForeignStream:
    """Another library's stream. Its owner destroys it; gpufleet never does.

    Attributes
    ----------
    tail : CUevent or None
        Behind the work that gpufleet has put into it: by it, memory which that work uses is freed in time,
        also when the owner has destroyed the stream.
    """

    is_foreign = True
    graph: Graph | None = None

    def __init__(self, context: Context, address: int, owner: Any) -> None:
        self.context = context
        self.handle = self.address = address
        self.owner = owner
        self.key: Any = (context.address, address) if address in DEFAULT_STREAMS else address
        self.tail: Any = None

    @property
    def is_closed(self) -> bool:
        """Whether the stream's context was closed."""
        return self.context.is_closed

    def check_open(self) -> None:
        """Raise `ContextClosed` if the stream's context was closed."""
        self.context.check_open()

    def has_work(self) -> None:
        """Note that work was put into the stream, unless its owner captures it: then there is none."""
        if int(self.context.driver.cuStreamIsCapturing(self.handle)):
            return
        self.tail = self.context.heap.record_tail(self)

    def __repr__(self) -> str:
        return f"<{type(self.owner).__name__} {self.address:#x} of {self.context!r}>"


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


def foreign_queue(stream: Any, driver: Driver | None) -> ForeignStream:
    """Wrap an object with `__cuda_stream__`, as CuPy, PyTorch and cuda.core have.

    A default stream (0, 1 or 2) is that of the context that is current on this thread.

    Raises
    ------
    TypeError
        If it has no such method.
    WrongContext
        If it is a default stream and no context is current.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(f"expected a stream, or an object with __cuda_stream__, got {type(stream).__name__}")
    # Some libraries of the protocol's first days have a property in the place of the method.
    _version, address = protocol() if callable(protocol) else protocol
    return ForeignStream(_context_of_stream(int(address), driver), int(address), stream)


DEFAULT_STREAMS = (0, 1, 2)
"""The legacy default stream by its two names, and the per-thread one: each exists in every context."""


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
