"""How long the JIT engine takes to make a kernel ready: every kernel of the test corpus.

    python benchmarks/compile.py [--target 90] [--rounds 3] [--all] [--json FILE]

From a parsed module to code that can be launched, in milliseconds of processor time: analysed,
generated, compiled and linked.

* parse: the module's text, once for all its kernels
* cold: compiled quickly, as an engine does at first
* part: compiling what runs warps whose lanes part, quickly, when that first happens
* best: compiled with all optimisation, as it is in the background for kernels that run for long
* disk: found in the cache on disk, which another process has filled

The process has compiled one kernel before, so what LLVM does once is not in the figures; "first"
is the whole of that first kernel in wall time, with the engine's import.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "ptx-corpus"
KINDS = ("parse", "cold", "part", "best", "disk")
Times = dict[str, dict[str, list[float]]]


def kernels(target: int) -> Iterator[tuple[str, str]]:
    """Texts of the corpus, with the names of their kernels."""
    from gpufleet.virtual.ptx import parse

    for path in sorted(CORPUS.glob(f"*.sm_{target}.ptx")):
        text = path.read_text()
        for name in parse(text).kernels:
            yield text, name


def ready(text: str, name: str, effort: str) -> tuple[float, float, float]:
    """Milliseconds to parse, to load, and to compile diverged code; raises for what is refused."""
    from gpufleet.virtual.jit import JitEngine
    from gpufleet.virtual.jit.llvm import Effort
    from gpufleet.virtual.ptx import parse

    times = [time.process_time()]
    module = parse(text)
    times.append(time.process_time())
    executable = JitEngine(Effort(effort)).load(module, name, dict.fromkeys(module.variables, 4096))
    times.append(time.process_time())
    executable.prepare_diverged(module.kernels[name].required_block or (256, 1, 1))
    times.append(time.process_time())
    parsed, loaded, diverged = ((b - a) * 1e3 for a, b in itertools.pairwise(times))
    return parsed, loaded, diverged


def measure(found: list[tuple[str, str]], rounds: int) -> Times:
    times: Times = {name: {kind: [] for kind in KINDS} for _, name in found}
    for _ in range(rounds):
        for text, name in found:
            row = times[name]
            os.environ["GPUFLEET_CACHE_DIR"] = ""
            for kind, value in zip(KINDS, ready(text, name, "quick"), strict=False):
                row[kind].append(value)
            row["best"].append(ready(text, name, "best")[1])
            with tempfile.TemporaryDirectory() as folder:
                os.environ["GPUFLEET_CACHE_DIR"] = folder
                ready(text, name, "quick")
                row["disk"].append(ready(text, name, "quick")[1])
    return times


def accepted(found: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those kernels that the engine carries out."""
    from gpufleet.virtual.ptx import PtxError

    os.environ["GPUFLEET_CACHE_DIR"] = ""
    result = []
    for text, name in found:
        try:
            ready(text, name, "quick")
        except PtxError as error:
            print(f"left out: {error}")
            continue
        result.append((text, name))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=int, choices=(75, 90, 120), default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="show every kernel")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    found = list(kernels(options.target))
    os.environ["GPUFLEET_CACHE_DIR"] = ""
    start = time.perf_counter()
    ready(*next(pair for pair in found if pair[1] == "vectoradd"), "quick")
    first = (time.perf_counter() - start) * 1e3
    times = measure(accepted(iter(found)), options.rounds)

    medians = {name: {k: statistics.median(v) for k, v in row.items()} for name, row in times.items()}
    if options.all:
        for name, row in sorted(medians.items(), key=lambda item: -item[1]["cold"]):
            print(f"{name:20}" + "".join(f"{kind:>8} {row[kind]:7.1f}" for kind in row))
    summary = {}
    for kind in KINDS:
        values = [row[kind] for row in medians.values()]
        worst = max(medians, key=lambda name: medians[name][kind])
        summary[kind] = {"median": statistics.median(values), "worst": max(values)}
        print(f"{kind}: median {statistics.median(values):.1f} ms, worst {max(values):.1f} ms ({worst})")
    print(f"first: {first:.0f} ms; {len(medians)} kernels, {options.rounds} rounds")
    if options.json:
        machine = {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))}
        report = {"machine": machine, "summary": summary, "first": first, "kernels": medians}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
