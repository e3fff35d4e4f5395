"""The fast engine: PTX to machine code through LLVM, a warp as a vector.

How a kernel becomes code, file by file: nodes.py orders the flow graph, shapes.py finds what is
uniform, plan.py chooses the vectors' length. converged.py and diverged.py generate the two forms of
code with the help of lowering.py and its tables (arithmetic.py, floating.py, approx.py, convert.py,
memory.py, atomics.py, warp.py, calls.py); handover.py takes a warp's registers from one to the other.
kernel.py puts blocks and warps around them, llvm.py makes machine code, runtime.py runs it. variant.py
says when better code replaces what was compiled quickly, and optimiser.py makes it.
"""

from __future__ import annotations

from gpufleet.virtual.jit.engine import JitEngine

__all__ = ["JitEngine"]
