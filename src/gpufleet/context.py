"""Who is inside which context? Entering, leaving, pushing, popping and closing.

A CUDA context is current to a thread through a stack that the driver keeps per thread. gpufleet keeps
its own note of each entry beside it, so that leaving restores exactly what the driver said before, and
so that no context is destroyed while a thread is inside.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gpufleet import peers
from gpufleet.entries import ContextWarning, Entry, ThreadEntries, all_entries, of_thread, thread_entries
from gpufleet.errors import ContextClosed, ContextInUse, GpufleetError, WrongContext, add_note
from gpufleet.foreign_stream import ForeignStream, address_of
from gpufleet.graph import refuse_in_captures
from gpufleet.heap import Heap
from gpufleet.lifetime import Lifetime
from gpufleet.managed import ManagedBuffer
from gpufleet.memory import DeviceBuffer
from gpufleet.registration import unlock_all
from gpufleet.stream import DEFAULT_STREAMS, NON_BLOCKING, Event, Stream, StreamPriorities, settle

if TYPE_CHECKING:
    from gpufleet.allocators import Allocator
    from gpufleet.device import Device
    from gpufleet.driver import Driver

T = TypeVar("T")
Release = Callable[["Driver", Any, Any], None]
"""Ends a context in the driver, given its handle and its device's."""


