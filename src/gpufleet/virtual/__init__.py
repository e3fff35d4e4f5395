"""The virtual driver: CUDA devices on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet.virtual.driver import VirtualDriver

__all__ = ["VirtualDriver"]


def __getattr__(name: str) -> Any:
    # The PTX parser and the engines live in this package too and need no driver.
    if name == "VirtualDriver":
        from gpufleet.virtual.driver import VirtualDriver

        return VirtualDriver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
