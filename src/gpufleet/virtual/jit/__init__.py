"""The fast engine: PTX to machine code through LLVM, a warp as a vector.

How a kernel becomes code, file by file: nodes.py orders the flow graph, shapes.py finds what is
uniform, converged.py and diverged.py generate the two forms of code with the help of lowering.py and
its tables (arithmetic.py, floating.py, approx.py, convert.py, memory.py, atomics.py, warp.py,
calls.py), kernel.py puts blocks and warps around them, llvm.py makes machine code, runtime.py runs it.
"""

from __future__ import annotations

from gpufleet.virtual.jit.engine import JitEngine

__all__ = ["JitEngine"]