class Context:
    """A CUDA context that any thread may enter.

    Made by `Device.create_context` (a context of its own, floating: current nowhere) and
    `Device.retain_primary_context` (the one that the CUDA runtime, CuPy and PyTorch use). One thread at a
    time may enter what `Device.create_green_context` makes (`GreenContext`).

    One object may be entered by many threads at once, nested and recursively. After every method, also
    one that raises, the calling thread's current context is what it was before, except `push` and
    `pop`. Methods act in this context, whatever is current.

    Attributes
    ----------
    device : Device
    handle : CUcontext
        Of `cuda.bindings.driver`.
    kind : str
        "created", "primary", "green", or "borrowed" (found current, made by somebody else).
    leaves_contents : bool
        Whether what is in it lives on when it is closed, unless it is freed before: all that is in a
        primary context or a green one belongs to the primary one, which others may retain.
    covered_by : tuple of int
        The addresses of the contexts whose work is this one's, too: itself, and a green one's primary.
    """

    def __init__(self, device: Device, handle: Any, kind: str, release: Release | None = None) -> None:
        self.device = device
        self.driver: Driver = device.driver
        self.handle = handle
        self.address = int(handle)
        self.kind = kind
        self.leaves_contents = kind in ("primary", "green")
        self.covered_by: tuple[int, ...] = (self.address,)
        self._closed = False
        self._kept: dict[Any, tuple[Any, Callable[[Any], None] | None]] = {}
        self._children: weakref.WeakSet[Any] = weakref.WeakSet()
        self._main_stream: Stream | None = None
        self._heap: Heap | None = None
        raw = self.driver.raw
        self._get_current = raw.cuCtxGetCurrent
        self._push = raw.cuCtxPushCurrent
        self._pop = raw.cuCtxPopCurrent
        self.life = Lifetime(self.driver, repr(self))
        if kind == "borrowed":  # nobody would destroy them
            self.life.most_spare_events = 0
        self._lock = self.life.lock
        self._release = release or _RELEASE[kind]
        self._finalizer = weakref.finalize(self, _forgotten, self.life, self._release, handle, device.handle)
        self._finalizer.atexit = False

    # Entering and leaving

    # Written for speed: handles are compared before they are turned into numbers, and no call is made
    # that need not be (`with context` takes 1.7 us else, 1.3 as it is; H200).

    def __enter__(self) -> Context:
        if self.driver.is_lost:
            self._check_not_lost()
        error, previous = self._get_current()
        if error:
            raise self.driver.failure(error, "cuCtxGetCurrent")
        entry = (self, previous, True)
        entries = of_thread.entries
        try:
            # Noted before the check below: `close` sets the flag first and looks at the notes second.
            entries.append(entry)
            if self._closed:
                raise self._is_closed()
            (error,) = self._push(self.handle)
            if error:
                raise self.driver.failure(error, "cuCtxPushCurrent")
        except BaseException as failure:
            self._undo(entry, failure)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entries = of_thread.entries
        try:
            entry = entries.pop() if entries else None
            if entry is None or entry[0] is not self or not entry[2]:
                entry = self._entry_below(entries, entry)
            if self.driver.is_forked:
                return
            previous = entry[1]
            try:
                failed, popped = self._pop()
                lost, remaining = self._get_current()
                if not (failed or lost) and remaining == previous and popped == self.handle:
                    return
            except BaseException:  # Ctrl-C, before or after the pop
                self._back_to(previous)
                raise
            if failed or lost or int(remaining) != int(previous) or int(popped) != self.address:
                self._restore(entry)
        except GpufleetError as second:
            if error is None:
                raise
            add_note(error, f"leaving {self!r} failed too: {second}")

    def push(self) -> None:
        """Make this context current on the calling thread until `pop`.

        Raises
        ------
        ContextClosed
            If it was closed.
        """
        self.__enter__()
        entries = of_thread.entries
        entries[-1] = (self, entries[-1][1], False)

    def pop(self) -> None:
        """Undo this thread's last `push`, which must have been of this context.

        Raises
        ------
        WrongContext
            If this context is not on top of the thread's stack, or was entered there by `with`. Nothing
            has changed then.
        """
        entries = thread_entries()
        top = entries[-1] if entries else None
        if top is None or top[0] is not self or top[2]:
            raise WrongContext(f"{self!r} cannot be popped: {_what_is_on_top(top)}")
        current = self.driver.cuCtxGetCurrent()
        if int(current) != self.address:
            raise WrongContext(
                f"{self!r} cannot be popped: the driver's current context is {int(current):#x}, which "
                "something else has pushed; pop that first"
            )
        self.driver.cuCtxPopCurrent()
        entries.pop()

    def _undo(self, entry: Entry, failure: BaseException) -> None:
        """Leave this thread as it was before an entry that failed, or that Ctrl-C ended."""
        if not isinstance(failure, GpufleetError):  # before or after the push
            self._back_to(entry[1])
        entries = of_thread.entries
        if entries and entries[-1] is entry:
            entries.pop()

    def _back_to(self, previous: Any) -> None:
        """Make current what was so before an entry, of whose push or pop nobody knows whether it happened."""
        if self.address == int(self.driver.cuCtxGetCurrent()) != int(previous):
            self.driver.cuCtxPopCurrent()
        if int(self.driver.cuCtxGetCurrent()) != int(previous):
            self.driver.cuCtxSetCurrent(previous)

    def _entry_below(self, entries: ThreadEntries, top: Entry | None) -> Entry:
        """Put `top` back, and take out this thread's last `with` entry of this context."""
        if top is not None:
            entries.append(top)
        for index in range(len(entries) - 1, -1, -1):
            context, _, by_with = entries[index]
            if context is self and by_with:
                return entries.pop(index)
        raise WrongContext(
            f"{self!r} was not entered by thread {threading.current_thread().name!r}: leave it in the "
            "thread that entered it"
        )

    def _restore(self, entry: Entry) -> None:
        self.driver.cuCtxSetCurrent(entry[1])
        warnings.warn(
            f"the context stack of thread {threading.current_thread().name!r} was changed inside "
            f"`with {self!r}`; the context that was current before it has been set again",
            ContextWarning,
            stacklevel=_depth_of_caller(),
        )

    @property
    def is_current(self) -> bool:
        """Whether the driver says that this context is current on the calling thread."""
        return not self._closed and int(self.driver.cuCtxGetCurrent()) == self.address

    # Closing

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def close(self, *, wait: bool = False) -> None:
        """Destroy a created or green context with all that is in it; release our retain of a primary one.

        Closing twice is no error, from two threads neither: exactly one destroys. Objects of the
        context are closed with it.

        Parameters
        ----------
        wait : bool
            Wait until no thread is inside, instead of raising.

        Raises
        ------
        ContextInUse
            If a thread is inside, naming the threads: the driver may crash when a context is destroyed
            under a thread (seen on driver 580). The context stays open.
        CaptureError
            If a stream of it is being captured. The context stays open.
        """
        while not self._close():
            threads = ", ".join(repr(name) for name in self.threads_inside())
            if not wait:
                raise ContextInUse(
                    f"{self!r} cannot be closed while threads are inside it: {threads}; let them leave "
                    "first, or use close(wait=True)"
                )
            if any(entry[0] is self for entry in thread_entries()):
                raise ContextInUse(f"{self!r} cannot be closed: the closing thread is itself inside it")
            time.sleep(0.001)

    def _close(self) -> bool:
        if self.driver.is_forked:  # the driver's objects are the parent's, and the lock may be for ever
            self._closed = True
            return True
        with self._lock:
            if self._closed:
                return True
            refuse_in_captures(self, "be closed")
            self._closed = True
            if self.threads_inside():
                self._closed = False
                return False
            self._finalizer.detach()
            self._destroy()
            return True

    def _destroy(self) -> None:
        try:
            if not self.driver.is_lost and (self.leaves_contents or self._heap is not None):
                self._release_contents()
        finally:
            self._kept.clear()
            self.is_gone = True
            self._release(self.driver, self.handle, self.device.handle)

    @property
    def is_gone(self) -> bool:
        """Whether the driver's context was destroyed, or our retain of it released."""
        return self.life.is_gone

    @is_gone.setter
    def is_gone(self, is_gone: bool) -> None:
        self.life.is_gone = is_gone

    def free(self, call: str, handle: Any) -> None:
        """Call a driver function that frees an object of this context, if it still exists."""
        self.if_alive(lambda: getattr(self.driver, call)(handle))

    def if_alive(self, release: Callable[[], object]) -> None:
        """Call what frees something in this context, if that still exists."""
        self.life.if_alive(release)

    def _release_contents(self) -> None:
        """Free what outlives the context: memory of pools, and all that is in a primary or green one."""
        self.life.free_forgotten()
        previous = self.driver.cuCtxGetCurrent()
        self.driver.cuCtxPushCurrent(self.handle)
        with contextlib.ExitStack() as steps:  # last in, first out; when one raises, the others follow still
            steps.callback(self._pop_back_to, previous)
            if self._heap is not None:
                steps.callback(self._heap.close)
            if not self.leaves_contents:
                return
            steps.callback(self.life.destroy_spare_events)
            steps.callback(unlock_all, self)
            for value, release in self._kept.values():
                if release is not None:
                    steps.callback(release, value)
            for child in list(self._children):
                steps.callback(child.close)

    def _pop_back_to(self, previous: Any) -> None:
        try:
            self.driver.cuCtxPopCurrent()
        except GpufleetError:
            self.driver.cuCtxSetCurrent(previous)
            raise

    def threads_inside(self) -> list[str]:
        """Name the threads that are inside this context now."""
        return [
            entries.thread for entries in all_entries() if any(entry[0] is self for entry in list(entries))
        ]

    def _check_not_lost(self) -> None:
        if self.driver.is_lost:
            self.driver.cuCtxSynchronize()  # raises, saying how it was lost

    def check_open(self) -> None:
        """Raise `ContextClosed` if this context was closed."""
        if self._closed:
            raise self._is_closed()

    def _is_closed(self) -> ContextClosed:
        return ContextClosed(f"{self!r} was closed; create or retain another one")

    # What lives in a context

    @property
    def main_stream(self) -> Stream:
        """The non-blocking stream that is used where none is given, made at first use."""
        stream = self._main_stream
        if stream is None:
            self._check_not_lost()
            with self._lock:
                stream = self._main_stream
                if stream is None:
                    stream = self._main_stream = Stream.create(self, is_main=True)
                    self.life.main_stream = stream._finalizer
                    if self.kind == "borrowed":
                        stream.abandon()  # nobody closes a borrowed context, and its maker may destroy it
        return stream

    def new_stream(self, priority: int = 0) -> Any:
        """Create a non-blocking `CUstream`, for gpufleet's own use; this context is current."""
        if priority:
            return self.driver.cuStreamCreateWithPriority(NON_BLOCKING, priority)
        return self.driver.cuStreamCreate(NON_BLOCKING)

    def stream(self, *, priority: int = 0) -> Stream:
        """Create a non-blocking stream.

        Parameters
        ----------
        priority : int
            From `stream_priorities`: blocks of its kernels start before waiting ones of streams with a
            greater number; what runs is not interrupted. Virtual devices take it, without effect.

        Raises
        ------
        ValueError
            If there is no such priority (the driver would silently take the nearest one).
        """
        return Stream.create(self, priority=priority)

    @property
    def stream_priorities(self) -> StreamPriorities:
        """(least, greatest), such as (0, -5): the smaller number is the more urgent."""
        with self:
            least, greatest = self.driver.cuCtxGetStreamPriorityRange()
        return StreamPriorities(int(least), int(greatest))

    def as_stream(self, stream: Any) -> Stream:
        """Wrap another library's stream of this context, an object with `__cuda_stream__`.

        Raises
        ------
        TypeError
            If it has no such method.
        WrongContext
            If it is of another context.
        """
        if isinstance(stream, Stream):
            return stream
        address = address_of(stream)
        if address not in DEFAULT_STREAMS:
            owner = int(self.driver.cuStreamGetCtx(address))
            if owner != self.address:
                raise WrongContext(
                    f"the {type(stream).__name__} {address:#x} is of context {owner:#x}, not of {self!r}: "
                    "wrap it with gpufleet.as_stream(stream)"
                )
        return ForeignStream(self, address, stream)

    def event(self, *, timing: bool = True) -> Event:
        """Create an event; without `timing` it is cheaper and has no `elapsed`."""
        return Event.create(self, timing=timing)

    @property
    def heap(self) -> Heap:
        """What allocates and frees this context's memory, made at first use."""
        heap = self._heap
        if heap is None:
            with self._lock:
                heap = self._heap
                if heap is None:
                    with self:
                        heap = self._heap = Heap(self)
        return heap

    def note_closed_stream(self) -> None:
        """Note that a stream of this context was closed, and that no memory is used by it any more."""
        if self._heap is not None:
            self._heap.note_closed_stream()

    @property
    def allocator(self) -> Allocator:
        """What `alloc` uses where it is given none: at first a `PoolAllocator` (borrowed: a plain one)."""
        return self.heap.allocator

    @allocator.setter
    def allocator(self, allocator: Allocator) -> None:
        self.heap.allocator = allocator

    def alloc(
        self, nbytes: int, *, stream: Stream | None = None, allocator: Allocator | None = None
    ) -> DeviceBuffer:
        """Allocate `nbytes` (1 or more) of device memory, uninitialised.

        Parameters
        ----------
        stream : Stream
            Allocate in the order of this stream: memory freed behind its earlier work can be had at once.
            None: the buffer is ready for all streams. In both cases every stream may use it; a stream that
            has to wait for that does so on the device.
        allocator : Allocator
            None: `Context.allocator`.

        Raises
        ------
        CudaError
            CUDA_ERROR_OUT_OF_MEMORY when the device has no room.
        """
        return DeviceBuffer.allocate(self, nbytes, stream, allocator)

    def alloc_managed(self, nbytes: int) -> ManagedBuffer:
        """Allocate `nbytes` (1 or more) that the host and all devices use at the same address.

        Raises
        ------
        CudaError
            CUDA_ERROR_OUT_OF_MEMORY when it is more than the device has free: the driver would take it,
            and move pages to and fro.
        """
        return ManagedBuffer.allocate(self, nbytes)

    def enable_peer_access(self, other: Context) -> None:
        """Let kernels of this context use the memory of `other`, a context of another device.

        It opens all memory that `other` has or will have, in this direction only. Opening twice, also from
        two threads, is no error, and nothing has to be opened between contexts of one device. The first
        call for a pair of devices tries it with data, which waits for kernels that run in this context.

        Copies need no such call: `DeviceBuffer.copy_from` opens by itself what makes it faster.

        Raises
        ------
        WrongContext
            If this device has no access to the memory of the other, or `other` is of another driver:
            copy the data over instead.
        """
        peers.enable(self, other)

    def trim_memory(self, keep: int = 0) -> None:
        """Give memory that buffers have left back to the device, but for `keep` bytes.

        Waits for the frees that are on their way.
        """
        if self._heap is not None:
            self._heap.drain()
        self.synchronize()  # waiting for the streams alone left 32 MiB in the pool (driver 580)
        if self._heap is not None:
            self._heap.trim(keep)

    def synchronize(self) -> None:
        """Wait for all work of this context; stays interruptible by Ctrl-C where the driver's wait is."""
        refuse_in_captures(self, "be waited for")
        with self:
            self.driver.cuCtxSynchronize()
        self.driver.launches.finished(self.address)
        if self._heap is not None:
            self._heap.drain()
        settle(self.driver)

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device.

        What closed buffers have left stays with the context's pool, and is not free before `trim_memory`.
        """
        with self:
            free, total = self.driver.cuMemGetInfo()
        return int(free), int(total)

    def keep(self, key: Any, make: Callable[[], T], release: Callable[[T], None] | None = None) -> T:
        """Return what `make()` returned for `key`, calling it inside this context and only once.

        `release` is called at `close` where what is in the context lives on (`leaves_contents`);
        destroying a created context frees all that is in it.
        """
        found = self._kept.get(key)
        if found is None:
            self._check_not_lost()
            with self._lock:
                found = self._kept.get(key)
                if found is None:
                    with self:
                        found = self._kept[key] = (make(), release)
            self.life.free_forgotten()
        value: T = found[0]
        return value

    def drop(self, key: Any) -> None:
        """Release what `keep` made for `key`, if anything, before `close` does."""
        with self._lock:
            value, release = self._kept.pop(key, (None, None))
        if release is not None:
            with self:
                release(value)

    def adopt(self, child: Any) -> None:
        """Note an object whose `close` must come before this context's release."""
        self._children.add(child)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<Context {self.address:#x} {self.kind}{state} on device {self.device.ordinal}>"


def _what_is_on_top(top: Entry | None) -> str:
    thread = threading.current_thread().name
    if top is None:
        return f"thread {thread!r} has pushed nothing"
    context, _, by_with = top
    if by_with:
        return f"{context!r}, on top of thread {thread!r}'s stack, was entered by `with`, which pops it"
    return f"{context!r} is on top of thread {thread!r}'s stack; pop that first"


def _destroy_created(driver: Driver, handle: Any, device: Any) -> None:
    driver.cuCtxDestroy(handle)
    driver.launches.forget(int(handle))


def _release_primary(driver: Driver, handle: Any, device: Any) -> None:
    driver.cuDevicePrimaryCtxRelease(device)


def _depth_of_caller() -> int:
    """Return the `stacklevel` by which the caller's warning names the first line outside of gpufleet."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gpufleet."):
        frame, depth = frame.f_back, depth + 1
    return depth


def _leave_alone(driver: Driver, handle: Any, device: Any) -> None:
    """Do nothing: a borrowed context is its maker's."""


_RELEASE: dict[str, Release] = {
    "created": _destroy_created,
    "primary": _release_primary,
    "borrowed": _leave_alone,
}


def _forgotten(life: Lifetime, release: Release, handle: Any, device: Any) -> None:
    if sys.is_finalizing() or life.driver.is_forked or release is _leave_alone:
        return
    warnings.warn(f"{life!r} was never closed", ResourceWarning, stacklevel=2)
    if life.main_stream is not None:  # dies with the context, and would be finalized after it
        life.main_stream()
    life.is_gone = True
    with contextlib.suppress(GpufleetError):  # a finalizer has nobody to tell
        if life.leftovers is not None:
            life.leftovers(life.driver)
        life.destroy_spare_events()
        release(life.driver, handle, device)
