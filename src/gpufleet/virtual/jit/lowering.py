"""Instructions to LLVM IR, in one of the two ways in which code is generated.

A `Lowering` knows where registers are kept (scalar or vector), brings operands into the type and
number of lanes that an instruction wants, writes results back, and dispatches on the opcode. In
diverged code every write spares the lanes that are not active, unless nobody can see the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit.arithmetic import INTEGER, comparison
from gpufleet.virtual.jit.convert import convert
from gpufleet.virtual.jit.floating import FLOATING, flush, flush_half, widen
from gpufleet.virtual.jit.shapes import Shapes
from gpufleet.virtual.jit.specials import special
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import Code, constant, is_float, vector, width
from gpufleet.virtual.jit.unit import Unit
from gpufleet.virtual.ptx.scalars import SIZES, is_signed
from gpufleet.virtual.ptx.scalars import is_float as is_float_type
from gpufleet.virtual.ptx.syntax import (
    CODE_WINDOW,
    Discard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)


class Lowering:
    """Common to converged and diverged code; the subclasses are in converged.py and diverged.py."""

    converged: bool

    def __init__(self, unit: Unit, shapes: Shapes) -> None:
        self.unit = unit
        self.code: Code = unit.code
        self.shapes = shapes
        self.lanes = unit.lanes
        self.masks = unit.masks
        self.guard: str | None = None
        """Predicate of the current instruction's guard as i1 lanes, where it has one and lanes differ."""
        self.checked: dict[tuple[int, str], set[int]] = {}
        """Instructions whose access is already known to be in bounds, by base register and space."""
        self.known: dict[int, str] = {}
        """Registers whose value was read or written on the straight way to here, as it is kept."""
        self.position = 0
        """Index of the current instruction."""
        self.node = 0

    # ----------------------------------------------------------------- what the subclasses decide

    def active(self) -> str | None:
        """Mask of the lanes that carry out the current instruction; None: all."""
        raise NotImplementedError

    def must_spare(self, register: int) -> bool:
        """Whether a write to a register may be seen by lanes that are not active."""
        raise NotImplementedError

    def check_no_wrap(self, instruction: Instruction, register: Register) -> bool:
        """Make sure that an affine value does not wrap; False if it must be taken as varying."""
        raise NotImplementedError

    def end_threads(self, ended: str) -> None:
        """After a call: the lanes of a mask ended in it, and do not go on here."""
        raise NotImplementedError

    def emit_instruction(self, instruction: Instruction) -> None:
        """Emit one instruction with its guard."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- operands

    def active_predicate(self) -> str | None:
        """The active lanes as i1; None: all."""
        mask = self.active()
        return None if mask is None else self.masks.predicate(self.code, mask)

    def stride(self, operand: Operand) -> int | None:
        """How an operand steps from lane to lane."""
        return self.shapes.of(operand)

    def fetch(self, operand: Operand, ptx: str, n: int) -> str:
        """An operand as `n` lanes of a PTX type; with n = 1, lane 0 of a uniform or affine operand."""
        element = scalar_type(ptx)
        if isinstance(operand, Register):
            return self._register(operand, element, n)
        if isinstance(operand, Immediate):
            return constant(element, operand.bits, n)
        if isinstance(operand, Negated):
            value = self._register(operand.register, "i1", n)
            return self.code.let(f"xor {vector('i1', n)} {value}, {constant('i1', 1, n)}")
        if isinstance(operand, Special):
            value, type = special(self, operand.name, n)
            return self.code.resize(value, type, element, n, signed=False)
        if isinstance(operand, Symbol):
            return self.code.splat(element, self._symbol(operand, element), n)
        raise AssertionError(f"operand {operand}")

    def _register(self, register: Register, element: str, n: int) -> str:
        c, unit = self.code, self.unit
        kept = unit.storage[register.index]
        stride = self.shapes.of(register)
        value = self.known.get(register.index)
        if value is None:
            if stride is None:
                slot = unit.vector_slot(register.index)
                value = c.let(f"load {unit.vector_type(register.index)}, ptr {slot}")
            else:
                value = c.let(f"load {kept}, ptr {unit.scalar_slot(register.index)}")
            self.known[register.index] = value
        if stride is None:
            if kept == "i1":
                value = self.masks.predicate(c, value)
        elif n > 1:
            value = self.spread(value, kept, stride)
        if kept == "float" and not is_float(element) and self._may_be_any_nan(register.index):
            value = self._canonical(value, self.lanes if n > 1 else 1)
        return self.reinterpret(value, kept, element, self.lanes if n > 1 else 1)

    def _may_be_any_nan(self, register: int) -> bool:
        """Whether what stands in a register may be a NaN that the CPU made."""
        known = self.unit.facts
        return register in known.computed and register not in known.mixed

    def _canonical(self, value: str, n: int) -> str:
        """A float whose bits are about to be seen: a GPU's arithmetic has one NaN, 0x7fffffff.

        Where only its bits count, and not at every instruction: that would cost as much as an fma.
        """
        c, t = self.code, vector("float", n)
        number = c.let(f"fcmp ord {t} {value}, {value}")
        return c.let(
            f"select {vector('i1', n)} {number}, {t} {value}, {t} {constant('float', 0x7FFFFFFF, n)}"
        )

    def spread(self, value: str, element: str, stride: int) -> str:
        """Lane 0 of a uniform or affine value to all lanes."""
        whole = self.code.splat(element, value, self.lanes)
        if stride == 0:
            return whole
        steps = self.code.lanes(element, stride, self.lanes)
        return self.code.let(f"add {vector(element, self.lanes)} {whole}, {steps}")

    def reinterpret(self, value: str, source: str, target: str, n: int, signed: bool = False) -> str:
        """The same bits as another type; a smaller one drops high bits, a larger one extends."""
        c = self.code
        if source == target:
            return value
        if is_float(source):
            integer = f"i{width(source)}"
            value = c.let(f"bitcast {vector(source, n)} {value} to {vector(integer, n)}")
            source = integer
        if is_float(target):
            value = c.resize(value, source, f"i{width(target)}", n, signed)
            return c.let(f"bitcast {vector(f'i{width(target)}', n)} {value} to {vector(target, n)}")
        return c.resize(value, source, target, n, signed)

    def _symbol(self, symbol: Symbol, element: str) -> str:
        c, unit = self.code, self.unit
        if symbol.space in ("global", "const"):
            address = unit.symbol_address(symbol.name)
            value = c.let(f"add i64 {address}, {symbol.offset}") if symbol.offset else address
        else:
            value = self.symbol_offset(symbol)
        return c.resize(value, "i64", element, 1, signed=False) if value[0] == "%" else value

    def symbol_offset(self, symbol: Symbol) -> str:
        """The address of a symbol in its own space."""
        program = self.unit.program
        if symbol.space == "shared":
            offsets = program.shared.offsets
            key = self.unit.owners.get(symbol.name, (self.unit.function.name, symbol.name))
            return str(offsets[key if key in offsets else ("", symbol.name)] + symbol.offset)
        if symbol.space == "local":
            place = self.unit.local_offsets[symbol.name] + symbol.offset
            top = self.unit.local_top
            return str(place) if top == "0" else self.code.let(f"add i64 {top}, {place}")
        if symbol.space == "param":
            for parameter in self.unit.function.parameters:
                if parameter.name == symbol.name:
                    return str(parameter.offset + symbol.offset)
        if symbol.space == "code":
            return str(program.module.code_addresses[symbol.name] + symbol.offset)
        raise self.unit.refuse(self.instruction, f"(the address of {symbol.name!r})")

    @property
    def instruction(self) -> Instruction:
        """The instruction that is being emitted."""
        return self.unit.graph.body.instructions[self.position]

    # -------------------------------------------------------------------------------------- results

    def write(
        self,
        operand: Operand,
        value: str,
        element: str,
        n: int,
        stride: int | None = 0,
        signed: bool = False,
    ) -> None:
        """Put a result into a register.

        Parameters
        ----------
        operand : Register or Discard
        value, element, n : the value, its LLVM type, its lanes
        stride : for n = 1, how the value steps from lane to lane
        signed : whether a wider register is filled with the sign
        """
        if isinstance(operand, Discard):
            return
        assert isinstance(operand, Register)
        c, unit = self.code, self.unit
        kept = unit.storage[operand.index]
        if element == "float" and operand.index in unit.facts.mixed:
            value = self._canonical(value, n)
        value = self.reinterpret(value, element, kept, n, signed)
        if self.shapes.strides[operand.index] is not None:
            assert n == 1, f"{self.instruction} gives a vector where a scalar was expected"
            self._store_scalar(operand.index, value, kept)
            return
        if n == 1:
            value = self.spread(value, kept, stride or 0)
        slot, type = unit.vector_slot(operand.index), unit.vector_type(operand.index)
        predicate = self.guard
        if self.must_spare(operand.index):
            predicate = self.active_predicate()
        if predicate is not None:
            old = c.let(f"load {type}, ptr {slot}")
            if kept == "i1":
                value = self.masks.make(c, value)
                chosen = self.masks.make(c, predicate)
                new = self.masks.both(c, value, chosen)
                value = self.masks.either(c, new, self.masks.without(c, old, chosen))
            else:
                value = c.let(f"select {vector('i1', self.lanes)} {predicate}, {type} {value}, {type} {old}")
        elif kept == "i1":
            value = self.masks.make(c, value)
        c.do(f"store {type} {value}, ptr {slot}")
        self.known[operand.index] = value

    def _store_scalar(self, register: int, value: str, kept: str) -> None:
        self.code.do(f"store {kept} {value}, ptr {self.unit.scalar_slot(register)}")
        self.known[register] = value

    # ------------------------------------------------------------------------------------- dispatch

    def lower(self, instruction: Instruction) -> None:
        """Emit one instruction whose guard has been taken care of."""
        operation = instruction.operation
        if operation.shapes is None:
            raise self.unit.refuse(instruction)
        effect = effects().get(operation.name)
        if effect is not None:
            effect(self, instruction)
            return
        self._compute(instruction)

    def _compute(self, instruction: Instruction) -> None:
        """An instruction that only computes: operands in, one result out."""
        operation = instruction.operation
        table = (
            FLOATING if is_float_type(operation.type) and operation.name not in ("selp", "slct") else INTEGER
        )
        emitter = convert if operation.name == "cvt" else table.get(operation.name)
        if emitter is None:
            raise self.unit.refuse(instruction)
        stride = self.shapes.result(instruction)
        affine = self.shapes.needs_check(instruction) if stride is not None else None
        if affine is not None and not self.check_no_wrap(instruction, affine):
            stride = None
        n = self.lanes if stride is None else 1
        shapes = operation.shapes or ()
        sources = [
            self.fetch(operand, shape.type, n)
            for operand, shape in zip(instruction.operands, shapes, strict=False)
            if not shape.destination
        ]
        value = emitter(self.code, operation, n, sources)
        target = shapes[0]
        self.write(
            instruction.operands[0], value, scalar_type(target.type), n, stride, is_signed(target.type)
        )


def _set_predicate(low: Lowering, instruction: Instruction) -> None:
    """setp: compare, combine with a third predicate, and give the opposite to the second result."""
    operation = instruction.operation
    destination, *sources = instruction.operands
    if operation.type.endswith("x2"):
        _set_two_predicates(low, instruction)
        return
    n = 1 if all(low.stride(s) == 0 for s in sources) else low.lanes
    held = compare(low, instruction, operation.type, sources[0], sources[1], n)
    i1, c = vector("i1", n), low.code
    opposite = c.let(f"xor {i1} {held}, {constant('i1', 1, n)}") if isinstance(destination, Pair) else ""
    if "boolean" in operation:
        third = low.fetch(sources[2], "pred", n)
        held = c.let(f"{operation.get('boolean')} {i1} {held}, {third}")
        if opposite:
            opposite = c.let(f"{operation.get('boolean')} {i1} {opposite}, {third}")
    first = destination.first if isinstance(destination, Pair) else destination
    low.write(first, held, "i1", n)
    if isinstance(destination, Pair):
        low.write(destination.second, opposite, "i1", n)


def _set_two_predicates(low: Lowering, instruction: Instruction) -> None:
    """setp on pairs of halves: the first result is for the low halves, the second for the high ones."""
    destination, *sources = instruction.operands
    targets = [destination.first, destination.second] if isinstance(destination, Pair) else [destination]
    for target, held in zip(targets, _compare_pairs(low, instruction, sources), strict=False):
        low.write(target, held, "i1", low.lanes)


def _compare_pairs(low: Lowering, instruction: Instruction, sources: Sequence[Operand]) -> list[str]:
    """Compare pairs of halves, and combine with a predicate if there is one: low halves, high halves."""
    operation, c, n = instruction.operation, low.code, low.lanes
    base = operation.types[-1].removesuffix("x2")
    t, half = vector("i32", n), vector("i16", n)
    results = []
    for place in range(2):
        values = []
        for source in sources[:2]:
            whole = low.fetch(source, "b32", n)
            part = c.let(f"lshr {t} {whole}, {constant('i32', 16, n)}") if place else whole
            bits = c.let(f"trunc {t} {part} to {half}")
            bits = c.cast("bitcast", half, bits, vector(scalar_type(base), n))
            if "ftz" in operation:
                bits = flush_half(c, n, bits)
            values.append(widen(c, base, n, bits, "float"))
        held = c.let(f"{comparison(operation, base)} {vector('float', n)} {values[0]}, {values[1]}")
        if "boolean" in operation:
            third = low.fetch(sources[2], "pred", n)
            held = c.let(f"{operation.get('boolean')} {vector('i1', n)} {held}, {third}")
        results.append(held)
    return results


def compare(low: Lowering, instruction: Instruction, ptx: str, a: Operand, b: Operand, n: int) -> str:
    """Compare two operands of a type; the result is i1 lanes."""
    operation, c = instruction.operation, low.code
    values = [low.fetch(x, ptx, n) for x in (a, b)]
    element = scalar_type(ptx)
    if ptx in ("f16", "bf16"):
        if "ftz" in operation:
            values = [flush_half(c, n, v) for v in values]
        values = [widen(c, ptx, n, v, "float") for v in values]
        element = "float"
    if "ftz" in operation and ptx == "f32":
        values = [flush(c, n, v) for v in values]
    return c.let(f"{comparison(operation, ptx)} {vector(element, n)} {values[0]}, {values[1]}")


def _set(low: Lowering, instruction: Instruction) -> None:
    """set: all ones or 1.0 where the comparison holds."""
    operation, c = instruction.operation, low.code
    destination, *sources = instruction.operands
    target, source = operation.types
    if source.endswith("x2"):
        _set_pairs(low, instruction)
        return
    n = 1 if all(low.stride(s) == 0 for s in sources) else low.lanes
    held = compare(low, instruction, source, sources[0], sources[1], n)
    if "boolean" in operation:
        third = low.fetch(sources[2], "pred", n)
        held = c.let(f"{operation.get('boolean')} {vector('i1', n)} {held}, {third}")
    element = scalar_type(target)
    bits = _ONES.get(target, -1)
    t = vector(element, n)
    value = c.let(
        f"select {vector('i1', n)} {held}, {t} {constant(element, bits, n)}, {t} {constant(element, 0, n)}"
    )
    low.write(destination, value, element, n)


_ONES = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}
"""What `set` gives to a float where the comparison holds."""


def _set_pairs(low: Lowering, instruction: Instruction) -> None:
    """set on pairs of halves: 1.0, or all ones of a half, for each."""
    c, n = low.code, low.lanes
    t = vector("i32", n)
    one = _ONES.get(instruction.operation.type.removesuffix("x2"), 0xFFFF)
    result = constant("i32", 0, n)
    for place, held in enumerate(_compare_pairs(low, instruction, instruction.operands[1:])):
        bits = constant("i32", one << 16 * place, n)
        part = c.let(f"select {vector('i1', n)} {held}, {t} {bits}, {t} {constant('i32', 0, n)}")
        result = c.let(f"or {t} {result}, {part}")
    low.write(instruction.operands[0], result, "i32", n)


def _lop3(low: Lowering, instruction: Instruction) -> None:
    """lop3, also with a predicate: whether any bit of the result is set, combined with another one."""
    destination, *sources = instruction.operands
    if not isinstance(destination, Pair):
        low._compute(instruction)
        return
    operation, c = instruction.operation, low.code
    n = 1 if all(low.stride(s) == 0 for s in sources) else low.lanes
    values = [low.fetch(s, "b32", n) for s in sources[:4]]
    result = INTEGER["lop3"](c, operation, n, values)
    some = c.let(f"icmp ne {vector('i32', n)} {result}, {constant('i32', 0, n)}")
    third = low.fetch(sources[4], "pred", n)
    held = c.let(f"{operation.get('boolean')} {vector('i1', n)} {some}, {third}")
    low.write(destination.first, result, "i32", n)
    low.write(destination.second, held, "i1", n)


def _move(low: Lowering, instruction: Instruction) -> None:
    """mov: copy, pack, unpack."""
    destination, source = instruction.operands
    ptx = instruction.operation.type
    if isinstance(source, Vector) and isinstance(destination, Vector):
        values = [
            (d, s, 1 if low.stride(s) == 0 else low.lanes)
            for d, s in zip(destination.elements, source.elements, strict=False)
        ]
        fetched = [(d, low.fetch(s, ptx, n), n) for d, s, n in values]
        for d, value, n in fetched:
            low.write(d, value, scalar_type(ptx), n)
    elif isinstance(source, Vector):
        _pack(low, destination, source, ptx)
    elif isinstance(destination, Vector):
        _unpack(low, destination, source, ptx)
    else:
        stride = low.stride(source)
        n = low.lanes if stride is None else 1
        low.write(destination, low.fetch(source, ptx, n), scalar_type(ptx), n, stride)


def _pack(low: Lowering, destination: Operand, source: Vector, ptx: str) -> None:
    c = low.code
    n = 1 if low.stride(source) == 0 else low.lanes
    whole = f"i{8 * SIZES[ptx]}"
    part = f"i{8 * SIZES[ptx] // len(source.elements)}"
    result = constant(whole, 0, n)
    for place, element in enumerate(source.elements):
        value = low.fetch(element, f"b{part[1:]}", n)
        value = c.resize(value, part, whole, n, signed=False)
        shift = constant(whole, place * int(part[1:]), n)
        value = c.let(f"shl {vector(whole, n)} {value}, {shift}") if place else value
        result = c.let(f"or {vector(whole, n)} {result}, {value}")
    low.write(destination, low.reinterpret(result, whole, scalar_type(ptx), n), scalar_type(ptx), n)


def _unpack(low: Lowering, destination: Vector, source: Operand, ptx: str) -> None:
    c = low.code
    n = 1 if low.stride(source) == 0 else low.lanes
    whole = f"i{8 * SIZES[ptx]}"
    part = f"i{8 * SIZES[ptx] // len(destination.elements)}"
    value = low.reinterpret(low.fetch(source, ptx, n), scalar_type(ptx), whole, n)
    for place, element in enumerate(destination.elements):
        shifted = value
        if place:
            shift = constant(whole, place * int(part[1:]), n)
            shifted = c.let(f"lshr {vector(whole, n)} {value}, {shift}")
        low.write(element, c.resize(shifted, whole, part, n, signed=False), part, n)


def _convert_address(low: Lowering, instruction: Instruction) -> None:
    """cvta: global and constant addresses are generic; shared and local ones lie in the arena."""
    operation, c = instruction.operation, low.code
    destination, source = instruction.operands
    stride = low.stride(source)
    space = operation.space
    n = low.lanes if stride is None else 1
    t = vector("i64", n)
    if operation.type != "u64":
        raise low.unit.refuse(instruction)
    value = low.fetch(source, "u64", n)
    operator = "sub" if "to" in operation else "add"
    if space == "shared":
        base = c.splat("i64", low.unit.arena_base(), n)
        value = c.let(f"{operator} {t} {value}, {base}")
    elif space == "param":
        base = low.unit.once("params.base", f"ptrtoint ptr {low.unit.job('parameters', 'ptr')} to i64")
        value = c.let(f"{operator} {t} {value}, {c.splat('i64', base, n)}")
    elif space == "local":
        from gpufleet.virtual.jit.memory import lane_locals

        n, t = low.lanes, vector("i64", low.lanes)
        value = low.fetch(source, "u64", n)
        value = c.let(f"{operator} {t} {value}, {lane_locals(low)}")
        stride = None
    low.write(destination, value, "i64", n, stride)


def _add_with_carry(low: Lowering, instruction: Instruction) -> None:
    """add.cc, addc, sub.cc, subc, mad.cc, madc: the carry flag is a register of its own."""
    operation, c = instruction.operation, low.code
    name = operation.name
    destination, *sources = instruction.operands
    n = 1 if low.shapes.result(instruction) == 0 else low.lanes
    element, ptx = scalar_type(operation.type), operation.type
    t, i1 = vector(element, n), vector("i1", n)
    values = [low.fetch(s, ptx, n) for s in sources]
    if name in ("mad", "madc"):
        from gpufleet.virtual.jit.arithmetic import product

        values = [product(c, operation, n, values[0], values[1]), values[2]]
    subtract = name in ("sub", "subc")
    slot, every = low.unit.carry_slot(), vector("i1", low.lanes)
    carry_in = ""
    if name in ("addc", "subc", "madc"):
        carry_in = c.let(f"load {every}, ptr {slot}")
        if n == 1:
            carry_in = c.let(f"extractelement {every} {carry_in}, i64 0")
    left, right = values
    operator, relation = ("sub", "ugt") if subtract else ("add", "ult")
    result = c.let(f"{operator} {t} {left}, {right}")
    # Unsigned: a sum is smaller than an addend after an overflow, a difference larger than the minuend.
    carry = c.let(f"icmp {relation} {t} {result}, {left}")
    if carry_in:
        extra = c.let(f"zext {i1} {carry_in} to {t}")
        total = c.let(f"{operator} {t} {result}, {extra}")
        again = c.let(f"icmp {relation} {t} {total}, {result}")
        carry = c.let(f"or {i1} {carry}, {again}")
        result = total
    if "cc" in operation:
        carry = c.splat("i1", carry, low.lanes) if n == 1 else carry
        predicate = low.guard
        if predicate is not None:
            old = c.let(f"load {every}, ptr {slot}")
            carry = c.let(f"select {every} {predicate}, {every} {carry}, {every} {old}")
        c.do(f"store {every} {carry}, ptr {slot}")
    low.write(destination, result, element, n)


def _add_or_multiply(low: Lowering, instruction: Instruction) -> None:
    if "cc" in instruction.operation or instruction.opcode in ("addc", "subc", "madc"):
        _add_with_carry(low, instruction)
    else:
        low._compute(instruction)


def _is_space(low: Lowering, instruction: Instruction) -> None:
    """isspacep: which window an address lies in."""
    from gpufleet.virtual.jit.memory import in_space

    destination, source = instruction.operands
    n = 1 if low.stride(source) == 0 else low.lanes
    address = low.fetch(source, "u64", n)
    low.write(destination, in_space(low, address, instruction.operation.space, n, instruction), "i1", n)


def _nothing(low: Lowering, instruction: Instruction) -> None:
    """Hints that change no result."""


def _fence(low: Lowering, instruction: Instruction) -> None:
    low.code.do("fence seq_cst")


def _zero(low: Lowering, instruction: Instruction) -> None:
    """createpolicy, as good as any where there are no caches; getctarank in a cluster of one block."""
    low.write(instruction.operands[0], "0", "i32" if instruction.opcode == "getctarank" else "i64", 1)


def _map_address(low: Lowering, instruction: Instruction) -> None:
    """mapa: a cluster is one block here, its shared memory is the block's own."""
    destination, source, _ = instruction.operands
    stride, type = low.stride(source), instruction.operation.type
    n = low.lanes if stride is None else 1
    low.write(destination, low.fetch(source, type, n), scalar_type(type), n, stride)


