"""What is another library's stream to gpufleet?"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gpufleet.stream import DEFAULT_STREAMS, Event, Stream

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.transfer import Transfer


class ForeignStream(Stream):
    """Another library's stream. Its owner destroys it; gpufleet never does. Made by `as_stream`.

    Attributes
    ----------
    tail : CUevent or None
        Behind the work that gpufleet has put into it: by it, memory which that work uses is freed in time,
        also when the owner has destroyed the stream.
    """

    is_foreign = True

    def __init__(self, context: Context, address: int, owner: Any) -> None:
        self.context = context
        self.handle = self.address = address
        self.owner = owner
        self.key: Any = (context.address, address) if address in DEFAULT_STREAMS else address
        self.tail = None
        self._closed = False
        self.lock = threading.RLock()
        self._held: deque[tuple[Event, tuple[Any, ...]]] = deque()

    @property
    def must_enter(self) -> bool:  # type: ignore[override]  # a plain False costs other launches less
        """Whether the driver would take another context's default stream for this one now."""
        return self.address in DEFAULT_STREAMS and not self.context.is_current

    def _entered(self) -> AbstractContextManager[Any]:
        return self.context if self.must_enter else contextlib.nullcontext()

    def has_work(self) -> None:
        """Note that work was put into the stream, unless its owner captures it: then there is none."""
        if int(self.context.driver.cuStreamIsCapturing(self.handle)):
            return
        self.tail = self.context.heap.record_tail(self)

    def record(self, event: Event | None = None) -> Event:
        """Record `event` (a new one without timing, if None) behind the work queued so far."""
        with self._entered():
            self.has_work()
            return super().record(event)

    def wait(self, event: Event | Transfer) -> None:
        """Let later work of this stream wait for `event`, of whatever context and device."""
        with self._entered():
            super().wait(event)

    def query(self) -> bool:
        """Return whether all queued work is complete."""
        with self._entered():
            return super().query()

    def synchronize(self) -> None:
        """Wait until all queued work is complete; Ctrl-C interrupts the wait, not the work."""
        with self._entered():
            super().synchronize()

    def precede(self, later: Any) -> None:
        """Let later work of a stream (a CUstream) wait for what gpufleet has put into this one."""
        if self.tail is not None:
            self.context.driver.cuStreamWaitEvent(later, self.tail, 0)

    def close(self) -> None:
        """Do nothing: the stream is its owner's."""

    def abandon(self) -> None:
        """Do nothing: the stream is its owner's."""

    def __repr__(self) -> str:
        return f"<{type(self.owner).__name__} {self.address:#x} of {self.context!r}>"


def address_of(stream: Any) -> int:
    """Return the address of an object with `__cuda_stream__`.

    Raises
    ------
    TypeError
        If it has no such method.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(f"expected a stream, or an object with __cuda_stream__, got {type(stream).__name__}")
    # Some libraries of the protocol's first days have a property in the place of the method.
    _version, address = protocol() if callable(protocol) else protocol
    return int(address)
