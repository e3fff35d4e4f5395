"""Shape analysis: which registers are the same in all lanes, and which step evenly from lane to lane.

A register's stride is 0 if all lanes of the vector hold the same value (uniform), another constant
if lane i holds the value of lane 0 plus i * stride modulo its width (affine), and None if nothing is
known (varying). Uniform and affine registers are kept as the scalar of lane 0.

Two analyses serve the two ways in which code is generated:

* `converged`: all lanes run together. Every branch is unanimous, so only data flow counts; a
  register's stride is what all its definitions have in common.
* `diverged`: lanes come and go. A register is only scalar if it is defined once, outside every loop
  or used only by the node that defines it, from scalars: then all lanes that have it agree.

Widening an affine 32-bit value is only affine in 64 bits if no lane wraps around. Where bounds do
not prove that, converged code checks it when it gets there (`needs_check`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from gpufleet.virtual.jit.nodes import Graph
from gpufleet.virtual.ptx.flow import reads_and_writes, sources_of
from gpufleet.virtual.ptx.scalars import SIZES, is_float, is_signed
from gpufleet.virtual.ptx.syntax import (
    Address,
    Body,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
)

UNKNOWN = -(1 << 80)
"""Not seen yet: joins with everything."""
MAX_THREADS = 1024
CARRY = -1
"""Stands for the carry flag among registers."""


@dataclass(frozen=True)
class BlockShape:
    """What is known about a block when code is generated: the class of its dimensions.

    even: x is a multiple of the vector's lanes, or y and z are 1, so that a vector lies in one row;
    any: nothing.
    """

    kind: str
    lanes: int

    @property
    def x_stride(self) -> int | None:
        """How %tid.x steps from lane to lane."""
        return None if self.kind == "any" else 1

    @property
    def yz_stride(self) -> int | None:
        """How %tid.y and %tid.z step."""
        return None if self.kind == "any" else 0


_LANE_SPECIALS = frozenset(f"%lanemask_{r}" for r in ("eq", "le", "lt", "ge", "gt"))
_WARP_RESULTS = frozenset({"vote", "redux", "activemask", "bar", "barrier"})
_USES_CARRY = frozenset({"addc", "subc", "madc"})
_VARYING = frozenset({"atom", "shfl", "call", "elect", "mbarrier"})


@dataclass
class Facts:
    """What the text alone says about a function's registers."""

    definitions: dict[int, list[Instruction]] = field(default_factory=dict)
    rows: list[tuple[Instruction, Set[int], Set[int]]] = field(default_factory=list)
    """Every instruction that control reaches, with the registers it reads and writes."""
    readers: dict[int, list[int]] = field(default_factory=dict)
    """By register: the rows that read it."""
    used_outside: set[int] = field(default_factory=set)
    """Registers read by a node other than the one that defines them."""
    node_of: dict[int, int] = field(default_factory=dict)
    """Node of each register's last definition."""
    computed: set[int] = field(default_factory=set)
    """Registers that may hold a float which an instruction computed: a NaN in it has no payload yet."""
    mixed: set[int] = field(default_factory=set)
    """Those of them that hold integers at other times, whose bits a NaN must not be taken for."""
    is_kernel: bool = True
    """Whether parameters are the launch's, the same for all lanes."""
    given: set[int] = field(default_factory=set)
    """Registers that are parameters of a function."""
    returned: set[int] = field(default_factory=set)
    """Registers that are results of a function."""
    read: set[int] = field(default_factory=set)
    """Registers that anything reads."""

    def only(self, register: int) -> Instruction | None:
        """The one instruction that defines a register, if it always does."""
        found = self.definitions.get(register, [])
        return found[0] if len(found) == 1 and found[0].guard is None else None


def facts(graph: Graph, is_kernel: bool = True) -> Facts:
    """Collect definitions and uses."""
    result = Facts(is_kernel=is_kernel)
    for node in graph.nodes:
        for instruction in graph.body.instructions[node.start : node.stop]:
            reads, writes = reads_and_writes(instruction)
            for register in (*reads, CARRY) if instruction.opcode in _USES_CARRY else reads:
                result.readers.setdefault(register, []).append(len(result.rows))
            result.rows.append((instruction, reads, writes))
            result.read |= reads
            for register in writes:
                result.definitions.setdefault(register, []).append(instruction)
                result.node_of[register] = node.index
    _find_computed(result)
    result.mixed = {r for r in result.computed if any(map(_gives_integer, result.definitions[r]))}
    for node in graph.nodes:
        live = graph.live_in[node.index]
        while live:
            low = live & -live
            result.used_outside.add(low.bit_length() - 1)
            live ^= low
    return result


