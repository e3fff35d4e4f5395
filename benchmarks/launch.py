"""What does a launch cost, beside what the driver itself takes, and beside other libraries?

    python benchmarks/launch.py                  # against a driver that does nothing: Python's part
    python benchmarks/launch.py --driver nvidia  # on a GPU, beside C (if there is a `cc`) and others

Microseconds per launch, calls back to back, the best of several rounds that take turns: of a kernel with two
parameters and of one with ten. With --threads, launches per second of so many threads, each on its own
stream. --native FILE takes another build of the C extension.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gpufleet as gf
from gpufleet import native

TEN = "u64 u64 f32 f64 u32 u32 u32 u32 u32 u32"
PTX = f"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 add_param_0, .param .u32 add_param_1) {{ ret; }}
.visible .entry ten({", ".join(f".param .{kind} p{n}" for n, kind in enumerate(TEN.split()))}) {{ ret; }}
"""
CUDA = """
extern "C" __global__ void add(int *a, unsigned b) {}
extern "C" __global__ void ten(int *a, int *b, float c, double d, int e, int f, int g, int h, int i, int j) {}
"""
ROUNDS = 60
CALLS = 500


class IdleDriver:
    """A driver with one device that succeeds at once in everything that a launch needs."""

    sizes = ((8, 4), (8, 8, 4, 8, 4, 4, 4, 4, 4, 4))

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
        sizes = self.sizes[function - 1]
        if index >= len(sizes):
            return self._invalid, 0, 0
        offset = 0
        for size in sizes[:index]:
            offset = -(-offset // size) * size + size
        return self._success, -(-offset // sizes[index]) * sizes[index], sizes[index]

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, int]:
        return self._success, 2 if name == b"ten" else 1

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple[Any, int]:
        return self._success, 2 if name == b"ten" else 1

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return self._success, self._stack[-1] if self._stack else 0

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any]:
        self._stack.append(int(context))
        return (self._success,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        return self._success, self._stack.pop() if self._stack else 0

    def cuGetProcAddress(self, *arguments: Any) -> tuple[Any, int, int]:
        return self._invalid, 0, 0  # it is none of C's

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
            "cuDevicePrimaryCtxRetain",
            "cuDeviceGet",
            "cuGetError",
        )
        answer = (self._success, 1) if name.startswith(makes) else (self._success,)
        return lambda *arguments: answer


VALUES: dict[str, Callable[[gf.DeviceBuffer], tuple[Any, ...]]] = {
    "add": lambda buffer: (buffer, 7),
    "ten": lambda buffer: (buffer, buffer, 1.5, 2.5, 1, 2, 3, 4, 5, 6),
}
FORMATS = {"add": "<QI", "ten": "<QQf4xd6I"}


class Bench:
    """One kernel, one buffer and one stream, and the ways to launch with them."""

    def __init__(self, context: gf.Context, name: str) -> None:
        self.context = context
        self.kernel = gf.Program.from_image(PTX, driver=context.driver).kernel(name)
        self.stream = context.stream()
        self.buffer = context.alloc(4096)
        self.values = VALUES[name](self.buffer)
        self.kernel.load(context)
        self.function, _ = self.kernel.program.function(context, name)
        self.layout = struct.Struct(FORMATS[name])
        self.plain = [self.buffer.address if value is self.buffer else value for value in self.values]

    def close(self) -> None:
        self.stream.close()
        self.buffer.close()

    def bare(self) -> Callable[[], Any]:
        """Return the least that Python can do: pack the values and call the driver."""
        launch = self.context.driver.raw.cuLaunchKernel
        memory = bytearray(self.layout.size)
        start = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        size = ctypes.c_size_t(len(memory))
        extra = (ctypes.c_void_p * 5)(1, start, 2, ctypes.addressof(size), 0)
        address, handle, pack, plain = ctypes.addressof(extra), self.stream.handle, self.layout, self.plain
        function = self.function

        def call(keep: Any = (memory, size, extra)) -> None:
            pack.pack_into(memory, 0, *plain)
            launch(function, 1, 1, 1, 32, 1, 1, 0, handle, None, address)

        return call

    def bound(self) -> Callable[[], Any]:
        bound, values = self.kernel.bind(1, 32, stream=self.stream), self.values
        return functools.partial(bound, *values)

    def general(self) -> Callable[[], Any]:
        return functools.partial(self.kernel.launch, 1, 32, *self.values, stream=self.stream)

    def general_of_numpy(self) -> Callable[[], Any]:
        launch, stream = self.kernel.launch, self.stream
        kinds = {int: np.int32, float: np.float32}
        values = [kinds[type(v)](v) if type(v) in kinds else v for v in self.values]
        if len(values) == 10:
            values[3] = np.float64(self.values[3])
        return functools.partial(launch, 1, 32, *values, stream=stream)

    def current(self) -> Callable[[], Any]:
        return functools.partial(self.kernel.launch, 1, 32, *self.values)

    def in_c(self) -> Callable[[], Any] | None:
        """Return 1,000 launches by a loop in C, if it can be compiled."""
        address = native.address_of(self.context.driver, "cuLaunchKernel")
        loop = c_loop()
        if address is None or loop is None:
            return None
        memory = bytearray(self.layout.pack(*self.plain))
        start = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        offsets = self.kernel._plans[id(self.context)]._layout.offsets
        pointers = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        function, stream = int(self.function), self.stream.address

        def call(keep: Any = (memory, pointers)) -> None:
            if loop(address, function, stream, pointers, CALLS):
                raise RuntimeError("a launch failed")

        return call


