"""How does a part of a device become a context of its own, for one thread at a time?"""

from __future__ import annotations

import functools
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.context import Context
from gpufleet.entries import ThreadEntries, of_thread
from gpufleet.errors import ContextInUse
from gpufleet.multiprocessors import Parts, Share, checked_count, parts_of
from gpufleet.stream import NON_BLOCKING

if TYPE_CHECKING:
    from gpufleet.allocators import Allocator
    from gpufleet.device import Device
    from gpufleet.driver import Driver
    from gpufleet.memory import DeviceBuffer
    from gpufleet.stream import Stream


class GreenContext(Context):
    """A context whose kernels run on a share of its device's multiprocessors.

    Made by `Device.create_green_context`. Memory, modules and events made in it belong to the device's
    primary context, which it retains; `close` frees what was made through this object.

    **One thread at a time** may be inside. That is NVIDIA's rule: a green context has no lock of its own.
    The driver does not refuse a second thread (driver 580), so gpufleet does, with `ContextInUse`: when it
    enters, allocates, or makes a stream or event there. The thread that is inside may enter again. Use its
    streams and buffers in that thread, too: who makes a launch with ``stream=`` is not looked at.

    Attributes
    ----------
    sm_count : int
        How many multiprocessors the driver gave it.
    asked_sm_count : int
        How many were asked for: the same or fewer.
    shared_sm_count : int
        How many of them other green contexts had when this one was made; 0 as long as there are enough.
    """

    def __init__(self, device: Device, green: Any, asked: int, parts: Parts, share: Share) -> None:
        from cuda.bindings.driver import CUdevResourceType

        driver = device.driver
        sort = CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self.green_handle = green
        self.sm_count = int(driver.cuGreenCtxGetDevResource(green, sort).sm.smCount)
        self.asked_sm_count = asked
        self.shared_sm_count = share.shared
        self._total = parts.total
        self._turn = threading.RLock()  # a finalizer may run while its thread holds it
        self._last: weakref.ref[ThreadEntries] | None = None
        primary = int(driver.cuDevicePrimaryCtxRetain(device.handle))
        driver.cuDevicePrimaryCtxRelease(device.handle)
        release = functools.partial(_destroy, green, parts, share)
        super().__init__(device, driver.cuCtxFromGreenCtx(green), "green", release)
        self.covered_by = (self.address, primary)

    @classmethod
    def create(cls, device: Device, sm_count: int) -> GreenContext:
        """Create a green context with at least `sm_count` multiprocessors."""
        device.driver.cuDeviceGetCount()  # raises in a forked child, where locks may be held for ever
        parts = parts_of(device)
        asked = checked_count(device, sm_count, parts.total)
        share = parts.take(asked)
        try:
            context = cls._of_share(device, asked, parts, share)
        except BaseException:
            parts.give_back(share)
            raise
        try:
            _ = context.heap  # who frees a buffer needs it, and may not enter while another thread is inside
        except BaseException:
            context.close()
            raise
        return context

    @classmethod
    def _of_share(cls, device: Device, asked: int, parts: Parts, share: Share) -> GreenContext:
        driver = device.driver
        green = driver.cuGreenCtxCreate(parts.describe(driver, share), device.handle, DEFAULT_STREAM)
        try:
            return cls(device, green, asked, parts, share)
        except BaseException:
            driver.cuGreenCtxDestroy(green)
            raise

    # One thread at a time. The lock is held while a thread enters or leaves, not while it is inside: who
    # entered last is asked whether it still is.

    def __enter__(self) -> GreenContext:
        if self.driver.is_lost:  # by a fork, say, when another thread held the lock
            self._check_not_lost()
        entries = of_thread.entries
        with self._turn:
            last = None if self._last is None else self._last()
            if last is not None and last is not entries and any(entry[0] is self for entry in list(last)):
                raise ContextInUse(
                    f"{self!r} is current to thread {last.thread!r}, and a green context is for one thread "
                    f"at a time: let that leave before {entries.thread!r} uses it, or give each thread one "
                    "of its own, as ContextPool(kind='green') does"
                )
            self._last = weakref.ref(entries)
            super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.driver.is_forked:
            super().__exit__(kind, error, trace)
            return
        with self._turn:
            super().__exit__(kind, error, trace)

    def pop(self) -> None:
        """Undo this thread's last `push`, as `Context.pop` does."""
        if self.driver.is_forked:
            super().pop()  # raises
            return
        with self._turn:
            super().pop()

    def new_stream(self, priority: int = 0) -> Any:
        """Create a non-blocking `CUstream`, for gpufleet's own use."""
        return self.driver.cuGreenCtxStreamCreate(self.green_handle, NON_BLOCKING, priority)

    def alloc(
        self, nbytes: int, *, stream: Stream | None = None, allocator: Allocator | None = None
    ) -> DeviceBuffer:
        """Allocate device memory, as `Context.alloc` does, if no other thread is inside."""
        with self:
            return super().alloc(nbytes, stream=stream, allocator=allocator)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        asked = "" if self.asked_sm_count == self.sm_count else f" ({self.asked_sm_count} asked for)"
        return (
            f"<GreenContext {self.address:#x}{state} with {self.sm_count} of {self._total} multiprocessors"
            f"{asked} on device {self.device.ordinal}>"
        )


DEFAULT_STREAM = 1
"""CU_GREEN_CTX_DEFAULT_STREAM, without which driver 580 makes no green context."""


def _destroy(green: Any, parts: Parts, share: Share, driver: Driver, handle: Any, device: Any) -> None:
    """Destroy a green context; cuCtxDestroy is undefined for one (driver 580 answers INVALID_CONTEXT)."""
    try:
        driver.cuGreenCtxDestroy(green)
    finally:
        driver.launches.forget(int(handle))
        parts.give_back(share)