_KEEPS_NANS = frozenset({"ld", "ldu", "atom", "call", "copysign"})
_COPIES = frozenset({"mov", "selp", "slct"})


def _find_computed(known: Facts) -> None:
    """Follow computed floats through copies."""
    changed = True
    while changed:
        changed = False
        for register, definitions in known.definitions.items():
            if register not in known.computed and any(_computes(i, known) for i in definitions):
                known.computed.add(register)
                changed = True


def _gives_integer(instruction: Instruction) -> bool:
    """Whether an instruction computes an integer; loads and the like may bring anything."""
    operation = instruction.operation
    if operation.name in ("ld", "ldu", "mov", "selp", "slct", "shfl", "atom", "call", "cvta"):
        return False
    return operation.type != "" and not is_float(operation.type)


def _computes(instruction: Instruction, known: Facts) -> bool:
    operation = instruction.operation
    if operation.name in _COPIES:
        return any(isinstance(o, Register) and o.index in known.computed for o in instruction.operands[1:])
    if operation.name == "cvt" and operation.types[-1] in ("f64", "bf16"):
        return False  # which keep what a NaN carries (H200)
    return operation.type == "f32" and operation.name not in _KEEPS_NANS


class Shapes:
    """Strides of a function's registers under one of the two analyses."""

    def __init__(self, body: Body, known: Facts, block: BlockShape) -> None:
        self._body = body
        self._facts = known
        self._block = block
        self.strides: list[int | None] = [UNKNOWN] * len(body.registers)
        self.carry: int | None = 0
        """Stride of the carry flag."""
        self._bounds: dict[int, int | None] = {}

    # ------------------------------------------------------------------------------------ questions

    def of(self, operand: Operand) -> int | None:
        """Stride of an operand."""
        if isinstance(operand, Register):
            stride = self.strides[operand.index]
            return 0 if stride == UNKNOWN else stride
        if isinstance(operand, Negated):
            return self.of(operand.register)
        if isinstance(operand, Special):
            return self._special(operand.name)
        if isinstance(operand, Address):
            return 0 if operand.base is None else self.of(operand.base)
        if isinstance(operand, Vector):
            return 0 if all(self.of(e) == 0 for e in operand.elements) else None
        return 0

    def result(self, instruction: Instruction) -> int | None:
        """Stride of what an instruction computes, given its operands' strides now."""
        name = instruction.opcode
        if name in _VARYING:
            return None
        if name in _WARP_RESULTS:
            return 0
        sources = sources_of(instruction)
        if name == "setp" and instruction.operation.type.endswith("x2"):
            return None
        if name == "cvta" and instruction.operation.space == "local":
            return None
        if name == "match":
            return 0 if instruction.operation.get("match") == "all" else None
        if name == "ld" and instruction.operation.type == "b128":
            return None
        if name in ("ld", "ldu"):
            private = instruction.operation.space == "local" or self._is_call_parameter(sources[0])
            return 0 if not private and self.of(sources[0]) == 0 else None
        strides = [self.of(s) for s in sources]
        if all(s == 0 for s in strides) and (name not in _USES_CARRY or self.carry == 0):
            return 0
        return self._affine(instruction, sources, strides)

    def _is_call_parameter(self, operand: Operand) -> bool:
        """Whether an address names a parameter that differs from lane to lane: any but the kernel's."""
        if not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
            return False
        base = operand.base
        return base.space == "local" or (
            base.space == "param" and (not self._facts.is_kernel or base.name in self._body.variables)
        )

    def needs_check(self, instruction: Instruction) -> Register | None:
        """The operand that must not wrap from lane to lane for `result` to hold."""
        if not _widens(instruction):
            return None
        for source in sources_of(instruction)[:2]:
            if isinstance(source, Register) and self.of(source) not in (0, None):
                return None if self._is_bounded(source) else source
        return None

    def _is_bounded(self, register: Register) -> bool:
        bound = self.bound(register)
        return bound is not None and bound < 1 << (8 * SIZES[register.type] - 1)

    def bound(self, operand: Operand, depth: int = 0) -> int | None:
        """A proven upper bound of an operand as an unsigned number that never wraps; None: unknown."""
        if isinstance(operand, Immediate):
            return operand.bits if operand.bits < 1 << 31 else None
        if isinstance(operand, Special):
            if operand.name.startswith(("%tid", "%ntid")):
                return MAX_THREADS
            return 32 if operand.name == "%laneid" else None
        if not isinstance(operand, Register) or depth > 20:
            return None
        if operand.index not in self._bounds:
            self._bounds[operand.index] = None
            definition = self._facts.only(operand.index)
            if definition is not None:
                self._bounds[operand.index] = self._bound_of(definition, depth)
        return self._bounds[operand.index]

    def _bound_of(self, instruction: Instruction, depth: int) -> int | None:
        operation = instruction.operation
        sources = sources_of(instruction)
        bounds = [self.bound(s, depth + 1) for s in sources]
        first, second = bounds[0] if bounds else None, bounds[1] if len(bounds) > 1 else None
        name = operation.name
        if name == "and":
            known = [b for b in (first, second) if b is not None]
            return min(known) if known else None
        if first is None or any(isinstance(s, Vector) for s in sources):
            return None
        limit = 1 << 31
        if name in ("mov", "cvta") and len(sources) == 1:
            return first
        if name == "cvt" and not any(is_float(t) for t in operation.types):
            return first if first < 1 << (8 * min(SIZES[t] for t in operation.types) - 1) else None
        if second is None:
            return None
        value = None
        if name == "add":
            value = first + second
        elif name == "mul" and operation.get("part") in ("lo", "wide"):
            value = first * second
        elif name == "shl" and isinstance(sources[1], Immediate) and second < 31:
            value = first << second
        elif name == "shr" and isinstance(sources[1], Immediate):
            value = first >> min(second, 31)
        elif name == "mad" and operation.get("part") in ("lo", "wide") and bounds[2] is not None:
            value = first * second + bounds[2]
        return value if value is not None and value < limit else None

    # ---------------------------------------------------------------------------------------- rules

    def _special(self, name: str) -> int | None:
        if name == "%tid.x":
            return self._block.x_stride
        if name in ("%tid.y", "%tid.z"):
            return self._block.yz_stride
        if name == "%laneid":
            return 1
        if name in _LANE_SPECIALS or (name == "%warpid" and self._block.lanes > 32):
            return None
        return 0

    def _affine(
        self, instruction: Instruction, sources: Sequence[Operand], strides: Sequence[int | None]
    ) -> int | None:
        """Stride of an instruction that has an operand which is not uniform."""
        operation = instruction.operation
        if any(is_float(t) for t in operation.types) or "sat" in operation or "cc" in operation:
            return None
        name = operation.name
        if name == "and":
            return self._lane_mask(sources, strides)
        if name == "shr":
            return self._lane_shift(sources)
        if None in strides or len(strides) == 0:
            return None
        first = strides[0] or 0
        if name in ("mov", "cvta") and len(sources) == 1 and not isinstance(sources[0], Vector):
            return first
        if name == "cvt":
            return self._converted(instruction, first)
        if len(strides) < 2:
            return None if name != "neg" else -first
        second = strides[1] or 0
        if name == "add":
            return first + second
        if name == "sub":
            return first - second
        if name == "shl" and isinstance(sources[1], Immediate):
            return first << sources[1].bits if sources[1].bits < 32 else None
        if name in ("mul", "mad") and operation.get("part") in ("lo", "wide"):
            product = _product(sources, first, second)
            if product is None:
                return None
            return product + (strides[2] or 0) if name == "mad" else product
        return None

    def _converted(self, instruction: Instruction, stride: int) -> int | None:
        target, source = instruction.operation.types
        register = sources_of(instruction)[0]
        if SIZES[target] <= SIZES[source]:
            return stride
        if SIZES[source] < 4 or (isinstance(register, Register) and SIZES[register.type] != SIZES[source]):
            return None
        return stride

    def _lane_mask(self, sources: Sequence[Operand], strides: Sequence[int | None]) -> int | None:
        """`tid & 31` steps like tid: lane 0 of a vector is at a multiple of its lanes."""
        mask = sources[1]
        if (
            isinstance(mask, Immediate)
            and strides[0] == 1
            and self._starts_at_multiple(sources[0])
            and mask.bits & (mask.bits + 1) == 0
            and mask.bits + 1 >= self._block.lanes
        ):
            return 1
        return None

    def _lane_shift(self, sources: Sequence[Operand]) -> int | None:
        """`tid >> 5` is the same in all lanes."""
        shift = sources[1]
        if (
            isinstance(shift, Immediate)
            and shift.bits < 31
            and 1 << shift.bits >= self._block.lanes
            and self._starts_at_multiple(sources[0])
        ):
            return 0
        return None

    def _starts_at_multiple(self, operand: Operand) -> bool:
        if not isinstance(operand, Register):
            return False
        definition = self._facts.only(operand.index)
        if definition is None or definition.opcode not in ("mov", "cvt"):
            return False
        source = sources_of(definition)[0]
        if isinstance(source, Special):
            return source.name in ("%tid.x", "%laneid") and self._special(source.name) == 1
        return self._starts_at_multiple(source)


