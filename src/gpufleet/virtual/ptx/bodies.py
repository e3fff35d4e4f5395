"""A function's body to its tree: statements, scopes, labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpufleet.virtual.ptx import declarations
from gpufleet.virtual.ptx.cursor import Cursor, is_name
from gpufleet.virtual.ptx.errors import PtxError, invalid
from gpufleet.virtual.ptx.flow import basic_blocks, continues, leaders
from gpufleet.virtual.ptx.operands import Named, OperandReader
from gpufleet.virtual.ptx.operations import operation
from gpufleet.virtual.ptx.scan import UniqueNames, read_opcode, skip_file, skip_location
from gpufleet.virtual.ptx.syntax import (
    Body,
    Instruction,
    Label,
    Location,
    Operand,
    Parameter,
    Prototype,
    Register,
    Symbol,
    Targets,
    Variable,
    Vector,
)
from gpufleet.virtual.ptx.tokens import Tokens


@dataclass
class ModuleNames:
    """What a body may refer to outside itself."""

    symbols: Mapping[str, str]
    """Space of every variable, and "code" for every function."""
    files: Mapping[int, str]


def read_body(tokens: Tokens, start: int, parameters: tuple[Parameter, ...], names: ModuleNames) -> Body:
    """Build the tree of the body whose `{` is token `start`; raises `PtxError` where it is malformed."""
    cursor = Cursor(tokens, start)
    try:
        return _BodyReader(cursor, parameters, names).read()
    except RecursionError:
        raise invalid("the text is nested too deeply", cursor.line) from None


@dataclass
class _Scope:
    """What the names between one pair of braces mean."""

    parent: _Scope | None
    names: dict[str, Named] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    """The index of the instruction that follows the label."""
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`.branchtargets` and `.calltargets`."""
    prototypes: dict[str, Prototype] = field(default_factory=dict)


