"""What does a launch cost in Python, beside what the driver itself takes?

    python benchmarks/launch.py                  # against a driver that does nothing: Python's part
    python benchmarks/launch.py --driver nvidia  # on a GPU, beside the bare call of cuda.bindings

Microseconds per launch, calls back to back, the best of several rounds. The kernel has two parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpufleet as gf

PTX = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 add_param_0, .param .u32 add_param_1) { ret; }
"""
ROUNDS = 60
CALLS = 500


class IdleDriver:
    """A driver with one device that succeeds at once in everything that a launch needs."""

    sizes = (8, 4)

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._success = driver.CUresult.CUDA_SUCCESS
        self._invalid = driver.CUresult.CUDA_ERROR_INVALID_VALUE
        self._stack: list[int] = []

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, int]:
        return self._success, 9 if "CAPABILITY" in attribute.name else 1024

    def cuFuncGetAttribute(self, attribute: Any, function: Any) -> tuple[Any, int]:
        return self._success, 1024 if "THREADS" in attribute.name else 0

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        if index >= len(self.sizes):
            return self._invalid, 0, 0
        return self._success, 8 * index, self.sizes[index]

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return self._success, self._stack[-1] if self._stack else 0

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any]:
        self._stack.append(int(context))
        return (self._success,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        return self._success, self._stack.pop() if self._stack else 0

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any]:
        return (self._success,)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        makes = (
            "cuCtxCreate",
            "cuMemAlloc",
            "cuStreamCreate",
            "cuEventCreate",
            "cuModule",
            "cuDeviceGet",
            "cuGetError",
        )
        answer = (self._success, 1) if name.startswith(makes) else (self._success,)
        return lambda *arguments: answer


def measure(cases: dict[str, Callable[[], Any]], settle: Callable[[], Any]) -> dict[str, float]:
    """Return the microseconds of one call of each, the best round; rounds alternate between them."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(ROUNDS):
        for name, call in cases.items():
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], time.perf_counter() - began)
            settle()
    return {name: seconds / CALLS * 1e6 for name, seconds in best.items()}


def bare_packed(context: gf.Context, kernel: gf.Kernel, buffer: gf.DeviceBuffer, stream: gf.Stream) -> Any:
    """Return the least that Python can do: pack two values and call the driver."""
    function, _ = kernel.program.function(context, kernel.name)
    launch = context.driver.raw.cuLaunchKernel
    layout = struct.Struct("<QI")
    memory = bytearray(layout.size)
    start = ctypes.addressof((ctypes.c_char * layout.size).from_buffer(memory))
    size = ctypes.c_size_t(layout.size)
    extra = (ctypes.c_void_p * 5)(1, start, 2, ctypes.addressof(size), 0)
    address, handle = ctypes.addressof(extra), stream.handle

    def call(keep: Any = (memory, size, extra)) -> None:
        layout.pack_into(memory, 0, buffer.address, 7)
        launch(function, 1, 1, 1, 32, 1, 1, 0, handle, None, address)

    return call


def run(driver: Any) -> dict[str, float]:
    device = gf.devices(driver)[0]
    context = device.create_context()
    kernel = gf.Program.from_image(PTX, driver=driver).kernel("add")
    with context, context.stream() as stream, context.alloc(4096) as buffer:
        small = np.int32(7)
        cases = {
            "bare call, packed": bare_packed(context, kernel, buffer, stream),
            "launch(buffer, int, stream=)": lambda: kernel.launch(1, 32, buffer, 7, stream=stream),
            "launch(buffer, int)": lambda: kernel.launch(1, 32, buffer, 7),
            "launch(buffer, numpy.int32, stream=)": lambda: kernel.launch(
                1, 32, buffer, small, stream=stream
            ),
            "launch(..., style='pointers')": lambda: kernel.launch(
                1, 32, buffer, 7, stream=stream, style="pointers"
            ),
        }
        found = measure(cases, context.synchronize)
    context.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", choices=("idle", "nvidia", "virtual"), default="idle")
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    found = run(IdleDriver() if options.driver == "idle" else options.driver)
    bare = found["bare call, packed"]
    for name, microseconds in found.items():
        print(f"{name:40} {microseconds:6.2f} us  {microseconds - bare:+6.2f}")
    if options.json:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "driver": options.driver,
        }
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "microseconds": found}, file, indent=1)


if __name__ == "__main__":
    main()
