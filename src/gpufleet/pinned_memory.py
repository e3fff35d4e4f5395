"""Where does page-locked memory of gpufleet's own come from? Pinned buffers, and the pool behind them.

The memory is the process's own (an anonymous map), page-locked in place, so that an array in it stays
valid memory when the context that locked it is destroyed. Locking pages that are there runs at 22 GB/s (a
machine with H200s); new ones cost what `cuMemHostAlloc` does (2.3 GB/s), since the system clears them.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.driver import Driver, DriverLike, get_driver
from gpufleet.errors import ContextClosed, ContextInUse, WrongContext
from gpufleet.heap import FORGET_EVERY, Queue, forget_closed
from gpufleet.host_view import byte_interface, host_view
from gpufleet.registration import Lock, find_home, lock, release_home, unlock
from gpufleet.stream import DISABLE_TIMING, is_ready

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpufleet.context import Context
    from gpufleet.lifetime import Lifetime

SMALLEST = 64 << 10
LARGEST_CLASS = 64 << 20
"""Blocks up to this size are powers of two, larger ones multiples of it."""


def pinned(source: Any, *, context: Context | None = None, driver: DriverLike = None) -> PinnedBuffer:
    """Return page-locked host memory from a pool: `source` bytes, or a copy of an array.

    Parameters
    ----------
    source : int or array
    context, driver : optional
        In which context it is locked, as in `gpufleet.registered`. Every context may use it.
    """
    import numpy as np

    if isinstance(source, (int, np.integer)):
        if source < 1:
            raise ValueError(f"cannot allocate {source} bytes of pinned memory: expected 1 or more")
        return PinnedBuffer(int(source), find_home(context, driver))
    array = np.asarray(source)
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be copied to a GPU: give it a numeric dtype")
    buffer = PinnedBuffer(array.nbytes, find_home(context, driver), array.dtype, array.shape)
    buffer.array[...] = array
    return buffer


class PinnedBuffer:
    """Page-locked host memory: NumPy reads and writes it, devices copy it at full speed, kernels use it.

    Made by `pinned`. Its memory goes back to a pool when it is closed or forgotten, and is handed out
    again when the work that uses it is complete: copies, and kernels that got this object.

    `array` and ``numpy.asarray(buffer)`` are views that keep the buffer alive; do not use one after
    `close`.

    Attributes
    ----------
    nbytes : int
    address : int
    """

    def __init__(self, nbytes: int, home: Any, dtype: Any = "u1", shape: Any = None) -> None:
        self.nbytes = nbytes
        self._pool = pool_of(home.driver)
        self._block: PinnedBlock | None = None
        self._block = block = self._pool.take(max(nbytes, 1), home)
        self.address = block.address
        self._bytes = block.bytes  # a view that is used after `close` in spite of all finds memory
        self._dtype, self._shape = dtype, (nbytes,) if shape is None else shape
        self.uses: dict[Any, Queue] = {}

    @property
    def array(self) -> NDArray[Any]:
        """The memory as a NumPy array: of bytes, or of the type and shape that it was made from."""
        self.check_open()
        view: NDArray[Any] = host_view(self, self.address, self.nbytes).view(self._dtype)
        return view.reshape(self._shape)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self.check_open()
        return byte_interface(self.address, self.nbytes)

    def __buffer__(self, flags: int) -> memoryview:
        """Give the memory to what takes a buffer (Python 3.12 and later; before, use `array`)."""
        return self.array.data

    @property
    def is_locked(self) -> bool:
        """Whether it is page-locked still: not after the context that locked it was closed."""
        return self._block is not None and not self._block.lock.life.is_gone

    def address_for(self, queue: Queue) -> int:
        """Return the address for work that is put into `queue` next, which is noted as a user."""
        self.check_open()
        if queue.context.driver is not self._pool.driver:
            raise WrongContext(f"{self!r} is of another driver than {queue.context!r}")
        if not self.is_locked:
            raise ContextClosed(f"{self!r} cannot be used by a kernel: the context that locked it was closed")
        self.note_user(queue)
        return self.address

    def note_user(self, queue: Queue) -> None:
        """Note that work which is put into `queue` next uses the memory."""
        self.check_open()
        if queue.context.driver is not self._pool.driver:  # to which this is ordinary memory
            return
        if len(self.uses) >= FORGET_EVERY:
            forget_closed(self.uses)
        self.uses[queue.key] = queue
        if queue.graph is not None:
            queue.graph.keep(self)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._block is None

    def check_open(self) -> None:
        """Raise `ContextClosed` if it was closed."""
        if self._block is None:
            raise ContextClosed("this pinned buffer was closed; make another one")

    def close(self) -> None:
        """Give the memory back to the pool. Closing twice is no error."""
        block, self._block = self.__dict__.pop("_block", None), None
        if block is not None:
            self._pool.give_back(block, self.uses.values())

    def __del__(self) -> None:
        # No weakref.finalize: it would keep the streams in `uses`, and with them their contexts, alive.
        block, self._block = self.__dict__.pop("_block", None), None
        if block is not None:
            self._pool.forget(block, self.uses)

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PinnedBuffer of {self.nbytes} bytes at {self.address:#x}>"


class PinnedBlock:
    """Memory of the pool, and the events of the work that may be using it still."""

    def __init__(self, nbytes: int, home: Any) -> None:
        import numpy as np

        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2 << 20:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._map, "u1")
        self.address = int(self.bytes.ctypes.data)
        self.lock: Lock = lock(home, self.address, nbytes, False)
        self.busy: list[tuple[Lifetime, Any, bool]] = []  # whose event, and whether the event is ours alone

    def is_idle(self) -> bool:
        """Whether the work that used it is complete."""
        while self.busy:
            life, event, _ = self.busy[-1]
            if not (life.is_gone or is_ready(life.driver, "cuEventQuery", event)):
                return False
            self.drop_event()
        return True

    def drop_event(self) -> None:
        """Forget an event, and destroy it if it is the block's alone."""
        life, event, is_ours = self.busy.pop()
        if is_ours:
            life.if_alive(lambda: life.driver.cuEventDestroy(event))


