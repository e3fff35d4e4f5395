"""Calls of device functions."""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.ptx.syntax import Instruction


def _call(low: Lowering, instruction: Instruction) -> None:
    raise low.unit.refuse(instruction)


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {"call": _call}
"""Calls, by opcode."""
