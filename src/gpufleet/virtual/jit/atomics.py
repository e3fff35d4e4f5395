"""atom and red. A block runs on one CPU thread, so its shared memory needs no lock prefix (ten times
faster); global atomics are real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit.lanes import each_lane
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.memory import _pointers, access_size, checked_pointer, reach
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import SIZES, is_float, is_signed
from gpufleet.virtual.ptx.syntax import Address, Discard, Instruction, Operand, Register


def _atomic(low: Lowering, instruction: Instruction) -> None:
    operation = instruction.operation
    returns = operation.name == "atom"
    destination = instruction.operands[0] if returns else Discard()
    address, *sources = instruction.operands[1:] if returns else instruction.operands
    assert isinstance(address, Address)
    if operation.lanes > 1 or operation.type in ("f16", "f16x2", "bf16", "bf16x2"):
        raise low.unit.refuse(instruction)
    if is_float(operation.type) and operation.get("atomic") != "add":
        raise low.unit.refuse(instruction)
    element, n = scalar_type(operation.type), low.lanes
    place = reach(low, instruction, address, *access_size(instruction))
    inputs = [(element, low.fetch(s, operation.type, n)) for s in sources]
    private = operation.space == "shared"
    wanted = _is_read(low, destination)
    emit = _plain if private else _real

    if place.stride == 0:

        def one(scalars: Sequence[str]) -> Sequence[str]:
            return _kept(wanted, emit(low, operation, element, place.pointer, scalars))
    elif place.check is not None:
        inputs.insert(0, ("i64", place.pointer))
        check = place.check

        def one(scalars: Sequence[str]) -> Sequence[str]:
            pointer = checked_pointer(low, scalars[0], check)
            return _kept(wanted, emit(low, operation, element, pointer, scalars[1:]))
    else:
        inputs.insert(0, ("ptr", _pointers(low, place)))

        def one(scalars: Sequence[str]) -> Sequence[str]:
            return _kept(wanted, emit(low, operation, element, scalars[0], scalars[1:]))

    found = each_lane(low, inputs, [element] if wanted else [], one)
    if wanted:
        low.write(destination, found[0], element, n)


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
    return c.let(f"atomicrmw {_operator(op)} ptr {pointer}, {element} {values[0]} {order}, align {size}")


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


def _combine(low: Lowering, op: Operation, element: str, old: str, values: Sequence[str]) -> str:
    c, which, value = low.code, op.get("atomic"), values[0]
    if which == "exch":
        return value
    if which == "cas":
        same = c.let(f"icmp eq {element} {old}, {values[0]}")
        return c.let(f"select i1 {same}, {element} {values[1]}, {element} {old}")
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
    operation = "fadd" if is_float(op.type) else which
    return c.let(f"{operation} {element} {old}, {value}")


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {"atom": _atomic, "red": _atomic}
"""Atomic operations, by opcode."""
