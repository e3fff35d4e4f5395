"""Floating-point instructions: for each opcode, the LLVM IR that carries it out.

Half precision is computed in double and rounded once: for add, mul and fma the double result is
exact enough that the second rounding changes nothing. bfloat16 is the upper half of a float.

Directed rounding (.rz, .rm, .rp) is left to the hardware (`directed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit import approx
from gpufleet.virtual.jit.arithmetic import Emitter
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import Code, constant, float_constant, vector
from gpufleet.virtual.ptx.operations import Operation

SMALLEST_NORMAL = 0x00800000


def flush(c: Code, n: int, value: str) -> str:
    """Subnormal floats to zero of the same sign (.ftz)."""
    t, i, i1 = vector("float", n), vector("i32", n), vector("i1", n)
    bits = c.let(f"bitcast {t} {value} to {i}")
    magnitude = c.let(f"and {i} {bits}, {constant('i32', 0x7FFFFFFF, n)}")
    tiny = c.let(f"icmp ult {i} {magnitude}, {constant('i32', SMALLEST_NORMAL, n)}")
    sign = c.let(f"and {i} {bits}, {constant('i32', 0x80000000, n)}")
    kept = c.let(f"select {i1} {tiny}, {i} {sign}, {i} {bits}")
    return c.let(f"bitcast {i} {kept} to {t}")


def saturate(c: Code, element: str, n: int, value: str) -> str:
    """To [0, 1]; NaN becomes 0."""
    t = vector(element, n)
    low = c.intrinsic("maximumnum", t, (t, value), (t, float_constant(element, 0.0, n)))
    return c.intrinsic("minimumnum", t, (t, low), (t, float_constant(element, 1.0, n)))


# ------------------------------------------------------------------- halves, widened and narrowed


def widen(c: Code, type: str, n: int, value: str, target: str = "double") -> str:
    """A half or bfloat16 value as float or double; packed pairs come as 2n lanes."""
    if type == "f16":
        return c.let(f"fpext {vector('half', n)} {value} to {vector(target, n)}")
    i16, i32 = vector("i16", n), vector("i32", n)
    bits = c.let(f"shl {i32} {c.let(f'zext {i16} {value} to {i32}')}, {constant('i32', 16, n)}")
    single = c.let(f"bitcast {i32} {bits} to {vector('float', n)}")
    return (
        single
        if target == "float"
        else c.let(f"fpext {vector('float', n)} {single} to {vector('double', n)}")
    )


def narrow(c: Code, type: str, n: int, value: str, source: str = "double") -> str:
    """Round to nearest even, to half or bfloat16; the one NaN is 0x7fff."""
    i32, i1, f32 = vector("i32", n), vector("i1", n), vector("float", n)
    single = value if source == "float" else _round_to_odd(c, n, value)
    if type == "f16":
        half = vector("half", n)
        rounded = c.let(f"fptrunc {f32} {single} to {half}")
        number = c.let(f"fcmp ord {f32} {single}, {single}")
        return c.let(f"select {i1} {number}, {half} {rounded}, {half} {constant('half', 0x7FFF, n)}")
    bits = c.let(f"bitcast {f32} {single} to {i32}")
    lowest = c.let(f"and {i32} {c.let(f'lshr {i32} {bits}, {sixteen(n)}')}, {constant('i32', 1, n)}")
    bias = c.let(f"add {i32} {lowest}, {constant('i32', 0x7FFF, n)}")
    rounded = c.let(f"lshr {i32} {c.let(f'add {i32} {bits}, {bias}')}, {sixteen(n)}")
    nan = c.let(f"fcmp uno {f32} {single}, {single}")
    found = c.let(f"select {i1} {nan}, {i32} {constant('i32', 0x7FFF, n)}, {i32} {rounded}")
    return c.let(f"trunc {i32} {found} to {vector('i16', n)}")


def sixteen(n: int) -> str:
    """The constant 16 in every lane."""
    return constant("i32", 16, n)


def _round_to_odd(c: Code, n: int, value: str) -> str:
    """Double to float so that rounding once more (to bfloat16) is as good as rounding once."""
    d, f, i, i1 = vector("double", n), vector("float", n), vector("i32", n), vector("i1", n)
    near = c.let(f"fptrunc {d} {value} to {f}")
    back = c.let(f"fpext {f} {near} to {d}")
    inexact = c.let(f"fcmp one {d} {back}, {value}")
    bits = c.let(f"bitcast {f} {near} to {i}")
    even = c.let(f"icmp eq {i} {c.let(f'and {i} {bits}, {ones(n)}')}, {constant('i32', 0, n)}")
    larger = c.let(f"fcmp ogt {d} {c.intrinsic('fabs', d, (d, back))}, {c.intrinsic('fabs', d, (d, value))}")
    down = c.let(f"sub {i} {bits}, {ones(n)}")
    up = c.let(f"add {i} {bits}, {ones(n)}")
    odd = c.let(f"select {i1} {larger}, {i} {down}, {i} {up}")
    step = c.let(f"and {i1} {inexact}, {even}")
    return c.let(f"bitcast {i} {c.let(f'select {i1} {step}, {i} {odd}, {i} {bits}')} to {f}")


def ones(n: int) -> str:
    """The constant 1 in every lane."""
    return constant("i32", 1, n)


def packed(op: Operation) -> bool:
    """Whether an operand holds two halves."""
    return op.type.endswith("x2")


def unpack(c: Code, op: Operation, n: int, value: str) -> str:
    """Bits of an operand as (2)n lanes of half or i16."""
    element = "half" if op.type.startswith("f16") else "i16"
    if not packed(op):
        return value
    return c.let(f"bitcast {vector('i32', n)} {value} to <{2 * n} x {element}>")


def pack(c: Code, op: Operation, n: int, value: str) -> str:
    """The reverse of `unpack`."""
    element = "half" if op.type.startswith("f16") else "i16"
    if not packed(op):
        return value
    return c.let(f"bitcast <{2 * n} x {element}> {value} to {vector('i32', n)}")


Compute = Callable[[Code, str, int, Sequence[str]], str]
"""(code, LLVM scalar type, lanes, operands) -> result, rounded to nearest."""


def _in_double(compute: Compute) -> Emitter:
    """Compute halves in double and round once."""
    exact = _fma_to_odd if compute is _fma else compute

    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        base = op.type.removesuffix("x2")
        lanes = 2 * n if packed(op) else n
        parts = [unpack(c, op, n, x) for x in a]
        if "ftz" in op:
            parts = [flush_half(c, lanes, x) for x in parts]
        wide = [widen(c, base, lanes, x) for x in parts]
        result = exact(c, "double", lanes, wide)
        if "sat" in op:
            result = saturate(c, "double", lanes, result)
        if "relu" in op:
            result = _relu(c, "double", lanes, result)
        half = narrow(c, base, lanes, result)
        if "ftz" in op:
            half = flush_half(c, lanes, half)
        if "oob" in op:
            half = _without_out_of_bounds(c, base, lanes, half, parts[:2])
        return pack(c, op, n, half)

    return emit


OUT_OF_BOUNDS = 0xFFFF
"""The NaN that tensor copies put where a tensor has ended; `.oob` makes it a zero."""


def _without_out_of_bounds(c: Code, base: str, n: int, result: str, factors: Sequence[str]) -> str:
    t, i, i1 = vector(scalar_type(base), n), vector("i16", n), vector("i1", n)
    outside = constant("i1", 0, n)
    for factor in factors:
        bits = c.cast("bitcast", t, factor, i)
        here = c.let(f"icmp eq {i} {bits}, {constant('i16', OUT_OF_BOUNDS, n)}")
        outside = c.let(f"or {i1} {outside}, {here}")
    return c.let(f"select {i1} {outside}, {t} {constant(scalar_type(base), 0, n)}, {t} {result}")


def flush_half(c: Code, n: int, value: str) -> str:
    """Subnormal halves to zero of the same sign."""
    t, i = vector("half", n), vector("i16", n)
    bits = c.let(f"bitcast {t} {value} to {i}")
    magnitude = c.let(f"and {i} {bits}, {constant('i16', 0x7FFF, n)}")
    tiny = c.let(f"icmp ult {i} {magnitude}, {constant('i16', 0x0400, n)}")
    sign = c.let(f"and {i} {bits}, {constant('i16', 0x8000, n)}")
    kept = c.let(f"select {vector('i1', n)} {tiny}, {i} {sign}, {i} {bits}")
    return c.let(f"bitcast {i} {kept} to {t}")


def _relu(c: Code, element: str, n: int, value: str) -> str:
    """Negative numbers and -0 to +0; NaN stays NaN."""
    t, zero = vector(element, n), float_constant(element, 0.0, n)
    kept = c.let(f"fcmp ugt {t} {value}, {zero}")
    return c.let(f"select {vector('i1', n)} {kept}, {t} {value}, {t} {zero}")


# ------------------------------------------------------------------------------- add, mul, fma, div


def _plain(operation: str) -> Compute:
    def compute(c: Code, element: str, n: int, a: Sequence[str]) -> str:
        return c.let(f"{operation} {vector(element, n)} {a[0]}, {a[1]}")

    return compute


def _fma(c: Code, element: str, n: int, a: Sequence[str]) -> str:
    t = vector(element, n)
    return c.intrinsic("fma", t, (t, a[0]), (t, a[1]), (t, a[2]))


def _fma_to_odd(c: Code, element: str, n: int, a: Sequence[str]) -> str:
    """a * b + c of halves as a double that may be rounded again: the product is exact, and a sum that is
    not gets an odd last bit (Boldo and Melquiond). bfloat16 has the range for sums that need it."""
    d, i, i1 = vector("double", n), vector("i64", n), vector("i1", n)
    product = c.let(f"fmul {d} {a[0]}, {a[1]}")
    total = c.let(f"fadd {d} {product}, {a[2]}")
    part = c.let(f"fsub {d} {total}, {product}")
    lost = c.let(f"fsub {d} {product}, {c.let(f'fsub {d} {total}, {part}')}")
    error = c.let(f"fadd {d} {lost}, {c.let(f'fsub {d} {a[2]}, {part}')}")
    zero = float_constant("double", 0.0, n)
    inexact = c.let(f"fcmp one {d} {error}, {zero}")
    bits = c.let(f"bitcast {d} {total} to {i}")
    one = constant("i64", 1, n)
    even = c.let(f"icmp eq {i} {c.let(f'and {i} {bits}, {one}')}, {constant('i64', 0, n)}")
    outward = c.let(
        f"icmp eq {i1} {c.let(f'fcmp ogt {d} {error}, {zero}')}, {c.let(f'fcmp ogt {d} {total}, {zero}')}"
    )
    up, down = c.let(f"add {i} {bits}, {one}"), c.let(f"sub {i} {bits}, {one}")
    odd = c.let(f"select {i1} {outward}, {i} {up}, {i} {down}")
    step = c.let(f"and {i1} {inexact}, {even}")
    return c.let(f"bitcast {i} {c.let(f'select {i1} {step}, {i} {odd}, {i} {bits}')} to {d}")


def _sqrt(c: Code, element: str, n: int, a: Sequence[str]) -> str:
    t = vector(element, n)
    return c.intrinsic("sqrt", t, (t, a[0]))


def _reciprocal(c: Code, element: str, n: int, a: Sequence[str]) -> str:
    return c.let(f"fdiv {vector(element, n)} {float_constant(element, 1.0, n)}, {a[0]}")


def _arithmetic(compute: Compute, operation: str) -> Emitter:
    """add, sub, mul, div, fma, rcp, sqrt; `operation` is LLVM's word for it."""

    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        if op.type.startswith(("f16", "bf16")):
            return _in_double(compute)(c, op, n, a)
        if op.type == "f32x2":
            return _paired(c, op, n, a, compute)
        element = scalar_type(op.type)
        if len(op.types) > 1:  # the factors are halves, or the first summand
            halves = len(a) - 1
            a = [widen(c, op.types[1], n, x, "float") if i < halves else x for i, x in enumerate(a)]
        if "ftz" in op and element == "float":
            a = [flush(c, n, x) for x in a]
        rounding = op.get("rounding", "rn")
        if rounding == "rn":
            result = compute(c, element, n, a)
        else:
            one = [float_constant(element, 1.0, n)] if op.name == "rcp" else []
            result = directed(c, operation, element, n, [*one, *a], rounding)
        if "sat" in op:
            result = saturate(c, element, n, result)
        return flush(c, n, result) if "ftz" in op and element == "float" else result

    return emit