class _BodyReader:
    def __init__(self, cursor: Cursor, parameters: tuple[Parameter, ...], names: ModuleNames) -> None:
        self.cursor = cursor
        self.names = names
        self.scope = _Scope(None)
        self.registers: list[Register] = []
        self.variables: dict[str, Variable] = {}
        self.unique = UniqueNames(p.name for p in parameters)
        self.instructions: list[Instruction] = []
        self.labels: dict[int, list[str]] = {}
        self.location: Location | None = None
        self.files = dict(names.files)
        self.jumps: list[tuple[Instruction, _Scope]] = []
        """Branches, whose labels are resolved when all are known."""
        self.operands = OperandReader(cursor, self._resolve, self._prototype)
        for parameter in parameters:
            if parameter.register:
                self._declare_register(parameter.name, parameter.type, 1)
            else:
                self.scope.names[parameter.name] = Symbol(parameter.name, "param")

    def read(self) -> Body:
        self.cursor.expect("{")
        root = self.scope
        self.scope = _Scope(root)
        while self.scope is not root:
            self._statement()
        self._end_with_return()
        starts = leaders(self.instructions, self.labels)
        for instruction, scope in self.jumps:
            self._resolve_labels(instruction, scope, starts)
        blocks = basic_blocks(self.instructions, starts, self.labels)
        return Body(self.instructions, self.registers, self.variables, blocks)

    # -------------------------------------------------------------------------------- statements

    def _statement(self) -> None:
        cursor = self.cursor
        token = cursor.peek()
        if token == "{":
            cursor.position += 1
            self.scope = _Scope(self.scope)
        elif token == "}":
            cursor.position += 1
            assert self.scope.parent is not None
            self.scope = self.scope.parent
        elif token.startswith("."):
            self._directive()
        elif is_name(token) and cursor.peek(1) == ":":
            self._label()
        else:
            self._instruction()

    def _instruction(self) -> None:
        cursor = self.cursor
        guard, negated = self._guard()
        line = cursor.line
        try:
            found = operation(read_opcode(cursor))
        except PtxError as error:
            raise invalid(error.message, line) from None
        instruction = Instruction(found, self.operands.read(found), guard, negated, line, self.location)
        if found.name in ("bra", "brx"):
            self.jumps.append((instruction, self.scope))
        self.instructions.append(instruction)

    def _guard(self) -> tuple[Register | None, bool]:
        cursor = self.cursor
        if not cursor.accept("@"):
            return None, False
        negated = cursor.accept("!")
        register = self._resolve(cursor.name("a predicate"))
        if not isinstance(register, Register) or register.type != "pred":
            cursor.position -= 1
            raise cursor.error("expected a predicate")
        return register, negated

    def _label(self) -> None:
        cursor = self.cursor
        name = cursor.next()
        cursor.expect(":")
        directive = cursor.peek()
        if directive in (".branchtargets", ".calltargets"):
            cursor.next()
            targets = [cursor.name("a label")]
            while cursor.accept(","):
                targets.append(cursor.name("a label"))
            cursor.expect(";")
            self.scope.tables[name] = tuple(targets)
        elif directive == ".callprototype":
            cursor.next()
            self.scope.prototypes[name] = declarations.prototype(cursor)
        else:
            if name in self.scope.labels:
                cursor.position -= 2
                raise cursor.error("the label is defined twice")
            self.scope.labels[name] = len(self.instructions)
            self.labels.setdefault(len(self.instructions), []).append(name)

    def _directive(self) -> None:
        cursor = self.cursor
        token = cursor.peek()
        if token == ".loc":
            file, line = skip_location(cursor)
            self.location = Location(self.files.get(file, f"file {file}"), line)
        elif token == ".file":
            index, path = skip_file(cursor)
            self.files[index] = path
        elif token == ".reg":
            for name, type, lanes in declarations.registers(cursor):
                self._declare_register(name, type, lanes)
        elif token.split("::")[0] in (".shared", ".local", ".param"):
            self._declare_variables(frozenset())
        elif token == ".extern":
            cursor.next()
            self._declare_variables(frozenset({".extern"}))
        elif token == ".pragma":
            cursor.skip_past(";")
        else:
            raise cursor.error("unexpected directive in a function")

    # ------------------------------------------------------------------------------------- names

    def _declare_register(self, name: str, type: str, lanes: int) -> None:
        parts = [Register(name, type, len(self.registers))]
        if lanes > 1:
            parts = [Register(f"{name}.{'xyzwabcd'[i]}", type, len(self.registers) + i) for i in range(lanes)]
        self.registers += parts
        self.scope.names[name] = parts[0] if lanes == 1 else Vector(tuple(parts))

    def _declare_variables(self, linkage: frozenset[str]) -> None:
        for variable in declarations.variables(self.cursor, linkage):
            name = self.unique(variable.name)
            self.scope.names[variable.name] = Symbol(name, variable.space)
            self.variables[name] = variable if name == variable.name else replace(variable, name=name)

    def _resolve(self, name: str) -> Named | None:
        scope: _Scope | None = self.scope
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.parent
        space = self.names.symbols.get(name)
        return Symbol(name, space) if space is not None else None

    def _prototype(self, name: str) -> Prototype | tuple[str, ...] | None:
        scope: _Scope | None = self.scope
        while scope is not None:
            found = scope.prototypes.get(name) or scope.tables.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    # ------------------------------------------------------------------------------------ labels

    def _end_with_return(self) -> None:
        """Running off the end of a function returns from it."""
        instructions = self.instructions
        if not instructions or continues(instructions[-1]) or len(instructions) in self.labels:
            line = self.cursor.tokens.lines[self.cursor.position - 1]
            instructions.append(Instruction(operation("ret"), (), None, False, line, self.location))

    def _resolve_labels(self, instruction: Instruction, scope: _Scope, starts: list[int]) -> None:
        block_at = {start: index for index, start in enumerate(starts)}
        shapes = instruction.operation.shapes
        if shapes is None:
            return
        resolved: list[Operand] = []
        for shape, operand in zip(shapes, instruction.operands, strict=False):
            if shape.kind == "label" and isinstance(operand, Label):
                resolved.append(_find_label(operand.name, scope, block_at, instruction.line))
            elif shape.kind == "table" and isinstance(operand, Label):
                names = _find_table(operand.name, scope, instruction.line)
                resolved.append(
                    Targets(tuple(_find_label(n, scope, block_at, instruction.line) for n in names))
                )
            else:
                resolved.append(operand)
        instruction.operands = tuple(resolved)


def _find_label(name: str, scope: _Scope | None, block_at: dict[int, int], line: int) -> Label:
    while scope is not None:
        if name in scope.labels:
            return Label(name, block_at[scope.labels[name]])
        scope = scope.parent
    raise invalid(f"unknown label {name!r}", line)


def _find_table(name: str, scope: _Scope | None, line: int) -> tuple[str, ...]:
    while scope is not None:
        if name in scope.tables:
            return scope.tables[name]
        scope = scope.parent
    raise invalid(f"unknown table of labels {name!r}", line)
