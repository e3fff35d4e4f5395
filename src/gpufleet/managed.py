"""Which memory is the host's and the devices' at once? Managed (unified) buffers."""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.allocators import OUT_OF_MEMORY
from gpufleet.errors import ContextClosed, CudaError, WrongContext
from gpufleet.heap import Queue
from gpufleet.host_view import byte_interface, host_view
from gpufleet.stream import Stream
from gpufleet.transfer import Transfer

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from gpufleet.context import Context
    from gpufleet.device import Device
    from gpufleet.lifetime import Lifetime

ATTACH_GLOBAL = 1
"""CU_MEM_ATTACH_GLOBAL: every stream of every device may use the memory."""
ADVICE = {
    "read_mostly": "SET_READ_MOSTLY",
    "not_read_mostly": "UNSET_READ_MOSTLY",
    "preferred_location": "SET_PREFERRED_LOCATION",
    "no_preferred_location": "UNSET_PREFERRED_LOCATION",
    "accessed_by": "SET_ACCESSED_BY",
    "not_accessed_by": "UNSET_ACCESSED_BY",
}


class ManagedMemoryWarning(UserWarning):
    """Advice or a prefetch had no effect, since a device does not move managed memory on demand."""


class ManagedBuffer:
    """Memory that the host and all devices use at the same address. Made by `Context.alloc_managed`.

    Where a device cannot share it with the host at the same time (`concurrentManagedAccess` is 0: Windows,
    and devices before Pascal), the host gets at it only inside ``with buffer.on_host() as array``, during
    which no kernel may take it.

    Attributes
    ----------
    context : Context
    address : int
    nbytes : int
    is_concurrent : bool
        Whether host and devices may use it at the same time.
    """

    def __init__(self, context: Context, address: int, nbytes: int) -> None:
        self.context = context
        self.address = address
        self.nbytes = nbytes
        self.is_concurrent = bool(context.device.attribute("concurrent_managed_access"))
        self._on_host = 0
        self._finalizer = weakref.finalize(self, _forgotten, context.life, address, nbytes)
        self._finalizer.atexit = False

    @classmethod
    def allocate(cls, context: Context, nbytes: int) -> ManagedBuffer:
        """Allocate `nbytes` (1 or more) in `context`."""
        nbytes = operator.index(nbytes)
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes: expected 1 or more")
        free, _ = context.memory_info()
        if nbytes > free:
            raise CudaError(
                OUT_OF_MEMORY,
                "CUDA_ERROR_OUT_OF_MEMORY",
                "alloc_managed",
                f"{nbytes} bytes do not fit: device {context.device.ordinal} has {free} free",
            )
        with context:
            address = int(context.driver.cuMemAllocManaged(nbytes, ATTACH_GLOBAL))
        buffer = cls(context, address, nbytes)
        context.adopt(buffer)
        return buffer

    # The host's view

    @property
    def array(self) -> NDArray[Any]:
        """The memory as a NumPy array of bytes, which keeps the buffer alive. Not for use after `close`.

        Raises
        ------
        WrongContext
            Where host and device cannot use it at the same time: use `on_host` there.
        """
        self.check_open()
        if not self.is_concurrent:
            raise WrongContext(
                f"{self!r} cannot be shared with the host at any time, since device "
                f"{self.context.device.ordinal} has no concurrent managed access: use "
                "`with buffer.on_host() as array`"
            )
        return self._bytes()

    def _bytes(self) -> NDArray[Any]:
        return host_view(self, self.address, self.nbytes)

    def view(self, dtype: DTypeLike, shape: int | tuple[int, ...] = -1) -> NDArray[Any]:
        """Return `array` with a type and shape."""
        return self.array.view(dtype).reshape(shape)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[NDArray[Any]]:
        """Wait for all work of the context, and let the host use the memory during the block.

        Where it is not concurrent, launches that take this buffer raise meanwhile, and the array is made
        read-only at the end of the block. Other kernels must not be running on the device then either;
        the wait sees to those of this context.
        """
        self.check_open()
        self._on_host += 1
        array = None
        try:
            self.context.synchronize()
            array = self._bytes()
            yield array
        finally:
            self._on_host -= 1
            if array is not None and not self.is_concurrent:
                array.flags.writeable = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self._check_on_host()
        return byte_interface(self.address, self.nbytes)

    def _check_on_host(self) -> None:
        self.check_open()
        if not self.is_concurrent and not self._on_host:
            raise WrongContext(f"{self!r} is not the host's now: use `with buffer.on_host() as array`")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes, as other libraries take them. `close` waits for the device's work, also for theirs."""
        self.check_open()
        return byte_interface(self.address, self.nbytes)

    def __buffer__(self, flags: int) -> memoryview:
        """Give the memory to what takes a buffer (Python 3.12 and later; before, use `array`)."""
        self._check_on_host()
        return self._bytes().data

    # The devices' use

    def address_for(self, queue: Queue) -> int:
        """Return the address for a kernel in `queue`.

        Raises
        ------
        WrongContext
            If the host is using it (`on_host`) and it is not concurrent, or if it is of another driver.
        """
        self.check_open()
        if queue.context.driver is not self.context.driver:
            raise WrongContext(f"{self!r} is of another driver than {queue.context!r}")
        if self._on_host and not self.is_concurrent:
            raise WrongContext(f"{self!r} cannot be used by a kernel inside `with buffer.on_host()`")
        return self.address

    def prefetch(
        self,
        where: Device | str,
        *,
        stream: Stream | None = None,
        offset: int = 0,
        nbytes: int | None = None,
    ) -> Transfer | None:
        """Move pages to a device, or to "host", before they are needed there.

        Parameters
        ----------
        where : Device or "host"
        stream : Stream
            In whose order, and return a `Transfer`. None: complete on return.
        offset, nbytes : int
            Which part. None: up to the end.

        Warns
        -----
        ManagedMemoryWarning
            If nothing was done, since a device has no concurrent managed access.
        """
        self.check_open()
        offset, nbytes = self._checked(offset, nbytes)
        given = None if stream is None else self.context.as_stream(stream)
        if given is not None and given.context.driver is not self.context.driver:
            raise WrongContext(f"{self!r} cannot be prefetched on {given!r}, of another driver")
        if self._can_move("prefetch", where):
            queue = self.context.main_stream if given is None else given
            with self.context:
                self.context.driver.cuMemPrefetchAsync(
                    self.address + offset, nbytes, _location(where), 0, queue.handle
                )
            if given is None:
                queue.synchronize()
        return None if given is None else Transfer(given.hold(self))

    def advise(
        self, advice: str, where: Device | str = "host", *, offset: int = 0, nbytes: int | None = None
    ) -> None:
        """Tell the driver how pages will be used.

        Parameters
        ----------
        advice : str
            "read_mostly" (each device keeps a copy), "preferred_location" (where), "accessed_by" (where:
            mapped there, not moved), or one of these with "not_" or "no_" before it, which takes it back.
        where : Device or "host"
        offset, nbytes : int
            Which part. None: up to the end.

        Warns
        -----
        ManagedMemoryWarning
            If nothing was done, since a device has no concurrent managed access.
        """
        from cuda.bindings.driver import CUmem_advise

        self.check_open()
        offset, nbytes = self._checked(offset, nbytes)
        if advice not in ADVICE:
            raise ValueError(f"there is no advice {advice!r}: expected one of {', '.join(ADVICE)}")
        if self._can_move("advise", where):
            kind = getattr(CUmem_advise, f"CU_MEM_ADVISE_{ADVICE[advice]}")
            with self.context:  # cuMemAdvise needs a current one (driver 580)
                self.context.driver.cuMemAdvise(self.address + offset, nbytes, kind, _location(where))

    def _checked(self, offset: int, nbytes: int | None) -> tuple[int, int]:
        offset = operator.index(offset)
        nbytes = self.nbytes - offset if nbytes is None else operator.index(nbytes)
        if offset < 0 or nbytes < 1 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes from byte {offset} on are not in a buffer of {self.nbytes} bytes"
            )
        return offset, nbytes

    def _can_move(self, what: str, where: Device | str) -> bool:
        if where != "host" and getattr(where, "driver", None) is not self.context.driver:
            raise ValueError(
                f"{where!r} is no place for {self!r}: expected a Device of its driver, or 'host'"
            )
        can = self.is_concurrent and (
            isinstance(where, str) or bool(where.attribute("concurrent_managed_access"))
        )
        if not can:
            ordinal = self.context.device.ordinal
            warnings.warn(
                f"{what} had no effect: device {ordinal}, or the other one, has no concurrent managed access",
                ManagedMemoryWarning,
                stacklevel=3,
            )
        return can

    # Closing

    @property
    def is_closed(self) -> bool:
        """Whether this buffer or its context was closed."""
        return not self._finalizer.alive or self.context.is_closed

    def check_open(self) -> None:
        """Raise `ContextClosed` if this buffer or its context was closed."""
        self.context.check_open()
        if not self._finalizer.alive:
            raise ContextClosed(f"{self!r} was closed; allocate another one")

    def close(self) -> None:
        """Free the memory, after all work of the device: the driver waits. Closing twice is no error."""
        if self._finalizer.detach() is not None:
            self.context.free("cuMemFree", self.address)

    def __enter__(self) -> ManagedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ManagedBuffer {self.address:#x}, {self.nbytes} bytes, of {self.context!r}>"


def _location(where: Device | str) -> Any:
    from cuda.bindings import driver as types

    location = types.CUmemLocation()
    kinds = types.CUmemLocationType
    if isinstance(where, str):
        location.type = kinds.CU_MEM_LOCATION_TYPE_HOST
    else:
        location.type = kinds.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = where.ordinal
    return location


def _forgotten(life: Lifetime, address: int, nbytes: int) -> None:
    if sys.is_finalizing() or life.is_gone or life.driver.is_forked:
        return
    warnings.warn(f"{nbytes} managed bytes of {life!r} were never freed", ResourceWarning, stacklevel=2)
    life.free_later(lambda: life.driver.cuMemFree(address))
