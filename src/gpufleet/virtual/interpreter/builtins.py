"""Functions that the CUDA runtime provides to kernels: printf, and the end of a failed assertion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.virtual.interpreter.code import Block, End
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.syntax import CallTarget, Function, Instruction

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.decode import Decoder


def decode_builtin(
    decoder: Decoder, instruction: Instruction, call: CallTarget, function: Function, following: Block
) -> End:
    """Return how a call of a function without a body leaves its block."""
    raise unsupported(f"a call of {function.name!r}, which is declared but not defined", instruction.line)
