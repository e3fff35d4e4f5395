"""atom and red. A block runs on one CPU thread, so its shared memory needs no lock prefix (ten times
faster); global atomics are real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpufleet.virtual.jit.convert import canonical
from gpufleet.virtual.jit.floating import FLOATING, flush
from gpufleet.virtual.jit.lanes import each_lane
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.memory import access_size, reach
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.ptx.instructions import INSTRUCTIONS
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import SIZES, is_float, is_signed
from gpufleet.virtual.ptx.syntax import Address, Discard, Instruction, Operand, Register, Vector


def _atomic(low: Lowering, instruction: Instruction) -> None:
    operation = instruction.operation
    returns = operation.name == "atom"
    destination = instruction.operands[0] if returns else Discard()
    address, *sources = instruction.operands[1:] if returns else instruction.operands
    assert isinstance(address, Address)
    if operation.type == "b128" and "+cx16" not in low.unit.program.target.features:
        raise low.unit.refuse(instruction, "(on a CPU that cannot exchange 128 bits at once)")
    element, n = _element(operation), low.lanes
    place = reach(low, instruction, address, *access_size(instruction))
    operands = [e for s in sources for e in (s.elements if isinstance(s, Vector) else (s,))]
    ptx = operation.type if element == scalar_type(operation.type) else f"b{8 * SIZES[operation.type]}"
    inputs = [place.lanes(low), *((element, low.fetch(s, ptx, n)) for s in operands)]
    targets = destination.elements if isinstance(destination, Vector) else (destination,)
    wanted = any(_is_read(low, target) for target in targets)
    emit = _plain if operation.space == "shared" else _real

    def one(scalars: Sequence[str]) -> Sequence[str]:
        pointer, values = place.pointer_of(low, scalars[0]), scalars[1:]
        if operation.lanes == 1:
            return _kept(wanted, emit(low, operation, element, pointer, values))
        places = [low.code.field(pointer, k * SIZES[operation.type]) for k in range(operation.lanes)]
        olds = [emit(low, operation, element, p, [v]) for p, v in zip(places, values, strict=True)]
        return olds if wanted else []

    found = each_lane(low, inputs, [element] * len(targets) if wanted else [], one)
    if wanted:
        for target, old in zip(targets, found, strict=True):
            low.write(target, old, element, n)


def _element(op: Operation) -> str:
    """The LLVM type that memory is read and written as: bits, where no CPU has the operation."""
    return f"i{8 * SIZES[op.type]}" if op.type in _HALVES or op.type == "f32" else scalar_type(op.type)


_HALVES = frozenset({"f16", "f16x2", "bf16", "bf16x2"})


def _kept(wanted: bool, old: str) -> Sequence[str]:
    return [old] if wanted else []


def _is_read(low: Lowering, destination: Operand) -> bool:
    """Whether the old value is looked at anywhere."""
    return isinstance(destination, Register) and destination.index in low.unit.facts.read


def _real(low: Lowering, op: Operation, element: str, pointer: str, values: Sequence[str]) -> str:
    c = low.code
    order = {"acquire": "acquire", "release": "release", "acq_rel": "acq_rel"}.get(
        op.get("semantics"), "monotonic"
    )
    size = SIZES[op.type]
    which = op.get("atomic")
    if which == "cas":
        failure = "acquire" if order in ("acquire", "acq_rel") else "monotonic"
        pair = c.let(
            f"cmpxchg ptr {pointer}, {element} {values[0]}, {element} {values[1]} "
            f"{order} {failure}, align {size}"
        )
        return c.let(f"extractvalue {{{element}, i1}} {pair}, 0")
    if op.type in _HALVES or op.type == "f32":
        return _swapped_in(low, op, element, pointer, values, order)
    return c.let(f"atomicrmw {_operator(op)} ptr {pointer}, {element} {values[0]} {order}, align {size}")


def _swapped_in(
    low: Lowering, op: Operation, element: str, pointer: str, values: Sequence[str], order: str
) -> str:
    """What no CPU has: compute, and put the result there if nobody was faster."""
    c, size = low.code, SIZES[op.type]
    failure = "acquire" if order in ("acquire", "acq_rel") else "monotonic"
    slot = c.slot(element)
    first = c.let(f"load atomic {element}, ptr {pointer} monotonic, align {size}")
    c.do(f"store {element} {first}, ptr {slot}")
    again, done = c.name("again"), c.name("swapped")
    c.jump(again)
    c.label(again)
    old = c.let(f"load {element}, ptr {slot}")
    new = _combine(low, op, element, old, values)
    pair = c.let(f"cmpxchg ptr {pointer}, {element} {old}, {element} {new} {order} {failure}, align {size}")
    c.do(f"store {element} {c.let(f'extractvalue {{{element}, i1}} {pair}, 0')}, ptr {slot}")
    c.branch(c.let(f"extractvalue {{{element}, i1}} {pair}, 1"), done, again)
    c.label(done)
    return old


def _operator(op: Operation) -> str:
    which = op.get("atomic")
    if which in ("min", "max"):
        return which if is_signed(op.type) else f"u{which}"
    if which == "add" and is_float(op.type):
        return "fadd"
    return {"exch": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap"}.get(which, which)


def _plain(low: Lowering, op: Operation, element: str, pointer: str, values: Sequence[str]) -> str:
    """The same without a lock, for memory that only this CPU thread sees."""
    c = low.code
    size = SIZES[op.type]
    old = c.let(f"load {element}, ptr {pointer}, align {size}")
    c.do(f"store {element} {_combine(low, op, element, old, values)}, ptr {pointer}, align {size}")
    return old


def _sum(low: Lowering, op: Operation, old: str, value: str) -> str:
    """Of single precision: in global memory without subnormals (PTX ISA 9.7.13.6)."""
    c = low.code
    parts = [c.let(f"bitcast i32 {x} to float") for x in (old, value)]
    if op.space != "shared":
        parts = [flush(c, 1, x) for x in parts]
    total = c.let(f"fadd float {parts[0]}, {parts[1]}")
    if op.space != "shared":
        total = flush(c, 1, total)
    return c.let(f"bitcast float {canonical(c, 1, total)} to i32")


def _combine(low: Lowering, op: Operation, element: str, old: str, values: Sequence[str]) -> str:
    c, which, value = low.code, op.get("atomic"), values[0]
    if which == "exch":
        return value
    if which == "cas":
        same = c.let(f"icmp eq {element} {old}, {values[0]}")
        return c.let(f"select i1 {same}, {element} {values[1]}, {element} {old}")
    if op.type in _HALVES:
        return _combine_halves(low, op, element, old, value)
    if which in ("min", "max"):
        return c.intrinsic(
            f"{'s' if is_signed(op.type) else 'u'}{which}", element, (element, old), (element, value)
        )
    if which == "inc":
        over = c.let(f"icmp uge {element} {old}, {value}")
        return c.let(f"select i1 {over}, {element} 0, {element} {c.let(f'add {element} {old}, 1')}")
    if which == "dec":
        zero = c.let(f"icmp eq {element} {old}, 0")
        over = c.let(f"or i1 {zero}, {c.let(f'icmp ugt {element} {old}, {value}')}")
        return c.let(f"select i1 {over}, {element} {value}, {element} {c.let(f'sub {element} {old}, 1')}")
    if op.type == "f32":
        return _sum(low, op, old, value)
    operation = "fadd" if is_float(op.type) else which
    return c.let(f"{operation} {element} {old}, {value}")


def _combine_halves(low: Lowering, op: Operation, element: str, old: str, value: str) -> str:
    """As the instruction of the same name computes them."""
    c, type = low.code, scalar_type(op.type)
    parts = [c.cast("bitcast", element, x, type) for x in (old, value)]
    like = replace(op, spec=INSTRUCTIONS[op.get("atomic")])
    return c.cast("bitcast", type, FLOATING[op.get("atomic")](c, like, 1, parts), element)


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {"atom": _atomic, "red": _atomic}
"""Atomic operations, by opcode."""
