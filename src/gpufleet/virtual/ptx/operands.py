"""Operands: what stands between an opcode and its semicolon."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpufleet.virtual.ptx.cursor import Cursor, is_name
from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.literals import expression, literal_bits
from gpufleet.virtual.ptx.operations import OperandShape, Operation
from gpufleet.virtual.ptx.scalars import SIZES, fits, is_float
from gpufleet.virtual.ptx.specials import SPECIAL_REGISTERS, VECTORS, can_be_read_as
from gpufleet.virtual.ptx.syntax import (
    Address,
    CallTarget,
    Discard,
    Immediate,
    Label,
    Negated,
    Operand,
    Pair,
    Prototype,
    Raw,
    Register,
    Selected,
    Special,
    Symbol,
    Vector,
)

DISCARD = Discard()
_SELECTOR = re.compile(r"b[0-7]{1,4}\Z|h[0-3]{1,2}\Z")
_PREDICATE = OperandShape("q", "value", "pred", destination=True)
Named = Register | Vector | Symbol


class OperandReader:
    """Reads operands at a cursor; `resolve` says what a name means in the current scope."""

    def __init__(
        self,
        cursor: Cursor,
        resolve: Callable[[str], Named | None],
        prototype: Callable[[str], Prototype | tuple[str, ...] | None],
    ) -> None:
        self._cursor = cursor
        self._resolve = resolve
        self._prototype = prototype

    def read(self, operation: Operation) -> tuple[Operand, ...]:
        """Read all operands of an instruction, with its semicolon."""
        cursor = self._cursor
        if operation.shapes is None:
            return (self._raw(),)
        operands: list[Operand] = []
        for shape in operation.shapes:
            if shape.optional and self._is_missing(operation.shapes, shape):
                continue
            if operands:
                cursor.expect(",")
            operands.append(self._plain_register(shape, operation) or self._operand(shape, operation))
        if not cursor.accept(";"):
            raise cursor.error(f"expected ';' after the operands of {operation.text}")
        return tuple(operands)

    def _plain_register(self, shape: OperandShape, operation: Operation) -> Register | None:
        """Read the most common operand, a register that ends here, without looking for anything else."""
        cursor = self._cursor
        if (
            shape.kind != "value"
            or cursor.texts[cursor.position + 1] not in (",", ";")
            or operation.lanes > 1
        ):
            return None
        found = self._resolve(cursor.texts[cursor.position])
        if not isinstance(found, Register):
            return None
        cursor.position += 1
        self._check(found, shape.type, operation)
        return found

    def _is_missing(self, shapes: tuple[OperandShape, ...], shape: OperandShape) -> bool:
        """An optional operand is there if more commas follow than the operands after it need."""
        following = len(shapes) - 1 - shapes.index(shape)
        return self._commas_ahead() <= following

    def _commas_ahead(self) -> int:
        """Count the commas up to the semicolon that are not inside brackets."""
        depth = commas = 0
        ahead = 0
        while True:
            token = self._cursor.peek(ahead)
            if token in ("", ";"):
                return commas
            if token in "[{(":
                depth += 1
            elif token in "]})":
                depth -= 1
            elif token == "," and depth == 0:
                commas += 1
            ahead += 1

    def _operand(self, shape: OperandShape, operation: Operation) -> Operand:
        if shape.kind == "address":
            return self.address()
        if shape.kind in ("label", "table"):
            return Label(self._cursor.name("a label"), -1)
        if shape.kind == "call":
            return self._call()
        operand = (self._destination if shape.destination else self._source)(shape, operation)
        if (
            shape.vector
            and operation.lanes > 1
            and operation.name != "mov"
            and not isinstance(operand, Vector)
        ):
            self._cursor.position -= 1
            raise self._cursor.error(f"{operation.text} takes a vector")
        return operand

    # ----------------------------------------------------------------------------- destinations

    def _destination(self, shape: OperandShape, operation: Operation) -> Operand:
        cursor = self._cursor
        if shape.vector and cursor.peek() == "{":
            return self._vector(shape, operation)
        first = self._destination_register(shape, operation)
        if shape.pair and cursor.accept("|"):
            second = self._destination_register(_PREDICATE, operation)
            if isinstance(first, (Vector, Selected)) or isinstance(second, (Vector, Selected)):
                raise cursor.error("a pair holds registers only")
            return Pair(first, second)
        return first

    def _destination_register(
        self, shape: OperandShape, operation: Operation
    ) -> Register | Vector | Selected | Discard:
        cursor = self._cursor
        if cursor.accept("_"):
            return DISCARD
        name = cursor.name("a register")
        if shape.selectable and "." in name:
            return self._selected(name, shape, operation)
        found = self._register(name)
        if isinstance(found, Vector) and shape.vector:
            return found
        if not isinstance(found, Register):
            cursor.position -= 1
            raise cursor.error("expected a register")
        self._check(found, shape.type, operation)
        return found

    # ---------------------------------------------------------------------------------- sources

    def _source(self, shape: OperandShape, operation: Operation) -> Operand:
        cursor = self._cursor
        token = cursor.peek()
        if token == "{" and shape.vector:
            return self._vector(shape, operation)
        if token == "!" and shape.negatable and is_name(cursor.peek(1)):
            cursor.next()
            register = self._register(cursor.name())
            if not isinstance(register, Register):
                cursor.position -= 1
                raise cursor.error("expected a predicate")
            self._check(register, "pred", operation)
            return Negated(register)
        if not is_name(token) or token == "WARP_SZ":
            type = shape.type.partition("|")[0]
            return Immediate(literal_bits(cursor, type), type)
        cursor.next()
        if shape.selectable and "." in token:
            return self._selected(token, shape, operation)
        found = self._register(token)
        if isinstance(found, Register):
            self._check(found, shape.type, operation)
            return found
        if isinstance(found, Vector):
            if shape.vector:
                return found
        elif isinstance(found, Symbol):
            return Symbol(found.name, found.space, self._symbol_offset())
        elif token in SPECIAL_REGISTERS:
            return self._special(token, shape, operation)
        elif token in VECTORS and shape.vector and operation.lanes == 4:
            return Vector(tuple(Special(part, SPECIAL_REGISTERS[part]) for part in VECTORS[token]))
        cursor.position -= 1
        raise cursor.error("unknown name" if found is None else "a vector cannot stand here")

    def _special(self, name: str, shape: OperandShape, operation: Operation) -> Special:
        line = self._cursor.tokens.lines[self._cursor.position - 1]
        if operation.name not in ("mov", "cvt") or any(map(is_float, operation.types)):
            raise invalid(f"the special register {name} cannot be an operand of {operation.text}", line)
        if not can_be_read_as(name, SIZES[shape.type]):
            raise invalid(f"the special register {name} does not fit {operation.text}", line)
        return Special(name, SPECIAL_REGISTERS[name])

    def _vector(self, shape: OperandShape, operation: Operation) -> Vector:
        """Read `{a, b}`: elements of the type, or, packed by `mov`, parts of it."""
        cursor = self._cursor
        cursor.expect("{")
        position = cursor.position
        count = 1
        while cursor.peek(count) not in ("}", ";", ""):
            count += 1
        elements = 1 + cursor.texts[position : position + count].count(",")
        type = shape.type
        if operation.name == "mov" and "vector" not in operation:
            size = SIZES[type] // elements
            if elements not in (2, 4) or size == 0:
                raise cursor.error(f"a {type} does not split into {elements} elements")
            type = f"b{8 * size}"
        elif elements != operation.lanes:
            raise cursor.error(f"{operation.text} takes {operation.lanes} elements")
        part = OperandShape(shape.name, "value", type, shape.destination)
        read: list[Operand] = []
        while not cursor.accept("}"):
            if read:
                cursor.expect(",")
            read.append(self._operand(part, operation))
        return Vector(tuple(read))

    def _selected(self, token: str, shape: OperandShape, operation: Operation) -> Selected:
        """Resolve `%r1.b3`: bytes or halves of a register."""
        name, _, selector = token.partition(".")
        register = self._resolve(name)
        if not isinstance(register, Register) or not _SELECTOR.match(selector):
            self._cursor.position -= 1
            raise self._cursor.error("expected a register, or bytes or halves of one")
        self._check(register, shape.type, operation)
        return Selected(register, selector)

    def _register(self, name: str) -> Named | None:
        """Resolve a name; `%v.y` is a component of a vector register."""
        found = self._resolve(name)
        if found is None and "." in name:
            base, _, component = name.rpartition(".")
            vector = self._resolve(base)
            place = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}.get(component)
            if isinstance(vector, Vector) and place is not None and place < len(vector.elements):
                element = vector.elements[place]
                assert isinstance(element, Register)
                return element
        return found

    def _check(self, register: Register, type: str, operation: Operation) -> None:
        if "|" in type:
            type = "pred" if register.type == "pred" else type.partition("|")[0]
        if not fits(register.type, type, operation.wider):
            line = self._cursor.tokens.lines[self._cursor.position - 1]
            raise invalid(
                f"register {register.name} of type .{register.type} does not fit {operation.text}, "
                f"which wants .{type} there",
                line,
            )

    # ------------------------------------------------------------------------ addresses and calls

    def address(self) -> Address:
        """Read `[base + offset]`."""
        cursor = self._cursor
        cursor.expect("[")
        token = cursor.peek()
        base: Register | Symbol | None = None
        offset = 0
        if is_name(token):
            found = self._register(cursor.next())
            if isinstance(found, Register):
                if (
                    found.type == "pred"
                    or SIZES[found.type] not in (4, 8)
                    or not fits(found.type, f"b{8 * SIZES[found.type]}")
                ):
                    raise cursor.error(f"register {token} of type .{found.type} cannot hold an address")
                base = found
            elif isinstance(found, Symbol):
                base = Symbol(found.name, found.space)
            else:
                cursor.position -= 1
                raise cursor.error("unknown name")
            offset = self._symbol_offset()
        else:
            value = expression(cursor)
            if not isinstance(value, int):
                raise cursor.error("expected an address")
            offset = value
        cursor.expect("]")
        return Address(base, offset)

    def _symbol_offset(self) -> int:
        """Read what may follow a name: `+4`, `+-4`, `-4`."""
        cursor = self._cursor
        if cursor.peek() not in ("+", "-"):
            return 0
        value = expression(cursor)
        if not isinstance(value, int):
            raise cursor.error("expected an integer offset")
        return value

    def _call(self) -> CallTarget:
        cursor = self._cursor
        results: tuple[Operand, ...] = ()
        if cursor.peek() == "(":
            results = self._call_list()
            cursor.expect(",")
        name = cursor.name("a function")
        target = self._register(name)
        if not isinstance(target, (Register, Symbol)) or (
            isinstance(target, Symbol) and target.space != "code"
        ):
            cursor.position -= 1
            raise cursor.error("expected a function")
        arguments: tuple[Operand, ...] = ()
        prototype: Prototype | None = None
        candidates: tuple[str, ...] = ()
        if cursor.accept(","):
            if cursor.peek() == "(":
                arguments = self._call_list()
                if cursor.accept(","):
                    prototype, candidates = self._call_prototype()
            else:
                prototype, candidates = self._call_prototype()
        return CallTarget(target, results, arguments, prototype, candidates)

    def _call_prototype(self) -> tuple[Prototype | None, tuple[str, ...]]:
        found = self._prototype(self._cursor.name("a prototype"))
        if found is None:
            self._cursor.position -= 1
            raise self._cursor.error("unknown prototype")
        return (found, ()) if isinstance(found, Prototype) else (None, found)

    def _call_list(self) -> tuple[Operand, ...]:
        cursor = self._cursor
        cursor.expect("(")
        found: list[Operand] = []
        while not cursor.accept(")"):
            if found:
                cursor.expect(",")
            token = cursor.peek()
            if is_name(token):
                operand = self._register(cursor.next())
                if operand is None:
                    cursor.position -= 1
                    raise cursor.error("unknown name")
                found.append(operand)
            else:
                found.append(Immediate(literal_bits(cursor, "f64" if "." in token else "b64"), "b64"))
        return tuple(found)

    def _raw(self) -> Raw:
        cursor = self._cursor
        start = cursor.position
        cursor.skip_past(";")
        return Raw(" ".join(cursor.texts[start : cursor.position - 1]))
