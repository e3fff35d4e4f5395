"""What can go wrong, in one short vocabulary.

Every error gpufleet raises on purpose derives from `GpufleetError` and survives pickling, so that it
reaches the parent of a worker process as what it is.
"""

from __future__ import annotations

from typing import Any


class GpufleetError(Exception):
    """Base of all errors that gpufleet raises on purpose."""


class CudaError(GpufleetError):
    """A driver call answered with something else than success.

    Parameters
    ----------
    code : int
        The `CUresult`.
    name : str
        Its name, such as ``CUDA_ERROR_INVALID_VALUE``.
    call : str
        The driver function, such as ``cuMemAlloc``.
    detail : str
        What the driver says of the code, or what gpufleet knows of the cause.
    """

    def __init__(self, code: int, name: str, call: str, detail: str = "") -> None:
        super().__init__(code, name, call, detail)
        self.code = code
        self.name = name
        self.call = call
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.call} answered {self.name} ({self.code})" + (f": {self.detail}" if self.detail else "")


class StickyError(CudaError):
    """A kernel faulted, and its driver carries out no work any more.

    The driver answers every later call, also in other contexts and on other devices, with the same
    code. NVIDIA's is one for the process, so only a new process recovers (seen on driver 580 with two
    H200s); a virtual one (`is_virtual`) is an object of its own, which `Driver.reset` makes anew.
    `launches` names what had been launched and was not yet known to be complete: the culprit is among
    it.
    """

    def __init__(
        self,
        code: int,
        name: str,
        call: str,
        detail: str = "",
        launches: tuple[str, ...] = (),
        is_virtual: bool = False,
    ) -> None:
        super().__init__(code, name, call, detail)
        self.args = (code, name, call, detail, launches, is_virtual)
        self.launches = launches
        self.is_virtual = is_virtual

    def __str__(self) -> str:
        suspects = ", ".join(self.launches) if self.launches else "none that gpufleet started"
        cure = (
            "every call of this virtual driver fails from now on; reset the driver, or use a new one"
            if self.is_virtual
            else "every CUDA call of this process fails from now on; start a new process"
        )
        return f"{super().__str__()}. The fault is sticky: {cure}. Launches in flight: {suspects}."


class ContextClosed(GpufleetError):
    """The context, or the object's context, was closed."""


class ContextInUse(GpufleetError):
    """Threads are inside the context: it cannot be closed, or, if it is green, entered by another one."""


class WrongContext(GpufleetError):
    """An object was used with an object of another context, or left in the wrong order."""


class LeaseEnded(GpufleetError):
    """A lease was used after it had been given back, or twice at once."""


class PoolTimeout(GpufleetError, TimeoutError):
    """No context of a pool became free in time."""


class PoolClosed(GpufleetError):
    """The pool or executor was closed."""


class PoolBroken(GpufleetError):
    """A kernel's fault has ended a pool or executor for good.

    Its `__cause__` is the `StickyError`; `launches` are those that were in flight. A supervisor that sees
    this replaces the process (or, with virtual devices, the driver) and not the pool.
    """

    def __init__(self, message: str, launches: tuple[str, ...] = ()) -> None:
        super().__init__(message, launches)
        self.launches = launches

    def __str__(self) -> str:
        return str(self.args[0])


class ForkedProcess(GpufleetError):
    """A forked child uses a driver that its parent had initialised."""


class CaptureError(GpufleetError):
    """Something that cannot be part of a capture, or an object that has to do with one used otherwise."""


class KernelArgumentError(GpufleetError, TypeError):
    """The values given to a kernel do not fit its parameters."""


class LaunchError(GpufleetError, ValueError):
    """The grid, block or shared memory of a launch is beyond what the device allows."""


class ImageError(GpufleetError, ValueError):
    """A file or byte string is no image that this device can load, or lacks the kernel asked for."""


class UnsupportedPtx(GpufleetError):
    """Valid PTX that virtual devices do not carry out yet."""


class NoDriver(GpufleetError):
    """No usable driver, or no device."""


class CompileError(GpufleetError):
    """CUDA C++ that does not compile. `log` is the compiler's own text."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message, log)
        self.log = log

    def __str__(self) -> str:
        return str(self.args[0])


STICKY: dict[int, str] = {
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_CONTAINED",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
}
"""Codes after which the process is lost.

Illegal address, misaligned address and launch failed were seen to be so on driver 580; of the others
NVIDIA's documentation of `CUresult` says that "the process must be terminated and relaunched".
"""


def add_note(error: BaseException, note: str) -> None:
    """Attach a second failure to the first (`add_note` of Python 3.11, kept for 3.10)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        notes: list[Any] = error.__dict__.setdefault("__notes__", [])
        notes.append(note)
