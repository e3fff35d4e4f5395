"""What belongs to a context, and how it ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpufleet.virtual.device_memory import ContextMemory, WideMemory
from gpufleet.virtual.handles import new_handle
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.streams import Event, Stream

if TYPE_CHECKING:
    from gpufleet.virtual.devices import Device
    from gpufleet.virtual.engine import DeviceMemory
    from gpufleet.virtual.green_contexts import GreenContext
    from gpufleet.virtual.memory import Memory
    from gpufleet.virtual.modules import Module
    from gpufleet.virtual.work import Scheduler

_ids = itertools.count(1)

DEFAULT_LIMITS = {
    "STACK_SIZE": 1024,
    "PRINTF_FIFO_SIZE": 8_650_752,
    "MALLOC_HEAP_SIZE": 8 << 20,
    "DEV_RUNTIME_PENDING_LAUNCH_COUNT": 2048,
    "MAX_L2_FETCH_GRANULARITY": 64,
    "PERSISTING_L2_CACHE_SIZE": 0,
}
"""As on an H200; that has no other limits either."""
LARGEST_LIMITS = {
    "STACK_SIZE": 512 << 10,
    "MAX_L2_FETCH_GRANULARITY": 128,
    "PERSISTING_L2_CACHE_SIZE": 60 << 20,
}


class Context:
    """One context of one device.

    Attributes
    ----------
    is_destroyed : bool
        Whether calls in it answer CONTEXT_IS_DESTROYED. A primary context that is retained again is alive
        again, under the same handle.
    legacy : Stream
        Its legacy default stream.
    streams, events, modules : dict
        What is to end with it, by handle.
    home : Context
        Whose the memory, modules and events are that are made in it: the primary one for a green context,
        which has streams of its own only.
    green_handle : int
        Of a green context: that of its CUgreenCtx.
    multiprocessors : int
        How many of the device's its kernels run on.
    greens : list of GreenContext
        Of a primary one, the green contexts that are alive: its work is theirs, too.
    gate : Operation or None
        What streams that are made now have to wait for (cuCtxWaitEvent).
    peers : set of Context
        Whose memory its kernels may touch (cuCtxEnablePeerAccess).
    """

    def __init__(self, device: Device, flags: int, *, is_primary: bool = False) -> None:
        self.handle = new_handle()
        self.device = device
        self.home = self
        self.green_handle = 0
        self.multiprocessors = device.multiprocessors
        self.greens: list[GreenContext] = []
        self.flags = flags
        self.is_primary = is_primary
        self.is_destroyed = is_primary
        self.peer_version = 0
        self.clear()

    def clear(self) -> None:
        """Begin a life: no streams, no modules, no peers."""
        self.id = next(_ids)
        self.legacy = Stream(self, 0, is_legacy=True)
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.modules: dict[int, Module] = {}
        self.gate: Operation | None = None
        self.peers: set[Context] = set()
        self.peer_version += 1
        self.limits: dict[str, int] = {}
        self.cache_preference: Any = None
        self._per_thread = threading.local()
        self._thread_streams: list[tuple[threading.Thread, Stream]] = []
        self._draining: list[Stream] = []
        """Destroyed streams whose work has not ended."""
        self._memory: DeviceMemory | None = None
        self._wide_memory: DeviceMemory | None = None

    def memory(self, memory: Memory) -> DeviceMemory:
        """Return what a kernel of this context may touch, as an engine sees it."""
        if len(memory.registered):
            if self._wide_memory is None:
                self._wide_memory = WideMemory(memory, self)
            return self._wide_memory
        if self._memory is None:
            self._memory = ContextMemory(memory, self)
        return self._memory

    def add_stream(self, stream: Stream) -> None:
        """Adopt a stream."""
        self.streams[stream.handle] = stream
        stream.tail = self.gate

    def remove_stream(self, stream: Stream) -> None:
        """Forget a stream once its work has ended."""
        del self.streams[stream.handle]
        self._draining = [other for other in self._draining if other.pending()]
        if stream.pending():
            self._draining.append(stream)

    def per_thread_stream(self) -> Stream:
        """Return the calling thread's own default stream, a blocking one."""
        stream: Stream | None = getattr(self._per_thread, "stream", None)
        if stream is None:
            stream = self._per_thread.stream = Stream(self, 0)
            stream.tail = self.gate
            alive = [pair for pair in self._thread_streams if pair[0].is_alive() or pair[1].pending()]
            self._thread_streams = [*alive, (threading.current_thread(), stream)]
        return stream

    def close_gate(self, scheduler: Scheduler, operation: Operation | None) -> None:
        """Let streams that are made from now on wait for an operation, too; the lock is held."""
        before = [each for each in (self.gate, operation) if each is not None and not each.done]
        self.gate = None
        if before:
            self.gate = Operation(self.device.ordinal)
            scheduler.submit(self.gate, before)

    def blocking_streams(self) -> Iterator[Stream]:
        """Yield the streams that the legacy default stream waits for."""
        return (stream for stream in self.ordinary_streams() if stream.is_blocking)

    def pending(self) -> list[Operation]:
        """Return the operations whose end means that all work of the context has ended."""
        tails = [stream.tail for stream in self.all_streams()]
        return [tail for tail in tails if tail is not None and not tail.done]

    def all_streams(self) -> Iterator[Stream]:
        """Yield all streams, also those of a primary context's green ones."""
        for context in (self, *self.greens):
            yield context.legacy
            yield from context.ordinary_streams()

    def ordinary_streams(self) -> Iterator[Stream]:
        """Yield all streams but the legacy default one, also those destroyed that have work."""
        yield from list(self.streams.values())
        yield from self._draining
        for _, stream in self._thread_streams:
            yield stream

    def set_peer(self, peer: Context, enabled: bool) -> None:
        """Let kernels touch what `peer` allocates, or no longer."""
        if enabled:
            self.peers.add(peer)
        else:
            self.peers.discard(peer)
        self.peer_version += 1
