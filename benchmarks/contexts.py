"""What entering and leaving a context costs, against the bindings alone, in one run.

    python benchmarks/contexts.py [--driver nvidia|virtual] [--json FILE]

CuPy and PyTorch stand in the same table where they are installed and see a GPU. Times are microseconds
per call, the median of nine rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gpufleet as gf

ROUNDS, CALLS = 9, 20_000


def microseconds(work: Callable[[int], None]) -> float:
    """Return the median time of one of `work`'s repetitions."""
    work(CALLS // 10)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work(CALLS)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def bare(context: gf.Context) -> Callable[[int], None]:
    push, pop, handle = (
        context.driver.raw.cuCtxPushCurrent,
        context.driver.raw.cuCtxPopCurrent,
        context.handle,
    )

    def work(calls: int) -> None:
        for _ in range(calls):
            push(handle)
            pop()

    return work


def with_block(manager: object) -> Callable[[int], None]:
    def work(calls: int) -> None:
        for _ in range(calls):
            with manager:  # type: ignore[attr-defined]
                pass

    return work


def push_pop(context: gf.Context) -> Callable[[int], None]:
    def work(calls: int) -> None:
        for _ in range(calls):
            context.push()
            context.pop()

    return work


def creation(device: gf.Device) -> float:
    """Return the median time to make and close a green context; the primary one is there."""
    times = []
    for _ in range(100):
        start = time.perf_counter()
        device.create_green_context(sm_count=1).close()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = gf.devices(options.driver)[0]
    context = device.create_context()
    primary = device.retain_primary_context()
    green = device.create_green_context(sm_count=1)
    results = {
        "bindings: push + pop": microseconds(bare(context)),
        "with context": microseconds(with_block(context)),
        "context.push, context.pop": microseconds(push_pop(context)),
        "with green context": microseconds(with_block(green)),
        "create + close green context": creation(device),
    }
    for each in (green, primary, context):
        each.close()
    if not device.is_virtual:
        results |= peers()
    for name, value in results.items():
        print(f"{name:28} {value:7.2f} us")
    if options.json:
        machine = {"device": device.name, "python": platform.python_version(), "cpu": platform.processor()}
        options.json.write_text(json.dumps({"machine": machine, "microseconds": results}, indent=1))


def peers() -> dict[str, float]:
    """Time the same in other libraries, where they are there."""
    found = {}
    try:
        import cupy

        found["CuPy: with Device"] = microseconds(with_block(cupy.cuda.Device(0)))
    except ImportError:
        pass
    try:
        import torch

        found["PyTorch: with device"] = microseconds(with_block(torch.cuda.device(0)))
    except ImportError:
        pass
    return found


if __name__ == "__main__":
    main()
