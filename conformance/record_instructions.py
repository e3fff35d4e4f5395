"""Record what a GPU computes: `python conformance/record_instructions.py OUTPUT_DIR`.

Runs every kernel of instruction_kernels/ twice and stores inputs and outputs in one file, named after the
GPU and the driver. Needs numpy, cuda-bindings 13 and a GPU of compute capability 9.0; not gpufleet. A kernel
that faults, or runs for ten seconds, costs its process only: the rest goes on in a new one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from instruction_kernels import Kernel, all_kernels
from instruction_kernels.recording import Recording

PATIENCE = 10  # seconds for one kernel
STACK = 16 << 10  # bytes per thread, for recursion and alloca


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", nargs="?", type=pathlib.Path, help="folder for the file")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the kernels' names")
    parser.add_argument("--from", dest="first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kernels = [kernel for kernel in all_kernels() if options.only in kernel.name]
    if not kernels:
        parser.error(f"no kernel's name contains {options.only!r}; --list prints them")
    if options.list:
        print("\n".join(kernel.name for kernel in kernels))
    elif options.journal:
        run_here(kernels, options.first, options.journal)
    elif options.output:
        record(kernels, options)
    else:
        parser.error("an output folder is needed")


# The recorder's own process: it never calls the driver itself


def record(kernels: list[Kernel], options: argparse.Namespace) -> None:
    began = time.perf_counter()
    recording = Recording({})
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        while done < len(kernels):
            journal = pathlib.Path(folder) / f"from{done}"
            words = [sys.executable, __file__, "--from", str(done), "--journal", str(journal)]
            code = subprocess.run([*words, "--only", options.only]).returncode
            done += take(recording, kernels[done:], journal)
            if not recording.about:
                sys.exit("nothing was recorded: the driver could not be initialised")
            if code and done < len(kernels):
                why = "no end" if code == -signal.SIGALRM else f"the process ended with {code}"
                recording.failures[kernels[done].name] = why
                done += 1
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / file_name(recording.about)
    recording.save(path)
    seconds = time.perf_counter() - began
    print(f"{len(recording.answers)} kernels in {path}, {path.stat().st_size} bytes, {seconds:.0f} s")
    for name, why in recording.failures.items():
        print(f"failed: {name}: {why}")
    for name in recording.unstable:
        print(f"unstable: {name}")


def take(recording: Recording, kernels: list[Kernel], journal: pathlib.Path) -> int:
    """Read what a child process has written; returns the number of kernels it has done with."""
    done = 0
    with journal.open("rb") if journal.exists() else tempfile.TemporaryFile() as file:
        for line in file:
            entry = json.loads(line)
            if "about" in entry:
                recording.about = entry["about"]
                continue
            if "error" in entry:
                recording.failures[kernels[done].name] = entry["error"]
            else:
                recording.add(kernels[done], file.read(entry["bytes"]))
                if not entry["stable"]:
                    recording.unstable.append(kernels[done].name)
            done += 1
    return done


def file_name(about: dict[str, Any]) -> str:
    gpu = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower().replace("nvidia", "")).strip("-")
    return f"{gpu}-driver-{about['driver'].split('.')[0]}-instructions.npz"


# A child process: runs kernels until one of them ends it


def run_here(kernels: list[Kernel], first: int, journal: pathlib.Path) -> None:
    from cuda.bindings import driver

    with journal.open("wb") as file:
        file.write(json.dumps({"about": open_gpu(driver)}).encode() + b"\n")
        for kernel in kernels[first:]:
            file.flush()
            signal.alarm(PATIENCE)
            try:
                output, again = run(driver, kernel), run(driver, kernel)
            except Refused as error:
                file.write(json.dumps({"error": str(error)}).encode() + b"\n")
                continue
            entry = {"bytes": len(output), "stable": output == again}
            file.write(json.dumps(entry).encode() + b"\n" + output)


class Refused(Exception):
    """The driver does not take a kernel's PTX."""


def open_gpu(driver: Any) -> dict[str, str]:
    """Make a context current, and say on what."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    check(driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, STACK))
    name = check(driver.cuDeviceGetName(100, device)).split(b"\0")[0].decode().strip()
    try:
        version = pathlib.Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", version)
        number = found[1] if found else "unknown"
    except OSError:
        number = "unknown"
    return {"gpu": name, "driver": number, "recorded": time.strftime("%Y-%m-%d")}


def run(driver: Any, kernel: Kernel) -> bytes:
    """Run a kernel once in the current context; anything that fails but its PTX ends the process."""
    code, loaded = driver.cuModuleLoadData(kernel.ptx.encode() + b"\0")
    if int(code):
        raise Refused(f"cuModuleLoadData answers {code.name}")
    function = check(driver.cuModuleGetFunction(loaded, b"k"))
    start = kernel.start or bytes(kernel.output_bytes)
    pointers = [upload(driver, data) for data in (start, *(array.tobytes() for array in kernel.inputs))]
    arguments = tuple(map(int, pointers)), (ctypes.c_void_p,) * len(pointers)
    grid, block = kernel.lanes // kernel.block, kernel.block
    launch = function, grid, 1, 1, block, 1, 1, kernel.dynamic_shared, 0, arguments, 0
    check(driver.cuLaunchKernel(*launch))
    check(driver.cuCtxSynchronize())
    output = bytearray(kernel.output_bytes)
    check(driver.cuMemcpyDtoH(output, pointers[0], len(output)))
    for pointer in pointers:
        check(driver.cuMemFree(pointer))
    check(driver.cuModuleUnload(loaded))
    return bytes(output)


def upload(driver: Any, data: bytes) -> Any:
    pointer = check(driver.cuMemAlloc(max(len(data), 1)))
    check(driver.cuMemcpyHtoD(pointer, data, len(data)))
    return pointer


def check(answer: tuple[Any, ...]) -> Any:
    code, *values = answer
    if int(code):
        sys.exit(f"the driver answers {code.name}")
    return values[0] if values else None


if __name__ == "__main__":
    main()