def converged(graph: Graph, known: Facts, block: BlockShape) -> Shapes:
    """Shapes while all lanes run together."""
    return _solve(graph, known, block, diverged=False)


def diverged(graph: Graph, known: Facts, block: BlockShape) -> Shapes:
    """Shapes that hold whatever lanes are active."""
    return _solve(graph, known, block, diverged=True)


def _solve(graph: Graph, known: Facts, block: BlockShape, diverged: bool) -> Shapes:
    """Go down from "not seen yet" until nothing changes; what nothing defines is as good as uniform."""
    shapes = Shapes(graph.body, known, block)
    for register in known.given | known.returned:
        shapes.strides[register] = None
    waiting = bytearray([1]) * len(known.rows)
    _settle(graph, shapes, known, diverged, waiting)
    for register, stride in enumerate(shapes.strides):
        if stride == UNKNOWN:
            shapes.strides[register] = 0
            for reader in known.readers.get(register, ()):
                waiting[reader] = 1
    _settle(graph, shapes, known, diverged, waiting)
    return shapes


def _settle(graph: Graph, shapes: Shapes, known: Facts, diverged: bool, waiting: bytearray) -> None:
    """Look at the rows that wait, in the order of the text, until none does."""
    while 1 in waiting:
        for row, waits in enumerate(waiting):
            if not waits:
                continue
            waiting[row] = 0
            for register in _look_at(graph, shapes, known, diverged, row):
                for reader in known.readers.get(register, ()):
                    waiting[reader] = 1


