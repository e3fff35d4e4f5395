"""An engine that executes PTX with NumPy, many blocks at once, and checks every access."""

from __future__ import annotations

from gpufleet.virtual.interpreter.engine import InterpretedKernel, InterpreterEngine

__all__ = ["InterpretedKernel", "InterpreterEngine"]
