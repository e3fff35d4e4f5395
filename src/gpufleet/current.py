"""Which context is current on this thread?"""

from __future__ import annotations

from gpufleet.context import Context
from gpufleet.device import Device
from gpufleet.driver import DriverLike, get_driver
from gpufleet.entries import thread_entries


def current_context(driver: DriverLike = None) -> Context | None:
    """Return the context that is current on the calling thread, or None.

    A context that gpufleet entered comes back as the same object; one that somebody else made current
    as a borrowed one, which gpufleet never destroys.
    """
    chosen = get_driver(driver)
    handle = chosen.cuCtxGetCurrent()
    address = int(handle)
    if not address:
        return None
    for entry in reversed(thread_entries()):
        if entry.context.address == address and entry.context.driver is chosen:
            return entry.context
    return Context(Device(int(chosen.cuCtxGetDevice()), chosen), handle, "borrowed")
