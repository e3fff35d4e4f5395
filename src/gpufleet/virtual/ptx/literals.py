"""Literals and constant expressions (PTX ISA 4.5), and their bits in a given type.

Integer expressions are 64 bits wide, signed unless a literal has the suffix U or does not fit; the
use truncates them silently, as ptxas does. Floating-point literals are doubles unless written 0f.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from gpufleet.virtual.ptx.cursor import Cursor
from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.scalars import SIZES, is_float
from gpufleet.virtual.ptx.tokens import integer

_MASK = (1 << 64) - 1
_DECIMAL_FLOAT = re.compile(r"\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+")
_NESTING = 30
_OPERAND_ENDS = frozenset(",;]})")


def floating(token: str) -> float | None:
    """Return the value of a floating-point literal, or None if the token is not one."""
    if token[:2] in ("0f", "0F"):
        return float(struct.unpack("<f", int(token[2:], 16).to_bytes(4, "little"))[0])
    if token[:2] in ("0d", "0D"):
        return float(struct.unpack("<d", int(token[2:], 16).to_bytes(8, "little"))[0])
    if _DECIMAL_FLOAT.fullmatch(token):
        return float(token)
    return None


def literal_bits(cursor: Cursor, type: str) -> int:
    """Read a constant expression as the bit pattern of `type`.

    Raises `PtxError` where ptxas says "arguments mismatch": an integer for a float or the reverse.
    """
    exact = _exact_bits(cursor, type)
    if exact is not None:
        return exact
    line = cursor.line
    value = _lone_integer(cursor)
    if value is None:
        value = expression(cursor)
    if type == "pred":
        if isinstance(value, float):
            raise invalid("a floating-point literal stands where a predicate is expected", line)
        return int(value != 0)
    if isinstance(value, float):
        if type == "f32":
            return _float_bits(value)
        if type == "f64":
            return int.from_bytes(struct.pack("<d", value), "little")
        raise invalid(f"a floating-point literal stands where a {type} is expected", line)
    if is_float(type):
        raise invalid(f"an integer literal stands where a {type} is expected", line)
    return value & ((1 << 8 * SIZES[type]) - 1)


def expression(cursor: Cursor) -> int | float:
    """Read a constant expression of literals (no symbols)."""
    try:
        return _conditional(cursor, 0)
    except (OverflowError, ZeroDivisionError, ValueError, TypeError):
        raise cursor.error("cannot evaluate the constant expression") from None


def _exact_bits(cursor: Cursor, type: str) -> int | None:
    """Bits written as 0f or 0d keep the payload of a NaN, which a round trip through float may not."""
    token = cursor.peek()
    if token[:2] in ("0f", "0F") and type in ("f32", "b32"):
        cursor.next()
        return int(token[2:], 16)
    if token[:2] in ("0d", "0D") and type in ("f64", "b64"):
        cursor.next()
        return int(token[2:], 16)
    return None


def _lone_integer(cursor: Cursor) -> int | float | None:
    """Read the common case, a literal that ends the operand, without descending through the levels."""
    if cursor.peek(1) not in _OPERAND_ENDS:
        return None
    value = integer(cursor.peek())
    if value is not None:
        cursor.position += 1
    return value


def _float_bits(value: float) -> int:
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return 0xFF800000 if value < 0 else 0x7F800000


def _wrap(value: int) -> int:
    """Keep 64 bits: as s64 where it fits, else the pattern as u64."""
    if -(1 << 63) <= value <= _MASK:
        return value
    return value & _MASK


def _conditional(cursor: Cursor, depth: int) -> int | float:
    condition = _binary(cursor, 0, depth)
    if not cursor.accept("?"):
        return condition
    when_true = _conditional(cursor, depth + 1)
    cursor.expect(":")
    when_false = _conditional(cursor, depth + 1)
    return when_true if condition else when_false


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {"<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b)}
    | {"<=": lambda a, b: int(a <= b), ">=": lambda a, b: int(a >= b)},
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": _divide, "%": lambda a, b: a - b * _divide(a, b)},
)


def _binary(cursor: Cursor, level: int, depth: int) -> int | float:
    if level == len(_LEVELS):
        return _unary(cursor, depth)
    operators = _LEVELS[level]
    left = _binary(cursor, level + 1, depth)
    while cursor.peek() in operators:
        operator = operators[cursor.next()]
        right = _binary(cursor, level + 1, depth)
        if isinstance(left, float) or isinstance(right, float):
            raise cursor.error("floating-point literals cannot be combined")
        left = _wrap(operator(left, right))
    return left


def _unary(cursor: Cursor, depth: int) -> int | float:
    if depth > _NESTING:
        raise cursor.error("the constant expression is nested too deeply")
    token = cursor.next()
    if token == "-":
        value = _unary(cursor, depth + 1)
        return -value if isinstance(value, float) else _wrap(-value)
    if token == "+":
        return _unary(cursor, depth + 1)
    if token in ("!", "~"):
        operand = _integer_operand(cursor, depth)
        return int(not operand) if token == "!" else _wrap(~operand)
    if token == "(":
        return _parenthesis(cursor, depth)
    if token == "WARP_SZ":
        return 32
    whole = integer(token)
    number = floating(token) if whole is None else whole
    if number is None:
        cursor.position -= 1
        raise cursor.error("expected a constant")
    return number


def _parenthesis(cursor: Cursor, depth: int) -> int | float:
    if cursor.peek() in (".s64", ".u64") and cursor.peek(1) == ")":
        unsigned = cursor.next() == ".u64"
        cursor.expect(")")
        operand = _integer_operand(cursor, depth) & _MASK
        return operand if unsigned or operand < 1 << 63 else operand - (1 << 64)
    value = _conditional(cursor, depth + 1)
    cursor.expect(")")
    return value


def _integer_operand(cursor: Cursor, depth: int) -> int:
    value = _unary(cursor, depth + 1)
    if isinstance(value, float):
        raise cursor.error("expected an integer constant")
    return value
