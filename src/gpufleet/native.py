"""Is the C extension here, and can it call this driver?

It is optional, and built where there is a C compiler. It calls the driver through the addresses of its
functions, which virtual devices do not have: there, and without it, launches go through Python.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet.configuration import Configuration
    from gpufleet.driver import Driver
    from gpufleet.frame import Layout


@functools.cache
def extension() -> Any:
    """Return the module, or None."""
    try:
        from gpufleet import _native
    except ImportError:
        return None
    return _native


def launcher(driver: Driver, layout: Layout, function: Any, configuration: Configuration) -> Any:
    """Return the C twin of a configuration, or None where there is none."""
    native = extension()
    call = address_of(driver, "cuLaunchKernel") if native else None
    if call is None or layout.size > native.MOST_BYTES or layout.count > native.MOST_PARAMETERS:
        return None
    from gpufleet.memory import DeviceBuffer

    parameters = tuple(
        _parameter(offset, size, each)
        for (offset, size), each in zip(layout.table, layout.conversions, strict=True)
    )
    sizes = (*configuration.grid, *configuration.block, configuration.shared)
    return native.Launcher(call, int(function), sizes, parameters, DeviceBuffer)


def address_of(driver: Driver, function: str) -> int | None:
    """Return the address of a function of the driver, or None if it has no such thing."""
    found = driver.belongings.setdefault("addresses", {})
    if function not in found:
        find = getattr(driver.raw, "cuGetProcAddress", None)
        error, address, *_ = (1, 0) if find is None else find(function.encode(), VERSION, 0)
        found[function] = None if error else int(address)
    address_found: int | None = found[function]
    return address_found


VERSION = 13000
"""Of CUDA, whose functions are wanted."""


def _parameter(offset: int, size: int, each: Any) -> tuple[Any, ...]:
    """Write a parameter as `Launcher` reads it."""
    code, convert = each.code[-1], each.convert
    if code == "e":  # a half, which C before C23 does not know
        code, convert = "s", functools.partial(_packed_half, convert)
    native = each.native
    return (code, native.common, offset, size, native.lowest, native.highest, native.bound, convert)


def _packed_half(convert: Any, value: Any, queue: Any) -> bytes:
    import struct

    return struct.pack("<e", convert(value, queue))
