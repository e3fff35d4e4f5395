"""Integer and logical instructions: for each opcode, the LLVM IR that carries it out.

An emitter gets the operands as values of the instruction's type, for one lane (`n` = 1) or all, and
returns the result. Nothing here may be undefined in LLVM, also not in lanes whose result is thrown
away: shifts are clamped, divisors are made harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import Code, constant, float_constant, vector
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import SIZES, WIDER, is_float, is_signed

Emitter = Callable[[Code, Operation, int, Sequence[str]], str]


def _bits(op: Operation) -> int:
    return 8 * SIZES[op.type]


def _type(op: Operation, n: int) -> str:
    return vector(scalar_type(op.type), n)


def _binary(operation: str) -> Emitter:
    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        return c.let(f"{operation} {_type(op, n)} {a[0]}, {a[1]}")

    return emit


def _add_or_sub(operation: str) -> Emitter:
    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        t = _type(op, n)
        if "sat" in op:
            return c.intrinsic(f"s{operation}.sat", t, (t, a[0]), (t, a[1]))
        if op.type in ("u16x2", "s16x2"):
            return _on_halves(c, n, a, lambda t, x: c.let(f"{operation} {t} {x[0]}, {x[1]}"))
        return c.let(f"{operation} {t} {a[0]}, {a[1]}")

    return emit


def _on_halves(c: Code, n: int, a: Sequence[str], emit: Callable[[str, Sequence[str]], str]) -> str:
    """Compute on pairs of 16-bit values in 32-bit registers."""
    whole, pairs = vector("i32", n), f"<{2 * n} x i16>"
    parts = [c.let(f"bitcast {whole} {x} to {pairs}") for x in a]
    return c.let(f"bitcast {pairs} {emit(pairs, parts)} to {whole}")


def product(c: Code, op: Operation, n: int, a: str, b: str) -> str:
    """The part of a * b that `.lo`, `.hi` or `.wide` names."""
    part = op.get("part", "lo")
    t = _type(op, n)
    if part == "lo":
        return c.let(f"mul {t} {a}, {b}")
    if part == "hi" and n > 1 and _bits(op) == 64:
        return _high_product(c, n, a, b, is_signed(op.type))
    wide = vector(f"i{2 * _bits(op)}", n)
    extend = "sext" if is_signed(op.type) else "zext"
    x = c.let(f"{extend} {t} {a} to {wide}")
    y = c.let(f"{extend} {t} {b} to {wide}")
    whole = c.let(f"mul {wide} {x}, {y}")
    if part == "wide":
        return whole
    high = c.let(f"lshr {wide} {whole}, {constant(f'i{2 * _bits(op)}', _bits(op), n)}")
    return c.let(f"trunc {wide} {high} to {t}")


def _mul(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    return product(c, op, n, a[0], a[1])


def _mad(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = vector(scalar_type(WIDER[op.type]), n) if op.get("part") == "wide" else _type(op, n)
    p = product(c, op, n, a[0], a[1])
    if "sat" in op:
        return c.intrinsic("sadd.sat", t, (t, p), (t, a[2]))
    return c.let(f"add {t} {p}, {a[2]}")


def _product24(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """48 bits of a product of 24-bit numbers: bits 0-31 (.lo) or 16-47 (.hi)."""
    t, wide = vector("i32", n), vector("i64", n)
    shift = "ashr" if is_signed(op.type) else "lshr"
    parts = []
    for x in a[:2]:
        up = c.let(f"shl {t} {x}, {constant('i32', 8, n)}")
        low = c.let(f"{shift} {t} {up}, {constant('i32', 8, n)}")
        parts.append(c.let(f"{'sext' if is_signed(op.type) else 'zext'} {t} {low} to {wide}"))
    whole = c.let(f"mul {wide} {parts[0]}, {parts[1]}")
    if op.get("part") == "hi":
        whole = c.let(f"lshr {wide} {whole}, {constant('i64', 16, n)}")
    return c.let(f"trunc {wide} {whole} to {t}")


def _mad24(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = vector("i32", n)
    p = _product24(c, op, n, a)
    if "sat" in op:
        return c.intrinsic("sadd.sat", t, (t, p), (t, a[2]))
    return c.let(f"add {t} {p}, {a[2]}")


def _sad(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = _type(op, n)
    sign = "s" if is_signed(op.type) else "u"
    high = c.intrinsic(f"{sign}max", t, (t, a[0]), (t, a[1]))
    low = c.intrinsic(f"{sign}min", t, (t, a[0]), (t, a[1]))
    return c.let(f"add {t} {c.let(f'sub {t} {high}, {low}')}, {a[2]}")


def _divide(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Quotient; all ones where the divisor is 0, INT_MIN for INT_MIN / -1, as the hardware answers."""
    quotient, _ = _division(c, op, n, a)
    return quotient


