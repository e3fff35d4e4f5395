"""What the virtual driver asks of an engine, and what an engine may ask of the driver.

An engine executes PTX on a virtual device. The driver owns memory, streams and modules; it hands
the engine one syntax tree and the addresses of the module's symbols (`Engine.load`), and later one
`Launch` at a time, from any thread, several at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpufleet.virtual.ptx import Module

Dim3 = tuple[int, int, int]


class KernelFault(Exception):
    """A kernel did what a GPU answers with a sticky error.

    `code` is the name of a `CUresult` without its `CUDA_ERROR_` prefix: ILLEGAL_ADDRESS,
    MISALIGNED_ADDRESS, LAUNCH_FAILED (a trap), LAUNCH_TIMEOUT, ASSERT, ILLEGAL_INSTRUCTION.
    The message names kernel, PTX line (and CUDA line where `.loc` gives it), block, thread and,
    for an access, the address and the nearest allocation.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceMemory(Protocol):
    """The memory that kernels of one device may touch: one reserved region of real host addresses.

    Only bytes inside a span of `spans()` are mapped; an engine checks each access against the
    spans before it touches the view.
    """

    base: int
    """Address of the region's first byte; a multiple of 4096."""

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """The whole region as an array of `dtype`: element i is at address `base + i * itemsize`."""
        ...

    def spans(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """First and one-past-last addresses of the allocations a kernel of this device may touch.

        Sorted, disjoint; a snapshot that later allocations do not change (copy on write), so that
        comparing the arrays by identity tells whether anything changed.
        """
        ...

    def describe(self, address: int) -> str:
        """Say in words what lies nearest to `address`, for a fault's message."""
        ...


@dataclass(frozen=True)
class Launch:
    """One grid to execute, with all that it may depend on."""

    grid: Dim3
    block: Dim3
    dynamic_shared: int
    """Bytes of `extern __shared__` memory per block."""
    parameters: bytes
    """The kernel's parameter space, laid out as `Kernel.parameters` says, `Kernel.parameter_bytes` long."""
    memory: DeviceMemory
    clock_rate: int
    """Kilohertz; `%clock64` advances by this many thousand a second of wall time."""
    device_ordinal: int
    multiprocessors: int
    cooperative: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set by the driver when the launch must stop; the engine then raises `KernelFault`."""
    output: Callable[[bytes], None] = lambda text: None
    """Takes what `printf` in the kernel writes, in order."""


class Executable(Protocol):
    """One kernel of a loaded module, ready to run."""

    def run(self, launch: Launch) -> None:
        """Execute the whole grid, or raise `KernelFault`. Safe to call from several threads."""
        ...


class Engine(Protocol):
    """Turns kernels of a loaded module into something that runs."""

    name: str

    def load(self, module: Module, kernel: str, symbols: Mapping[str, int]) -> Executable:
        """Prepare one kernel.

        `symbols` has the device address of each module-scope `.global` and `.const` variable.
        Raises `gpufleet.virtual.ptx.PtxError` for what the engine cannot carry out.
        """
        ...