def _paired(c: Code, op: Operation, n: int, a: Sequence[str], compute: Compute) -> str:
    whole, pairs = vector("i64", n), f"<{2 * n} x float>"
    parts = [c.let(f"bitcast {whole} {x} to {pairs}") for x in a]
    if "ftz" in op:
        parts = [flush(c, 2 * n, x) for x in parts]
    result = compute(c, "float", 2 * n, parts)
    if "ftz" in op:
        result = flush(c, 2 * n, result)
    return c.let(f"bitcast {pairs} {result} to {whole}")


def directed(c: Code, operation: str, element: str, n: int, a: Sequence[str], rounding: str) -> str:
    """Let the hardware round as asked: a function of its own changes the mode, computes, and restores it.

    LLVM moves nothing across because the function is `strictfp` and its operation says that the mode
    is not known.
    """
    sources = [vector(_SOURCES.get(operation, element), n)] * len(a)
    t = vector(element, n)
    name = f"round.{operation}.{rounding}.{element}.{n}"
    arguments = ", ".join(f"{s} %x{i}" for i, s in enumerate(sources))
    passed = ", ".join(f"{s} %x{i}" for i, s in enumerate(sources))
    overload = _short(t) if operation != "fptrunc" else f"{_short(t)}.{_short(sources[0])}"
    intrinsic = f"llvm.experimental.constrained.{operation}.{overload}"
    plain = ", ".join(sources)
    c.declare("declare void @llvm.set.rounding(i32)")
    c.declare(f"declare {t} @{intrinsic}({plain}, metadata, metadata)")
    c.declare(
        f"define internal {t} @{name}({arguments}) noinline nounwind strictfp {{\n"
        f"  call void @llvm.set.rounding(i32 {_MODES[rounding]}) strictfp\n"
        f'  %r = call {t} @{intrinsic}({passed}, metadata !"round.dynamic", '
        f'metadata !"fpexcept.ignore") strictfp\n'
        f"  call void @llvm.set.rounding(i32 1) strictfp\n  ret {t} %r\n}}"
    )
    given = ", ".join(f"{s} {x}" for s, x in zip(sources, a, strict=True))
    return c.let(f"call {t} @{name}({given})")


