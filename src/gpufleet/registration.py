"""Which of the caller's own memory is page-locked? Registration of arrays, in place.

Copies of page-locked memory run at the full speed of the bus and without waiting. Locking costs 45 us a
MiB (H200, driver 580), so it pays for arrays that are copied several times.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.driver import Driver, DriverLike, get_driver
from gpufleet.entries import thread_entries
from gpufleet.errors import CudaError, GpufleetError, add_note
from gpufleet.lifetime import Lifetime

if TYPE_CHECKING:
    from gpufleet.context import Context

PIECE = 1 << 30
"""Most bytes that are locked by one call: users report failures from 512 GiB on (driver 580), and other
threads' calls wait for as long as one takes."""
PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: locked for every context."""
READ_ONLY = 8
"""CU_MEMHOSTREGISTER_READ_ONLY: devices only read it."""
ALREADY_REGISTERED = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"


def registered(
    array: Any, *, read_only: bool | None = None, context: Context | None = None, driver: DriverLike = None
) -> Registration:
    """Page-lock a NumPy array (or what has the buffer protocol) where it is, until the result is closed.

    ``with gf.registered(array): ...`` closes it. An array that is locked already, by an outer block or by
    another library, is accepted; the last to close unlocks it.

    Parameters
    ----------
    array : array
        C-contiguous, at any address; memory-mapped ones too.
    read_only : bool
        Whether devices will only read it. None: as the array says. The driver locks read-only pages, and
        files on disk that are mapped for writing (``numpy.memmap(..., mode="r+")``), in no other way.
    context : Context
        In which context to lock; the lock holds for all, but ends with this one. None: the one that this
        thread has entered, else a primary context that is kept for this.
    driver : optional
        As in `get_driver`, where no context says which.

    Raises
    ------
    ValueError
        If the array cannot be locked, with the reason. Nothing is locked then.
    """
    import numpy as np

    view = array if isinstance(array, np.ndarray) else np.frombuffer(array, "u1")
    if not view.flags.c_contiguous:
        raise ValueError(
            "the array is not C-contiguous, so the memory between its elements would be locked too: "
            "register the array that it is a view of"
        )
    home = find_home(context, driver)
    if read_only is None:
        read_only = not view.flags.writeable
    return Registration(view, lock(home, view.ctypes.data, view.nbytes, read_only))


class Registration:
    """The page-lock of one array. Made by `registered`; closing it unlocks, after waiting for the device.

    Attributes
    ----------
    array : numpy.ndarray
    """

    def __init__(self, array: Any, lock: Lock) -> None:
        self.array = array
        self._lock = lock
        self._finalizer = weakref.finalize(self, _forgotten, lock, array)
        self._finalizer.atexit = False

    @property
    def read_only(self) -> bool:
        """Whether devices may only read it."""
        return self._lock.read_only

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or the context that locks has been."""
        return not self._finalizer.alive or self._lock.life.is_gone

    def close(self) -> None:
        """Unlock, after all work of the devices that may use the memory. Closing twice is no error."""
        if self._finalizer.detach() is not None:
            unlock(self._lock)

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Registration of {self._lock.nbytes} bytes at {self._lock.address:#x}>"


class Lock:
    """Memory that is page-locked, in pieces, and how many have asked for it.

    It knows the lifetime of the context that locks, not the context, which it must not keep alive.
    """

    def __init__(self, life: Lifetime, address: int, nbytes: int, read_only: bool) -> None:
        self.life = life
        self.address = address
        self.nbytes = nbytes
        self.read_only = read_only
        self.pieces: list[int] = []
        self.count = 1

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether all of this memory is in it, and the lock still in force."""
        return (
            not self.life.is_gone
            and self.address <= address
            and address + nbytes <= self.address + self.nbytes
        )


class Locks:
    """All that gpufleet has page-locked for one driver."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may enter it again
        self.all: list[Lock] = []
        self.cuts: list[int] = []
        """Addresses at which a piece begins, or the last one ends, sorted: no copy may cross one."""

    def update(self) -> None:
        """Find out anew where the cuts are."""
        ends = {lock.address + lock.nbytes for lock in self.all}
        self.cuts = sorted(ends.union(*(lock.pieces for lock in self.all)))


def lock(home: Any, address: int, nbytes: int, read_only: bool) -> Lock:
    """Page-lock memory, or count up the lock that it has."""
    locks = locks_of(home.driver)
    with locks.lock:
        locks.all = [each for each in locks.all if not each.life.is_gone]
        for known in locks.all:
            if known.holds(address, nbytes) and (read_only or not known.read_only):
                known.count += 1
                return known
        made = Lock(home.life, address, nbytes, read_only)
        reading = [each for each in locks.all if each.read_only and each.holds(address, nbytes)]
        if reading and nbytes:
            raise ValueError(
                f"{nbytes} bytes at {address:#x} cannot be page-locked for writing: they are locked already, "
                "for reading only; close that registration first, or use registered(array, read_only=True)"
            )
        if not nbytes or is_known(home.driver, address, nbytes):
            return made  # without pieces: another library has locked it
        _lock_pieces(made, home)
        locks.all.append(made)
        locks.update()
        return made


def unlock(lock: Lock) -> None:
    """Undo one `lock`."""
    locks = locks_of(lock.life.driver)
    with locks.lock:
        lock.count -= 1
        if lock.count or lock not in locks.all:
            return
        locks.all.remove(lock)
        locks.update()
    for piece in lock.pieces:
        _unlock_piece(lock.life, piece)


def unlock_all(home: Any) -> None:
    """Undo every lock that was made in a context, since it is being closed but may live on."""
    locks = locks_of(home.driver)
    with locks.lock:
        ending = [each for each in locks.all if each.life is home.life]
        locks.all = [each for each in locks.all if each.life is not home.life]
        locks.update()
    for each in ending:
        for piece in each.pieces:
            home.driver.cuMemHostUnregister(piece)


def _unlock_piece(life: Lifetime, address: int) -> None:
    life.if_alive(lambda: life.driver.cuMemHostUnregister(address))


def split(driver: Driver, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the parts of a copy that each lie in one page-locked piece.

    The driver refuses a copy that begins in one registration and ends in another (driver 580).
    """
    cuts = locks_of(driver).cuts
    start = 0
    if cuts:
        first = bisect.bisect_right(cuts, address)
        for cut in cuts[first : bisect.bisect_left(cuts, address + nbytes)]:
            yield start, cut - address - start
            start = cut - address
    yield start, nbytes - start


def is_known(driver: Driver, address: int, nbytes: int) -> bool:
    """Whether the driver knows this host memory (pinned, registered, managed): copies need not wait."""
    from cuda.bindings.driver import CUpointer_attribute

    kind = CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    ask = driver.raw.cuPointerGetAttribute
    return not (ask(kind, address)[0] or ask(kind, address + nbytes - 1)[0])


def locks_of(driver: Driver) -> Locks:
    """Return what is locked for a driver."""
    found = driver.belongings.get("locks")
    if found is None:
        found = driver.belongings.setdefault("locks", Locks())
    locks: Locks = found
    return locks


def _lock_pieces(made: Lock, home: Any) -> None:
    flags = PORTABLE | (READ_ONLY if made.read_only else 0)
    end = made.address + made.nbytes
    start = made.address
    try:
        while start < end:
            following = min(end, (start + PIECE) // mmap.PAGESIZE * mmap.PAGESIZE)
            made.pieces.append(start)  # before, since Ctrl-C may come behind the call
            with home:
                home.driver.cuMemHostRegister(start, following - start, flags)
            start = following
    except BaseException as error:
        if isinstance(error, GpufleetError):
            made.pieces.pop()  # it was refused
        for piece in made.pieces:
            try:
                _unlock_piece(made.life, piece)
            except GpufleetError as second:
                add_note(error, f"unlocking what was locked already failed too: {second}")
        if isinstance(error, CudaError):
            raise ValueError(_reason(made, start, error)) from error
        raise


def _reason(made: Lock, start: int, error: CudaError) -> str:
    what = f"{made.nbytes} bytes at {made.address:#x} cannot be page-locked"
    if error.name == ALREADY_REGISTERED:
        return f"{what}: a part of them is already; register the whole array once, before its parts"
    if error.name == "CUDA_ERROR_INVALID_VALUE" and not made.read_only:
        return (
            f"{what} for writing: they are read-only pages, or a file that is mapped from a disk, which can "
            "be locked for reading only: registered(array, read_only=True)"
        )
    if error.name == "CUDA_ERROR_NOT_SUPPORTED" and made.read_only:
        return f"{what} for reading only: the device does not support that ({error})"
    return f"{what} from {start:#x} on: {error}"


def _forgotten(lock: Lock, array: Any) -> None:
    if sys.is_finalizing() or lock.life.is_gone or lock.life.driver.is_forked:
        return
    warnings.warn(
        f"{lock.nbytes} bytes at {lock.address:#x} stayed registered", ResourceWarning, stacklevel=2
    )
    unlock(lock)


# The context that locks


class PrimaryHome:
    """A primary context, retained for as long as something of gpufleet's is locked in it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.device = _device_in_use(driver)
        self.handle = driver.cuDevicePrimaryCtxRetain(self.device)
        self.life = Lifetime(driver, "the primary context that locks memory")

    def __enter__(self) -> PrimaryHome:
        self.driver.cuCtxPushCurrent(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.cuCtxPopCurrent()

    def release(self) -> None:
        """Release the context."""
        if not self.life.is_gone:
            self.life.is_gone = True
            self.driver.cuDevicePrimaryCtxRelease(self.device)


def find_home(context: Context | None, driver: DriverLike) -> Any:
    """Return the context to lock memory in: the one given, the thread's, or a primary one."""
    if context is not None:
        context.check_open()
        return context
    entries = thread_entries()
    chosen = entries[-1][0].driver if driver is None and entries else get_driver(driver)
    if entries and entries[-1][0].driver is chosen and not entries[-1][0].is_closed:
        return entries[-1][0]
    with locks_of(chosen).lock:
        home = chosen.belongings.get("home")
        if home is None or home.life.is_gone:
            home = chosen.belongings["home"] = PrimaryHome(chosen)
        return home


def release_home(driver: Driver) -> None:
    """Release the primary context that was kept, if nothing is locked in it any more."""
    locks = locks_of(driver)
    with locks.lock:
        home = driver.belongings.get("home")
        if home is not None and not any(each.life is home.life for each in locks.all):
            del driver.belongings["home"]
            home.release()


def _device_in_use(driver: Driver) -> Any:
    """Return a device whose primary context is active, so that none is made on a device nobody uses."""
    handles = [driver.cuDeviceGet(ordinal) for ordinal in range(int(driver.cuDeviceGetCount()))]
    for handle in handles:
        with contextlib.suppress(CudaError):
            if driver.cuDevicePrimaryCtxGetState(handle)[1]:
                return handle
    return handles[0]
