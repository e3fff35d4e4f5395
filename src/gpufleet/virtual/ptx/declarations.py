"""Declarations of variables, parameters and registers (PTX ISA 5.4), with their initial values."""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet.virtual.ptx.cursor import Cursor, is_name
from gpufleet.virtual.ptx.errors import invalid, unsupported
from gpufleet.virtual.ptx.literals import expression, literal_bits
from gpufleet.virtual.ptx.scalars import OPAQUE, SIZES
from gpufleet.virtual.ptx.syntax import Parameter, Prototype, Variable

LINKAGE = frozenset({".extern", ".visible", ".weak", ".common"})
SPACES = frozenset({".global", ".const", ".shared", ".local", ".param", ".tex"})
_LARGEST = 1 << 46
_MOST_REGISTERS = 1 << 20


@dataclass
class _Declared:
    """What stands before the name in a declaration."""

    space: str
    type: str = ""
    lanes: int = 1
    align: int = 0
    pointer: bool = False


def variables(cursor: Cursor, linkage: frozenset[str] = frozenset()) -> list[Variable]:
    """Read `.space .align 8 .b8 name[64] = {...}, other;` from the space on."""
    declared = _specifiers(cursor)
    if not declared.type:
        raise cursor.error("expected a type")
    found = []
    while True:
        line = cursor.line
        name = cursor.name("the name of a variable")
        count = _dimensions(cursor)
        item = SIZES[declared.type] * declared.lanes
        initial: bytes = b""
        relocations: tuple[tuple[int, str, int], ...] = ()
        if cursor.accept("="):
            initial, relocations = _initializer(cursor, declared.type)
            if count is None:
                count = -(-len(initial) // item)
        size = item * (1 if count == () else count or 0)
        if size > _LARGEST or len(initial) > size:
            raise invalid(f"the size of {name!r} does not fit", line)
        found.append(
            Variable(
                name,
                declared.space,
                size,
                declared.align or item,
                initial,
                relocations,
                visible=bool(linkage & {".visible", ".weak", ".common"}),
                external=".extern" in linkage,
            )
        )
        if not cursor.accept(","):
            break
    cursor.expect(";")
    return found


def parameters(cursor: Cursor) -> tuple[Parameter, ...]:
    """Read a parenthesised list of `.param` and `.reg` declarations; places each as the driver does."""
    cursor.expect("(")
    found: list[Parameter] = []
    offset = 0
    while not cursor.accept(")"):
        if found:
            cursor.expect(",")
        register = cursor.peek() == ".reg"
        declared = _specifiers(cursor)
        if declared.space not in ("param", "reg") or not declared.type:
            raise cursor.error("expected a parameter")
        name = cursor.name("the name of a parameter")
        count = _dimensions(cursor)
        item = SIZES[declared.type] * declared.lanes
        size = item * (1 if count == () else count or 0)
        if size > _LARGEST:
            raise cursor.error("the parameter is too large")
        align = declared.align or item
        offset = -(-offset // align) * align
        found.append(Parameter(name, declared.type, size, align, offset, declared.pointer, register))
        offset += size
    return tuple(found)


def prototype(cursor: Cursor) -> Prototype:
    """Read `.callprototype (results) _ (parameters) .noreturn` from the results on, with its semicolon."""
    results: tuple[Parameter, ...] = ()
    if cursor.peek() == "(":
        results = parameters(cursor)
    cursor.name("'_'")
    arguments = parameters(cursor) if cursor.peek() == "(" else ()
    noreturn = False
    while not cursor.accept(";"):
        token = cursor.next()
        noreturn = noreturn or token == ".noreturn"
        if token == ".abi_preserve" or token == ".abi_preserve_control":
            cursor.integer()
        elif token != ".noreturn":
            cursor.position -= 1
            raise cursor.error("expected ';'")
    return Prototype(results, arguments, noreturn)


def registers(cursor: Cursor) -> list[tuple[str, str, int]]:
    """Read `.reg .b32 %r<9>, %x;` from `.reg` on, as (name, type, lanes)."""
    declared = _specifiers(cursor)
    if declared.space != "reg" or not declared.type:
        raise cursor.error("expected the type of a register")
    found: list[tuple[str, str, int]] = []
    while True:
        name = cursor.name("the name of a register")
        if cursor.accept("<"):
            count = cursor.integer()
            cursor.expect(">")
            if len(found) + count > _MOST_REGISTERS:
                raise cursor.error("too many registers")
            found += [(f"{name}{i}", declared.type, declared.lanes) for i in range(count)]
        else:
            found.append((name, declared.type, declared.lanes))
        if not cursor.accept(","):
            break
    cursor.expect(";")
    return found


def _specifiers(cursor: Cursor) -> _Declared:
    declared = _Declared(cursor.next().lstrip(".").split("::")[0])
    while cursor.peek().startswith("."):
        token = cursor.next()
        if token == ".align":
            align = cursor.integer("an alignment")
            if align == 0 or align & (align - 1) or align > 1 << 20:
                raise cursor.error("expected an alignment that is a power of two before this")
            # The alignment after .ptr is that of what the pointer points to.
            if not declared.pointer:
                declared.align = align
        elif token == ".ptr":
            declared.pointer = True
        elif token in (".v2", ".v4", ".v8"):
            declared.lanes = int(token[2:])
        elif token == ".attribute":
            _skip_parenthesis(cursor)
        elif token[1:] in SIZES and not declared.type:
            declared.type = token[1:]
        elif token not in SPACES:
            cursor.position -= 1
            raise cursor.error("unexpected word in a declaration")
    return declared


def _skip_parenthesis(cursor: Cursor) -> None:
    cursor.expect("(")
    cursor.skip_past(")")


def _dimensions(cursor: Cursor) -> int | tuple[()] | None:
    """Read `[4][8]` as 32; () without brackets, None for `[]`."""
    if cursor.peek() != "[":
        return ()
    total: int | None = 1
    while cursor.accept("["):
        if cursor.accept("]"):
            total = None
            continue
        count = expression(cursor)
        cursor.expect("]")
        if not isinstance(count, int) or count < 0 or count > _LARGEST:
            raise cursor.error("expected the number of elements before this")
        total = None if total is None else total * count
    return total


def _initializer(cursor: Cursor, type: str) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    if type in OPAQUE:
        raise unsupported(f"an initialised .{type}", cursor.line)
    data = bytearray()
    relocations: list[tuple[int, str, int]] = []
    depth = 0
    while True:
        if cursor.accept("{"):
            depth += 1
            continue
        if depth and cursor.accept("}"):
            depth -= 1
        else:
            _element(cursor, type, data, relocations)
        while depth and cursor.accept("}"):
            depth -= 1
        if depth == 0:
            break
        cursor.expect(",")
    return bytes(data), tuple(relocations)


def _element(cursor: Cursor, type: str, data: bytearray, relocations: list[tuple[int, str, int]]) -> None:
    size = SIZES[type]
    if is_name(cursor.peek()) and cursor.peek() != "WARP_SZ":
        if size != 8:
            raise unsupported(f"the address of {cursor.peek()!r} in a {type}", cursor.line)
        name = cursor.next()
        if name == "generic" and cursor.accept("("):
            name = cursor.name("a symbol")
            cursor.expect(")")
        addend = 0
        if cursor.peek() in ("+", "-"):
            value = expression(cursor)
            if not isinstance(value, int):
                raise cursor.error("expected an integer offset")
            addend = value
        relocations.append((len(data), name, addend))
        data += bytes(8)
        return
    if cursor.peek(1) == "(":
        raise unsupported("a part of an address in an initialiser", cursor.line)
    bits = literal_bits(cursor, type)
    data += bits.to_bytes(size, "little")
