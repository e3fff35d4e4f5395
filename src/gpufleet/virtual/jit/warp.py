"""Operations between the lanes of a warp: plain vector operations, since a warp is a vector.

Kernels that contain them are compiled with vectors of 32 lanes (engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpufleet.virtual.jit import barriers
from gpufleet.virtual.jit.floating import FLOATING
from gpufleet.virtual.jit.lanes import each_lane
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import constant, number, vector
from gpufleet.virtual.ptx.instructions import INSTRUCTIONS
from gpufleet.virtual.ptx.scalars import is_float, is_signed
from gpufleet.virtual.ptx.syntax import Immediate, Instruction, Operand, Pair, Register

WARP = 32
WARP_OPERATIONS = frozenset({"shfl", "vote", "match", "redux", "activemask", "elect"})


def constant_of(low: Lowering, operand: Operand) -> int | None:
    """The value of an operand that is always the same constant."""
    if isinstance(operand, Immediate):
        return operand.bits
    if isinstance(operand, Register):
        definition = low.unit.facts.only(operand.index)
        if definition is not None and definition.opcode == "mov":
            source = definition.operands[1]
            return source.bits if isinstance(source, Immediate) else None
    return None


def _active_number(low: Lowering) -> str:
    """Active lanes as an i32."""
    predicate = low.active_predicate()
    return "-1" if predicate is None else number(low.code, predicate, low.lanes)


def _shuffle(low: Lowering, instruction: Instruction) -> None:
    """shfl: lane i gets the value of lane j, or keeps its own where j is out of range."""
    operation, c = instruction.operation, low.code
    destination, source, b, control, *_ = instruction.operands
    first, second = (
        (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    )
    value = low.fetch(source, "b32", low.lanes)
    t, i1 = vector("i32", low.lanes), vector("i1", low.lanes)
    known_b, known_c = constant_of(low, b), constant_of(low, control)
    if known_b is not None and known_c is not None:
        lanes = [shuffle_source(operation.get("shuffle"), i, known_b, known_c) for i in range(WARP)]
        order = ", ".join(f"i32 {j if ok else i}" for i, (j, ok) in enumerate(lanes))
        result = c.let(f"shufflevector {t} {value}, {t} poison, <{low.lanes} x i32> <{order}>")
        valid = "<" + ", ".join(f"i1 {'true' if ok else 'false'}" for _, ok in lanes) + ">"
    else:
        place, valid = _shuffle_places(low, operation.get("shuffle"), b, control)
        result = permute(low, "i32", value, place)
    low.write(first, result, "i32", low.lanes)
    if second is not None:
        low.write(second, c.let(f"and {i1} {valid}, {constant('i1', 1, low.lanes)}"), "i1", low.lanes)


def shuffle_source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Lane that a lane reads and whether it is in range (PTX ISA, shfl.sync)."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    high = lane & segment | clamp & ~segment & 31
    low = lane & segment
    if mode == "up":
        j = lane - b
        return j, j >= high
    if mode == "down":
        j = lane + b
    elif mode == "bfly":
        j = lane ^ b
    else:
        j = low | b & ~segment & 31
    return j, j <= high


def _shuffle_places(low: Lowering, mode: str, b: Operand, control: Operand) -> tuple[str, str]:
    """The same for operands that are only known when the kernel runs."""
    c, n = low.code, low.lanes
    t, i1 = vector("i32", n), vector("i1", n)

    def const(value: int) -> str:
        return constant("i32", value, n)

    lane = c.lanes("i32", 1, n)
    bits = c.let(f"and {t} {low.fetch(b, 'u32', n)}, {const(31)}")
    whole = low.fetch(control, "u32", n)
    clamp = c.let(f"and {t} {whole}, {const(31)}")
    segment = c.let(f"and {t} {c.let(f'lshr {t} {whole}, {const(8)}')}, {const(31)}")
    outside = c.let(f"and {t} {c.let(f'xor {t} {segment}, {const(31)}')}, {const(31)}")
    lowest = c.let(f"and {t} {lane}, {segment}")
    highest = c.let(f"or {t} {lowest}, {c.let(f'and {t} {clamp}, {outside}')}")
    if mode == "up":
        place = c.let(f"sub {t} {lane}, {bits}")
        valid = c.let(f"icmp sge {t} {place}, {highest}")
    else:
        if mode == "down":
            place = c.let(f"add {t} {lane}, {bits}")
        elif mode == "bfly":
            place = c.let(f"xor {t} {lane}, {bits}")
        else:
            place = c.let(f"or {t} {lowest}, {c.let(f'and {t} {bits}, {outside}')}")
        valid = c.let(f"icmp sle {t} {place}, {highest}")
    return c.let(f"select {i1} {valid}, {t} {place}, {t} {lane}"), valid


def permute(low: Lowering, element: str, value: str, place: str) -> str:
    """Pick lanes by a vector of i32 in range."""
    c, n = low.code, low.lanes
    slot = c.slot(vector(element, n))
    c.do(f"store {vector(element, n)} {value}, ptr {slot}")
    wide = c.let(f"zext {vector('i32', n)} {place} to {vector('i64', n)}")
    pointers = c.let(f"getelementptr {element}, ptr {slot}, {vector('i64', n)} {wide}")
    return c.intrinsic(
        "masked.gather",
        vector(element, n),
        (f"{vector('ptr', n)} align 4", pointers),
        (vector("i1", n), constant("i1", 1, n)),
        (vector(element, n), "zeroinitializer"),
    )


def _vote(low: Lowering, instruction: Instruction) -> None:
    operation, c = instruction.operation, low.code
    destination, source = instruction.operands[:2]
    held = number(c, low.fetch(source, "pred", low.lanes), low.lanes)
    active = _active_number(low)
    ballot = c.let(f"and i32 {held}, {active}")
    mode = operation.get("vote")
    if mode == "ballot":
        low.write(destination, ballot, "i32", 1)
        return
    nobody = c.let(f"icmp eq i32 {ballot}, 0")
    everybody = c.let(f"icmp eq i32 {ballot}, {active}")
    result = {
        "any": lambda: c.let(f"xor i1 {nobody}, true"),
        "all": lambda: everybody,
        "uni": lambda: c.let(f"or i1 {nobody}, {everybody}"),
    }[mode]()
    low.write(destination, result, "i1", 1)


def _match(low: Lowering, instruction: Instruction) -> None:
    operation, c, n = instruction.operation, low.code, low.lanes
    destination, source = instruction.operands[:2]
    element = scalar_type(operation.type)
    value = low.fetch(source, operation.type, n)
    active = _active_number(low)
    if operation.get("match") == "any":

        def same(scalars: Sequence[str]) -> Sequence[str]:
            equal = c.let(f"icmp eq {vector(element, n)} {value}, {c.splat(element, scalars[0], n)}")
            return [c.let(f"and i32 {number(c, equal, n)}, {active}")]

        low.write(destination, each_lane(low, [(element, value)], ["i32"], same)[0], "i32", n)
        return
    first = _first_active(low, element, value)
    equal = number(c, c.let(f"icmp eq {vector(element, n)} {value}, {c.splat(element, first, n)}"), n)
    everybody = c.let(f"icmp eq i32 {c.let(f'and i32 {equal}, {active}')}, {active}")
    target = destination.first if isinstance(destination, Pair) else destination
    low.write(target, c.let(f"select i1 {everybody}, i32 {active}, i32 0"), "i32", 1)
    if isinstance(destination, Pair):
        low.write(destination.second, everybody, "i1", 1)


def _first_active(low: Lowering, element: str, value: str) -> str:
    c = low.code
    lane = "0"
    predicate = low.active_predicate()
    if predicate is not None:
        lane = c.intrinsic("cttz", "i32", ("i32", number(c, predicate, low.lanes)), ("i1", "false"))
    return c.let(f"extractelement {vector(element, low.lanes)} {value}, i32 {lane}")


_IDENTITIES = {"add": 0, "and": -1, "or": 0, "xor": 0}


def _reduce(low: Lowering, instruction: Instruction) -> None:
    operation, c, n = instruction.operation, low.code, low.lanes
    if is_float(operation.type):
        _reduce_floats(low, instruction)
        return
    destination, source = instruction.operands[:2]
    which = operation.get("reduction")
    t = vector("i32", n)
    value = low.fetch(source, operation.type, n)
    if which in ("min", "max"):
        sign = "s" if is_signed(operation.type) else "u"
        name = f"vector.reduce.{sign}{which}"
        largest = 0x7FFFFFFF if sign == "s" else 0xFFFFFFFF
        smallest = 0x80000000 if sign == "s" else 0
        identity = largest if which == "min" else smallest
    else:
        name, identity = f"vector.reduce.{which}", _IDENTITIES[which]
    predicate = low.active_predicate()
    if predicate is not None:
        value = c.let(
            f"select {vector('i1', n)} {predicate}, {t} {value}, {t} {constant('i32', identity, n)}"
        )
    low.write(destination, c.intrinsic(name, "i32", (t, value)), "i32", 1)


def _reduce_floats(low: Lowering, instruction: Instruction) -> None:
    """The smallest or largest: halves of the warp against each other, until one lane is left."""
    operation, c, n = instruction.operation, low.code, low.lanes
    destination, source = instruction.operands[:2]
    which = operation.get("reduction")
    t = vector("float", n)
    value = low.fetch(source, "f32", n)
    if "abs" in operation:
        value = c.intrinsic("fabs", t, (t, value))
    predicate = low.active_predicate()
    if predicate is not None:
        # What changes nothing: a NaN, which every number beats, or where NaNs pass, an infinity.
        bits = 0x7FFFFFFF
        if "NaN" in operation:
            bits = 0x7F800000 if which == "min" else 0xFF800000
        value = c.let(f"select {vector('i1', n)} {predicate}, {t} {value}, {t} {constant('float', bits, n)}")
    modifiers = {key: word for key, word in operation.modifiers.items() if key == "NaN"}
    choice = replace(operation, spec=INSTRUCTIONS[which], modifiers=modifiers)
    while n > 1:
        n //= 2
        parts = []
        for first in (0, n):
            order = ", ".join(f"i32 {first + i}" for i in range(n))
            whole = vector("float", 2 * n)
            if n == 1:
                parts.append(c.let(f"extractelement {whole} {value}, i64 {first}"))
            else:
                parts.append(c.let(f"shufflevector {whole} {value}, {whole} poison, <{n} x i32> <{order}>"))
        value = FLOATING[which](c, choice, n, parts)
    low.write(destination, value, "float", 1)


def _active_mask(low: Lowering, instruction: Instruction) -> None:
    low.write(instruction.operands[0], _active_number(low), "i32", 1)


def _elect(low: Lowering, instruction: Instruction) -> None:
    c, n = low.code, low.lanes
    destination = instruction.operands[0]
    leader = c.intrinsic("cttz", "i32", ("i32", _active_number(low)), ("i1", "false"))
    first = destination.first if isinstance(destination, Pair) else destination
    low.write(first, c.splat("i32", leader, n), "i32", n)
    if isinstance(destination, Pair):
        chosen = c.let(f"icmp eq {vector('i32', n)} {c.lanes('i32', 1, n)}, {c.splat('i32', leader, n)}")
        low.write(destination.second, chosen, "i1", n)


def _bar(low: Lowering, instruction: Instruction) -> None:
    """What does not wait for other warps; the rest ends a node (nodes.py)."""
    if "arrive" in instruction.operation and "cluster" not in instruction.operation:
        barriers.arrive_only(low, instruction)


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _reduce,
    "activemask": _active_mask,
    "elect": _elect,
    "bar": _bar,
    "barrier": _bar,
}
"""Warp operations, by opcode."""
