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
    from gpufleet.allocators import (
        Allocator,
        LimitedAllocator,
        PlainAllocator,
        PoolAllocator,
        StatisticsAllocator,
    )
    from gpufleet.array import DeviceArray
    from gpufleet.bound import BoundKernel
    from gpufleet.context import Context
    from gpufleet.crew import ExecutorBroken
    from gpufleet.current import current_context
    from gpufleet.device import Device, devices
    from gpufleet.driver import Driver, get_driver
    from gpufleet.entries import ContextWarning
    from gpufleet.errors import (
        CaptureError,
        CompileError,
        ContextClosed,
        ContextInUse,
        CudaError,
        ForkedProcess,
        GpufleetError,
        ImageError,
        KernelArgumentError,
        LaunchError,
        LeaseEnded,
        NoDriver,
        PoolBroken,
        PoolClosed,
        PoolTimeout,
        StickyError,
        UnsupportedPtx,
        WrongContext,
    )
    from gpufleet.executor import FleetExecutor
    from gpufleet.foreign import as_array
    from gpufleet.graph import Graph
    from gpufleet.green import GreenContext
    from gpufleet.lease import Lease
    from gpufleet.managed import ManagedBuffer, ManagedMemoryWarning
    from gpufleet.memory import DeviceBuffer
    from gpufleet.pinned_memory import PinnedBuffer, pinned, trim_pinned
    from gpufleet.pool import ContextPool
    from gpufleet.program import Kernel, Program
    from gpufleet.queue import as_stream
    from gpufleet.registration import Registration, registered
    from gpufleet.stream import Event, Stream
    from gpufleet.transfer import BlockingCopyWarning, Transfer

__version__ = "0.1.0"

_WHERE = {
    "allocators": ("Allocator", "LimitedAllocator", "PlainAllocator", "PoolAllocator", "StatisticsAllocator"),
    "array": ("DeviceArray",),
    "bound": ("BoundKernel",),
    "context": ("Context",),
    "crew": ("ExecutorBroken",),
    "current": ("current_context",),
    "device": ("Device", "devices"),
    "driver": ("Driver", "get_driver"),
    "entries": ("ContextWarning",),
    "errors": (
        "CaptureError",
        "CompileError",
        "ContextClosed",
        "ContextInUse",
        "CudaError",
        "ForkedProcess",
        "GpufleetError",
        "ImageError",
        "KernelArgumentError",
        "LaunchError",
        "LeaseEnded",
        "NoDriver",
        "PoolBroken",
        "PoolClosed",
        "PoolTimeout",
        "StickyError",
        "UnsupportedPtx",
        "WrongContext",
    ),
    "executor": ("FleetExecutor",),
    "foreign": ("as_array",),
    "graph": ("Graph",),
    "green": ("GreenContext",),
    "lease": ("Lease",),
    "managed": ("ManagedBuffer", "ManagedMemoryWarning"),
    "memory": ("DeviceBuffer",),
    "pinned_memory": ("PinnedBuffer", "pinned", "trim_pinned"),
    "pool": ("ContextPool",),
    "program": ("Kernel", "Program"),
    "queue": ("as_stream",),
    "registration": ("Registration", "registered"),
    "stream": ("Event", "Stream"),
    "transfer": ("BlockingCopyWarning", "Transfer"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Allocator",
    "BlockingCopyWarning",
    "BoundKernel",
    "CaptureError",
    "CompileError",
    "Context",
    "ContextClosed",
    "ContextInUse",
    "ContextPool",
    "ContextWarning",
    "CudaError",
    "Device",
    "DeviceArray",
    "DeviceBuffer",
    "Driver",
    "Event",
    "ExecutorBroken",
    "FleetExecutor",
    "ForkedProcess",
    "GpufleetError",
    "Graph",
    "GreenContext",
    "ImageError",
    "Kernel",
    "KernelArgumentError",
    "LaunchError",
    "Lease",
    "LeaseEnded",
    "LimitedAllocator",
    "ManagedBuffer",
    "ManagedMemoryWarning",
    "NoDriver",
    "PinnedBuffer",
    "PlainAllocator",
    "PoolAllocator",
    "PoolBroken",
    "PoolClosed",
    "PoolTimeout",
    "Program",
    "Registration",
    "StatisticsAllocator",
    "StickyError",
    "Stream",
    "Transfer",
    "UnsupportedPtx",
    "WrongContext",
    "as_array",
    "as_stream",
    "current_context",
    "devices",
    "get_driver",
    "pinned",
    "registered",
    "trim_pinned",
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
