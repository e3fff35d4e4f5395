"""Which engine executes kernels on virtual devices?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from gpufleet.errors import GpufleetError
from gpufleet.virtual.engine import Engine, Executable
from gpufleet.virtual.ptx import Module, PtxError

CHOICES = ("interpreter", "jit", "auto")


def engine_from_environment() -> Engine:
    """Make the engine that ``GPUFLEET_ENGINE`` names.

    interpreter (if it is not set): NumPy; checks every access exactly. jit: LLVM; faster, of large
    kernels by far, but slow to compile and without some instructions. auto: the JIT, and the
    interpreter for kernels that the JIT does not know.

    Raises
    ------
    GpufleetError
        If it names none of them, or llvmlite is not installed.
    """
    name = os.environ.get("GPUFLEET_ENGINE") or CHOICES[0]
    if name not in CHOICES:
        raise GpufleetError(f"GPUFLEET_ENGINE is {name!r}: expected one of {', '.join(CHOICES)}")
    if name == "interpreter":
        return _interpreter()
    return _jit() if name == "jit" else FallbackEngine(_jit(), _interpreter())


class FallbackEngine:
    """The first engine that can carry out a kernel does."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self.name = f"{first.name}, else {second.name}"
        self._first, self._second = first, second

    def load(self, module: Module, kernel: str, symbols: Mapping[str, int]) -> Executable:
        """Prepare one kernel, saying so if the second engine had to."""
        try:
            return self._first.load(module, kernel, symbols)
        except PtxError as error:
            if error.code != "NOT_SUPPORTED":
                raise
            executable = self._second.load(module, kernel, symbols)
            warnings.warn(f"kernel {kernel!r} runs on the {self._second.name}: {error}", stacklevel=2)
            return executable


def _interpreter() -> Engine:
    from gpufleet.virtual.interpreter import InterpreterEngine

    return InterpreterEngine()


def _jit() -> Engine:
    try:
        from gpufleet.virtual.jit import JitEngine

        return JitEngine()
    except ImportError as error:
        raise GpufleetError(
            f"the JIT engine needs llvmlite ({error}): pip install 'gpufleet[jit]', or leave "
            "GPUFLEET_ENGINE unset for the interpreter"
        ) from error
