"""CUDA contexts that float between threads, over real and virtual GPUs.

    import gpufleet as gf

    context = gf.devices()[0].create_context()
    with context:                       # in any thread
        ...

Importing this package does nothing but define names: no driver call, no environment read, no thread.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.current import current_context
    from gpufleet.device import Device, devices
    from gpufleet.driver import Driver, get_driver
    from gpufleet.entries import ContextWarning
    from gpufleet.errors import (
        CompileError,
        ContextClosed,
        ContextInUse,
        CudaError,
        ForkedProcess,
        GpufleetError,
        ImageError,
        KernelArgumentError,
        LaunchError,
        NoDriver,
        StickyError,
        UnsupportedPtx,
        WrongContext,
    )
    from gpufleet.memory import DeviceBuffer
    from gpufleet.program import Kernel, Program
    from gpufleet.stream import Event, Stream

__version__ = "0.1.0"

_WHERE = {
    "context": ("Context",),
    "current": ("current_context",),
    "device": ("Device", "devices"),
    "driver": ("Driver", "get_driver"),
    "entries": ("ContextWarning",),
    "errors": (
        "CompileError",
        "ContextClosed",
        "ContextInUse",
        "CudaError",
        "ForkedProcess",
        "GpufleetError",
        "ImageError",
        "KernelArgumentError",
        "LaunchError",
        "NoDriver",
        "StickyError",
        "UnsupportedPtx",
        "WrongContext",
    ),
    "memory": ("DeviceBuffer",),
    "program": ("Kernel", "Program"),
    "stream": ("Event", "Stream"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "CompileError",
    "Context",
    "ContextClosed",
    "ContextInUse",
    "ContextWarning",
    "CudaError",
    "Device",
    "DeviceBuffer",
    "Driver",
    "Event",
    "ForkedProcess",
    "GpufleetError",
    "ImageError",
    "Kernel",
    "KernelArgumentError",
    "LaunchError",
    "NoDriver",
    "Program",
    "StickyError",
    "Stream",
    "UnsupportedPtx",
    "WrongContext",
    "current_context",
    "devices",
    "get_driver",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'gpufleet' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpufleet.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
