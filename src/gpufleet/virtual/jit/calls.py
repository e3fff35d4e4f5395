"""Calls: device functions become LLVM functions of diverged code, called with a mask.

Parameters and results travel in memory, as vectors of 32-bit words: word w of all lanes, then word
w + 1. A `.param` variable of a call sequence is such a block; the callee gets a pointer to each. An
indirect call asks, for each function that its prototype fits, which lanes mean it.

Functions with barriers are not called but copied into their caller (inlining.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpufleet.virtual.jit.abi import FAULT_ASSERT, FAULT_STACK, FAULT_WILD_CALL
from gpufleet.virtual.jit.callers import fits
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import constant, number, vector, width
from gpufleet.virtual.ptx.parser import HEAP
from gpufleet.virtual.ptx.scalars import SIZES, is_signed
from gpufleet.virtual.ptx.syntax import (
    Address,
    CallTarget,
    Function,
    Immediate,
    Instruction,
    Operand,
    Parameter,
    Register,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from gpufleet.virtual.jit.unit import Unit


def symbol_name(function: Function) -> str:
    """Name of the LLVM function that stands for a PTX function."""
    return f'"fn.{function.name}"'


def result_type(unit: Unit, function: Function) -> str:
    """What that LLVM function returns: the mask of the lanes that ended, if any may."""
    return unit.masks.type if function.name in unit.program.ending else "void"


def signature(unit: Unit, function: Function) -> str:
    """Parameters of that LLVM function."""
    pointers = [f"ptr %in{i}" for i in range(len(function.parameters))]
    pointers += [f"ptr %out{i}" for i in range(len(function.results))]
    return ", ".join(
        [
            "ptr %job, ptr %worker, i32 %warp, ptr %tid.table",
            "i32 %ctaid.x, i32 %ctaid.y, i32 %ctaid.z",
            f"i64 %top, {unit.masks.type} %mask",
            *pointers,
        ]
    )


# ------------------------------------------------------------------------------- parameter blocks


def block_of(low: Lowering, symbol: Symbol) -> str | None:
    """Pointer to the words of a parameter of this function, or of a call in it; None: another kind."""
    unit = low.unit
    if symbol.space != "param":
        return None
    if symbol.name in unit.parameter_blocks:
        return unit.parameter_blocks[symbol.name]
    variable = unit.graph.body.variables.get(symbol.name)
    if variable is None:
        return None
    words = max(-(-variable.size // 4), 1)
    if unit.place_in_state is not None:
        place = unit.place_in_state(symbol.name, words * 4 * low.lanes)
        slot = unit.once(f"block.{symbol.name}", f"getelementptr i8, ptr %state, i64 {place}")
    else:
        slot = low.code.slot(f"[{words} x {vector('i32', low.lanes)}]", 64)
    unit.parameter_blocks[symbol.name] = slot
    return slot


def load_parameter(low: Lowering, instruction: Instruction, block: str, offset: int) -> None:
    """ld.param from a block of words."""
    operation = instruction.operation
    destination = instruction.operands[0]
    targets = destination.elements if isinstance(destination, Vector) else (destination,)
    size = SIZES[operation.type]
    for place, target in enumerate(targets):
        value = _read_words(low, block, offset + place * size, size)
        element = scalar_type(operation.type)
        value = low.reinterpret(value, f"i{8 * size}", element, low.lanes)
        low.write(target, value, element, low.lanes, 0, is_signed(operation.type))


def store_parameter(low: Lowering, instruction: Instruction, block: str, offset: int) -> None:
    """st.param to a block of words, for the active lanes."""
    operation = instruction.operation
    source = instruction.operands[1]
    sources = source.elements if isinstance(source, Vector) else (source,)
    size = SIZES[operation.type]
    for place, operand in enumerate(sources):
        value = low.fetch(operand, operation.type, low.lanes)
        value = low.reinterpret(value, scalar_type(operation.type), f"i{8 * size}", low.lanes)
        _write_words(low, block, offset + place * size, size, value)


def _word(low: Lowering, block: str, index: int) -> str:
    return low.code.field(block, index * 4 * low.lanes)


def _read_words(low: Lowering, block: str, offset: int, size: int) -> str:
    c, n = low.code, low.lanes
    t = vector("i32", n)
    first = c.let(f"load {t}, ptr {_word(low, block, offset // 4)}")
    if size == 4:
        return first
    if size < 4:
        shifted = c.let(f"lshr {t} {first}, {constant('i32', 8 * (offset % 4), n)}")
        return c.let(f"trunc {t} {shifted} to {vector(f'i{8 * size}', n)}")
    wide = vector("i64", n)
    second = c.let(f"load {t}, ptr {_word(low, block, offset // 4 + 1)}")
    upper = c.let(f"shl {wide} {c.let(f'zext {t} {second} to {wide}')}, {constant('i64', 32, n)}")
    return c.let(f"or {wide} {upper}, {c.let(f'zext {t} {first} to {wide}')}")


def _write_words(low: Lowering, block: str, offset: int, size: int, value: str) -> None:
    c, n = low.code, low.lanes
    t = vector("i32", n)
    if size == 8:
        wide = vector("i64", n)
        _write_word(low, block, offset // 4, c.let(f"trunc {wide} {value} to {t}"))
        upper = c.let(f"lshr {wide} {value}, {constant('i64', 32, n)}")
        _write_word(low, block, offset // 4 + 1, c.let(f"trunc {wide} {upper} to {t}"))
        return
    if size < 4:
        old = c.let(f"load {t}, ptr {_word(low, block, offset // 4)}")
        shift = 8 * (offset % 4)
        mask = ((1 << 8 * size) - 1) << shift
        kept = c.let(f"and {t} {old}, {constant('i32', ~mask, n)}")
        wide = c.let(f"zext {vector(f'i{8 * size}', n)} {value} to {t}")
        moved = c.let(f"shl {t} {wide}, {constant('i32', shift, n)}")
        value = c.let(f"or {t} {kept}, {moved}")
    _write_word(low, block, offset // 4, value)


def _write_word(low: Lowering, block: str, index: int, value: str) -> None:
    c, n = low.code, low.lanes
    t = vector("i32", n)
    place = _word(low, block, index)
    predicate = low.active_predicate()
    if predicate is not None:
        old = c.let(f"load {t}, ptr {place}")
        value = c.let(f"select {vector('i1', n)} {predicate}, {t} {value}, {t} {old}")
    c.do(f"store {t} {value}, ptr {place}")


# ------------------------------------------------------------------------------------------- calls


def _call(low: Lowering, instruction: Instruction) -> None:
    call = instruction.operands[0]
    assert isinstance(call, CallTarget)
    if isinstance(call.target, Register):
        _indirect(low, instruction, call)
        return
    function = low.unit.program.module.function(call.target.name)
    if function is None:
        raise low.unit.refuse(instruction, f"({call.target.name!r} is not there)")
    if function.build is None:
        builtin = BUILTINS.get(function.name)
        if builtin is None:
            raise low.unit.refuse(instruction, f"({function.name!r} is declared but not defined)")
        builtin(low, instruction, call)
        return
    mask = low.active()
    ended = _enter(low, instruction, call, function, low.masks.full if mask is None else mask)
    if ended is not None:
        low.end_threads(ended)


def _enter(
    low: Lowering, instruction: Instruction, call: CallTarget, function: Function, mask: str
) -> str | None:
    """Call a function for some lanes; returns the mask of those that ended there, if any may."""
    c, unit = low.code, low.unit
    unit.program.called.setdefault(function.name, function)
    given = [
        _argument(low, instruction, o, p) for o, p in zip(call.arguments, function.parameters, strict=False)
    ]
    taken = [
        _result_block(low, instruction, o, p) for o, p in zip(call.results, function.results, strict=False)
    ]
    top = f"{unit.local_bytes}"
    if unit.local_top != "0":
        top = c.let(f"add i64 {unit.local_top}, {unit.local_bytes}")
    pointers = "".join(f", ptr {p}" for p in [*given, *taken])
    result = result_type(unit, function)
    text = (
        f"call {result} @{symbol_name(function)}(ptr %job, ptr %worker, i32 %warp, ptr %tid.table, "
        f"i32 %ctaid.x, i32 %ctaid.y, i32 %ctaid.z, i64 {top}, {low.masks.type} {mask}{pointers})"
    )
    ended = None
    if result == "void":
        c.do(text)
    else:
        ended = c.let(text)
    for operand, parameter, block in zip(call.results, function.results, taken, strict=False):
        if isinstance(operand, Register):
            size = SIZES[parameter.type]
            value = _read_words(low, block, 0, size)
            low.write(operand, value, f"i{8 * size}", low.lanes)
    return ended


def _argument(low: Lowering, instruction: Instruction, operand: Operand, parameter: Parameter) -> str:
    if isinstance(operand, Symbol):
        block = block_of(low, operand)
        if block is None:
            raise low.unit.refuse(instruction, f"(argument {operand.name!r})")
        return block
    assert isinstance(operand, (Register, Immediate))
    size = max(parameter.size, 4) if parameter.type == "pred" else parameter.size
    block = low.code.slot(f"[{max(-(-size // 4), 1)} x {vector('i32', low.lanes)}]", 64)
    element = scalar_type(parameter.type)
    value = low.fetch(operand, parameter.type, low.lanes)
    value = low.reinterpret(value, element, f"i{width(element)}", low.lanes)
    _write_words(low, block, 0, SIZES[parameter.type], value)
    return block


def register_indices(function: Function, parameters: Sequence[Parameter]) -> set[int]:
    """Registers in which parameters or results travel."""
    names = {p.name for p in parameters if p.register}
    return {r.index for r in function.body.registers if r.name in names}


def write_register_result(low: Lowering, result: Parameter, block: str) -> None:
    """At a function's end: put a `.reg` result into its block, for the lanes that called."""
    register = next(r for r in low.unit.graph.body.registers if r.name == result.name)
    value = low.fetch(register, f"b{8 * SIZES[result.type]}", low.lanes)
    _write_words(low, block, 0, SIZES[result.type], value)


