"""How fast copies between two devices are: `copy_from(buffer, stream=)` against bare `cuMemcpyPeerAsync`.

    python benchmarks/peers.py [--driver nvidia|virtual] [--json FILE]

Each round puts several copies into one stream and waits for the last, once with gpufleet and once with the
bindings, of the same two buffers with the same access, in alternating order. GB/s are the median of the
rounds; the ratio is gpufleet's to the bindings', the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
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
SIZES = {1: 256, 64: 16, 256: 8}
"""MiB of a copy, and how many are queued in a round."""
ROUNDS = {"nvidia": 25, "virtual": 5}


def measure(
    source: gf.DeviceBuffer, target: gf.DeviceBuffer, stream: gf.Stream, count: int
) -> dict[str, Any]:
    """Return GB/s of both ways, their ratio, and how long the host took to queue a copy."""
    raw, nbytes = stream.context.driver.raw, source.nbytes
    there, here = source.context.handle, target.context.handle

    def bare() -> None:
        raw.cuMemcpyPeerAsync(target.address, here, source.address, there, nbytes, stream.handle)

    def ours() -> None:
        target.copy_from(source, stream=stream)

    check(source, target, ours)
    ways = {"gpufleet": ours, "bindings": bare}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    queued: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS[stream.context.driver.name] + 1):
        for name in reversed(ways) if number % 2 else ways:
            began = time.perf_counter()
            for _ in range(count):
                ways[name]()
            submitted = time.perf_counter()
            stream.synchronize()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - began) / count)
                queued[name].append((submitted - began) / count)
    ratios = [theirs / mine for theirs, mine in zip(seconds["bindings"], seconds["gpufleet"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "gigabytes_per_second": {
            name: nbytes / statistics.median(each) / 1e9 for name, each in seconds.items()
        },
        "microseconds_to_queue": {name: statistics.median(each) * 1e6 for name, each in queued.items()},
    }


def check(source: gf.DeviceBuffer, target: gf.DeviceBuffer, copy: Callable[[], None]) -> None:
    """Copy once, which opens access, and see that all of it arrives."""
    data = np.random.default_rng(1).integers(0, 255, source.nbytes, "u1")
    source.copy_from(data)
    target.fill(0)
    copy()
    target.context.synchronize()
    source.context.synchronize()
    if not (target.to_numpy() == data).all():
        sys.exit("a copy did not arrive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    devices = gf.devices(options.driver)[:2]
    if len(devices) < 2:
        sys.exit("two devices are needed, one is visible")
    first, second = (device.create_context() for device in devices)
    access = {"0 to 1": devices[0].can_access(devices[1]), "1 to 0": devices[1].can_access(devices[0])}
    print(f"{devices[0].name}, two of them; access, tried with data: {access}")
    print(f"{'copy':34}{'ratio':>8}{'gpufleet':>12}{'bindings':>12}{'to queue one':>24}")
    results = {}
    for size, count in SIZES.items():
        with first.alloc(size * MIB) as source, second.alloc(size * MIB) as target:
            for whose, context in (("source", first), ("target", second)):
                with context.stream() as stream:
                    name = f"{size} MiB, stream of the {whose}"
                    found = results[name] = measure(source, target, stream, count)
                speed, queue = found["gigabytes_per_second"], found["microseconds_to_queue"]
                print(f"{name:34}{found['ratio']:8.3f}", end="")
                print(f"{speed['gpufleet']:7.1f} GB/s{speed['bindings']:7.1f} GB/s", end="")
                print(f"{queue['gpufleet']:11.1f} / {queue['bindings']:.1f} us")
    if options.json:
        machine = {
            "device": devices[0].name,
            "python": platform.python_version(),
            "cpu": platform.processor(),
        }
        options.json.write_text(
            json.dumps({"machine": machine, "access": access, "copies": results}, indent=1)
        )
    first.close()
    second.close()


if __name__ == "__main__":
    main()