def _remainder(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Remainder; all ones where the divisor is 0 (H200)."""
    t = _type(op, n)
    quotient, zero = _division(c, op, n, a)
    back = c.let(f"mul {t} {quotient}, {a[1]}")
    rest = c.let(f"sub {t} {a[0]}, {back}")
    ones = constant(scalar_type(op.type), -1, n)
    return c.let(f"select {vector('i1', n)} {zero}, {t} {ones}, {t} {rest}")


def _division(c: Code, op: Operation, n: int, a: Sequence[str]) -> tuple[str, str]:
    """Divide without trapping; also says where the divisor is 0."""
    element, t, i1 = scalar_type(op.type), _type(op, n), vector("i1", n)
    zero = c.let(f"icmp eq {t} {a[1]}, {constant(element, 0, n)}")
    safe = c.let(f"select {i1} {zero}, {t} {constant(element, 1, n)}, {t} {a[1]}")
    if n > 1 and _bits(op) <= 32:
        quotient = _divide_as_double(c, op, n, a[0], safe)
    elif is_signed(op.type):
        quotient = _divide_signed(c, element, n, a[0], safe)
    else:
        quotient = _divide_unsigned(c, element, n, a[0], safe)
    ones = constant(element, -1, n)
    return c.let(f"select {i1} {zero}, {t} {ones}, {t} {quotient}"), zero


def _divide_as_double(c: Code, op: Operation, n: int, a: str, b: str) -> str:
    """x86 has no vector division of integers. A double quotient of 32-bit integers, truncated, is
    exact: a quotient that is not an integer is at least 2^-32 away from the next one, relative to 2^-53.
    """
    t, d = _type(op, n), vector("double", n)
    sign = "si" if is_signed(op.type) else "ui"
    x = c.let(f"{sign}tofp {t} {a} to {d}")
    y = c.let(f"{sign}tofp {t} {b} to {d}")
    q = c.let(f"fdiv {d} {x}, {y}")
    wide = vector("i64", n) if _bits(op) == 32 else vector("i32", n)
    whole = c.let(f"fptosi {d} {q} to {wide}")
    return c.let(f"trunc {wide} {whole} to {t}")


def _divide_unsigned(c: Code, element: str, n: int, a: str, b: str) -> str:
    if n == 1:
        return c.let(f"udiv {element} {a}, {b}")
    return _lane_by_lane(c, "divide", element, n, a, b, f"  %w = udiv {element} %u, %v")


def _lane_by_lane(c: Code, name: str, element: str, n: int, a: str, b: str, work: str) -> str:
    """What CPUs have no vector operation for, in a loop of its own: unrolled, it took LLVM 0.2 s each.

    `work` computes %w from %u and %v.
    """
    t = vector(element, n)
    name = f"{name}.{element}.{n}"
    c.declare(
        f"""define internal {t} @{name}({t} %a, {t} %b) noinline nounwind {{
entry:
  %x = alloca {t}
  %y = alloca {t}
  store {t} %a, ptr %x
  store {t} %b, ptr %y
  br label %lane
lane:
  %i = phi i32 [0, %entry], [%j, %lane]
  %p = getelementptr {element}, ptr %x, i32 %i
  %q = getelementptr {element}, ptr %y, i32 %i
  %u = load {element}, ptr %p
  %v = load {element}, ptr %q
{work}
  store {element} %w, ptr %p
  %j = add i32 %i, 1
  %more = icmp ult i32 %j, {n}
  br i1 %more, label %lane, label %done, !llvm.loop !1
done:
  %r = load {t}, ptr %x
  ret {t} %r
}}"""
    )
    return c.let(f"call {t} @{name}({t} {a}, {t} {b})")


def _high_product(c: Code, n: int, a: str, b: str, signed: bool) -> str:
    """The upper 64 bits of a product of 64-bit integers, lane by lane."""
    extend = "sext" if signed else "zext"
    work = f"""  %uw = {extend} i64 %u to i128
  %vw = {extend} i64 %v to i128
  %whole = mul i128 %uw, %vw
  %upper = lshr i128 %whole, 64
  %w = trunc i128 %upper to i64"""
    return _lane_by_lane(c, f"high.{extend}", "i64", n, a, b, work)


def _divide_signed(c: Code, element: str, n: int, a: str, b: str) -> str:
    """Divide magnitudes: sdiv traps for INT_MIN / -1."""
    t, i1 = vector(element, n), vector("i1", n)
    zero = constant(element, 0, n)
    x = c.intrinsic("abs", t, (t, a), ("i1", "false"))
    y = c.intrinsic("abs", t, (t, b), ("i1", "false"))
    q = _divide_unsigned(c, element, n, x, y)
    negative = c.let(f"icmp slt {t} {c.let(f'xor {t} {a}, {b}')}, {zero}")
    return c.let(f"select {i1} {negative}, {t} {c.let(f'sub {t} {zero}, {q}')}, {t} {q}")


def _abs(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = _type(op, n)
    return c.intrinsic("abs", t, (t, a[0]), ("i1", "false"))


def _neg(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    return c.let(f"sub {_type(op, n)} {constant(scalar_type(op.type), 0, n)}, {a[0]}")


def _min_or_max(which: str) -> Emitter:
    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        sign = "s" if is_signed(op.type) else "u"
        if op.type in ("u16x2", "s16x2"):
            result = _on_halves(c, n, a, lambda t, x: c.intrinsic(f"{sign}{which}", t, (t, x[0]), (t, x[1])))
        else:
            t = _type(op, n)
            result = c.intrinsic(f"{sign}{which}", t, (t, a[0]), (t, a[1]))
        return _relu(c, op, n, result) if "relu" in op else result

    return emit


def _relu(c: Code, op: Operation, n: int, value: str) -> str:
    if op.type == "s16x2":
        return _on_halves(
            c, n, [value], lambda t, x: c.intrinsic("smax", t, (t, x[0]), (t, "zeroinitializer"))
        )
    t = _type(op, n)
    return c.intrinsic("smax", t, (t, value), (t, constant(scalar_type(op.type), 0, n)))


def _count(intrinsic: str) -> Emitter:
    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        t = _type(op, n)
        extra = [("i1", "false")] if intrinsic == "ctlz" else []
        found = c.intrinsic(intrinsic, t, (t, a[0]), *extra)
        return c.resize(found, scalar_type(op.type), "i32", n, signed=False)

    return emit


def _bfind(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    element, t, size = scalar_type(op.type), _type(op, n), _bits(op)
    value = a[0]
    if is_signed(op.type):
        sign = c.let(f"ashr {t} {value}, {constant(element, size - 1, n)}")
        value = c.let(f"xor {t} {value}, {sign}")
    zeros = c.resize(c.intrinsic("ctlz", t, (t, value), ("i1", "false")), element, "i32", n, signed=False)
    i32 = vector("i32", n)
    if "shiftamt" in op:
        none = c.let(f"icmp eq {t} {value}, {constant(element, 0, n)}")
        return c.let(f"select {vector('i1', n)} {none}, {i32} {constant('i32', -1, n)}, {i32} {zeros}")
    return c.let(f"sub {i32} {constant('i32', size - 1, n)}, {zeros}")


def _fns(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """The position of the c-th 1 bit of a from bit b on, downwards for a negative c; -1 for none."""
    t, i1 = vector("i32", n), vector("i1", n)

    def const(value: int) -> str:
        return constant("i32", value, n)

    mask, base, count = a
    down = c.let(f"icmp slt {t} {count}, {const(0)}")
    turned = c.intrinsic("bitreverse", t, (t, mask))
    start = c.let(f"and {t} {base}, {const(31)}")
    bits = c.let(f"select {i1} {down}, {t} {turned}, {t} {mask}")
    first = c.let(f"select {i1} {down}, {t} {c.let(f'xor {t} {start}, {const(31)}')}, {t} {start}")
    bits = c.let(f"and {t} {bits}, {c.let(f'shl {t} {const(-1)}, {first}')}")
    wanted = c.intrinsic("abs", t, (t, count), ("i1", "false"))
    for number in range(1, 32):
        fewer = c.let(f"and {t} {bits}, {c.let(f'sub {t} {bits}, {const(1)}')}")
        more = c.let(f"icmp ugt {t} {wanted}, {const(number)}")
        bits = c.let(f"select {i1} {more}, {t} {fewer}, {t} {bits}")
    place = c.intrinsic("cttz", t, (t, bits), ("i1", "false"))
    place = c.let(f"select {i1} {down}, {t} {c.let(f'sub {t} {const(31)}, {place}')}, {t} {place}")
    found = c.let(f"icmp ne {t} {bits}, {const(0)}")
    found = c.let(f"and {i1} {found}, {c.let(f'icmp ule {t} {wanted}, {const(32)}')}")
    bit = c.let(f"shl {t} {const(1)}, {start}")
    here = c.let(f"icmp ne {t} {c.let(f'and {t} {mask}, {bit}')}, {const(0)}")
    none = c.let(f"icmp eq {t} {count}, {const(0)}")
    place = c.let(f"select {i1} {none}, {t} {start}, {t} {place}")
    found = c.let(f"select {i1} {none}, {i1} {here}, {i1} {found}")
    found = c.let(f"and {i1} {found}, {c.let(f'icmp ult {t} {base}, {const(32)}')}")
    place = c.let(f"select {i1} {found}, {t} {place}, {t} {const(-1)}")
    # What an H200 answers, whatever the other operands are.
    most = c.let(f"icmp eq {t} {count}, {const(1 << 31)}")
    return c.let(f"select {i1} {most}, {t} {const(0)}, {t} {place}")


def _brev(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = _type(op, n)
    return c.intrinsic("bitreverse", t, (t, a[0]))


def _bfe(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Bits pos to pos+len-1; past the top the sign (or 0) continues (PTX ISA, bfe)."""
    element, t, i1, size = scalar_type(op.type), _type(op, n), vector("i1", n), _bits(op)
    pos = _byte(c, a[1], element, n)
    length = _byte(c, a[2], element, n)
    top = constant(element, size, n)
    zero = constant(element, 0, n)
    last = c.let(f"add {t} {pos}, {length}")
    capped = c.intrinsic("umin", t, (t, last), (t, top))
    start = c.intrinsic("umin", t, (t, pos), (t, top))
    # Shift the field to the top, then down by what is above and below it, in two safe steps each.
    left = c.let(f"sub {t} {top}, {capped}")
    up = _shift_left(c, element, n, a[0], left)
    if not is_signed(op.type):
        right = c.let(f"sub {t} {top}, {c.let(f'sub {t} {capped}, {start}')}")
        return _shift_right(c, element, n, up, right, signed=False)
    # Past the top a signed field is filled with the operand's sign bit.
    beyond = c.let(f"icmp uge {t} {pos}, {top}")
    right = c.let(f"sub {t} {top}, {c.let(f'sub {t} {capped}, {start}')}")
    field = _shift_right(c, element, n, up, right, signed=True)
    sign = c.let(f"ashr {t} {a[0]}, {constant(element, size - 1, n)}")
    found = c.let(f"select {i1} {beyond}, {t} {sign}, {t} {field}")
    empty = c.let(f"icmp eq {t} {length}, {zero}")
    return c.let(f"select {i1} {empty}, {t} {zero}, {t} {found}")


def _bfi(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    element, t = scalar_type(op.type), _type(op, n)
    pos = _byte(c, a[2], element, n)
    length = _byte(c, a[3], element, n)
    ones = constant(element, -1, n)
    room = _shift_left(c, element, n, ones, length)
    field = c.let(f"xor {t} {room}, {ones}")
    mask = _shift_left(c, element, n, field, pos)
    moved = _shift_left(c, element, n, a[0], pos)
    kept = c.let(f"and {t} {a[1]}, {c.let(f'xor {t} {mask}, {ones}')}")
    return c.let(f"or {t} {kept}, {c.let(f'and {t} {moved}, {mask}')}")


def _byte(c: Code, value: str, element: str, n: int) -> str:
    """A position or length as the instruction's type: of 32 bits the low byte counts, of 64 all (H200)."""
    if element == "i64":
        t = vector("i32", n)
        least = c.intrinsic("umin", t, (t, value), (t, constant("i32", 255, n)))
        return c.resize(least, "i32", element, n, signed=False)
    low = c.let(f"and {vector('i32', n)} {value}, {constant('i32', 255, n)}")
    return c.resize(low, "i32", element, n, signed=False)


def _shift_left(c: Code, element: str, n: int, value: str, amount: str) -> str:
    t = vector(element, n)
    size = int(element[1:])
    over = c.let(f"icmp uge {t} {amount}, {constant(element, size, n)}")
    safe = c.let(f"and {t} {amount}, {constant(element, size - 1, n)}")
    moved = c.let(f"shl {t} {value}, {safe}")
    return c.let(f"select {vector('i1', n)} {over}, {t} {constant(element, 0, n)}, {t} {moved}")


def _shift_right(c: Code, element: str, n: int, value: str, amount: str, signed: bool) -> str:
    t = vector(element, n)
    size = int(element[1:])
    if signed:
        capped = c.intrinsic("umin", t, (t, amount), (t, constant(element, size - 1, n)))
        return c.let(f"ashr {t} {value}, {capped}")
    over = c.let(f"icmp uge {t} {amount}, {constant(element, size, n)}")
    safe = c.let(f"and {t} {amount}, {constant(element, size - 1, n)}")
    moved = c.let(f"lshr {t} {value}, {safe}")
    return c.let(f"select {vector('i1', n)} {over}, {t} {constant(element, 0, n)}, {t} {moved}")


def _amount(c: Code, op: Operation, n: int, value: str) -> str:
    """A u32 shift amount in the instruction's type, never wrapped to something small."""
    element = scalar_type(op.type)
    if _bits(op) < 32:
        t = vector("i32", n)
        value = c.intrinsic("umin", t, (t, value), (t, constant("i32", 255, n)))
    return c.resize(value, "i32", element, n, signed=False)


def _shl(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    return _shift_left(c, scalar_type(op.type), n, a[0], _amount(c, op, n, a[1]))


def _shr(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    return _shift_right(c, scalar_type(op.type), n, a[0], _amount(c, op, n, a[1]), is_signed(op.type))


def _shf(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Funnel shift; .clamp stops at 32."""
    t, i1 = vector("i32", n), vector("i1", n)
    left = op.get("direction") == "l"
    shifted = c.intrinsic("fshl" if left else "fshr", t, (t, a[1]), (t, a[0]), (t, a[2]))
    if op.get("wrapping") == "wrap":
        return shifted
    over = c.let(f"icmp uge {t} {a[2]}, {constant('i32', 32, n)}")
    return c.let(f"select {i1} {over}, {t} {a[0] if left else a[1]}, {t} {shifted}")


def _not(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    return c.let(f"xor {_type(op, n)} {a[0]}, {constant(scalar_type(op.type), -1, n)}")


def _cnot(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    zero = c.let(f"icmp eq {_type(op, n)} {a[0]}, {constant(scalar_type(op.type), 0, n)}")
    return c.let(f"zext {vector('i1', n)} {zero} to {_type(op, n)}")


def _lop3(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Any function of three bits; the table is a constant (PTX ISA, lop3)."""
    t = vector("i32", n)
    table = int(a[3].removeprefix("splat (i32 ").rstrip(")"))
    inverse = [c.let(f"xor {t} {x}, {constant('i32', -1, n)}") for x in a[:3]]
    result = constant("i32", 0, n)
    for bit in range(8):
        if table >> bit & 1:
            terms = [x if bit >> (2 - i) & 1 else inverse[i] for i, x in enumerate(a[:3])]
            both = c.let(f"and {t} {terms[0]}, {terms[1]}")
            result = c.let(f"or {t} {result}, {c.let(f'and {t} {both}, {terms[2]}')}")
    return result


def _prmt(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Pick four of eight bytes; bit 3 of a selector repeats the byte's sign."""
    t, wide = vector("i32", n), vector("i64", n)
    low = c.let(f"zext {t} {a[0]} to {wide}")
    high = c.let(f"shl {wide} {c.let(f'zext {t} {a[1]} to {wide}')}, {constant('i64', 32, n)}")
    both = c.let(f"or {wide} {low}, {high}")
    result = constant("i32", 0, n)
    for place, (selector, signed) in enumerate(_selectors(c, op, n, a[2])):
        position = c.let(f"mul {t} {selector}, {constant('i32', 8, n)}")
        shift = c.let(f"zext {t} {position} to {wide}")
        byte = c.let(f"trunc {wide} {c.let(f'lshr {wide} {both}, {shift}')} to {vector('i8', n)}")
        if signed is not None:
            sign = c.let(f"ashr {vector('i8', n)} {byte}, {constant('i8', 7, n)}")
            byte = c.let(
                f"select {vector('i1', n)} {signed}, {vector('i8', n)} {sign}, {vector('i8', n)} {byte}"
            )
        piece = c.let(f"zext {vector('i8', n)} {byte} to {t}")
        moved = c.let(f"shl {t} {piece}, {constant('i32', 8 * place, n)}")
        result = c.let(f"or {t} {result}, {moved}")
    return result


_PERMUTATIONS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "f4e": tuple((k, k + 1, k + 2, k + 3) for k in range(4)),
    "b4e": tuple((k, (k - 1) % 8, (k - 2) % 8, (k - 3) % 8) for k in range(4)),
    "rc8": tuple((k, k, k, k) for k in range(4)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}
"""Bytes picked for each value of the selector's low two bits, lowest byte first (PTX ISA, prmt)."""


def _selectors(c: Code, op: Operation, n: int, control: str) -> list[tuple[str, str | None]]:
    t = vector("i32", n)
    mode = op.get("permute")
    result: list[tuple[str, str | None]] = []
    if not mode:
        for place in range(4):
            nibble = c.let(f"lshr {t} {control}, {constant('i32', 4 * place, n)}")
            selector = c.let(f"and {t} {nibble}, {constant('i32', 7, n)}")
            sign = c.let(f"and {t} {nibble}, {constant('i32', 8, n)}")
            result.append((selector, c.let(f"icmp ne {t} {sign}, {constant('i32', 0, n)}")))
        return result
    key = c.let(f"and {t} {control}, {constant('i32', 3, n)}")
    for place in range(4):
        selector = constant("i32", _PERMUTATIONS[mode][0][place], n)
        for value in range(1, 4):
            same = c.let(f"icmp eq {t} {key}, {constant('i32', value, n)}")
            picked = constant("i32", _PERMUTATIONS[mode][value][place], n)
            selector = c.let(f"select {vector('i1', n)} {same}, {t} {picked}, {t} {selector}")
        result.append((selector, None))
    return result


def _dot(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """dp4a, dp2a: products of bytes with bytes, or of halves with bytes, summed up."""
    t = vector("i32", n)
    result = a[2]
    bytes_only = op.name == "dp4a"
    step = 8 if bytes_only else 16
    base = 0 if bytes_only or op.get("part") == "lo" else 16
    for k in range(4 if bytes_only else 2):
        x = _field(c, n, a[0], k * step, step, is_signed(op.types[0]))
        y = _field(c, n, a[1], base + 8 * k, 8, is_signed(op.types[1]))
        result = c.let(f"add {t} {result}, {c.let(f'mul {t} {x}, {y}')}")
    return result


def _field(c: Code, n: int, value: str, start: int, size: int, signed: bool) -> str:
    t = vector("i32", n)
    up = c.let(f"shl {t} {value}, {constant('i32', 32 - start - size, n)}")
    return c.let(f"{'ashr' if signed else 'lshr'} {t} {up}, {constant('i32', 32 - size, n)}")


def _szext(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Extend from bit b-1; .wrap takes b modulo 32, .clamp at most 32."""
    t = vector("i32", n)
    if op.get("wrapping") == "wrap":
        length = c.let(f"and {t} {a[1]}, {constant('i32', 31, n)}")
    else:
        length = c.intrinsic("umin", t, (t, a[1]), (t, constant("i32", 32, n)))
    room = c.let(f"sub {t} {constant('i32', 32, n)}, {length}")
    up = _shift_left(c, "i32", n, a[0], room)
    down = _shift_right(c, "i32", n, up, room, is_signed(op.type))
    empty = c.let(f"icmp eq {t} {length}, {constant('i32', 0, n)}")
    return c.let(f"select {vector('i1', n)} {empty}, {t} {constant('i32', 0, n)}, {t} {down}")


def _bmsk(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = vector("i32", n)
    ones = constant("i32", -1, n)
    if op.get("wrapping") == "wrap":
        start, length = (c.let(f"and {t} {x}, {constant('i32', 31, n)}") for x in a[:2])
    else:
        start, length = (c.intrinsic("umin", t, (t, x), (t, constant("i32", 32, n))) for x in a[:2])
    field = c.let(f"xor {t} {_shift_left(c, 'i32', n, ones, length)}, {ones}")
    return _shift_left(c, "i32", n, field, start)


def _selp(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = _type(op, n)
    return c.let(f"select {vector('i1', n)} {a[2]}, {t} {a[0]}, {t} {a[1]}")


def _slct(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = _type(op, n)
    if is_float(op.types[1]):
        float_type = vector("float", n)
        # A subnormal counts as zero of its sign with .ftz, and both zeros are at least 0.
        limit = float_constant("float", 0.0, n)
        if "ftz" in op:
            limit = constant("float", 0x807FFFFF, n)
        at_least = c.let(f"fcmp oge {float_type} {a[2]}, {limit}")
    else:
        at_least = c.let(f"icmp sge {vector('i32', n)} {a[2]}, {constant('i32', 0, n)}")
    return c.let(f"select {vector('i1', n)} {at_least}, {t} {a[0]}, {t} {a[1]}")


INTEGER_COMPARISONS = {"eq": "eq", "ne": "ne", "lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
FLOAT_COMPARISONS = {
    **{name: f"o{name}" for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": "one",
    "equ": "ueq",
    "neu": "une",
    "num": "ord",
    "nan": "uno",
    **{f"{name}u": f"u{name}" for name in ("lt", "le", "gt", "ge")},
}


def comparison(op: Operation, type: str) -> str:
    """The LLVM predicate of a comparison, with `icmp` or `fcmp`."""
    relation = op.get("compare")
    if is_float(type):
        return f"fcmp {FLOAT_COMPARISONS[relation]}"
    return f"icmp {INTEGER_COMPARISONS.get(relation) or ('s' if is_signed(type) else 'u') + relation}"


INTEGER: dict[str, Emitter] = {
    "add": _add_or_sub("add"),
    "sub": _add_or_sub("sub"),
    "mul": _mul,
    "mad": _mad,
    "mul24": _product24,
    "mad24": _mad24,
    "sad": _sad,
    "div": _divide,
    "rem": _remainder,
    "abs": _abs,
    "neg": _neg,
    "min": _min_or_max("min"),
    "max": _min_or_max("max"),
    "popc": _count("ctpop"),
    "clz": _count("ctlz"),
    "bfind": _bfind,
    "fns": _fns,
    "brev": _brev,
    "bfe": _bfe,
    "bfi": _bfi,
    "szext": _szext,
    "bmsk": _bmsk,
    "dp4a": _dot,
    "dp2a": _dot,
    "and": _binary("and"),
    "or": _binary("or"),
    "xor": _binary("xor"),
    "not": _not,
    "cnot": _cnot,
    "lop3": _lop3,
    "shf": _shf,
    "shl": _shl,
    "shr": _shr,
    "prmt": _prmt,
    "selp": _selp,
    "slct": _slct,
}
"""Instructions on integers and bits, by opcode."""