def _look_at(graph: Graph, shapes: Shapes, known: Facts, diverged: bool, row: int) -> list[int]:
    """Work out the strides of what an instruction writes; returns the registers whose stride changed."""
    instruction, reads, writes = known.rows[row]
    strides = shapes.strides
    if any(strides[r] == UNKNOWN for r in reads):
        return []
    changed = []
    stride = shapes.result(instruction)
    if shapes.carry == 0 and stride != 0 and "cc" in instruction.operation:
        shapes.carry = None
        changed.append(CARRY)
    for index in writes:
        found = stride
        if instruction.guard is not None and shapes.of(instruction.guard) != 0:
            found = None
        if graph.body.registers[index].type == "pred" and found != 0:
            found = None
        if diverged:
            found = _if_stable(shapes, known, graph, instruction, index, found)
        joined = found if strides[index] in (UNKNOWN, found) else None
        if joined != strides[index]:
            strides[index] = joined
            changed.append(index)
    return changed


def _if_stable(
    shapes: Shapes, known: Facts, graph: Graph, instruction: Instruction, index: int, stride: int | None
) -> int | None:
    """Keep a stride only if lanes that took other paths cannot hold another value."""
    if stride is None or known.only(index) is None or shapes.needs_check(instruction) is not None:
        return None
    if index in known.used_outside and graph.nodes[known.node_of[index]].in_loop:
        return None
    return stride


def _product(sources: Sequence[Operand], first: int, second: int) -> int | None:
    """Stride of a product, if one factor is a constant."""
    if isinstance(sources[1], Immediate):
        return first * _signed(sources[1])
    if isinstance(sources[0], Immediate):
        return second * _signed(sources[0])
    return 0 if first == 0 and second == 0 else None


def _signed(immediate: Immediate) -> int:
    size = 8 * SIZES[immediate.type]
    if is_signed(immediate.type) and immediate.bits >> (size - 1):
        return immediate.bits - (1 << size)
    return immediate.bits


def _widens(instruction: Instruction) -> bool:
    operation = instruction.operation
    if operation.get("part") == "wide":
        return True
    return (
        operation.name == "cvt"
        and not any(is_float(t) for t in operation.types)
        and SIZES[operation.types[0]] > SIZES[operation.types[1]]
    )