class PinnedPool:
    """The pinned memory of one driver.

    Attributes
    ----------
    driver : Driver
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.RLock()  # signal handlers may enter it again
        self._free: dict[int, list[PinnedBlock]] = {}
        self._forgotten: deque[tuple[PinnedBlock, dict[Any, Queue]]] = deque()
        self.locked_bytes = 0

    def take(self, nbytes: int, home: Any) -> PinnedBlock:
        """Return a block that no work uses."""
        if self.driver.is_lost:
            self.driver.cuCtxSynchronize()  # raises, saying how it was lost
        self._collect()
        size = size_class(nbytes)
        with self._lock:
            blocks = self._free.get(size, [])
            blocks[:] = [block for block in blocks if not self._is_lost(block)]
            for index, block in enumerate(blocks):
                if block.is_idle():
                    return blocks.pop(index)
        made = PinnedBlock(size, home)
        self.locked_bytes += size
        return made

    def give_back(self, block: PinnedBlock, users: Iterable[Queue] = ()) -> None:
        """Take a block back, to be handed out when the work that is queued by its users is complete."""
        if self.driver.is_lost:  # nothing of this driver's is ever used again
            return
        users = list(users)
        if any(queue.graph is not None for queue in users):  # an event would become part of the capture
            self._forgotten.append((block, {queue.key: queue for queue in users}))
            return
        while users:
            try:
                self._note_work(block, users[-1])
            except ContextInUse:  # a green one that another thread is inside: a later `take` tries again
                self._forgotten.append((block, {queue.key: queue for queue in users}))
                return
            users.pop()
        with self._lock:
            if not self._is_lost(block):
                self._free.setdefault(block.nbytes, []).append(block)

    def _note_work(self, block: PinnedBlock, queue: Queue) -> None:
        """Note an event behind the work of a stream that may use the block."""
        if queue.is_closed:
            return
        if queue.is_foreign:
            if queue.tail is not None:
                block.busy.append((queue.context.life, queue.tail, False))
            return
        with contextlib.suppress(ContextClosed), queue.context:  # closing has waited for its work
            event = self.driver.cuEventCreate(DISABLE_TIMING)
            block.busy.append((queue.context.life, event, True))
            with queue.lock:
                if not queue.is_closed:
                    self.driver.cuEventRecord(event, queue.handle)

    def forget(self, block: PinnedBlock, uses: dict[Any, Queue]) -> None:
        """Take a block back from a finalizer, which makes no call of the driver: the next `take` does."""
        if not sys.is_finalizing():
            self._forgotten.append((block, uses))

    def _collect(self) -> None:
        for _ in range(len(self._forgotten)):
            try:
                block, uses = self._forgotten.popleft()
            except IndexError:  # another thread was faster
                return
            self.give_back(block, list(uses.values()))

    def _is_lost(self, block: PinnedBlock) -> bool:
        """Whether the context that locked a block is gone, and the lock with it; then let the block go."""
        if not block.lock.life.is_gone:
            return False
        self.locked_bytes -= block.nbytes
        return True

    def trim(self) -> None:
        """Unlock and free the blocks that nobody has, waiting for work that uses them."""
        self._collect()
        with self._lock:
            blocks = [block for blocks in self._free.values() for block in blocks]
            self._free.clear()
        for block in blocks:
            if not self._is_lost(block):
                unlock(block.lock)
                self.locked_bytes -= block.nbytes
            while block.busy:
                block.drop_event()
        release_home(self.driver)


def trim_pinned(driver: DriverLike = None) -> None:
    """Free the pinned memory that the pool keeps for later; buffers in use are not touched."""
    pool_of(get_driver(driver)).trim()


def pool_of(driver: Driver) -> PinnedPool:
    """Return the pool of a driver."""
    found = driver.belongings.get("pinned")
    if found is None:
        found = driver.belongings.setdefault("pinned", PinnedPool(driver))
    pool: PinnedPool = found
    return pool


def size_class(nbytes: int) -> int:
    """Return the size of the block that serves a request."""
    if nbytes <= LARGEST_CLASS:
        return max(SMALLEST, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // LARGEST_CLASS) * LARGEST_CLASS
