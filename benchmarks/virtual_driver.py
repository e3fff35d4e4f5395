"""What the calls of the virtual driver cost.

    python benchmarks/virtual_driver.py [--json FILE]

Times are microseconds per call, the median of nine rounds. "no engine" lines run kernels that do nothing,
so they show what the driver alone costs; "hand-over" is the least that a worker thread would cost here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpufleet.virtual import VirtualDriver
from gpufleet.virtual.engine import Launch

ROUNDS = 9
FILL = """.version 8.0
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 p, .param .u32 v) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [v];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
"""


class NoEngine:
    """Runs kernels that do nothing."""

    name = "none"

    def load(self, module: Any, kernel: str, symbols: Mapping[str, int]) -> NoEngine:
        return self

    def run(self, launch: Launch) -> None:
        pass


class Machine:
    """A driver with a context and the kernel `fill`."""

    def __init__(self, engine: Any = None) -> None:
        d = self.d = VirtualDriver(engine=engine, visible_devices=None)
        d.cuInit(0)
        self.context = d.cuCtxCreate(None, 0, 0)[1]
        module = d.cuModuleLoadData(FILL.encode())[1]
        self.fill = d.cuModuleGetFunction(module, b"fill")[1]
        self.stream = d.cuStreamCreate(1)[1]
        self.event = d.cuEventCreate(0)[1]
        self.pointer = d.cuMemAlloc(256 << 20)[1]
        self.arguments = ((int(self.pointer), 5), (ctypes.c_void_p, ctypes.c_int))

    def launch(self) -> None:
        self.d.cuLaunchKernel(self.fill, 1, 1, 1, 32, 1, 1, 0, self.stream, self.arguments, 0)

    def launch_and_wait(self) -> None:
        self.launch()
        self.d.cuStreamSynchronize(self.stream)


def microseconds(work: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


def measure() -> dict[str, float]:
    machine, bare = Machine(), Machine(NoEngine())
    d, host = machine.d, np.ones(256 << 20, np.uint8)
    small = host.ctypes.data

    def push_pop() -> None:
        d.cuCtxPushCurrent(machine.context)
        d.cuCtxPopCurrent()

    def allocate(size: int) -> None:
        d.cuMemFree(d.cuMemAlloc(size)[1])

    def allocate_async() -> None:
        d.cuMemFreeAsync(d.cuMemAllocAsync(1 << 20, machine.stream)[1], machine.stream)

    def launch_many() -> None:
        for _ in range(100):
            bare.launch()
        bare.d.cuStreamSynchronize(bare.stream)

    copy = 256 << 20
    in_copy = microseconds(lambda: d.cuMemcpyHtoD(machine.pointer, small, copy), 1)
    out_copy = microseconds(lambda: d.cuMemcpyDtoH(small, machine.pointer, copy), 1)
    plain = microseconds(lambda: ctypes.memmove(small, small + copy // 2, copy // 2), 1) * 2
    return {
        "cuCtxPushCurrent + cuCtxPopCurrent": microseconds(push_pop, 5000),
        "cuCtxGetCurrent": microseconds(d.cuCtxGetCurrent, 5000),
        "cuStreamQuery": microseconds(lambda: d.cuStreamQuery(machine.stream), 5000),
        "cuEventRecord": microseconds(lambda: d.cuEventRecord(machine.event, machine.stream), 3000),
        "cuMemAlloc + cuMemFree, 4 KiB": microseconds(lambda: allocate(4096), 1000),
        "cuMemAlloc + cuMemFree, 1 MiB": microseconds(lambda: allocate(1 << 20), 1000),
        "cuMemAllocAsync + cuMemFreeAsync, 1 MiB": microseconds(allocate_async, 1000),
        "cuMemcpyHtoD, 64 bytes": microseconds(lambda: d.cuMemcpyHtoD(machine.pointer, small, 64), 2000),
        "cuMemsetD8, 64 bytes, and wait": microseconds(
            lambda: (d.cuMemsetD8(machine.pointer, 1, 64), d.cuStreamSynchronize(0)), 1000
        ),
        "launch of 32 threads to synchronize": microseconds(machine.launch_and_wait, 300),
        "launch to synchronize, no engine": microseconds(bare.launch_and_wait, 1000),
        "launch in a row of 100, no engine": microseconds(launch_many, 20) / 100,
        "hand-over to a thread and back": hand_over(),
        "copy in, GB/s": copy / in_copy / 1e3,
        "copy out, GB/s": copy / out_copy / 1e3,
        "memmove alone, GB/s": copy / plain / 1e3,
    }


def hand_over() -> float:
    inbox, outbox = allocate_lock(), allocate_lock()
    inbox.acquire()
    outbox.acquire()

    def serve() -> None:
        while True:
            inbox.acquire()
            outbox.release()

    threading.Thread(target=serve, daemon=True).start()

    def ask() -> None:
        inbox.release()
        outbox.acquire()

    return microseconds(ask, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure()
    for name, figure in figures.items():
        print(f"{name:44} {figure:8.1f}")
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.platform()}
        options.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
