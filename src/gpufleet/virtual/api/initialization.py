"""Initialization, version, and error texts."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.state import State

VERSION = 13_000
"""CUDA 13.0, the version of the driver (580) that the answers were recorded on."""


@call(any_time=True, after_fault=True)
def cuInit(state: State, Flags: int) -> None:
    """Build the devices. Flags must be 0."""
    if Flags != 0:
        raise Refusal("INVALID_VALUE", f"the flags are {Flags}: expected 0")
    state.initialize()


@call(outputs=1, any_time=True, after_fault=True)
def cuDriverGetVersion(state: State) -> int:
    """Return the CUDA version that this driver follows."""
    return VERSION


@call(outputs=1, any_time=True, after_fault=True)
def cuGetErrorName(state: State, error: Any) -> bytes:
    """Return the name of a CUresult."""
    return _name(error).encode()


@call(outputs=1, any_time=True, after_fault=True)
def cuGetErrorString(state: State, error: Any) -> bytes:
    """Return what a CUresult means: here its name in words."""
    name = _name(error).removeprefix("CUDA_").removeprefix("ERROR_")
    return _TEXTS.get(name, name.lower().replace("_", " ")).encode()


@call()
def cuProfilerStart(state: State) -> None:
    """Do nothing: there is no profiler."""


@call()
def cuProfilerStop(state: State) -> None:
    """Do nothing: there is no profiler."""


def _name(error: Any) -> str:
    try:
        return str(bindings().CUresult(int(error)).name)
    except ValueError:
        raise Refusal("INVALID_VALUE", f"{int(error)} is no CUresult") from None


_TEXTS = {
    "SUCCESS": "no error",
    "INVALID_VALUE": "invalid argument",
    "OUT_OF_MEMORY": "out of memory",
    "NOT_INITIALIZED": "initialization error",
    "DEINITIALIZED": "driver shutting down",
    "NO_DEVICE": "no CUDA-capable device is detected",
    "INVALID_DEVICE": "invalid device ordinal",
    "INVALID_IMAGE": "device kernel image is invalid",
    "INVALID_CONTEXT": "invalid device context",
    "NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "INVALID_PTX": "a PTX JIT compilation failed",
    "UNSUPPORTED_PTX_VERSION": "the provided PTX was compiled with an unsupported toolchain.",
    "FILE_NOT_FOUND": "file not found",
    "INVALID_HANDLE": "invalid resource handle",
    "NOT_FOUND": "named symbol not found",
    "NOT_READY": "device not ready",
    "ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
    "LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "PEER_ACCESS_ALREADY_ENABLED": "peer access is already enabled",
    "PEER_ACCESS_NOT_ENABLED": "peer access has not been enabled",
    "CONTEXT_IS_DESTROYED": "context is destroyed",
    "ASSERT": "device-side assert triggered",
    "HOST_MEMORY_ALREADY_REGISTERED": "part or all of the requested memory range is already mapped",
    "HOST_MEMORY_NOT_REGISTERED": "pointer does not correspond to a registered memory region",
    "ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
    "MISALIGNED_ADDRESS": "misaligned address",
    "LAUNCH_FAILED": "unspecified launch failure",
    "COOPERATIVE_LAUNCH_TOO_LARGE": "too many blocks in cooperative launch",
    "NOT_PERMITTED": "operation not permitted",
    "NOT_SUPPORTED": "operation not supported",
    "UNKNOWN": "unknown error",
}
"""As the driver words them."""
