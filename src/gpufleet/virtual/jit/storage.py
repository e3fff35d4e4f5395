"""How PTX types appear in LLVM."""

from __future__ import annotations

from gpufleet.virtual.ptx.scalars import SIZES
from gpufleet.virtual.ptx.syntax import Body, Register

_FLOATS = {"f16": "half", "f32": "float", "f64": "double", "tf32": "float"}


def scalar_type(ptx: str) -> str:
    """The LLVM type in which instructions compute with a PTX type; bfloat16 and packed types are bits."""
    if ptx == "pred":
        return "i1"
    return _FLOATS.get(ptx) or f"i{8 * SIZES[ptx]}"


def storage_types(body: Body) -> list[str]:
    """The LLVM type that each register is kept in: what most instructions write it as.

    The newest PTX declares only .b32 and .b64 registers; a floating-point value that is kept as an
    integer would travel between register files in scalar code.
    """
    types = [_plain(register) for register in body.registers]
    for instruction in body.instructions:
        for operand, shape in zip(instruction.operands, instruction.operation.shapes or (), strict=False):
            if (
                shape.destination
                and shape.type in ("f32", "f64")
                and isinstance(operand, Register)
                and SIZES[operand.type] == SIZES[shape.type]
            ):
                types[operand.index] = scalar_type(shape.type)
    return types


def _plain(register: Register) -> str:
    if register.type in ("f32", "f64"):
        return scalar_type(register.type)
    return "i1" if register.type == "pred" else f"i{8 * SIZES[register.type]}"
