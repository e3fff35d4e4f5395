"""In which order does work run? Streams and events."""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufleet.awaiting import until
from gpufleet.errors import ContextClosed, CudaError, WrongContext
from gpufleet.graph import Graph, capture, check_meeting, refuse_to_wait

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gpufleet.context import Context
    from gpufleet.driver import Driver
    from gpufleet.lifetime import Lifetime
    from gpufleet.transfer import Transfer

NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: no implicit ordering with the legacy default stream."""
DISABLE_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""
DEFAULT_STREAMS = (0, 1, 2)
"""The legacy default stream by its two names, and the per-thread one: each exists in every context."""
NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""


class Stream:
    """A queue of work on one device, in order.

    Made by `Context.stream`. Safe to use from many threads; work of two threads enters in some order.

    Attributes
    ----------
    graph : Graph or None
        What its work is captured into now.
    must_enter : bool
        Whether its context must be current while work is put into it, and is not.
    lock : RLock
        Held while it is destroyed, and by other threads that must not find it so.
    """

    graph: Graph | None = None

    is_foreign = False
    must_enter = False
    tail: Any = None

    def __init__(self, context: Context, handle: Any, *, is_main: bool = False) -> None:
        self.context = context
        self.handle = handle
        self.address = self.key = int(handle)
        self._closed = False
        self._held: deque[tuple[Event, tuple[Any, ...]]] = deque()
        self._is_main = is_main
        self.lock = threading.RLock()
        self._finalizer = _finalize(self, "cuStreamDestroy", handle)

    @classmethod
    def create(cls, context: Context, *, is_main: bool = False, priority: int = 0) -> Stream:
        """Create a non-blocking stream in `context`; its main one, nobody but the context closes."""
        priority = operator.index(priority)
        with context:
            if priority:
                _check_priority(context, priority)
            handle = context.new_stream(priority)
        stream = cls(context, handle, is_main=is_main)
        context.adopt(stream)
        return stream

    @property
    def priority(self) -> int:
        """How urgent its work is: 0, or less, which is more urgent."""
        self.check_open()
        return int(self.context.driver.cuStreamGetPriority(self.handle))

    def record(self, event: Event | None = None) -> Event:
        """Record `event` (a new one without timing, if None) behind the work queued so far.

        Raises
        ------
        WrongContext
            If the event is of another context than the stream.
        """
        self.check_open()
        if event is None:
            event = Event.for_recording(self.context)
        elif not isinstance(event, Event):
            raise TypeError(f"expected an event, got {type(event).__name__}")
        elif event.context is not self.context and event.context.address != self.context.address:
            raise WrongContext(f"{event!r} cannot be recorded on {self!r}: they are of different contexts")
        event.check_open()
        event.mark = (self.address, self.context.driver.launches.mark())
        event.graph = self.graph
        self.context.driver.cuEventRecord(event.handle, self.handle)
        return event

    def wait(self, event: Event | Transfer) -> None:
        """Let later work of this stream wait for `event`, of whatever context and device."""
        self.check_open()
        point = event if isinstance(event, Event) else getattr(event, "event", None)
        if not isinstance(point, Event):
            raise TypeError(
                f"{self!r} cannot wait for an object of type {type(event).__name__}: expected an event, such "
                "as other.record() of another stream, or a transfer"
            )
        point.check_open()
        _check_driver(self, point)
        graph = point.graph
        if graph is not self.graph or graph is not None:
            check_meeting(self, point)
        self.context.driver.cuStreamWaitEvent(self.handle, point.handle, 0)
        if graph is not None and self.graph is None:
            graph.join(self)

    def capture(self) -> AbstractContextManager[Graph]:
        """Record what is put into this stream, instead of carrying it out, as a graph.

        ``with stream.capture() as graph:`` records launches, copies and fills that are given this stream.
        A stream that waits for an event of a captured stream is captured too, from then on; this one must
        wait for it before the block ends. The graph can be launched when the block has ended.

        Copies from and to host arrays read and write these in each launch. Memory is not allocated in a
        graph: allocate before. What is freed meanwhile is freed when the block ends.

        Raises
        ------
        CaptureError
            If it is being captured already, or, at the end of the block, if it does not wait for a stream
            that joined it. Inside of the block: for what waits (`synchronize`, `query`, a copy without
            ``stream=``), and for copies between devices. An exception leaves no graph.
        """
        return capture(self)

    def query(self) -> bool:
        """Return whether all queued work is complete."""
        self.check_open()
        refuse_to_wait(self, "be asked whether it is done")
        return _answered(self.context.driver, "cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Wait until all queued work is complete; Ctrl-C interrupts the wait, not the work."""
        self.check_open()
        refuse_to_wait(self, "be waited for")
        driver = self.context.driver
        mark = driver.launches.mark()
        wait(driver, "cuStreamQuery", "cuStreamSynchronize", self.handle)
        driver.launches.finished(self.context.address, self.address, mark)
        self._let_go()
        settle(driver)

    async def synchronize_async(self) -> None:
        """Wait, in an asyncio task, until the work queued so far is complete, and let the loop go on.

        Notices it within a millisecond. What raises in `synchronize` raises here. A task that is cancelled
        waits no more; the work goes on.
        """
        refuse_to_wait(self, "be waited for")
        event = self.record()
        try:
            await event
            if not self.is_closed:  # by another task, in the same turn of the loop
                self._let_go()
        finally:
            event.close()

    def has_work(self) -> None:
        """Do nothing: this stream is asked when its work is to be known (another library's may be gone)."""

    def precede(self, later: Any) -> None:
        """Let later work of a stream (a CUstream) wait for what is in this one now, without a new event."""
        with self.lock:
            if not self._closed:
                self.context.heap.let_wait(later, self.handle)

    def hold(self, *objects: Any) -> Event:
        """Keep `objects` alive until the work queued so far is complete; return an event behind it."""
        if self.graph is not None:
            self.graph.keep_arrays(*objects)
            return self.record()
        self._let_go()
        event = self.record()
        event.is_held = True
        self._held.append((event, objects))
        return event

    def _let_go(self) -> None:
        held = self._held
        while held:
            try:
                first = held[0]
                if not is_ready(self.context.driver, "cuEventQuery", first[0].handle):
                    return
                held.remove(first)
                first[0].let_go()
            except (IndexError, ValueError):  # another thread let it go
                return

    @property
    def is_closed(self) -> bool:
        """Whether this stream or its context was closed."""
        return self._closed or self.context.is_closed

    def check_open(self) -> None:
        """Raise `ContextClosed` if this stream or its context was closed."""
        self.context.check_open()
        if self._closed:
            raise ContextClosed(f"{self!r} was closed; create another stream")

    def close(self) -> None:
        """Wait for the queued work, then destroy the stream. Closing twice is no error."""
        refuse_to_wait(self, "be closed")
        if self._closed or self._finalizer.detach() is None:
            return
        driver = self.context.driver
        try:
            if not (self.context.is_gone or driver.is_lost):
                wait(driver, "cuStreamQuery", "cuStreamSynchronize", self.handle)
        except BaseException:  # Ctrl-C: the stream is as open as it was
            self._finalizer = _finalize(self, "cuStreamDestroy", self.handle)
            raise
        self._closed = True
        for event, _ in tuple(self._held):
            event.let_go()
        self._held.clear()
        driver.launches.forget(self.context.address, self.address)
        self.context.if_alive(self._destroy)
        self.context.note_closed_stream()

    def _destroy(self) -> None:
        with self.lock:
            self.context.driver.cuStreamDestroy(self.handle)

    def abandon(self) -> None:
        """Leave the stream to its context, whose end frees it: no finalizer will."""
        self._finalizer.detach()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (protocol version, handle), by which other libraries use this stream."""
        return (0, self.address)

    def __repr__(self) -> str:
        return f"<Stream {self.address:#x} of {self.context!r}>"


class StreamPriorities(NamedTuple):
    """The range of the streams' priorities on a device; the smaller number is the more urgent."""

    least: int
    greatest: int