def c_loop() -> Any:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    target = Path(tempfile.mkdtemp()) / "loop.so"
    source = Path(__file__).with_name("launch_loop.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", target], check=True)
    loop = ctypes.CDLL(str(target)).launch_loop
    loop.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return loop


def cuda_core(bench: Bench, name: str) -> Callable[[], Any] | None:
    """Return its launch of the same kernel, where it is installed."""
    try:
        from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
    except ImportError:
        return None
    device = Device(0)
    device.set_current()
    options = ProgramOptions(arch=f"sm_{device.arch}")
    kernel = Program(CUDA, code_type="c++", options=options).compile("cubin").get_kernel(name)
    stream, config = device.create_stream(), LaunchConfig(grid=1, block=32)
    kinds = {int: np.int32, float: np.float32}
    values = [np.uint64(v.address) if v is bench.buffer else kinds[type(v)](v) for v in bench.values]
    if len(values) == 10:
        values[3] = np.float64(bench.values[3])
    return lambda: launch(stream, config, kernel, *values)


def cupy_raw(bench: Bench, name: str) -> Callable[[], Any] | None:
    try:
        import cupy
    except ImportError:
        return None
    kernel = cupy.RawModule(code=CUDA).get_function(name)
    array, stream = cupy.zeros(1024, "i4"), cupy.cuda.Stream(non_blocking=True)
    kinds = {int: np.int32, float: np.float32}
    values = [array if v is bench.buffer else kinds[type(v)](v) for v in bench.values]
    if len(values) == 10:
        values[3] = np.float64(bench.values[3])
    values = tuple(values)
    stream.use()
    return lambda: kernel((1,), (32,), values)


def run(driver: Any, name: str) -> dict[str, float]:
    device = gf.devices(driver)[0]
    context = device.retain_primary_context()
    with context:
        bench = Bench(context, name)
        cases: dict[str, Callable[[], Any] | None] = {
            "bare call of the bindings, packed": bench.bare(),
            "bound(...)": bench.bound(),
            "launch(..., stream=)": bench.general(),
            "launch(...)": bench.current(),
            "launch(..., stream=) of NumPy scalars": bench.general_of_numpy(),
        }
        if native.extension() is not None:
            found_extension = native.extension
            native.extension = lambda: None  # type: ignore[assignment]
            other = Bench(context, name)
            cases |= {
                "launch(..., stream=), in Python": other.general(),
                "bound(...), in Python": other.bound(),
            }
            native.extension = found_extension
        if not device.is_virtual and driver == "nvidia":
            cases |= {"cuda.core launch": cuda_core(bench, name), "CuPy RawKernel": cupy_raw(bench, name)}
        loop = bench.in_c() if driver == "nvidia" else None
        found = measure({key: case for key, case in cases.items() if case}, context.synchronize, loop)
        bench.close()
    context.close()
    return found


def measure(
    cases: dict[str, Callable[[], Any]], settle: Callable[[], Any], loop: Callable[[], Any] | None
) -> dict[str, float]:
    """Return the microseconds of one call of each, the best round; rounds alternate between them."""
    best = dict.fromkeys((["C cuLaunchKernel"] if loop else []) + list(cases), float("inf"))
    for _ in range(ROUNDS):
        if loop:
            began = time.perf_counter()
            loop()
            best["C cuLaunchKernel"] = min(best["C cuLaunchKernel"], time.perf_counter() - began)
            settle()
        for name, call in cases.items():
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], time.perf_counter() - began)
            settle()
    return {name: seconds / CALLS * 1e6 for name, seconds in best.items()}


def threads(driver: Any, count: int, seconds: float = 1.0) -> float:
    """Return the launches per second of so many threads together, each on a stream of its own."""
    context = gf.devices(driver)[0].create_context()
    benches = [Bench(context, "add") for _ in range(count)]
    done, ready = [0] * count, threading.Barrier(count + 1)
    stop = threading.Event()

    def work(number: int) -> None:
        call = benches[number].bound()
        ready.wait()
        while not stop.is_set():
            for _ in range(100):
                call()
            done[number] += 100

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for worker in workers:
        worker.join()
    rate = sum(done) / (time.perf_counter() - began)
    for bench in benches:
        bench.close()
    context.close()
    return rate


def take_build(path: Path) -> None:
    """Use another build of the C extension."""
    spec = importlib.util.spec_from_file_location("gpufleet._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["gpufleet._native"] = module
    gf._native = module  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--driver", choices=("idle", "nvidia", "virtual"), default="idle")
    parser.add_argument("--threads", type=int, nargs="*", default=[])
    parser.add_argument("--native", type=Path)
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    if options.native:
        take_build(options.native)
    driver = IdleDriver() if options.driver == "idle" else options.driver
    rates = {f"{count} threads": threads(driver, count) for count in options.threads}
    for name, rate in rates.items():
        print(f"{name:40} {rate / 1000:6.0f} thousand launches per second")
    found = {} if rates else {name: run(driver, name) for name in VALUES}
    for kernel, cases in found.items():
        print(f"{'two' if kernel == 'add' else kernel} parameters")
        first = next(iter(cases.values()))
        for name, microseconds in cases.items():
            print(f"  {name:40} {microseconds:6.2f} us  {microseconds / first:5.2f} x")
    if options.json:
        about = {"python": platform.python_version(), "machine": platform.machine(), "driver": options.driver}
        with open(options.json, "w") as file:
            json.dump({"machine": about, "microseconds": found, "per second": rates}, file, indent=1)


if __name__ == "__main__":
    main()
