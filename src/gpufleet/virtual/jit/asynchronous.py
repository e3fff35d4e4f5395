"""mbarrier, and copies from global to shared memory that would be asynchronous on a GPU.

Copies are done where they are asked for, so waiting for them is nothing. An mbarrier is eight bytes of
shared memory, laid out as the interpreter does (interpreter/mbarriers.py); the warps of a block run in turn
on one CPU thread, so it needs no lock. A wait that finds its phase incomplete lets the other warps run
(barriers.py) and then answers no: programs ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit.abi import FAULT_RANGE
from gpufleet.virtual.jit.lanes import each_lane
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.memory import address_lanes, reach, single_site, window
from gpufleet.virtual.jit.nodes import is_wait
from gpufleet.virtual.jit.text import constant, vector
from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.syntax import Address, Discard, Immediate, Instruction, Negated, Operand, Register

_COUNT = (1 << 20) - 1
_TRANSACTIONS = (1 << 22) - 1
_OBJECT = 8

_FUNCTIONS = f"""define internal i64 @mbarrier.completed(i64 %w) alwaysinline nounwind {{
  %pending = and i64 %w, {_COUNT}
  %high = lshr i64 %w, 40
  %bytes = and i64 %high, {_TRANSACTIONS}
  %left = or i64 %pending, %bytes
  %done = icmp eq i64 %left, 0
  %middle = lshr i64 %w, 20
  %expected = and i64 %middle, {_COUNT}
  %rest = and i64 %w, {~_COUNT}
  %again = or i64 %rest, %expected
  %following = xor i64 %again, {1 << 62}
  %r = select i1 %done, i64 %following, i64 %w
  ret i64 %r
}}
define internal i64 @mbarrier.arrive(i64 %w, i64 %n) alwaysinline nounwind {{
  %old = and i64 %w, {_COUNT}
  %less = sub i64 %old, %n
  %new = and i64 %less, {_COUNT}
  %rest = and i64 %w, {~_COUNT}
  %changed = or i64 %rest, %new
  %r = call i64 @mbarrier.completed(i64 %changed)
  ret i64 %r
}}
define internal i64 @mbarrier.drop(i64 %w, i64 %n) alwaysinline nounwind {{
  %middle = lshr i64 %w, 20
  %less = sub i64 %middle, %n
  %new = and i64 %less, {_COUNT}
  %up = shl i64 %new, 20
  %rest = and i64 %w, {~(_COUNT << 20)}
  %changed = or i64 %rest, %up
  %r = call i64 @mbarrier.arrive(i64 %changed, i64 %n)
  ret i64 %r
}}
define internal i64 @mbarrier.expect(i64 %w, i64 %n) alwaysinline nounwind {{
  %high = lshr i64 %w, 40
  %more = add i64 %high, %n
  %new = and i64 %more, {_TRANSACTIONS}
  %up = shl i64 %new, 40
  %rest = and i64 %w, {~(_TRANSACTIONS << 40)}
  %r = or i64 %rest, %up
  ret i64 %r
}}
define internal i64 @mbarrier.complete(i64 %w, i64 %n) alwaysinline nounwind {{
  %minus = sub i64 0, %n
  %changed = call i64 @mbarrier.expect(i64 %w, i64 %minus)
  %r = call i64 @mbarrier.completed(i64 %changed)
  ret i64 %r
}}
define internal i64 @mbarrier.init(i64 %w, i64 %n) alwaysinline nounwind {{
  %up = shl i64 %n, 20
  %r = or i64 %up, %n
  ret i64 %r
}}"""


# ---------------------------------------------------------------------------------------- mbarrier


def _mbarrier(low: Lowering, instruction: Instruction) -> None:
    operation, operands, c = instruction.operation, instruction.operands, low.code
    if "pending_count" in operation:
        n = low.lanes
        word = low.fetch(operands[1], "b64", n)
        count = c.let(f"and {vector('i64', n)} {word}, {constant('i64', _COUNT, n)}")
        low.write(operands[0], c.resize(count, "i64", "i32", n, signed=False), "i32", n)
    elif is_wait(instruction):
        _test(low, instruction)
    elif "init" in operation or "inval" in operation:
        amount = operands[1] if "init" in operation else Immediate(0, "u32")
        _change(low, instruction, ["init"], Discard(), operands[0], amount)
    elif "complete_tx" in operation:
        _change(low, instruction, ["complete"], Discard(), operands[0], operands[1])
    elif "arrive" not in operation and "arrive_drop" not in operation:
        _change(low, instruction, ["expect"], Discard(), operands[0], operands[1])
    else:
        arrivals = operands[2] if len(operands) > 2 else Immediate(1, "u32")
        action = "drop" if "arrive_drop" in operation else "arrive"
        steps = ["expect", action] if "expect_tx" in operation else [action]
        _change(low, instruction, steps, operands[0], operands[1], arrivals)


def _change(
    low: Lowering,
    instruction: Instruction,
    steps: Sequence[str],
    destination: Operand,
    address: Operand,
    amount: Operand,
) -> None:
    """Change an object once for every active lane; a lane's state is what it was before.

    The last step but for the first of two gets 1: of `arrive.expect_tx`, the arrival.
    """
    assert isinstance(address, Address)
    c, n = low.code, low.lanes
    low.unit.program.declarations.add(_FUNCTIONS)
    place = reach(low, instruction, address, _OBJECT, _OBJECT)
    wide = c.resize(low.fetch(amount, "u32", n), "i32", "i64", n, signed=False)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        pointer = place.pointer_of(low, scalars[0])
        old = word = c.let(f"load i64, ptr {pointer}, align 8")
        for number, step in enumerate(steps):
            by = "1" if number else scalars[1]
            word = c.let(f"call i64 @mbarrier.{step}(i64 {word}, i64 {by})")
        c.do(f"store i64 {word}, ptr {pointer}, align 8")
        return [old]

    found = each_lane(low, [place.lanes(low), ("i64", wide)], ["i64"], one)
    low.write(destination, found[0], "i64", n)


def _test(low: Lowering, instruction: Instruction) -> None:
    """Whether a phase is complete: whether the object is in another one by now."""
    destination, address, state = instruction.operands[:3]
    assert isinstance(address, Address)
    c, n = low.code, low.lanes
    t = vector("i64", n)
    place = reach(low, instruction, address, _OBJECT, _OBJECT)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        pointer = place.pointer_of(low, scalars[0])
        return [c.let(f"load i64, ptr {pointer}, align 8")]

    if place.stride == 0:
        word = c.splat("i64", c.let(f"load i64, ptr {place.pointer}, align 8"), n)
    else:
        word = each_lane(low, [place.lanes(low)], ["i64"], one)[0]
    now = c.let(f"lshr {t} {word}, {constant('i64', 62, n)}")
    if "parity" in instruction.operation:
        then = c.resize(low.fetch(state, "u32", n), "i32", "i64", n, signed=False)
    else:
        then = c.let(f"lshr {t} {low.fetch(state, 'b64', n)}, {constant('i64', 62, n)}")
    differs = c.let(f"and {t} {c.let(f'xor {t} {now}, {then}')}, {constant('i64', 1, n)}")
    low.write(destination, c.let(f"icmp ne {t} {differs}, {constant('i64', 0, n)}"), "i1", n)


# ------------------------------------------------------------------------------------------ copies


def _copy(low: Lowering, instruction: Instruction) -> None:
    operation = instruction.operation
    if "mbarrier" in operation:
        if "noinc" in operation:
            (address,) = instruction.operands
            _change(low, instruction, ["arrive"], Discard(), address, Immediate(1, "u32"))
        # Else one more arrival is expected, and it comes: as if nothing had happened.
        return
    if "to" not in operation:
        return  # groups of copies, and waiting for them
    target, source, size, *more = instruction.operands
    if not isinstance(size, Immediate) or size.bits not in (4, 8, 16):
        raise invalid(f"{instruction} of what is not 4, 8 or 16 bytes", instruction.line)
    if "hint" in operation:
        more = more[:-1]
    _copy_lanes(low, instruction, target, source, size.bits, more[0] if more else None)


def _copy_lanes(
    low: Lowering, instruction: Instruction, target: Operand, source: Operand, size: int, part: Operand | None
) -> None:
    """Copy the first bytes of each lane, as many as it wants, and zeros behind them."""
    assert isinstance(target, Address)
    assert isinstance(source, Address)
    c, n = low.code, low.lanes
    t = vector("i32", n)
    if part is None:
        count = constant("i32", size, n)
    elif isinstance(part, Negated) or (isinstance(part, Register) and part.type == "pred"):
        ignored = low.fetch(part, "pred", n)
        count = c.let(
            f"select {vector('i1', n)} {ignored}, {t} {constant('i32', 0, n)}, {t} {constant('i32', size, n)}"
        )
    else:
        count = c.intrinsic("umin", t, (t, low.fetch(part, "u32", n)), (t, constant("i32", size, n)))
    name = f"cp.async.{size}"
    low.unit.program.helpers.setdefault(name, _copy_function(name, size))
    for text in ("memset.p0.i64(ptr, i8, i64, i1)", "memcpy.p0.p0.i64(ptr, ptr, i64, i1)"):
        low.unit.program.declarations.add(f"declare void @llvm.{text}")
    low.unit.program.declarations.add("declare void @gf_fault(ptr, i32, i32, i64, i32) noreturn")
    to, origin = window(low, "shared"), window(low, "global")
    sites = (
        single_site(low, instruction, target.offset, size, "shared"),
        single_site(low, instruction, source.offset, size, "global"),
    )

    def one(scalars: Sequence[str]) -> Sequence[str]:
        arguments = (
            *("ptr %worker", f"ptr {to.pointer}", f"i64 {to.bytes}", f"ptr {origin.pointer}"),
            *(f"i64 {origin.origin}", f"i64 {origin.bytes}", f"i64 {scalars[0]}", f"i64 {scalars[1]}"),
            *(f"i32 {scalars[2]}", f"i32 {scalars[3]}"),
            *(f"i64 {target.offset}", f"i64 {source.offset}", f"i32 {sites[0]}", f"i32 {sites[1]}"),
        )
        c.do(f"call void @{name}({', '.join(arguments)})")
        return []

    inputs = [
        ("i64", address_lanes(low, target)),
        ("i64", address_lanes(low, source)),
        ("i32", count),
        ("i32", c.lanes("i32", 1, n)),
    ]
    each_lane(low, inputs, [], one)


def _copy_function(name: str, size: int) -> str:
    """One lane's copy, with its checks; a lane that reads nothing may have any source."""
    element = {4: "i32", 8: "i64", 16: "<2 x i64>"}[size]
    parameters = (
        "ptr %worker, ptr %shared, i64 %room, ptr %memory, i64 %origin, i64 %bytes, i64 %to, i64 %from, "
        "i32 %count, i32 %lane, i64 %to.offset, i64 %from.offset, i32 %to.site, i32 %from.site"
    )
    return f"""define internal void @{name}({parameters}) noinline nounwind {{
entry:
  %place = add i64 %to, %to.offset
  %most = sub i64 %room, {size}
  %fits = icmp sge i64 %most, 0
  %inside = icmp ule i64 %place, %most
  %odd = and i64 %place, {size - 1}
  %even = icmp eq i64 %odd, 0
  %both = and i1 %inside, %even
  %good = and i1 %both, %fits
  br i1 %good, label %read, label %bad.to
bad.to:
  call void @gf_fault(ptr %worker, i32 {FAULT_RANGE}, i32 %to.site, i64 %to, i32 %lane)
  unreachable
read:
  %target = getelementptr i8, ptr %shared, i64 %place
  %nothing = icmp eq i32 %count, 0
  br i1 %nothing, label %zero, label %check
check:
  %wide = zext i32 %count to i64
  %address = add i64 %from, %from.offset
  %start = sub i64 %address, %origin
  %last = sub i64 %bytes, %wide
  %known = icmp ule i64 %start, %last
  %skew = and i64 %address, {size - 1}
  %straight = icmp eq i64 %skew, 0
  %right = and i1 %known, %straight
  br i1 %right, label %copy, label %bad.from
bad.from:
  call void @gf_fault(ptr %worker, i32 {FAULT_RANGE}, i32 %from.site, i64 %from, i32 %lane)
  unreachable
copy:
  %source = getelementptr i8, ptr %memory, i64 %start
  %whole = icmp eq i32 %count, {size}
  br i1 %whole, label %all, label %some
all:
  %value = load {element}, ptr %source, align {size}
  store {element} %value, ptr %target, align {size}
  ret void
some:
  call void @llvm.memset.p0.i64(ptr %target, i8 0, i64 {size}, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %wide, i1 false)
  ret void
zero:
  call void @llvm.memset.p0.i64(ptr %target, i8 0, i64 {size}, i1 false)
  ret void
}}"""


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {"mbarrier": _mbarrier, "cp": _copy}
"""By opcode."""
