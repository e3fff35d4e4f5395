"""When is a context's memory there, and when is it free again? Allocation in the order of streams.

Each context allocates on a stream of its own, on which nothing else runs, so that a new buffer nearly
always is ready at once. A buffer knows the streams whose work uses it, and is freed behind that work
without anybody waiting: in the stream itself where it is only one, else in a second stream of the heap,
which waits for all of them. Waiting in the first would hold up every later allocation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from gpufleet.allocators import OUT_OF_MEMORY, Allocator, PlainAllocator, PoolAllocator
from gpufleet.errors import CaptureError, ContextClosed, CudaError
from gpufleet.graph import capture_in
from gpufleet.stream import DEFAULT_STREAMS, DISABLE_TIMING, NOT_READY, is_ready, settle, wait

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.driver import Driver
    from gpufleet.graph import Graph


class Queue(Protocol):
    """What memory needs of a stream: a `Stream`, or another library's."""

    @property
    def context(self) -> Context:
        """The context that its work runs in."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while it is destroyed, and by other threads that must not find it so."""

    @property
    def handle(self) -> Any:
        """The `CUstream`, or its address."""

    @property
    def key(self) -> Any:
        """What tells it from other streams."""

    @property
    def address(self) -> int | None:
        """The address of the stream; None where it is more than one stream."""

    @property
    def is_closed(self) -> bool:
        """Whether it can have no work any more."""

    @property
    def is_foreign(self) -> bool:
        """Whether it is another library's, which may destroy it at any time."""

    @property
    def graph(self) -> Graph | None:
        """What its work is captured into now."""

    @property
    def tail(self) -> Any:
        """Of a foreign one, the event behind the work that gpufleet has put into it, if any."""

    def precede(self, later: Any) -> None:
        """Let later work of a stream (a CUstream) wait for what is in this one now."""


