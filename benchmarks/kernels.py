"""Six kernels on the JIT engine against gcc, numba and PoCL, in one run.

    python benchmarks/kernels.py [--rounds 9] [--small] [--json FILE]

gcc (-O3 -march=native -fopenmp) is the yardstick; numba (parallel=True) and PoCL (pyopencl) stand in the
same table where they are installed. Every round runs every contestant once, in turning order; figures
are milliseconds (median of the rounds) and the median of the rounds' ratios to gcc. All cores, and the
JIT engine's default safety checks, are on. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import mmap
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpufleet.compiler import compile_source
from gpufleet.virtual.engine import Launch
from gpufleet.virtual.jit import JitEngine
from gpufleet.virtual.ptx import parse

FOLDER = Path(__file__).with_name("kernel_problems")
PROBLEMS = ("vectoradd", "saxpy", "mandelbrot", "matmul", "reduce", "histogram")
Contestant = dict[str, Callable[[], Any]]


class Region:
    """Memory for all arrays, as a virtual device has it."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.base = self._bytes.ctypes.data
        self._used = 0

    def array(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Place a copy of an array in the region."""
        start = -(-self._used // 4096) * 4096
        self._used = start + values.nbytes
        placed = self._bytes[start : self._used].view(values.dtype).reshape(values.shape)
        placed[...] = values
        return placed

    def view(self, dtype: Any) -> np.ndarray[Any, Any]:
        return self._bytes.view(dtype)

    def spans(self) -> Any:
        return np.array([self.base], np.uint64), np.array([self.base + len(self._bytes)], np.uint64)

    def describe(self, address: int) -> str:
        return f"the benchmark's region begins at {self.base:#x}"


class Data:
    """The problems' arrays and sizes."""

    def __init__(self, small: bool) -> None:
        self.n = 1 << (20 if small else 24)
        self.side = 512 if small else 2048
        self.matrix = 256 if small else 1024
        rng = np.random.default_rng(1)
        self.region = Region(8 * 4 * self.n + 16 * self.side**2 + 16 * self.matrix**2 + (1 << 20))
        place = self.region.array
        self.a, self.b = (place(rng.random(self.n, dtype=np.float32)) for _ in range(2))
        self.c, self.y = place(np.zeros_like(self.a)), place(self.b)
        self.image = place(np.zeros((self.side, self.side), np.int32))
        shape = (self.matrix, self.matrix)
        self.A, self.B = (place(rng.random(shape, dtype=np.float32)) for _ in range(2))
        self.C = place(np.zeros(shape, np.float32))
        self.partial = place(np.zeros(self.n // 512, np.float32))
        self.bytes = place(rng.integers(0, 256, self.n, dtype=np.uint8))
        self.counts = place(np.zeros(256, np.uint32))

    @property
    def frame(self) -> tuple[float, float, float, float]:
        return -2.0, -1.25, 2.5 / self.side, 2.5 / self.side


def jit(data: Data) -> Contestant:
    compiled = compile_source((FOLDER / "problems.cu").read_text(), arch=90, target="ptx")
    module = parse(compiled.code.decode())
    engine = JitEngine()

    def kernel(name: str, grid: tuple[int, ...], block: tuple[int, ...], *values: Any) -> Callable[[], None]:
        function = module.kernels[name]
        space = bytearray(function.parameter_bytes)
        for parameter, value in zip(function.parameters, values, strict=True):
            if isinstance(value, np.ndarray):
                value = np.uint64(value.ctypes.data)
            raw = (
                value.tobytes()
                if isinstance(value, np.generic)
                else int(value).to_bytes(parameter.size, "little")
            )
            space[parameter.offset : parameter.offset + parameter.size] = raw
        executable = engine.load(module, name, {})
        launch = Launch((*grid, 1, 1)[:3], (*block, 1, 1)[:3], 0, bytes(space), data.region, 1_000_000, 0, 2)
        return lambda: executable.run(launch)

    n, side, tiles = data.n, data.side, data.matrix // 16
    frame = [np.float32(v) for v in data.frame]
    histogram = kernel("histogram", (n // 16384,), (256,), data.bytes, data.counts, n)

    def count() -> None:
        data.counts[:] = 0
        histogram()

    return {
        "vectoradd": kernel("vectoradd", (n // 256,), (256,), data.a, data.b, data.c, n),
        "saxpy": kernel("saxpy", (n // 256,), (256,), np.float32(2), data.a, data.y, n),
        "mandelbrot": kernel("mandelbrot", (side // 16,) * 2, (16, 16), data.image, side, side, *frame, 256),
        "matmul": kernel("matmul", (tiles, tiles), (16, 16), data.A, data.B, data.C, data.matrix),
        "reduce": kernel("reduce", (n // 512,), (256,), data.a, data.partial),
        "histogram": count,
    }


def gcc(data: Data) -> Contestant:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "problems.so"
        options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["gcc", *options, "-o", library, FOLDER / "problems.c"], check=True)
        code = c.CDLL(str(library))
    n, pointer = c.c_long(data.n), lambda array: c.c_void_p(array.ctypes.data)
    a, b, out, y = (pointer(x) for x in (data.a, data.b, data.c, data.y))
    frame = [c.c_float(v) for v in data.frame]
    return {
        "vectoradd": lambda: code.vectoradd(a, b, out, n),
        "saxpy": lambda: code.saxpy(c.c_float(2), a, y, n),
        "mandelbrot": lambda: code.mandelbrot(pointer(data.image), data.side, data.side, *frame, 256),
        "matmul": lambda: code.matmul(pointer(data.A), pointer(data.B), pointer(data.C), data.matrix),
        "reduce": lambda: code.reduce(a, pointer(data.partial), c.c_long(data.n // 512)),
        "histogram": lambda: code.histogram(pointer(data.bytes), pointer(data.counts), n),
    }


def numba(data: Data) -> Contestant:
    from numba import get_num_threads, njit, prange

    f = np.float32

    @njit(parallel=True)
    def vectoradd(a: Any, b: Any, out: Any) -> None:
        for i in prange(a.size):
            out[i] = a[i] + b[i]

    @njit(parallel=True)
    def saxpy(alpha: Any, x: Any, y: Any) -> None:
        for i in prange(x.size):
            y[i] = alpha * x[i] + y[i]

    @njit(parallel=True)
    def mandelbrot(out: Any, x0: Any, y0: Any, dx: Any, dy: Any, limit: Any) -> None:
        for py in prange(out.shape[0]):
            for px in range(out.shape[1]):
                cx, cy, x, y, it = x0 + f(px) * dx, y0 + f(py) * dy, f(0), f(0), 0
                while it < limit and x * x + y * y <= f(4):
                    x, y = x * x - y * y + cx, f(2) * x * y + cy
                    it += 1
                out[py, px] = it

    @njit(parallel=True)
    def matmul(A: Any, B: Any, C: Any) -> None:
        n = A.shape[0] // 16
        for block in prange(n * n):
            by, bx = block // n * 16, block % n * 16
            left, right, sums = (np.zeros((16, 16), f), np.zeros((16, 16), f), np.zeros((16, 16), f))
            for m in range(n):
                for ty in range(16):
                    for tx in range(16):
                        left[ty, tx] = A[by + ty, m * 16 + tx]
                        right[ty, tx] = B[m * 16 + ty, bx + tx]
                for ty in range(16):
                    for k in range(16):
                        for tx in range(16):
                            sums[ty, tx] += left[ty, k] * right[k, tx]
            for ty in range(16):
                for tx in range(16):
                    C[by + ty, bx + tx] = sums[ty, tx]

    @njit(parallel=True)
    def reduce(x: Any, out: Any) -> None:
        for block in prange(out.size):
            s = np.empty(256, f)
            for t in range(256):
                s[t] = x[block * 512 + t] + x[block * 512 + t + 256]
            k = 128
            while k > 0:
                for t in range(k):
                    s[t] += s[t + k]
                k >>= 1
            out[block] = s[0]

    @njit(parallel=True)
    def histogram(x: Any, counts: Any, threads: Any) -> None:
        own = np.zeros((threads, 256), np.uint32)
        part = (x.size + threads - 1) // threads
        for t in prange(threads):
            for i in range(t * part, min(x.size, (t + 1) * part)):
                own[t, x[i]] += np.uint32(1)
        counts[:] = own.sum(0)

    frame = [f(v) for v in data.frame]
    return {
        "vectoradd": lambda: vectoradd(data.a, data.b, data.c),
        "saxpy": lambda: saxpy(f(2), data.a, data.y),
        "mandelbrot": lambda: mandelbrot(data.image, *frame, 256),
        "matmul": lambda: matmul(data.A, data.B, data.C),
        "reduce": lambda: reduce(data.a, data.partial),
        "histogram": lambda: histogram(data.bytes, data.counts, get_num_threads()),
    }


def pocl(data: Data) -> Contestant:
    import pyopencl as cl

    device = next(
        d for p in cl.get_platforms() if "Portable" in p.name for d in p.get_devices(cl.device_type.CPU)
    )
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, (FOLDER / "problems.cl").read_text()).build()
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR

    def buffer(array: np.ndarray[Any, Any]) -> Any:
        return cl.Buffer(context, flags, hostbuf=array)

    def kernel(name: str, size: tuple[int, ...], group: tuple[int, ...], *values: Any) -> Callable[[], None]:
        made = cl.Kernel(program, name)
        given = [buffer(v) if isinstance(v, np.ndarray) else v for v in values]

        def run() -> None:
            made(queue, size, group, *given)
            queue.finish()

        return run

    i, f, n, side = np.int32, np.float32, data.n, data.side
    histogram = kernel("histogram", (n // 64,), (256,), data.bytes, data.counts, i(n))

    def count() -> None:
        data.counts[:] = 0
        histogram()

    frame = [f(v) for v in data.frame]
    image = (data.image, i(side), i(side), *frame, i(256))
    return {
        "vectoradd": kernel("vectoradd", (n,), (256,), data.a, data.b, data.c, i(n)),
        "saxpy": kernel("saxpy", (n,), (256,), f(2), data.a, data.y, i(n)),
        "mandelbrot": kernel("mandelbrot", (side, side), (16, 16), *image),
        "matmul": kernel("matmul", (data.matrix,) * 2, (16, 16), data.A, data.B, data.C, i(data.matrix)),
        "reduce": kernel("reduce", (n // 2,), (256,), data.a, data.partial),
        "histogram": count,
    }


def check(name: str, contestant: Contestant, data: Data) -> None:
    """Compare a contestant's results with NumPy's."""
    contestant["vectoradd"]()
    assert np.array_equal(data.c, data.a + data.b), name
    data.y[:] = data.b
    contestant["saxpy"]()
    assert np.allclose(data.y, 2 * data.a + data.b, rtol=1e-6), name
    contestant["matmul"]()
    assert np.allclose(data.C, data.A @ data.B, rtol=1e-4), name
    contestant["reduce"]()
    assert np.allclose(data.partial, data.a.reshape(-1, 512).sum(1), rtol=1e-5), name
    contestant["histogram"]()
    assert np.array_equal(data.counts, np.bincount(data.bytes, minlength=256)), name
    contestant["mandelbrot"]()
    assert 0 < data.image.mean() < 256, name


def contestants(data: Data) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {}
    for make in (gcc, jit, numba, pocl):
        try:
            made = make(data)
            check(make.__name__, made, data)
        except (ImportError, FileNotFoundError, StopIteration) as error:
            print(f"{make.__name__} does not take part: {error!r}")
            continue
        found[make.__name__] = made
    return found


def measure(found: dict[str, Contestant], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by problem and contestant."""
    times: dict[str, dict[str, list[float]]] = {p: {n: [] for n in found} for p in PROBLEMS}
    for round in range(rounds):
        order = list(found)
        order = order[round % len(order) :] + order[: round % len(order)]
        for problem in PROBLEMS:
            for name in order:
                start = time.perf_counter()
                found[name][problem]()
                times[problem][name].append(time.perf_counter() - start)
    return times


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a sixteenth of the size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = Data(options.small)
    times = measure(contestants(data), options.rounds)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for problem, by_name in times.items():
        rows[problem] = {}
        for name, seconds in by_name.items():
            ratios = [s / g for s, g in zip(seconds, by_name["gcc"], strict=True)]
            rows[problem][name] = {
                "ms": statistics.median(seconds) * 1e3,
                "ratio": statistics.median(ratios),
                "best_ratio": min(seconds) / min(by_name["gcc"]),
            }
    names = list(next(iter(rows.values())))
    print(f"{'ms (ratio to gcc)':20}" + "".join(f"{name:>20}" for name in names))
    for problem, row in rows.items():
        cells = (f"{row[name]['ms']:.2f} ({row[name]['ratio']:.2f}x)" for name in names)
        print(f"{problem:20}" + "".join(f"{cell:>20}" for cell in cells))
    if options.json:
        report = {"machine": machine(), "rounds": options.rounds, "small": options.small, "problems": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
