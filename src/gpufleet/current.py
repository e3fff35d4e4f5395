"""Which context is current on this thread?"""

from __future__ import annotations

import threading
from typing import Any

from gpufleet.context import Context
from gpufleet.device import Device
from gpufleet.driver import Driver, DriverLike, get_driver
from gpufleet.entries import thread_entries


def current_context(driver: DriverLike = None) -> Context | None:
    """Return the context that is current on the calling thread, or None.

    A context that gpufleet entered comes back as the same object; one that somebody else made current
    as a borrowed one, which gpufleet never destroys. Without `driver` the driver is that of the context
    that this thread entered last, else the one that `get_driver` chooses.
    """
    entries = thread_entries()
    if driver is None and entries:
        driver = entries[-1][0].driver
    chosen = driver if type(driver) is Driver else get_driver(driver)
    handle = chosen.cuCtxGetCurrent()
    address = int(handle)
    if not address:
        return None
    if entries:
        context = entries[-1][0]  # nearly always
        if context.address == address and context.driver is chosen:
            return context
    return context_of(chosen, handle)


def context_of(driver: Driver, handle: Any) -> Context:
    """Return the object for a context's handle: the one that this thread entered, or a borrowed one."""
    address = int(handle)
    for context, _, _ in reversed(thread_entries()):
        if context.address == address and context.driver is driver:
            return context
    return _borrowed(driver, handle)


def _borrowed(driver: Driver, handle: Any) -> Context:
    """Return the same object each time, with the main stream and the modules that it has by now."""
    address = int(handle)
    # An id is never given twice, while a new context may get the handle of one that was destroyed.
    identity = int(driver.cuCtxGetId(handle))
    with _lock:
        known = driver.borrowed.get(address)
        if known is not None:
            context: Context = known[1]
            if known[0] == identity and not context.is_closed:
                return context
            context.is_gone = True  # its maker has destroyed it, and with it all that we had in it
        context = Context(_device_of(driver, handle), handle, "borrowed")
        driver.borrowed[address] = (identity, context)
        return context


def _device_of(driver: Driver, handle: Any) -> Device:
    driver.cuCtxPushCurrent(handle)
    try:
        return Device(int(driver.cuCtxGetDevice()), driver)
    finally:
        driver.cuCtxPopCurrent()


_lock = threading.Lock()