class Block:
    """One allocation, and the streams that use it.

    Attributes
    ----------
    address, nbytes : int
    uses : dict
        The streams whose work has used it, by their key.
    origin : Queue or None
        The stream in whose order it becomes usable; None when it is so for all.
    is_lent : bool
        Whether it is another library's memory, which its `allocator` lets go of.
    """

    __slots__ = ("address", "allocator", "is_lent", "nbytes", "origin", "uses")

    def __init__(
        self,
        address: int,
        nbytes: int,
        allocator: Allocator,
        origin: Queue | None = None,
        *,
        is_lent: bool = False,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.allocator = allocator
        self.uses: dict[Any, Queue] = {}
        self.origin = origin
        self.is_lent = is_lent


class Leftovers:
    """What outlives a context in the driver, for the finalizer of a context that nobody closed.

    Attributes
    ----------
    pool : CUmemoryPool or None
    addresses : set of int
        Memory that is not freed.

    The streams of the heap outlive what `Context.leaves_contents`, too.
    """

    def __init__(self, frees: Any, streams: tuple[Any, ...]) -> None:
        self.pool: Any = None
        self.addresses: set[int] = set()
        self._frees = frees
        self._streams = streams

    def free(self, driver: Driver) -> None:
        """Free everything; the streams are there still."""
        for address in list(self.addresses):
            with contextlib.suppress(CudaError):  # of an allocator of the user's own
                driver.cuMemFreeAsync(address, self._frees)
        if self.pool is not None:
            driver.cuMemPoolDestroy(self.pool)
        for stream in self._streams:
            driver.cuStreamSynchronize(stream)
            driver.cuStreamDestroy(stream)


class Heap:
    """The streams, the pool and the living allocations of one context. Made by `Context.heap`.

    Attributes
    ----------
    allocator : Allocator
        What is used where none is given.
    live : dict
        The blocks that are not freed, by address.
    joint : CUevent
        For `let_wait`.
    """

    is_foreign = False
    graph: Graph | None = None
    tail: Any = None

    def __init__(self, context: Context) -> None:
        self.context = context
        self.lock = context.life.lock
        driver = context.driver
        # A borrowed context may end without our knowledge, and with it the streams of this heap; plain
        # memory ends with it and needs no stream to be freed.
        self.allocator: Allocator = PlainAllocator() if context.kind == "borrowed" else PoolAllocator()
        self.live: dict[int, Block] = {}
        self.handle: Any = context.new_stream()
        self.address = self.key = int(self.handle)
        self.is_closed = False
        self._frees: Any = context.new_stream()
        self.joint: Any = driver.cuEventCreate(DISABLE_TIMING)
        self._tails: dict[Any, Any] = {}
        self._waiting: deque[Block] = deque()
        self._holds = 0
        streams = (self.handle, self._frees) if context.leaves_contents else ()
        self._left = Leftovers(self._frees, streams)
        context.life.leftovers = self._left.free
        self._open_to: set[int] = set()
        self._closed_streams = 0
        self._query = driver.raw.cuStreamQuery

    @property
    def pool(self) -> Any:
        """The `CUmemoryPool` of the context, made at first use. It keeps freed memory until `trim`."""
        left = self._left
        if left.pool is None:
            with _joining:
                if left.pool is None:
                    left.pool = _make_pool(self.context)
        return left.pool

    # Allocating

    def allocate(self, nbytes: int, allocator: Allocator | None, stream: Queue | None) -> Block:
        """Return new memory; ready for all streams, or else for `stream` (if None, the heap's own)."""
        if self._waiting:
            self.drain()
        chosen = self.allocator if allocator is None else allocator
        origin: Queue = self if stream is None else stream
        try:
            address = chosen.allocate(self.context, nbytes, origin.handle)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY or error.call.startswith("cuCtx"):
                raise
            self._make_room()
            address = chosen.allocate(self.context, nbytes, origin.handle)
        block = Block(address, nbytes, chosen)
        (answer,) = self._query(origin.handle)
        if answer == NOT_READY:
            block.origin = origin
        elif answer:
            self._free_in(origin.handle, block)
            raise self.context.driver.failure(answer, "cuStreamQuery")
        self.live[address] = block
        self._left.addresses.add(address)
        return block

    def become_usable(self, block: Block, queue: Queue) -> bool:
        """Let work that is put into `queue` from now on find the block; say whether all streams do now."""
        origin = block.origin
        if origin is None:
            return True
        if origin.is_closed or is_ready(self.context.driver, "cuStreamQuery", origin.handle):
            block.origin = None
            return True
        if queue.graph is not None:  # a wait for what is not captured would break the capture
            self.make_usable(block)
            return True
        if origin.key != queue.key and queue.key not in block.uses:
            origin.precede(queue.handle)
        return False

    def make_usable(self, block: Block) -> None:
        """Wait until all streams, also of other libraries, may use the block."""
        origin = block.origin
        if origin is not None and not origin.is_closed:
            wait(self.context.driver, "cuStreamQuery", "cuStreamSynchronize", origin.handle)
        block.origin = None

    def _make_room(self) -> None:
        if capture_in(self.context.driver, self.context.handle) is None:  # the wait would break the capture
            with self.context:
                self.context.driver.cuCtxSynchronize()
        self.trim()

    # Freeing

    def free(self, block: Block) -> None:
        """Free a block behind all work that uses it; the caller does not wait."""
        if self._waiting:
            self.drain()
        if self._holds:
            self._waiting.append(block)
        else:
            self._free_if_allowed(block)

    def free_forgotten(self, block: Block) -> None:
        """Free a block from a finalizer, which enters no context: at once, or else at the next call."""
        if self._holds or not self._free_at_once(block):
            self._waiting.append(block)

    def _free_at_once(self, block: Block) -> bool:
        """Free a block in a single stream that comes behind all its uses, if there is one."""
        if block.is_lent:
            if not block.uses:
                self._free_in(None, block)
            return not block.uses
        users = list(block.uses.values()) or [block.origin or self]
        if len(users) > 1:
            return False
        queue = users[0]
        if queue.is_closed:  # closing has waited for its work
            self._free_in(self._frees, block)
            return True
        # A stream of another context may be closed meanwhile: only that context's lock forbids it. And memory
        # of a pool cannot be freed in a stream of another device (INVALID_VALUE on driver 580).
        if queue.is_foreign or queue.context is not self.context:
            return False
        self._free_in(queue.handle, block)
        return True

    def _free_behind_all(self, block: Block) -> bool:
        """Free a block behind all its uses; say False where a capture forbids it."""
        try:
            for queue in tuple(block.uses.values()):
                with contextlib.suppress(ContextClosed):  # closed meanwhile, which has waited for its work
                    if not queue.is_closed:
                        queue.precede(self._frees)
        except CaptureError:
            return False
        except CudaError as error:  # another library captures
            if not error.name.startswith("CUDA_ERROR_STREAM_CAPTURE"):
                raise
            return False
        self._free_in(self._frees, block)
        return True

    def _free_in(self, stream: Any, block: Block) -> None:
        if not block.is_lent:  # else it may be memory of this heap that has come back
            self.live.pop(block.address, None)
            self._left.addresses.discard(block.address)
        block.allocator.free(self.context, block.address, block.nbytes, stream)

    def drain(self) -> None:
        """Free what waits to be freed."""
        for _ in range(len(self._waiting)):
            if self._holds:
                return
            try:
                block = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            with self.context.life.lock:  # a stream is destroyed under it too
                self._free_if_allowed(block)

    def _free_if_allowed(self, block: Block) -> None:
        if not (self._free_at_once(block) or self._free_behind_all(block)):
            self._waiting.append(block)

    @contextlib.contextmanager
    def frees_held(self) -> Iterator[None]:
        """Queue all frees during the block, such as one in which a stream is captured."""
        with _joining:
            self._holds += 1
        try:
            yield
        finally:
            with _joining:
                self._holds -= 1
            self.drain()

    def note_closed_stream(self) -> None:
        """Forget, now and then, closed streams that long-lived memory was used by."""
        self._closed_streams += 1
        if self._closed_streams % FORGET_EVERY == 0:
            for block in list(self.live.values()):
                forget_closed(block.uses)

    def precede(self, later: Any) -> None:
        """Let later work of a stream (a CUstream) wait for the allocations so far."""
        self.let_wait(later, self.handle)

    def let_wait(self, later: Any, handle: Any) -> None:
        """Let later work of a stream (a CUstream) wait for what is in a stream of this context now.

        One event serves all: a stream that waits for an event waits for its last recording before the call.
        """
        driver = self.context.driver
        is_default = (
            int(handle) in DEFAULT_STREAMS
        )  # the current context's; a green one another may be inside
        with _joining:
            with self.context if is_default else contextlib.nullcontext():
                driver.cuEventRecord(self.joint, handle)
            driver.cuStreamWaitEvent(later, self.joint, 0)

    def record_tail(self, queue: Queue) -> Any:
        """Return an event behind the work of another library's stream: one event for each such stream."""
        driver = self.context.driver
        with self.context:
            event = self._tails.get(queue.key)
            if event is None:
                event = self._tails[queue.key] = driver.cuEventCreate(DISABLE_TIMING)
            driver.cuEventRecord(event, queue.handle)
        return event

    # The pool

    def trim(self, keep: int = 0) -> None:
        """Give the pool's unused memory back to the device, but for `keep` bytes."""
        self.drain()
        driver = self.context.driver
        for stream in (self.handle, self._frees):
            wait(driver, "cuStreamQuery", "cuStreamSynchronize", stream)
        if self._left.pool is not None:
            driver.cuMemPoolTrimTo(self._left.pool, keep)

    def open_to(self, device: Any) -> None:
        """Let another device use the pool's memory, if the driver offers that. `gpufleet.peers` calls it."""
        if device.ordinal in self._open_to:
            return
        driver, pool = self.context.driver, self.pool
        if int(driver.cuDeviceCanAccessPeer(device.handle, self.context.device.handle)):
            driver.cuMemPoolSetAccess(pool, [_access(device.ordinal, READ_WRITE)], 1)
        self._open_to.add(device.ordinal)

    def close_to(self, device: Any) -> None:
        """Undo `open_to`."""
        if device.ordinal in self._open_to:
            self._open_to.discard(device.ordinal)
            self.context.driver.cuMemPoolSetAccess(self.pool, [_access(device.ordinal, NO_ACCESS)], 1)

    def pool_bytes(self) -> tuple[int, int]:
        """Return how many bytes of the pool are in use, and how many it has of the device."""
        from cuda.bindings.driver import CUmemPool_attribute as Attribute

        if self._left.pool is None:
            return 0, 0
        asked = (Attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT, Attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        used, reserved = (
            int(self.context.driver.cuMemPoolGetAttribute(self._left.pool, each)) for each in asked
        )
        return used, reserved

    def close(self) -> None:
        """Free everything, after all work of the context. The context is current.

        A pool and its memory outlive the context they were made in (driver 580), so destroying the
        context would not do it.
        """
        driver = self.context.driver
        with contextlib.ExitStack() as steps:  # last in, first out; when one raises, the others follow still
            if self._left.pool is not None:
                steps.callback(driver.cuMemPoolDestroy, self._left.pool)
            if self.context.leaves_contents:
                steps.callback(driver.cuStreamDestroy, self.handle)
                steps.callback(driver.cuStreamDestroy, self._frees)
                for event in (self.joint, *self._tails.values()):
                    steps.callback(driver.cuEventDestroy, event)
            steps.callback(driver.cuStreamSynchronize, self._frees)
            for block in list(self.live.values()):
                steps.callback(self._free_if_live, block)
            steps.callback(settle, driver)
            steps.callback(driver.cuCtxSynchronize)
            self._holds = 0
            self._waiting.clear()
        self.is_closed = True

    def _free_if_live(self, block: Block) -> None:
        """Free a block that no finalizer has freed since: dropping what waits can end a loan."""
        if self.live.get(block.address) is block:
            self._free_behind_all(block)


_joining = threading.RLock()
"""Held between a recording of an event and the wait for it. A finalizer never comes here."""


def _make_pool(context: Context) -> Any:
    from cuda.bindings import driver as types

    properties = types.CUmemPoolProps()
    properties.allocType = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.handleTypes = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    properties.location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = context.device.ordinal
    driver = context.driver
    pool = driver.cuMemPoolCreate(properties)
    try:
        threshold = types.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        driver.cuMemPoolSetAttribute(pool, threshold, types.cuuint64_t(KEEP_ALL))
    except BaseException:
        driver.cuMemPoolDestroy(pool)
        raise
    return pool


FORGET_EVERY = 256
"""So many streams are closed until those are forgotten that have used memory."""


def forget_closed(uses: dict[Any, Queue]) -> None:
    """Take the closed streams out of those that use memory."""
    for key, queue in tuple(uses.items()):
        if queue.is_closed:
            removed = uses.pop(key, queue)
            if removed is not queue:  # a new stream has the address
                uses.setdefault(key, removed)


KEEP_ALL = (1 << 64) - 1


NO_ACCESS, READ_WRITE = 0, 3
"""CU_MEM_ACCESS_FLAGS_PROT_NONE and _READWRITE."""


def _access(ordinal: int, flags: int) -> Any:
    from cuda.bindings import driver as types

    access = types.CUmemAccessDesc()
    access.location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = types.CUmemAccess_flags(flags)
    return access


def forget(context: Context, block: Block) -> None:
    """Free the block of a buffer that nobody closed, with a warning."""
    if sys.is_finalizing() or context.is_gone or context.driver.is_forked:
        return
    warnings.warn(f"{block.nbytes} bytes of {context!r} were never freed", ResourceWarning, stacklevel=2)
    forget_quietly(context, block)


def forget_quietly(context: Context, block: Block) -> None:
    """Free the block of a buffer from a finalizer."""
    if sys.is_finalizing() or context.is_gone or context.driver.is_forked:
        return
    heap = context.heap
    context.life.free_later(lambda: heap.free_forgotten(block))
