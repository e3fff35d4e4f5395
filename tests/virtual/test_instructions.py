"""Both engines compute what a GPU computed: conformance/instruction_kernels/ and its recording.

Bit for bit, but for `.approx` instructions, which stay within the bounds that the PTX ISA states.
`python tests/virtual/test_instructions.py` prints the number of kernels, values and mismatches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "conformance"
sys.path.append(str(FOLDER))
sys.path.append(str(Path(__file__).parent / "interpreter"))
from instruction_kernels import Bound, Kernel, all_kernels  # noqa: E402
from instruction_kernels.recording import Recording, digest  # noqa: E402
from machine import Device  # noqa: E402

from gpufleet.virtual.interpreter import InterpreterEngine  # noqa: E402

RECORDED = FOLDER / "h200-driver-580-instructions.npz"
PART = 25
"""Kernels of one test: the JIT compiles each in a third of a second."""
KERNELS = {kernel.name: kernel for kernel in all_kernels()}


@pytest.fixture(scope="module")
def recording() -> Recording:
    if not RECORDED.exists():
        pytest.skip(f"{RECORDED.name} is not there: conformance/record_instructions.py makes it on a GPU")
    return Recording.load(RECORDED)


def jit() -> Any:
    from gpufleet.virtual.jit import JitEngine

    return JitEngine()


@pytest.mark.parametrize("make_engine", [InterpreterEngine, jit], ids=["interpreter", "jit"])
@pytest.mark.parametrize("first", range(0, len(KERNELS), PART))
def test_an_engine_computes_what_the_gpu_computed(recording: Recording, first: int, make_engine: Any) -> None:
    engine = make_engine()
    wrong = []
    for name, kernel in list(KERNELS.items())[first : first + PART]:
        if name in recording.answers:
            wrong += mismatches(kernel, recording, run(kernel, engine, recording.answers[name].inputs))
    assert not wrong, "\n".join(wrong)


def test_the_recording_is_of_these_kernels(recording: Recording) -> None:
    known = {name: digest(kernel) for name, kernel in KERNELS.items() if name not in recording.failures}
    assert recording.digests == known, "record again: conformance/record_instructions.py"
    assert not recording.unstable


def run(kernel: Kernel, engine: Any, inputs: tuple[np.ndarray[Any, Any], ...]) -> bytes:
    """Execute a kernel on an engine; returns its output."""
    device = Device.load(kernel.ptx, 1 << 24)
    device.engine = engine
    out = device.memory.alloc(kernel.output_bytes)
    pointers = [device.memory.upload(array) for array in inputs]
    grid, block = (kernel.lanes // kernel.block, 1, 1), (kernel.block, 1, 1)
    device.launch("k", grid, block, out, *pointers, shared=kernel.dynamic_shared)
    return device.memory.download(out, np.uint8, kernel.output_bytes).tobytes()


def mismatches(kernel: Kernel, recording: Recording, output: bytes) -> list[str]:
    """Say in words which rows differ from the GPU's."""
    found = []
    rows = zip(
        kernel.rows,
        kernel.output_rows(output),
        kernel.output_rows(recording.answers[kernel.name].output),
        kernel.bounds or (None,) * len(kernel.rows),
        strict=True,
    )
    for number, (type, ours, theirs, bound) in enumerate(rows):
        wrong = ours != theirs
        if number in kernel.races:
            continue
        if bound is not None:
            wrong &= ~within(type, ours, theirs, bound)
        lanes = np.flatnonzero(wrong)
        if len(lanes):
            lane = int(lanes[0])
            operands = ", ".join(
                f"{array[lane % len(array)]:#x}" for array in recording.answers[kernel.name].inputs
            )
            found.append(
                f"{kernel.name}, row {number} ({type}): {len(lanes)} of {kernel.lanes} lanes; lane {lane} of "
                f"({operands}) gives {ours[lane]:#x}, the GPU {theirs[lane]:#x}"
            )
    return found


def within(
    type: str, ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], bound: Bound
) -> np.ndarray[Any, Any]:
    """Say where two results may both be approximations of one number: twice the bound apart at most."""
    if type.endswith("x2"):
        halves = within(type[:-2], ours.view(np.uint16), theirs.view(np.uint16), bound)
        return halves.reshape(-1, 2).all(axis=1)
    a, b = number(type, ours), number(type, theirs)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= 2 * (bound.absolute + bound.relative * np.abs(b))
    return near | (a == b) | (np.isnan(a) & np.isnan(b))


def number(type: str, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if type == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(f"f{bits.dtype.itemsize}").astype(np.float64)


def main() -> None:
    recorded = Recording.load(RECORDED)
    engines = {"interpreter": InterpreterEngine, "jit": jit}
    for name in sys.argv[1:] or engines:
        make_engine = engines[name]
        engine, kernels, values, wrong = make_engine(), 0, 0, []
        for kernel in KERNELS.values():
            if kernel.name in recorded.answers:
                kernels, values = kernels + 1, values + len(kernel.rows) * kernel.lanes
                try:
                    wrong += mismatches(
                        kernel, recorded, run(kernel, engine, recorded.answers[kernel.name].inputs)
                    )
                except Exception as error:
                    wrong.append(f"{kernel.name}: {error}")
        print(f"{name}: {kernels} kernels, {values} values, {len(wrong)} rows differ")
        print("\n".join(f"  {line}" for line in wrong))


if __name__ == "__main__":
    main()
