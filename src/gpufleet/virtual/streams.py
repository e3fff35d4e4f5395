"""In which order does work run? Streams, events, and how work enters a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.handles import new_handle
from gpufleet.virtual.interrupts import InterruptsDeferred
from gpufleet.virtual.operations import Operation

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.work import Scheduler

LEGACY = 1
"""CU_STREAM_LEGACY; 0 means the same."""
PER_THREAD = 2
"""CU_STREAM_PER_THREAD."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""


class Stream:
    """A first-in-first-out queue of work in one context."""

    __slots__ = ("context", "flags", "handle", "is_legacy", "priority", "tail")

    def __init__(self, context: Context, flags: int, priority: int = 0, *, is_legacy: bool = False) -> None:
        self.handle = LEGACY if is_legacy else new_handle()
        self.context = context
        self.flags = flags
        self.priority = priority
        self.is_legacy = is_legacy
        self.tail: Operation | None = None
        """The operation that entered last; its end is the stream's."""

    @property
    def is_blocking(self) -> bool:
        """Whether the legacy default stream and this one wait for each other."""
        return not self.flags & NON_BLOCKING

    def pending(self) -> list[Operation]:
        """Return the operations whose end means that all work of the stream has ended.

        For the legacy default stream this is the work of all blocking streams of the context as well.
        """
        tails = [stream.tail for stream in self._and_its_followers()]
        return [tail for tail in tails if tail is not None and not tail.done]

    def predecessors(self) -> list[Operation]:
        """Return what an operation that enters now has to wait for.

        The legacy default stream first waits for all blocking streams, and these for it (Driver API,
        "Stream synchronization behavior").
        """
        if self.is_legacy:
            return self.pending()
        before = [self.tail, self.context.legacy.tail] if self.is_blocking else [self.tail]
        return [tail for tail in before if tail is not None and not tail.done]

    def _and_its_followers(self) -> Iterator[Stream]:
        yield self
        if self.is_legacy:
            yield from self.context.blocking_streams()


class Event:
    """A point in a stream, and the time at which it was reached."""

    __slots__ = ("context", "flags", "handle", "operation", "time")

    DISABLE_TIMING = 2

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = new_handle()
        self.context = context
        self.flags = flags
        self.operation: Operation | None = None
        """What was recorded last."""
        self.time = 0
        """Nanoseconds of `time.perf_counter_ns` at which the last recording was reached."""

    @property
    def is_ready(self) -> bool:
        """Whether the work before the last recording has ended; True without any recording."""
        return self.operation is None or self.operation.done

    def record(self, scheduler: Scheduler, stream: Stream) -> None:
        """Let the event mean the work that is in `stream` now."""
        operation = Operation(stream.context.device.ordinal)

        def mark() -> None:
            if self.operation is operation:
                self.time = time.perf_counter_ns()

        operation.mark = mark
        self.operation = operation
        enqueue(scheduler, stream, operation)


def enqueue(
    scheduler: Scheduler, stream: Stream, operation: Operation, after: Operation | None = None
) -> None:
    """Put an operation behind the work of a stream, and behind `after`."""
    with scheduler.lock:
        scheduler.submit(operation, _before(stream, after))
        stream.tail = operation
    scheduler.settle()


def enqueue_and_wait(scheduler: Scheduler, stream: Stream, operation: Operation) -> None:
    """Put an operation behind the work of a stream and return when it has ended.

    If the wait is interrupted, the operation does nothing or has ended before this raises: it may use
    memory that the caller is about to free.
    """
    if scheduler.is_inside():
        raise Refusal("NOT_PERMITTED", "a finalizer in the middle of another call would wait for work")
    try:
        with InterruptsDeferred():
            with scheduler.lock:
                is_mine = scheduler.submit(operation, _before(stream, None), claim=True)
                stream.tail = operation
            if is_mine:
                scheduler.run(operation)
            scheduler.settle()
        scheduler.wait(operation)
    except BaseException:
        scheduler.revoke(operation)
        raise


def call_host(scheduler: Scheduler, stream: Stream, function: Callable[[], None]) -> None:
    """Put the call of a host function into a stream; it runs on a thread of the driver."""
    enqueue(scheduler, stream, Operation(stream.context.device.ordinal, function, on_worker=True))


def _before(stream: Stream, after: Operation | None) -> list[Operation]:
    predecessors = stream.predecessors()
    if after is not None and after not in predecessors:
        predecessors.append(after)
    return predecessors
