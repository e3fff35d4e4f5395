"""Who else has this memory? What is handed to other libraries, of whose work gpufleet knows nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpufleet.errors import CaptureError
from gpufleet.graph import capture_in, capturing
from gpufleet.stream import passing_event

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.device import Device
    from gpufleet.driver import Driver
    from gpufleet.graph import Graph


class AllWork:
    """All that a context, and the primary one of its device, have been given to do when it is asked.

    A primary context's work is that of its green contexts, too (CUDA Driver API, `cuCtxRecordEvent`).

    It stands among the streams that use a buffer (as a `gpufleet.heap.Queue`) for the streams of other
    libraries: they work in the primary context, and gpufleet does not know which of their streams exist.

    Attributes
    ----------
    context : Context
    """

    is_foreign = True
    address = None
    graph: Graph | None = None
    handle: Any = None
    tail: Any = None

    def __init__(self, context: Context) -> None:
        self.context = context
        self.lock = context.life.lock
        self.key = ("all work", context.address)

    @property
    def is_closed(self) -> bool:
        """Whether its context was closed."""
        return self.context.is_closed

    def precede(self, later: Any) -> None:
        """Let later work of a stream (a CUstream) wait for all that is to be done now.

        Raises
        ------
        CaptureError
            If gpufleet captures a stream of one of the contexts: the call would break the capture.
        """
        context = self.context
        if context.kind != "green":
            _precede(later, context.driver, context.handle)
        if context.kind in ("created", "green"):
            with active_primary(context.device) as primary:
                if primary is not None:
                    _precede(later, context.driver, primary)


def _precede(later: Any, driver: Driver, handle: Any) -> None:
    with passing_event(driver, handle) as event, capturing:
        if capture_in(driver, handle) is not None:
            raise CaptureError("a stream of the context is being captured, so its work cannot be waited for")
        driver.cuCtxRecordEvent(handle, event)
        driver.cuStreamWaitEvent(later, event, 0)


@contextlib.contextmanager
def active_primary(device: Device) -> Iterator[Any]:
    """Yield the handle of a device's primary context, retained meanwhile; None where it is not active."""
    driver = device.driver
    if not driver.cuDevicePrimaryCtxGetState(device.handle)[1]:
        yield None
        return
    handle = driver.cuDevicePrimaryCtxRetain(device.handle)
    try:
        yield handle
    finally:
        driver.cuDevicePrimaryCtxRelease(device.handle)


class Loan:
    """What the capsules of DLPack hold of a buffer.

    When the buffer is closed or forgotten before they are, its memory is freed with the last of them.
    """

    _release: Any = None

    def outlive(self, release: Any) -> None:
        """Call `release`, which frees the memory, when the last capsule is gone."""
        self._release = release

    def __del__(self) -> None:
        if self._release is not None:
            self._release()