def read_register_parameter(low: Lowering, parameter: Parameter, block: str) -> None:
    """At a function's start: bring a `.reg` parameter from its block into its register."""
    register = next(r for r in low.unit.graph.body.registers if r.name == parameter.name)
    size = SIZES[parameter.type]
    low.write(register, _read_words(low, block, 0, size), f"i{8 * size}", low.lanes)


def _result_block(low: Lowering, instruction: Instruction, operand: Operand, result: Parameter) -> str:
    if isinstance(operand, Symbol):
        block = block_of(low, operand)
        if block is not None:
            return block
    if isinstance(operand, Register):
        return low.code.slot(f"[2 x {vector('i32', low.lanes)}]", 64)
    raise low.unit.refuse(instruction, f"(where the result {result.name!r} goes)")


def _indirect(low: Lowering, instruction: Instruction, call: CallTarget) -> None:
    """For each function that may be meant: the lanes that mean it call it."""
    c, n, unit = low.code, low.lanes, low.unit
    t = vector("i64", n)
    assert isinstance(call.target, Register)
    address = low.fetch(call.target, "u64", n)
    mask = low.active()
    left = c.slot(low.masks.type)
    c.do(f"store {low.masks.type} {low.masks.full if mask is None else mask}, ptr {left}")
    ended = c.slot(low.masks.type)
    c.do(f"store {low.masks.type} {low.masks.none}, ptr {ended}")
    for function in unit.program.functions:
        if function.build is None or not fits(call, function):
            continue
        if function.name in unit.program.with_barriers:
            continue  # copied into the kernel, which asks for it first (inlining.py)
        code = unit.program.module.code_addresses[function.name]
        meant = low.masks.make(c, c.let(f"icmp eq {t} {address}, {constant('i64', code, n)}"))
        waiting = c.let(f"load {low.masks.type}, ptr {left}")
        chosen = low.masks.both(c, waiting, meant)
        enter, after = c.name("enter"), c.name("next")
        c.branch(low.masks.any(c, chosen), enter, after)
        c.label(enter)
        c.do(f"store {low.masks.type} {low.masks.without(c, waiting, chosen)}, ptr {left}")
        gone = _enter(low, instruction, call, function, chosen)
        if gone is not None:
            before = c.let(f"load {low.masks.type}, ptr {ended}")
            c.do(f"store {low.masks.type} {low.masks.either(c, before, gone)}, ptr {ended}")
        c.jump(after)
        c.label(after)
    wild = c.let(f"load {low.masks.type}, ptr {left}")
    bad, good = c.name("wild"), c.name("ok")
    c.branch(low.masks.any(c, wild), bad, good)
    with c.cold(bad):
        lane = c.intrinsic("cttz", "i32", ("i32", low.masks.number(c, wild)), ("i1", "false"))
        where = c.let(f"extractelement {t} {address}, i32 {lane}")
        _fault(low, instruction, FAULT_WILD_CALL, where, lane)
    c.label(good)
    if unit.program.ending:
        low.end_threads(c.let(f"load {low.masks.type}, ptr {ended}"))