_MODES = {"rz": 0, "rn": 1, "rp": 2, "rm": 3}
"""As C's FLT_ROUNDS numbers them."""
_SOURCES = {"fptrunc": "double"}


def _short(type: str) -> str:
    """How a type is written in an intrinsic's name."""
    if type[0] == "<":
        count, _, element = type[1:-1].partition(" x ")
        return f"v{count}{_short(element)}"
    return {"float": "f32", "double": "f64"}[type]


def step(c: Code, element: str, n: int, near: str, error: str, rounding: str) -> str:
    """Move a result rounded to nearest one unit, if the exact result minus it (`error`, a double) and
    the rounding mode say so."""
    t, d, i1 = vector(element, n), vector("double", n), vector("i1", n)
    integer = "i32" if element == "float" else "i64"
    i = vector(integer, n)
    zero = float_constant("double", 0.0, n)
    above = c.let(f"fcmp ogt {d} {error}, {zero}")
    below = c.let(f"fcmp olt {d} {error}, {zero}")
    bits = c.let(f"bitcast {t} {near} to {i}")
    negative = c.let(f"icmp slt {i} {bits}, {constant(integer, 0, n)}")
    positive = c.let(f"xor {i1} {negative}, {constant('i1', 1, n)}")
    is_zero = c.let(f"fcmp oeq {t} {near}, {float_constant(element, 0.0, n)}")
    one = constant(integer, 1, n)
    if rounding == "rp":
        move, toward = above, "up"
    elif rounding == "rm":
        move, toward = below, "down"
    else:
        too_high = c.let(f"and {i1} {positive}, {below}")
        too_low = c.let(f"and {i1} {negative}, {above}")
        shrink = c.let(f"or {i1} {too_high}, {too_low}")
        smaller = c.let(f"sub {i} {bits}, {one}")
        nonzero = c.let(f"xor {i1} {is_zero}, {constant('i1', 1, n)}")
        move = c.let(f"and {i1} {shrink}, {nonzero}")
        moved = c.let(f"select {i1} {move}, {i} {smaller}, {i} {bits}")
        return c.let(f"bitcast {i} {moved} to {t}")
    larger = c.let(f"add {i} {bits}, {one}")
    smaller = c.let(f"sub {i} {bits}, {one}")
    grows = positive if toward == "up" else negative
    other = c.let(f"select {i1} {grows}, {i} {larger}, {i} {smaller}")
    sign = 0 if toward == "up" else -1 << (31 if element == "float" else 63)
    first = constant(integer, sign | 1, n)
    other = c.let(f"select {i1} {is_zero}, {i} {first}, {i} {other}")
    moved = c.let(f"select {i1} {move}, {i} {other}, {i} {bits}")
    return c.let(f"bitcast {i} {moved} to {t}")


