"""The fundamental types of PTX (PTX ISA 5.2): their names, sizes and kinds.

A type is its name without the dot: "u32", "f64", "b8", "pred".
"""

from __future__ import annotations

_BY_SIZE = {
    1: "pred b8 u8 s8 e4m3 e5m2 ue8m0",
    2: "b16 u16 s16 f16 bf16 e4m3x2 e5m2x2 ue8m0x2",
    4: "b32 u32 s32 f32 f16x2 bf16x2 u16x2 s16x2 tf32",
    8: "b64 u64 s64 f64 f32x2 texref samplerref surfref",
    16: "b128",
}
SIZES: dict[str, int] = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
"""Bytes of each type; a predicate has none in memory, 1 stands for it."""

FLOATS = frozenset(
    {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "tf32", "f32x2", "e4m3", "e5m2", "ue8m0"}
    | {"e4m3x2", "e5m2x2", "ue8m0x2"}
)
SIGNED = frozenset({"s8", "s16", "s32", "s64", "s16x2"})
UNTYPED = frozenset({"b8", "b16", "b32", "b64", "b128"})
OPAQUE = frozenset({"texref", "samplerref", "surfref"})

WIDER = {"u8": "u16", "u16": "u32", "u32": "u64", "s8": "s16", "s16": "s32", "s32": "s64"}
"""The type of twice the size, for `mul.wide` and `mad.wide`."""


def is_float(name: str) -> bool:
    """Say whether values of this type are floating-point numbers."""
    return name in FLOATS


def is_signed(name: str) -> bool:
    """Say whether values of this type are two's complement integers."""
    return name in SIGNED


def fits(register: str, operand: str, wider: bool = False) -> bool:
    """Say whether a register of one type may stand where an instruction wants the other.

    Sizes must be equal, or the register may be larger where `wider` says so (ld, st, cvt: PTX ISA
    9.4.1); untyped registers match everything, floats match only floats (PTX ISA 9.2, table 26).
    """
    if register == "pred" or operand == "pred":
        return register == operand
    size, wanted = SIZES[register], SIZES[operand]
    if size < wanted or (size > wanted and not wider):
        return False
    if register in UNTYPED or operand in UNTYPED:
        return True
    return is_float(register) == is_float(operand)