def _fault(low: Lowering, instruction: Instruction, kind: int, address: str, lane: str) -> None:
    site = low.unit.site(instruction)
    low.code.function(
        "gf_fault",
        "void",
        *(("ptr", "%worker"), ("i32", str(kind)), ("i32", str(site)), ("i64", address), ("i32", lane)),
        tail=" noreturn",
    )
    low.code.do("unreachable")


def check_local_stack(low: Lowering) -> None:
    """At a function's start: is there room for its local variables?"""
    unit, c = low.unit, low.code
    if not unit.local_bytes:
        return
    end = c.let(f"add i64 {unit.local_top}, {unit.local_bytes}")
    bad, good = c.name("overflow"), c.name("room")
    c.branch(c.let(f"icmp ugt i64 {end}, {unit.program.local_bytes}"), bad, good)
    with c.cold(bad):
        _fault(low, unit.graph.body.instructions[0], FAULT_STACK, "0", "0")
    c.label(good)


# ---------------------------------------------------------------------------- runtime's functions


def _words_per_lane(low: Lowering, call: CallTarget) -> list[str]:
    """The arguments of a call of a runtime function, each as i64 lanes."""
    c, n = low.code, low.lanes
    values = []
    for operand in call.arguments:
        block = block_of(low, operand) if isinstance(operand, Symbol) else None
        if block is None or not isinstance(operand, Symbol):
            values.append(low.fetch(operand, "u64", n))
            continue
        size = low.unit.graph.body.variables[operand.name].size
        value = _read_words(low, block, 0, size)
        values.append(value if size == 8 else c.let(f"zext {vector('i32', n)} {value} to {vector('i64', n)}"))
    return values