# ------------------------------------------------------------------------------------ sign and order


def _abs(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    if op.type.startswith(("f16", "bf16")):
        a = _flushed_halves(c, op, n, a)
        return _on_bits(c, op, n, a, lambda i, x: _on_numbers(c, op, n, i, x[0], "and", 0x7FFF))
    t = vector(scalar_type(op.type), n)
    value = flush(c, n, a[0]) if "ftz" in op else a[0]
    return c.intrinsic("fabs", t, (t, value))


def _flushed_halves(c: Code, op: Operation, n: int, a: Sequence[str]) -> Sequence[str]:
    """Operands without subnormals, if the instruction says `.ftz`."""
    if "ftz" not in op:
        return a
    lanes = 2 * n if packed(op) else n
    return [pack(c, op, n, flush_half(c, lanes, unpack(c, op, n, x))) for x in a]


def _neg(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    if op.type.startswith(("f16", "bf16")):
        a = _flushed_halves(c, op, n, a)
        return _on_bits(c, op, n, a, lambda i, x: _on_numbers(c, op, n, i, x[0], "xor", 0x8000))
    value = flush(c, n, a[0]) if "ftz" in op else a[0]
    t = vector(scalar_type(op.type), n)
    negative = c.let(f"fneg {t} {value}")
    if op.type != "f64":
        return negative
    number = c.let(f"fcmp ord {t} {value}, {value}")  # a NaN of double precision stays (H200)
    return c.let(f"select {vector('i1', n)} {number}, {t} {negative}, {t} {value}")


def _on_numbers(c: Code, op: Operation, n: int, type: str, value: str, operation: str, bits: int) -> str:
    """Change the bits of halves; NaNs become the one that a GPU's arithmetic has."""
    lanes = 2 * n if packed(op) else n
    infinity = 0x7C00 if op.type.startswith("f16") else 0x7F80
    changed = c.let(f"{operation} {type} {value}, {constant('i16', bits, lanes)}")
    magnitude = c.let(f"and {type} {value}, {constant('i16', 0x7FFF, lanes)}")
    nan = c.let(f"icmp ugt {type} {magnitude}, {constant('i16', infinity, lanes)}")
    quiet = constant("i16", 0x7FFF, lanes)
    return c.let(f"select {vector('i1', lanes)} {nan}, {type} {quiet}, {type} {changed}")


def _on_bits(
    c: Code, op: Operation, n: int, a: Sequence[str], emit: Callable[[str, Sequence[str]], str]
) -> str:
    """Work on the bits of halves, packed or not."""
    source = vector(scalar_type(op.type), n)
    lanes = 2 * n if packed(op) else n
    bits = vector("i16", lanes)
    parts = [c.cast("bitcast", source, x, bits) for x in a]
    return c.cast("bitcast", bits, emit(bits, parts), source)


def _copysign(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """PTX takes the sign first."""
    t = vector(scalar_type(op.type), n)
    return c.intrinsic("copysign", t, (t, a[1]), (t, a[0]))


def _min_or_max(which: str) -> Emitter:
    """A number beats a NaN, unless .NaN; -0 is less than +0."""

    def compute(c: Code, op: Operation, element: str, n: int, a: Sequence[str]) -> str:
        t = vector(element, n)
        left, right = a[0], a[1]
        sign = ""
        if "xorsign" in op:
            bits = "i32" if element == "float" else "i64"
            i = vector(bits, n)
            parts = [c.let(f"bitcast {t} {x} to {i}") for x in (left, right)]
            sign = c.let(f"bitcast {i} {c.let(f'xor {i} {parts[0]}, {parts[1]}')} to {t}")
        if "abs" in op:
            left, right = (c.intrinsic("fabs", t, (t, x)) for x in (left, right))
        found = c.intrinsic(f"{which}imumnum", t, (t, left), (t, right))
        if sign:
            found = c.intrinsic("copysign", t, (t, found), (t, sign))
        if "NaN" in op:
            nan = c.let(f"fcmp uno {t} {left}, {right}")
            quiet = constant(
                "i32" if element == "float" else "i64", 0x7FFFFFFF if element == "float" else 0x7FF8 << 48
            )
            value = f"bitcast ({'i32' if element == 'float' else 'i64'} {quiet} to {element})"
            value = value if n == 1 else f"splat ({element} {value})"
            found = c.let(f"select {vector('i1', n)} {nan}, {t} {value}, {t} {found}")
        return found

    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        if op.type.startswith(("f16", "bf16")):
            base = op.type.removesuffix("x2")
            lanes = 2 * n if packed(op) else n
            a = _flushed_halves(c, op, n, a)
            wide = [widen(c, base, lanes, unpack(c, op, n, x), "float") for x in a]
            return pack(c, op, n, narrow(c, base, lanes, compute(c, op, "float", lanes, wide), "float"))
        element = scalar_type(op.type)
        if "ftz" in op:
            a = [flush(c, n, x) for x in a]
        found = compute(c, op, element, n, a)
        return compute(c, op, element, n, [found, a[2]]) if len(a) > 2 else found

    return emit


_CLASSES = {
    "finite": 0x1F8,
    "infinite": 0x204,
    "number": 0x3FC,
    "notanumber": 0x003,
    "normal": 0x168,
    "subnormal": 0x090,
}
"""Masks of LLVM's is.fpclass."""


def _testp(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    t = vector(scalar_type(op.types[0]), n)
    mask = _CLASSES[op.get("property")]
    return c.intrinsic("is.fpclass", vector("i1", n), (t, a[0]), ("i32", f"{mask}"))


def _divide(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    if "approx" in op or "full" in op:
        if "ftz" in op:
            a = [flush(c, n, x) for x in a]
        result = _plain("fdiv")(c, "float", n, a)
        if "approx" in op:
            result = _divided_by_much(c, n, a, result)
        return flush(c, n, result) if "ftz" in op else result
    return _arithmetic(_plain("fdiv"), "fdiv")(c, op, n, a)


def _divided_by_much(c: Code, n: int, a: Sequence[str], quotient: str) -> str:
    """For 2**126 < |b| < 2**128 the hardware gives 0, or NaN for an infinite a (PTX ISA 9.7.3.8)."""
    t, i1 = vector("float", n), vector("i1", n)
    size = c.intrinsic("fabs", t, (t, a[1]))
    above = c.let(f"fcmp ogt {t} {size}, {float_constant('float', 2.0**126, n)}")
    finite = c.let(f"fcmp olt {t} {size}, {constant('float', 0x7F800000, n)}")
    much = c.let(f"and {i1} {above}, {finite}")
    nothing = c.let(f"fmul {t} {quotient}, {float_constant('float', 0.0, n)}")
    return c.let(f"select {i1} {much}, {t} {nothing}, {t} {quotient}")


def _root_or_reciprocal(compute: Compute, operation: str) -> Emitter:
    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        if "approx" in op:
            if op.type == "f64":
                return approx.high_word(c, n, compute(c, "double", n, [approx.high_word(c, n, a[0])]))
            value = flush(c, n, a[0]) if "ftz" in op else a[0]
            result = compute(c, "float", n, [value])
            return flush(c, n, result) if "ftz" in op else result
        return _arithmetic(compute, operation)(c, op, n, a)

    return emit


def _approximation(emit_single: Callable[[Code, int, str], str]) -> Emitter:
    def emit(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
        if op.type == "f64":
            if "ftz" not in op:  # ptxas makes this one accurate: CUDA's rsqrt() is nothing else
                return approx.inverse_root_double(c, n, a[0])
            return approx.high_word(c, n, approx.inverse_root_double(c, n, approx.high_word(c, n, a[0])))
        if op.type.startswith(("f16", "bf16")):
            base = op.type.removesuffix("x2")
            lanes = 2 * n if packed(op) else n
            wide = widen(c, base, lanes, unpack(c, op, n, a[0]), "float")
            return pack(c, op, n, narrow(c, base, lanes, emit_single(c, lanes, wide), "float"))
        value = flush(c, n, a[0]) if "ftz" in op else a[0]
        result = emit_single(c, n, value)
        return flush(c, n, result) if "ftz" in op else result

    return emit


FLOATING: dict[str, Emitter] = {
    "add": _arithmetic(_plain("fadd"), "fadd"),
    "sub": _arithmetic(_plain("fsub"), "fsub"),
    "mul": _arithmetic(_plain("fmul"), "fmul"),
    "fma": _arithmetic(_fma, "fma"),
    "mad": _arithmetic(_fma, "fma"),
    "div": _divide,
    "rcp": _root_or_reciprocal(_reciprocal, "fdiv"),
    "sqrt": _root_or_reciprocal(_sqrt, "sqrt"),
    "rsqrt": _approximation(approx.inverse_root),
    "sin": _approximation(approx.sine),
    "cos": _approximation(approx.cosine),
    "lg2": _approximation(approx.log2),
    "ex2": _approximation(approx.exp2),
    "tanh": _approximation(approx.tanh),
    "abs": _abs,
    "neg": _neg,
    "min": _min_or_max("min"),
    "max": _min_or_max("max"),
    "testp": _testp,
    "copysign": _copysign,
}
"""Instructions on floating-point numbers, by opcode."""
