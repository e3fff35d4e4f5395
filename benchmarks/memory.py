"""What memory costs: allocating, pinning, registering, prefetching; and that loops leave nothing behind.

    python benchmarks/memory.py [--driver nvidia|virtual] [--json FILE]
    python benchmarks/memory.py --leak 100000     # allocations, streams and events; exit code 1 if one stays

Microseconds per call, the median of several rounds that alternate between the cases, beside the bare
calls of the bindings, and CuPy's where it is installed and sees a GPU. Managed memory: 64 MiB at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gpufleet as gf

MIB = 1 << 20
ROUNDS = 15
Case = tuple[Callable[[], Any], int]
"""What is called, and how often in a round."""


def measure(cases: dict[str, Case], settle: Callable[[], Any]) -> dict[str, float]:
    """Return the microseconds of one call of each, the median of the rounds."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(ROUNDS + 1):
        for name, (call, count) in cases.items():
            settle()
            call()  # another case may have emptied its pool
            began = time.perf_counter()
            for _ in range(count):
                call()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - began) / count * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def device_cases(context: gf.Context, nbytes: int, count: int) -> dict[str, Case]:
    driver, stream, plain = context.driver, context.stream(), gf.PlainAllocator()
    raw, size = driver.raw, f"{nbytes / MIB:g} MiB"

    def bare_pool() -> None:
        raw.cuMemFreeAsync(
            raw.cuMemAllocFromPoolAsync(nbytes, context.heap.pool, stream.handle)[1], stream.handle
        )

    def bare_plain() -> None:
        raw.cuMemFree(raw.cuMemAlloc(nbytes)[1])

    def after_use() -> None:
        buffer = context.alloc(nbytes)
        buffer.used_on(stream)
        buffer.close()

    return {
        f"bindings: cuMemAllocFromPoolAsync, free, {size}": (bare_pool, count),
        f"alloc, close, {size}": (lambda: context.alloc(nbytes).close(), count),
        f"alloc(stream=), close, {size}": (lambda: context.alloc(nbytes, stream=stream).close(), count),
        f"alloc, used on a stream, close, {size}": (after_use, count),
        f"bindings: cuMemAlloc, cuMemFree, {size}": (bare_plain, 20),
        f"alloc(allocator=PlainAllocator()), close, {size}": (
            lambda: context.alloc(nbytes, allocator=plain).close(),
            20,
        ),
    }


def host_cases(context: gf.Context, nbytes: int) -> dict[str, Case]:
    raw, size = context.driver.raw, f"{nbytes // MIB} MiB"
    array = np.ones(nbytes, "u1")

    def bare_pinned() -> None:
        raw.cuMemFreeHost(raw.cuMemHostAlloc(nbytes, 1)[1])

    def bare_register() -> None:
        raw.cuMemHostRegister(array.ctypes.data, nbytes, 1)
        raw.cuMemHostUnregister(array.ctypes.data)

    def pin_anew() -> None:
        gf.pinned(nbytes, context=context).close()
        gf.trim_pinned(context.driver)

    return {
        f"bindings: cuMemHostAlloc, cuMemFreeHost, {size}": (bare_pinned, 1),
        f"pinned, not from the pool, {size}": (pin_anew, 1),
        f"pinned, close, from the pool, {size}": (lambda: gf.pinned(nbytes, context=context).close(), 100),
        f"bindings: cuMemHostRegister, unregister, {size}": (bare_register, 1),
        f"registered(array), close, {size}": (lambda: gf.registered(array, context=context).close(), 1),
    }


def managed_cases(context: gf.Context, buffer: gf.ManagedBuffer) -> dict[str, Case]:
    size = f"{buffer.nbytes // MIB} MiB"

    def there_and_back() -> None:
        buffer.prefetch(context.device)
        buffer.prefetch("host")

    return {f"managed: prefetch to the device and back, {size}": (there_and_back, 1)}