_WITHOUT_RESULT = (
    *("prefetch", "prefetchu", "nanosleep", "pmevent", "brkpt", "griddepcontrol"),
    *("applypriority", "discard"),
)

Effect = Callable[[Lowering, Instruction], None]
_effects: dict[str, Effect] = {}


def effects() -> dict[str, Effect]:
    """Instructions that are more than one result computed from values, by opcode."""
    if not _effects:
        from gpufleet.virtual.jit import asynchronous, atomics, calls, memory, video, warp

        _effects.update(
            {
                "setp": _set_predicate,
                "set": _set,
                "lop3": _lop3,
                "mov": _move,
                "cvta": _convert_address,
                "isspacep": _is_space,
                **dict.fromkeys(("add", "sub", "mad", "addc", "subc", "madc"), _add_or_multiply),
                **dict.fromkeys(_WITHOUT_RESULT, _nothing),
                **dict.fromkeys(("createpolicy", "getctarank"), _zero),
                "mapa": _map_address,
                **dict.fromkeys(("membar", "fence"), _fence),
                **memory.EFFECTS,
                **atomics.EFFECTS,
                **warp.EFFECTS,
                **calls.EFFECTS,
                **asynchronous.EFFECTS,
                **video.EFFECTS,
            }
        )
    return _effects


def source_operands(instruction: Instruction) -> Sequence[Operand]:
    """The operands that an instruction reads as values."""
    shapes = instruction.operation.shapes or ()
    return [o for o, s in zip(instruction.operands, shapes, strict=False) if not s.destination]


__all__ = ["CODE_WINDOW", "Effect", "Lowering", "compare", "effects", "source_operands"]
