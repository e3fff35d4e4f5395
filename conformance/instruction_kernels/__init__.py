"""Small kernels that cover PTX's instructions, one family a file, with edge values as inputs.

`all_kernels()` makes them; `record_instructions.py` runs them on a GPU and stores inputs and outputs, and
tests/virtual/test_instructions.py holds both engines to what the GPU answered.
"""

from __future__ import annotations

from . import atomics, comparisons, control, conversions, floats, halves, integers, memory, video, warps
from .kernel import Bound, Kernel

FAMILIES = (integers, floats, halves, comparisons, conversions, memory, atomics, warps, control, video)


def all_kernels() -> list[Kernel]:
    """Make every kernel, in the same order each time."""
    return [kernel for family in FAMILIES for kernel in family.kernels()]


__all__ = ["FAMILIES", "Bound", "Kernel", "all_kernels"]