class Event:
    """A point in a stream. Made by `Context.event` or `Stream.record`.

    Attributes
    ----------
    graph : Graph or None
        The graph in whose capture it was recorded last: then it stands for a place in that graph.
    is_held : bool
        Whether its stream keeps objects until it is reached (`Stream.hold`).
    """

    graph: Graph | None = None
    is_held = False

    def __init__(self, context: Context, handle: Any, *, timing: bool) -> None:
        self.context = context
        self.handle = handle
        self.timing = timing
        self.mark: tuple[int, int] | None = None
        self._closed = False
        self._finalizer = _finalize(self, "cuEventDestroy" if timing else RETIRE, handle)

    @classmethod
    def create(cls, context: Context, *, timing: bool) -> Event:
        """Create an event in `context`."""
        with context:
            handle = context.driver.cuEventCreate(0 if timing else DISABLE_TIMING)
        event = cls(context, handle, timing=timing)
        context.adopt(event)
        return event

    @classmethod
    def for_recording(cls, context: Context) -> Event:
        """Return an event without timing that is recorded at once: what it meant before is over then.

        It takes the handle of an event that is closed, if there is one: that costs no call of the driver.
        """
        try:
            handle = context.life.spare_events.pop()
        except IndexError:
            return cls.create(context, timing=False)
        event = cls(context, handle, timing=False)
        context.adopt(event)
        return event

    def query(self) -> bool:
        """Return whether the work before the event is complete (True if it was never recorded)."""
        self.check_open()
        refuse_to_wait(self, "be asked whether it is reached")
        return _answered(self.context.driver, "cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Wait for the work before the event; Ctrl-C interrupts the wait, not the work."""
        self.check_open()
        refuse_to_wait(self, "be waited for")
        driver = self.context.driver
        mark = self.mark
        wait(driver, "cuEventQuery", "cuEventSynchronize", self.handle)
        if mark is not None:
            driver.launches.finished(self.context.address, *mark)
        settle(driver)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait, in an asyncio task, for the work before the event: see `Stream.synchronize_async`."""
        mark = self.mark
        yield from until(self.query)
        if mark is not None:
            self.context.driver.launches.finished(self.context.address, *mark)

    def elapsed(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`, both recorded and complete.

        Raises
        ------
        ValueError
            If they are of different devices, or an event was made without timing.
        CudaError
            If one is not recorded (CUDA_ERROR_INVALID_HANDLE) or not complete (CUDA_ERROR_NOT_READY).
        """
        _check_driver(self, end)
        if self.context.device.ordinal != end.context.device.ordinal:
            raise ValueError(
                f"no elapsed time between events of device {self.context.device.ordinal} and device "
                f"{end.context.device.ordinal}: their clocks are not the same"
            )
        if not (self.timing and end.timing):
            raise ValueError("no elapsed time between events without timing: use context.event()")
        refuse_to_wait(self, "be timed")
        refuse_to_wait(end, "be timed")
        return float(self.context.driver.cuEventElapsedTime(self.handle, end.handle))

    @property
    def is_closed(self) -> bool:
        """Whether this event or its context was closed."""
        return self._closed or self.context.is_closed

    def check_open(self) -> None:
        """Raise `ContextClosed` if this event or its context was closed."""
        self.context.check_open()
        if self._closed:
            raise ContextClosed(f"{self!r} was closed; create another event")

    def close(self) -> None:
        """Destroy the event; work that waits for it is not disturbed. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        if not self.is_held:
            self._retire()

    def let_go(self) -> None:
        """Note that its stream does not need it any more, which outlives `close`."""
        self.is_held = False
        if self._closed:
            self._retire()

    def _retire(self) -> None:
        if self._finalizer.detach() is None:
            return
        if self.timing:
            self.context.free("cuEventDestroy", self.handle)
        elif not self.context.is_gone:
            self.context.life.retire_event(self.handle)

    def __repr__(self) -> str:
        return f"<Event {int(self.handle):#x} of {self.context!r}>"


@contextlib.contextmanager
def passing_event(driver: Driver, context: Any) -> Iterator[Any]:
    """Yield an event of a context (a CUcontext), which is current meanwhile; then destroy the event."""
    driver.cuCtxPushCurrent(context)
    try:
        event = driver.cuEventCreate(DISABLE_TIMING)
        try:
            yield event
        finally:
            driver.cuEventDestroy(event)
    finally:
        driver.cuCtxPopCurrent()


SPIN_SECONDS = 0.0001
"""How long a wait polls without sleeping: most waits of short kernels end within it."""
LONGEST_NAP = 0.001


def wait(driver: Driver, query: str, synchronize: str, handle: Any) -> None:
    """Wait for a stream or event, without the GIL, and so that Ctrl-C arrives.

    Signals reach the main thread only, so other threads wait in the driver. The main thread polls,
    unless the driver's own wait is interruptible.
    """
    if driver.waits_are_interruptible or threading.current_thread() is not threading.main_thread():
        getattr(driver, synchronize)(handle)
        return
    spin_until = time.perf_counter() + SPIN_SECONDS
    nap = 0.00002
    while not is_ready(driver, query, handle):
        if time.perf_counter() > spin_until:
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_NAP)


def settle(driver: Driver) -> None:
    """Do what is left to the host of work that is complete (`Transfer`, `LastUse`)."""
    if driver.unfinished:
        for each in tuple(driver.unfinished):
            each.advance()


def _check_priority(context: Context, priority: int) -> None:
    """Refuse a priority that the driver would replace by the nearest one, without a word."""
    least, greatest = context.stream_priorities
    if not greatest <= priority <= least:
        raise ValueError(
            f"a stream of {context.device!r} cannot have priority {priority}: expected a number from {least} "
            f"(the least urgent) down to {greatest} (the most urgent)"
        )


def _check_driver(one: Stream | Event, other: Event) -> None:
    if one.context.driver is not other.context.driver:
        raise WrongContext(
            f"{one!r} and {other!r} are of different drivers, which know nothing of each other"
        )


def _answered(driver: Driver, query: str, handle: Any) -> bool:
    answer = is_ready(driver, query, handle)
    if answer:
        settle(driver)
    return answer


def is_ready(driver: Driver, query: str, handle: Any) -> bool:
    """Return what `query`, of a stream or an event, answers."""
    try:
        getattr(driver, query)(handle)
    except CudaError as error:
        if error.code == NOT_READY:
            return False
        raise
    return True


def _finalize(owner: Stream | Event, destroy: str, handle: Any) -> Any:
    is_missed = isinstance(owner, Stream) and not owner._is_main
    finalizer = weakref.finalize(owner, _forgotten, owner.context.life, destroy, handle, is_missed)
    finalizer.atexit = False
    return finalizer


def _forgotten(life: Lifetime, destroy: str, handle: Any, is_missed: bool) -> None:
    if sys.is_finalizing() or life.is_gone or life.driver.is_forked:
        return
    if is_missed:
        warnings.warn(f"a stream of {life!r} was never closed", ResourceWarning, stacklevel=2)
    if destroy == RETIRE:
        life.retire_event(handle)
    else:
        life.free_later(lambda: getattr(life.driver, destroy)(handle))


RETIRE = "retire"
"""What happens to an event without timing, instead of a call of the driver."""