def cupy_cases(device: gf.Device, nbytes: int, pinned_bytes: int) -> dict[str, Case]:
    """CuPy's own for the same, if it is there."""
    try:
        import cupy
    except ImportError:
        return {}
    cupy.cuda.Device(device.ordinal).use()
    pool, pinned = cupy.cuda.MemoryPool(), cupy.cuda.PinnedMemoryPool()
    asynchronous = cupy.cuda.MemoryAsyncPool()
    stream = cupy.cuda.Stream(non_blocking=True)

    def in_stream() -> None:
        with stream:
            asynchronous.malloc(nbytes)

    return {
        f"CuPy: MemoryPool.malloc, {nbytes / MIB:g} MiB": (lambda: pool.malloc(nbytes), 1000),
        f"CuPy: MemoryAsyncPool.malloc, {nbytes / MIB:g} MiB": (in_stream, 1000),
        f"CuPy: PinnedMemoryPool.malloc, {pinned_bytes // MIB} MiB": (
            lambda: pinned.malloc(pinned_bytes),
            100,
        ),
        f"CuPy: alloc_pinned_memory, not from a pool, {pinned_bytes // MIB} MiB": (
            lambda: cupy.cuda.PinnedMemory(pinned_bytes),
            1,
        ),
    }


def copy_gigabytes(context: gf.Context, nbytes: int) -> dict[str, float]:
    """Return GB/s of copies in with `stream=`, by the kind of host memory."""
    found = {}
    pageable = np.ones(nbytes, "u1")
    with (
        context.stream() as stream,
        context.alloc(nbytes) as buffer,
        gf.pinned(pageable, context=context) as pinned,
    ):
        for name, source in (("pinned", pinned), ("pageable, staged", pageable)):
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                buffer.copy_from(source, stream=stream)
                stream.synchronize()
                times.append(time.perf_counter() - began)
            found[f"copy in, {name}, {nbytes // MIB} MiB"] = nbytes / statistics.median(times) / 1e9
    return found


def leak(context: gf.Context, rounds: int) -> int:
    """Allocate, make a stream, record an event, `rounds` times; return how many bytes or objects stayed."""
    resident = resident_bytes()
    for number in range(rounds + rounds // 10):
        if number == rounds // 10:  # what is made once is there now
            gc.collect()
            context.trim_memory()
            free, objects, resident = context.memory_info()[0], len(gc.get_objects()), resident_bytes()
        with context.stream() as stream, context.alloc(4096 + number % 7 * 1024, stream=stream) as buffer:
            buffer.fill(1, stream=stream).close()
            event = stream.record()
            context.main_stream.wait(event)
            event.close()
    gc.collect()
    context.trim_memory()
    lost = free - context.memory_info()[0]
    new = len(gc.get_objects()) - objects
    grown = resident_bytes() - resident
    print(
        f"{rounds} rounds left {lost} bytes on the device, {new} objects, {grown / MIB:.1f} MiB on the host"
    )
    return lost + max(new - 100, 0) + max(grown - rounds * 100, 0)  # a leak of any kind takes more a round


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--leak", type=int, metavar="ROUNDS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = gf.devices(options.driver)[0]
    context = device.retain_primary_context()
    if options.leak:
        stayed = leak(context, options.leak)
        context.close()
        sys.exit(stayed > 0)
    pinned_bytes = 16 * MIB if device.is_virtual else 256 * MIB
    with context:
        cases = device_cases(context, MIB, 200) | device_cases(context, 64 * MIB, 200)
        if not device.is_virtual:
            cases |= cupy_cases(device, MIB, pinned_bytes)
        results = measure(cases | host_cases(context, pinned_bytes), context.synchronize)
        with context.alloc_managed(32 * MIB) as buffer:
            buffer.array[:] = 1
            results |= measure(managed_cases(context, buffer), context.synchronize)
        speeds = copy_gigabytes(context, 32 * MIB)
    for name, value in results.items():
        print(f"{name:62} {value:12.2f} us")
    for name, value in speeds.items():
        print(f"{name:62} {value:12.2f} GB/s")
    if options.json:
        machine = {"device": device.name, "python": platform.python_version(), "cpu": platform.processor()}
        options.json.write_text(
            json.dumps(
                {"machine": machine, "microseconds": results, "gigabytes_per_second": speeds}, indent=1
            )
        )
    gf.trim_pinned(context.driver)
    context.close()


if __name__ == "__main__":
    main()