def _print(low: Lowering, instruction: Instruction, call: CallTarget) -> None:
    """vprintf(format, arguments): Python formats and hands the text on, lane by lane."""
    from gpufleet.virtual.jit.lanes import each_lane

    c, n = low.code, low.lanes

    def one(scalars: Sequence[str]) -> Sequence[str]:
        return [
            c.function(
                "gf_print",
                "i32",
                *(("ptr", "%worker"), ("ptr", "%job"), ("i64", scalars[0]), ("i64", scalars[1])),
            )
        ]

    format_address, arguments = _words_per_lane(low, call)[:2]
    found = each_lane(low, [("i64", format_address), ("i64", arguments)], ["i32"], one)
    if call.results:
        result = call.results[0]
        if isinstance(result, Symbol):
            block = block_of(low, result)
            assert block is not None
            _write_word(low, block, 0, found[0])
        elif isinstance(result, Register):
            low.write(result, found[0], "i32", n)


def _assertion(low: Lowering, instruction: Instruction, call: CallTarget) -> None:
    """__assertfail(message, file, line, function, size): every lane is heard; the first is the fault."""
    from gpufleet.virtual.jit.lanes import each_lane

    c, n = low.code, low.lanes
    values = _words_per_lane(low, call)
    lane = "0"
    predicate = low.active_predicate()
    if predicate is not None:
        lane = c.intrinsic("cttz", "i32", ("i32", number(c, predicate, n)), ("i1", "false"))
    site = low.unit.site(instruction)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        c.function(
            "gf_assert",
            "void",
            *(("ptr", "%worker"), ("ptr", "%job"), ("i32", str(site)), ("i32", scalars[4])),
            *(("i64", word) for word in scalars[:4]),
        )
        return []

    inputs = [("i64", value) for value in values[:4]]
    each_lane(low, [*inputs, ("i32", c.lanes("i32", 1, n))], [], one)
    _fault(low, instruction, FAULT_ASSERT, "0", lane)
    c.label(c.name("never"))


def _malloc(low: Lowering, instruction: Instruction, call: CallTarget) -> None:
    """malloc(size): the module's heap is looked after by Python (kernel_heap.py)."""
    from gpufleet.virtual.jit.lanes import each_lane

    c = low.code
    heap = low.unit.symbol_address(HEAP)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        return [c.function("gf_malloc", "i64", ("i64", heap), ("i64", scalars[0]))]

    found = each_lane(low, [("i64", _words_per_lane(low, call)[0])], ["i64"], one)
    result = call.results[0] if call.results else None
    if isinstance(result, Symbol):
        block = block_of(low, result)
        assert block is not None
        _write_words(low, block, 0, 8, found[0])
    elif isinstance(result, Register):
        low.write(result, found[0], "i64", low.lanes)


def _free(low: Lowering, instruction: Instruction, call: CallTarget) -> None:
    """free(pointer); a pointer that malloc did not return is ignored, the interpreter reports it."""
    from gpufleet.virtual.jit.lanes import each_lane

    c = low.code
    heap = low.unit.symbol_address(HEAP)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        c.function("gf_free", "void", ("i64", heap), ("i64", scalars[0]))
        return []

    each_lane(low, [("i64", _words_per_lane(low, call)[0])], [], one)


BUILTINS: dict[str, Callable[[Lowering, Instruction, CallTarget], None]] = {
    "vprintf": _print,
    "__assertfail": _assertion,
    "malloc": _malloc,
    "free": _free,
}
"""Functions that the CUDA runtime provides, by name."""

EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {"call": _call}
"""Calls, by opcode."""


def parameter_access(low: Lowering, instruction: Instruction, address: Address) -> tuple[str, int] | None:
    """The block and offset that ld.param and st.param mean, if it is not the kernel's parameter space."""
    if not isinstance(address.base, Symbol) or instruction.operation.space not in ("param", ""):
        return None
    block = block_of(low, address.base)
    return None if block is None else (block, address.offset + address.base.offset)
