"""In which order does work run? Streams, events, and how work enters a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.capture import wait_in_capture
from gpufleet.virtual.handles import new_handle
from gpufleet.virtual.interrupts import InterruptsDeferred
from gpufleet.virtual.operations import Operation

if TYPE_CHECKING:
    from gpufleet.virtual.capture import Capture
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.graphs import Node
    from gpufleet.virtual.work import Scheduler

LEGACY = 1
"""CU_STREAM_LEGACY; 0 means the same."""
PER_THREAD = 2
"""CU_STREAM_PER_THREAD."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""


class Stream:
    """A first-in-first-out queue of work in one context."""

    __slots__ = ("capture", "context", "flags", "handle", "is_legacy", "priority", "settings", "tail")

    def __init__(self, context: Context, flags: int, priority: int = 0, *, is_legacy: bool = False) -> None:
        self.handle = LEGACY if is_legacy else new_handle()
        self.context = context
        self.flags = flags
        self.priority = priority
        self.is_legacy = is_legacy
        self.settings: dict[str, bytes] = {}
        """What cuStreamSetAttribute was told, by the attribute's name."""
        self.tail: Operation | None = None
        """The operation that entered last; its end is the stream's."""
        self.capture: Capture | None = None
        """Where its work goes instead of being carried out."""

    @property
    def is_blocking(self) -> bool:
        """Whether the legacy default stream and this one wait for each other."""
        return not self.flags & NON_BLOCKING

    def pending(self) -> list[Operation]:
        """Return the operations whose end means that all work of the stream has ended.

        For the legacy default stream this is the work of all blocking streams of the context as well;
        it cannot wait for one that is captured.
        """
        streams = list(self._and_its_followers())
        for stream in streams:
            if stream.capture is not None and self.is_legacy:
                raise stream.capture.broken_by("IMPLICIT", "the legacy default stream would wait for it")
        tails = [stream.tail for stream in streams]
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

    __slots__ = ("captured", "context", "flags", "handle", "operation", "time")

    DISABLE_TIMING = 2

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = new_handle()
        self.context = context
        self.flags = flags
        self.operation: Operation | None = None
        """What was recorded last."""
        self.captured: tuple[Capture, list[Node]] | None = None
        """What it means if it was last recorded in a capture."""
        self.time = 0
        """Nanoseconds of `time.perf_counter_ns` at which the last recording was reached."""

    @property
    def is_ready(self) -> bool:
        """Whether the work before the last recording has ended; True without any recording."""
        return self.operation is None or self.operation.done

    def record(self, scheduler: Scheduler, stream: Stream) -> None:
        """Let the event mean the work that is in `stream` now."""
        with InterruptsDeferred():
            with scheduler.lock:
                if stream.capture is not None:
                    stream.capture.record(self, stream)
                    return
                before = stream.predecessors()
                stream.tail = self.new_operation()
                scheduler.submit(stream.tail, before)
            scheduler.settle()

    def record_after(self, scheduler: Scheduler, operations: list[Operation]) -> None:
        """Let the event mean some operations; the lock is held, and `Scheduler.settle` follows."""
        scheduler.submit(self.new_operation(), operations)

    def new_operation(self) -> Operation:
        """Return a new recording, which the event means from now on."""
        operation = Operation(self.context.device.ordinal)

        def mark() -> None:
            if self.operation is operation:
                self.time = time.perf_counter_ns()

        operation.mark = mark
        self.operation = operation
        self.captured = None
        return operation


def enqueue(
    scheduler: Scheduler,
    stream: Stream,
    operation: Operation,
    after: Operation | None = None,
    *,
    kind: str = "",
) -> None:
    """Put an operation behind the work of a stream, and behind `after`.

    If the stream is captured, it becomes a node of this `kind`; without one it cannot be captured.
    """
    with InterruptsDeferred():  # else an operation could be entered that no worker is called for
        with scheduler.lock:
            if stream.capture is not None:
                stream.capture.add_operation(stream, kind, operation)
                return
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


def wait_for_event(scheduler: Scheduler, stream: Stream, event: Event) -> None:
    """Let later work of a stream wait for what an event means now."""
    if event.captured is not None or stream.capture is not None:
        with scheduler.lock:
            if wait_in_capture(stream, event):
                return
    operation = event.operation
    if operation is not None and not operation.done:
        enqueue(scheduler, stream, Operation(stream.context.device.ordinal), after=operation)


def call_host(scheduler: Scheduler, stream: Stream, function: Callable[[], None]) -> None:
    """Put the call of a host function into a stream; it runs on a thread of the driver."""
    operation = Operation(stream.context.device.ordinal, function, on_worker=True)
    enqueue(scheduler, stream, operation, kind="HOST")


def _before(stream: Stream, after: Operation | None) -> list[Operation]:
    predecessors = stream.predecessors()
    if after is not None and after not in predecessors:
        predecessors.append(after)
    return predecessors
