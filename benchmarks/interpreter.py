"""How fast the interpreter executes kernels, with all its checks on.

    python benchmarks/interpreter.py [--target 90] [--rounds 7] [--json FILE]

Times are milliseconds, the least of some rounds (the machine may be shared). "engine" is the time inside
`InterpretedKernel.run`; "driver" is from cuLaunchKernel to the end of cuStreamSynchronize on the virtual
driver; "NumPy" is the same computation written with NumPy by hand; "limit" is what issue 1 asks for.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "virtual" / "interpreter"))

from machine import CORPUS, Device  # noqa: E402

from gpufleet.virtual import VirtualDriver  # noqa: E402

Dim3 = tuple[int, int, int]


@dataclass
class Case:
    """A kernel, its launch, and the same in NumPy."""

    name: str
    source: str
    kernel: str
    grid: Dim3
    block: Dim3
    arguments: list[Any]
    """Arrays are uploaded, numbers go as they are."""
    types: tuple[Any, ...]
    numpy: Callable[[], object] | None
    limit: float


def cases(rng: np.random.Generator) -> list[Case]:
    pointer, integer, single = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    count, width, order = 1 << 20, 512, 256
    x, y = rng.random((2, count), dtype=np.float32)
    a, b = rng.random((2, order, order), dtype=np.float32)
    image = np.zeros(width * width, np.int32)
    corner, step = (-2.0, -1.25), 2.5 / width
    values = np.zeros(32, np.int32)
    saxpy: list[Any] = [1.7, x, y, count]
    mandelbrot = [image, width, width, *corner, step, step, 256]
    tiles = order // 16
    return [
        Case(
            *("saxpy, 1 Mi elements", "saxpy", "saxpy", (count // 256, 1, 1), (256, 1, 1), saxpy),
            *((single, pointer, pointer, ctypes.c_size_t), lambda: np.float32(1.7) * x + y, 60),
        ),
        Case(
            *("mandelbrot, 512 x 512 x 256", "mandelbrot", "mandelbrot"),
            *((width // 16, width // 16, 1), (16, 16, 1), mandelbrot),
            *((pointer, integer, integer, *[single] * 4, integer), lambda: escape_times(width, step), 2000),
        ),
        Case(
            *("tiled matmul, 256", "matmul_tiled", "matmul", (tiles, tiles, 1), (16, 16, 1)),
            *([a, b, np.zeros_like(a), order], (pointer, pointer, pointer, integer), lambda: a @ b, 700),
        ),
        Case(
            *("fill, 32 threads", "probes", "fill", (1, 1, 1), (32, 1, 1), [values, 7]),
            *((pointer, integer), None, 0.2),
        ),
    ]


def escape_times(width: int, step: float) -> object:
    """The usual NumPy program: all points, until the last has escaped."""
    points = np.arange(width, dtype=np.float32) * np.float32(step)
    c = (points - 2)[None, :] + 1j * (points - np.float32(1.25))[:, None]
    z, steps = np.zeros_like(c), np.zeros(c.shape, np.int32)
    with np.errstate(all="ignore"):
        for _ in range(256):
            going = (z.real**2 + z.imag**2) <= 4
            z = np.where(going, z * z + c, z)
            steps += going
    return steps


def engine_time(case: Case, target: int, rounds: int) -> float:
    device = Device.corpus(case.source, target)
    arguments = [device.memory.upload(a) if isinstance(a, np.ndarray) else a for a in case.arguments]
    executable, launch = device.prepare(case.kernel, case.grid, case.block, *arguments)
    return least(lambda: executable.run(launch), rounds)


def driver_time(case: Case, target: int, rounds: int) -> float:
    d = VirtualDriver(devices=1, compute_capability=(12, 0), visible_devices=None)
    done(d.cuInit(0))
    done(d.cuCtxCreate(None, 0, 0))
    image = (CORPUS / f"{case.source}.sm_{target}.ptx").read_bytes() + b"\0"
    function = done(d.cuModuleGetFunction(done(d.cuModuleLoadData(image)), case.kernel.encode()))
    values = []
    for argument in case.arguments:
        if isinstance(argument, np.ndarray):
            address = done(d.cuMemAlloc(argument.nbytes))
            done(d.cuMemcpyHtoD(address, argument.ctypes.data, argument.nbytes))
            argument = int(address)
        values.append(argument)
    stream = done(d.cuStreamCreate(1))
    parameters = (tuple(values), case.types)

    def run() -> None:
        done(d.cuLaunchKernel(function, *case.grid, *case.block, 0, stream, parameters, 0))
        done(d.cuStreamSynchronize(stream))

    time_taken = least(run, rounds)
    d.reset()
    return time_taken


def done(result: tuple[Any, ...]) -> Any:
    """Return the value of a call that must succeed."""
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None


def least(work: Callable[[], object], rounds: int) -> float:
    """Return the least time of a call, in milliseconds; short ones are called more often."""
    best = float("inf")
    work()
    stop = time.perf_counter() + 0.05
    while rounds > 0 or time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        rounds -= 1
    return best * 1e3


@dataclass
class Figure:
    name: str
    engine: float
    driver: float
    numpy: float | None
    limit: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=int, default=90, choices=(75, 90, 120))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = []
    print(f"{'milliseconds':30} {'engine':>9} {'driver':>9} {'limit':>9} {'NumPy':>9} {'engine / NumPy':>15}")
    for case in cases(np.random.default_rng(1)):
        engine = engine_time(case, options.target, options.rounds)
        driver = driver_time(case, options.target, options.rounds)
        peer = least(case.numpy, options.rounds) if case.numpy is not None else None
        figures.append(Figure(case.name, engine, driver, peer, case.limit))
        ratio = f"{peer:9.4g} {engine / peer:14.3g}x" if peer is not None else ""
        print(f"{case.name:30} {engine:9.4g} {driver:9.4g} {case.limit:9.4g} {ratio}", flush=True)
    if options.json:
        machine = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.platform(),
            "processor": platform.processor(),
            "cpus": os.cpu_count(),
        }
        record = {"machine": machine, "target": options.target, "figures": [asdict(f) for f in figures]}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
