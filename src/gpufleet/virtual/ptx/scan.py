"""The first look at a function's body: where it ends, what it declares, that PTX has its opcodes.

This is all that loading a module does with a body; the tree is built at first use (bodies.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gpufleet.virtual.ptx import declarations
from gpufleet.virtual.ptx.cursor import Cursor, is_name
from gpufleet.virtual.ptx.errors import PtxError, invalid
from gpufleet.virtual.ptx.operations import operation
from gpufleet.virtual.ptx.scalars import SIZES
from gpufleet.virtual.ptx.syntax import Variable


@dataclass
class BodyScan:
    """What a body says without its tree."""

    declared: list[Variable] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    register_words: int = 0
    """Declared registers in units of 32 bits."""


class UniqueNames:
    """Numbers variables that are declared again in an inner scope: x, x#2, x#3; parameters come first."""

    def __init__(self, parameters: Iterable[str]) -> None:
        self._count = dict.fromkeys(parameters, 1)

    def __call__(self, name: str) -> str:
        """Return the unique name for one more declaration of `name`."""
        count = self._count[name] = self._count.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"


def scan_body(cursor: Cursor, parameters: Iterable[str]) -> BodyScan:
    """Read a body from its `{` to its `}`; raises `PtxError` for an opcode that PTX does not have."""
    scan = BodyScan()
    unique = UniqueNames(parameters)
    start = cursor.position
    cursor.expect("{")
    depth = 1
    texts = cursor.texts
    known: set[str] = set()
    while depth:
        token = texts[cursor.position]
        if token in known and texts[cursor.position + 1][:1] not in (".", ":"):
            # Most of a body: an opcode that was looked up before.
            cursor.skip_past(";")
        elif token == "{":
            depth += 1
            cursor.position += 1
        elif token == "}":
            depth -= 1
            cursor.position += 1
        elif token == "":
            raise cursor.error("expected '}'")
        elif token.startswith("."):
            _directive(cursor, scan, unique)
        elif token != "@" and cursor.peek(1) == ":":
            cursor.position += 2
            if cursor.peek() in (".branchtargets", ".callprototype", ".calltargets"):
                cursor.skip_past(";")
        else:
            skip_guard(cursor)
            line = cursor.line
            text = read_opcode(cursor)
            try:
                operation(text)
            except PtxError as error:
                raise invalid(error.message, line) from None
            known.add(text)
            cursor.skip_past(";")
    scan.names = frozenset(cursor.texts[start : cursor.position])
    return scan


def skip_guard(cursor: Cursor) -> None:
    """Read `@p` or `@!p`, if there is one."""
    if cursor.accept("@"):
        cursor.accept("!")
        cursor.name("a predicate")


def read_opcode(cursor: Cursor) -> str:
    """Read an opcode; its suffixes may stand apart from it."""
    text = cursor.name("an instruction")
    while cursor.peek().startswith(".") and is_name(cursor.peek()[1:]):
        text += cursor.next()
    return text


def skip_location(cursor: Cursor) -> tuple[int, int]:
    """Read `.loc 1 7 3, function_name f, inlined_at 1 9 3`; returns file and line."""
    cursor.expect(".loc")
    file, line = cursor.integer("a file number"), cursor.integer("a line number")
    cursor.integer("a column")
    while cursor.peek() == "," and cursor.peek(1) in ("function_name", "inlined_at"):
        cursor.next()
        if cursor.next() == "function_name":
            cursor.name()
            if cursor.accept("+"):
                cursor.integer()
        else:
            for _ in range(3):
                cursor.integer()
    return file, line


def skip_file(cursor: Cursor) -> tuple[int, str]:
    """Read `.file 1 "path", timestamp, size`; returns the number and the path."""
    cursor.expect(".file")
    index = cursor.integer("a file number")
    path = cursor.next()
    if not path.startswith('"'):
        raise cursor.error("expected a file name before this")
    while cursor.peek() == "," and cursor.peek(1).isdigit():
        cursor.position += 2
    return index, path.strip('"')


def _directive(cursor: Cursor, scan: BodyScan, unique: UniqueNames) -> None:
    token = cursor.peek()
    space = token[1:].split("::")[0]
    if token == ".loc":
        skip_location(cursor)
    elif token == ".file":
        skip_file(cursor)
    elif token == ".reg":
        for _, type, lanes in declarations.registers(cursor):
            scan.register_words += -(-SIZES[type] // 4) * lanes if type != "pred" else 0
    elif space in ("shared", "local", "param"):
        for variable in declarations.variables(cursor):
            scan.declared.append(_renamed(variable, unique(variable.name)))
    elif token == ".extern":
        cursor.next()
        for variable in declarations.variables(cursor, frozenset({".extern"})):
            scan.declared.append(_renamed(variable, unique(variable.name)))
    else:
        cursor.skip_past(";")


def _renamed(variable: Variable, name: str) -> Variable:
    return variable if variable.name == name else replace(variable, name=name)
