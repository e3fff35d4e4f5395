"""`cvt`: every pair of types, with rounding, saturation and flushing of subnormals (PTX ISA 9.7.9)."""

from __future__ import annotations

from collections.abc import Sequence

from gpufleet.virtual.jit.floating import directed, flush, narrow, saturate, step, widen
from gpufleet.virtual.jit.small_floats import special
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import Code, constant, float_constant, vector
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.scalars import SIZES, is_float, is_signed

_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def convert(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Convert a value of the second type to the first."""
    emit = special(op)
    if emit is not None:
        return emit(c, op, n, a)
    if op.type.endswith("x2"):
        return _pack_two(c, op, n, a)
    target, source = op.types
    if is_float(source):
        return _float_to_float(c, op, n, a[0]) if is_float(target) else _float_to_integer(c, op, n, a[0])
    return _integer_to_float(c, op, n, a[0]) if is_float(target) else _integer_to_integer(c, op, n, a[0])


def _integer_to_integer(c: Code, op: Operation, n: int, a: str) -> str:
    target, source = op.types
    if "sat" in op:
        a = _clamp(c, target, source, n, a)
    return c.resize(a, scalar_type(source), scalar_type(target), n, is_signed(source))


def _clamp(c: Code, target: str, source: str, n: int, a: str) -> str:
    """Limit an integer to what the target type can hold."""
    element = scalar_type(source)
    t = vector(element, n)
    size, wanted = 8 * SIZES[source], 8 * SIZES[target]
    low, high = (
        (-(1 << (wanted - 1)), (1 << (wanted - 1)) - 1) if is_signed(target) else (0, (1 << wanted) - 1)
    )
    if is_signed(source):
        if low > -(1 << (size - 1)):
            a = c.intrinsic("smax", t, (t, a), (t, constant(element, low, n)))
        if high < (1 << (size - 1)) - 1:
            a = c.intrinsic("smin", t, (t, a), (t, constant(element, high, n)))
    elif high < (1 << size) - 1:
        a = c.intrinsic("umin", t, (t, a), (t, constant(element, high, n)))
    return a


def _integer_to_float(c: Code, op: Operation, n: int, a: str) -> str:
    target, source = op.types
    s, signed = vector(scalar_type(source), n), is_signed(source)
    operation = "sitofp" if signed else "uitofp"
    rounding = op.get("rounding", "rn")
    if target in ("f16", "bf16"):
        if SIZES[source] == 8:
            value = _to_nearest_odd(c, n, a, signed)
        else:
            value = c.let(f"{operation} {s} {a} to {vector('double', n)}")
        if "sat" in op:
            value = saturate(c, "double", n, value)
        return _narrow(c, target, n, value, rounding)
    element = scalar_type(target)
    t = vector(element, n)
    near = c.let(f"{operation} {s} {a} to {t}")
    if rounding != "rn" and not (element == "double" and SIZES[source] < 8):
        near = _step_integer(c, op, n, a, near, rounding)
    return saturate(c, element, n, near) if "sat" in op else near


def _step_integer(c: Code, op: Operation, n: int, a: str, near: str, rounding: str) -> str:
    """Correct a rounded integer by its exact error."""
    target, source = op.types
    element, signed = scalar_type(target), is_signed(source)
    wide, t, d = vector("i64", n), vector(element, n), vector("double", n)
    exact = c.resize(a, scalar_type(source), "i64", n, signed)
    back = c.intrinsic("fptosi.sat" if signed else "fptoui.sat", wide, (t, near))
    error = c.let(f"sitofp {wide} {c.let(f'sub {wide} {exact}, {back}')} to {d}")
    # Rounded up to 2^63 or 2^64, which no integer of the type equals.
    over = c.let(f"fcmp oge {t} {near}, {float_constant(element, 2.0**63 if signed else 2.0**64, n)}")
    minus = float_constant("double", -1.0, n)
    error = c.let(f"select {vector('i1', n)} {over}, {d} {minus}, {d} {error}")
    return step(c, element, n, near, error, rounding)


def _to_nearest_odd(c: Code, n: int, a: str, signed: bool) -> str:
    """A 64-bit integer as a double that rounds further as if it were exact: the low bits that a half
    cannot show are reduced to one sticky bit."""
    t = vector("i64", n)
    low = c.let(f"and {t} {a}, {constant('i64', 0xFFFF, n)}")
    some = c.let(f"icmp ne {t} {low}, {constant('i64', 0, n)}")
    sticky = c.let(f"zext {vector('i1', n)} {some} to {t}")
    high = c.let(f"and {t} {a}, {constant('i64', -0x10000, n)}")
    sticky = c.let(f"shl {t} {sticky}, {constant('i64', 16, n)}")
    reduced = c.let(f"or {t} {high}, {sticky}")
    magnitude = c.intrinsic("abs", t, (t, a), ("i1", "false")) if signed else a
    large = c.let(f"icmp ugt {t} {magnitude}, {constant('i64', 1 << 40, n)}")
    chosen = c.let(f"select {vector('i1', n)} {large}, {t} {reduced}, {t} {a}")
    return c.let(f"{'sitofp' if signed else 'uitofp'} {t} {chosen} to {vector('double', n)}")


def _float_to_integer(c: Code, op: Operation, n: int, a: str) -> str:
    """Round, saturate; NaN is 0, but for 64-bit types and sources the most negative number."""
    target, source = op.types
    element = "float" if source in ("f16", "bf16") else scalar_type(source)
    value = widen(c, source, n, a, "float") if source in ("f16", "bf16") else a
    t, i = vector(element, n), vector(scalar_type(target), n)
    if "ftz" in op and source == "f32":
        value = flush(c, n, value)
    rounded = c.intrinsic(_INTEGRAL[op.get("integral", "rzi")], t, (t, value))
    wanted = scalar_type(target)
    kind = "fptosi.sat" if is_signed(target) else "fptoui.sat"
    result = c.intrinsic(kind, i, (t, rounded))
    if source == "f64" or SIZES[target] == 8:
        nan = c.let(f"fcmp uno {t} {value}, {value}")
        top = constant(wanted, 1 << (8 * SIZES[target] - 1), n)
        result = c.let(f"select {vector('i1', n)} {nan}, {i} {top}, {i} {result}")
    return result


def _float_to_float(c: Code, op: Operation, n: int, a: str) -> str:
    target, source = op.types
    value, element = a, scalar_type(source)
    if source in ("f16", "bf16"):
        value, element = widen(c, source, n, a, "float"), "float"
    if "ftz" in op and source == "f32":
        value = canonical(c, n, flush(c, n, value)) if target == "f64" else flush(c, n, value)
    if target in ("f16", "bf16"):
        if "integral" in op:
            value = c.intrinsic(
                _INTEGRAL[op.get("integral")], vector(element, n), (vector(element, n), value)
            )
        if element == "float":
            value = c.let(f"fpext {vector('float', n)} {value} to {vector('double', n)}")
        if "sat" in op:
            value = saturate(c, "double", n, value)
        result = _narrow(c, target, n, value, op.get("rounding", "rn"))
        if source == "f64":
            result = _with_payload(c, target, n, a, result)
        return _relu_half(c, target, n, result) if "relu" in op else result
    wanted = scalar_type(target)
    t = vector(wanted, n)
    if "integral" in op:
        s = vector(element, n)
        value = c.intrinsic(_INTEGRAL[op.get("integral")], s, (s, value))
    if element == "float" and wanted == "double":
        value = c.let(f"fpext {vector('float', n)} {value} to {t}")
    elif element == "double" and wanted == "float":
        value = _narrow_double(c, n, value, op.get("rounding", "rn"))
    if "sat" in op:
        value = saturate(c, wanted, n, value)
    return flush(c, n, value) if "ftz" in op and target == "f32" else value


def _with_payload(c: Code, target: str, n: int, value: str, result: str) -> str:
    """NaNs of double precision keep their sign and the first bits of what they carry (H200)."""
    d, wide, i, i1 = vector("double", n), vector("i64", n), vector("i16", n), vector("i1", n)
    mantissa, exponent = (10, 0x7C00) if target == "f16" else (7, 0x7F80)
    bits = c.let(f"bitcast {d} {value} to {wide}")
    carried = c.let(f"lshr {wide} {bits}, {constant('i64', 52 - mantissa, n)}")
    carried = c.let(f"and {wide} {carried}, {constant('i64', (1 << mantissa) - 1, n)}")
    sign = c.let(f"lshr {wide} {bits}, {constant('i64', 48, n)}")
    sign = c.let(f"and {wide} {sign}, {constant('i64', 0x8000, n)}")
    quiet = constant("i64", exponent | 1 << (mantissa - 1), n)
    nan = c.let(f"or {wide} {c.let(f'or {wide} {carried}, {sign}')}, {quiet}")
    short = c.let(f"trunc {wide} {nan} to {i}")
    plain = c.cast("bitcast", vector(scalar_type(target), n), result, i)
    is_nan = c.let(f"fcmp uno {d} {value}, {value}")
    chosen = c.let(f"select {i1} {is_nan}, {i} {short}, {i} {plain}")
    return c.cast("bitcast", i, chosen, vector(scalar_type(target), n))


def canonical(c: Code, n: int, value: str) -> str:
    """The one NaN of a GPU's single precision."""
    t = vector("float", n)
    number = c.let(f"fcmp ord {t} {value}, {value}")
    quiet = constant("float", 0x7FFFFFFF, n)
    return c.let(f"select {vector('i1', n)} {number}, {t} {value}, {t} {quiet}")


def _narrow_double(c: Code, n: int, a: str, rounding: str) -> str:
    if rounding == "rn":
        return c.let(f"fptrunc {vector('double', n)} {a} to {vector('float', n)}")
    return directed(c, "fptrunc", "float", n, [a], rounding)


def _narrow(c: Code, target: str, n: int, value: str, rounding: str) -> str:
    """A double to half or bfloat16 in any rounding."""
    near = narrow(c, target, n, value)
    if rounding == "rn":
        return near
    d, i, i1 = vector("double", n), vector("i16", n), vector("i1", n)
    back = widen(c, target, n, near)
    error = c.let(f"fsub {d} {value}, {back}")
    bits = c.cast("bitcast", vector(scalar_type(target), n), near, i)
    zero = float_constant("double", 0.0, n)
    above = c.let(f"fcmp ogt {d} {error}, {zero}")
    below = c.let(f"fcmp olt {d} {error}, {zero}")
    negative = c.let(f"icmp slt {i} {bits}, {constant('i16', 0, n)}")
    is_zero = c.let(f"fcmp oeq {d} {back}, {zero}")
    larger = c.let(f"add {i} {bits}, {constant('i16', 1, n)}")
    smaller = c.let(f"sub {i} {bits}, {constant('i16', 1, n)}")
    up = c.let(f"select {i1} {negative}, {i} {smaller}, {i} {larger}")
    up = c.let(f"select {i1} {is_zero}, {i} {constant('i16', 1, n)}, {i} {up}")
    down = c.let(f"select {i1} {negative}, {i} {larger}, {i} {smaller}")
    down = c.let(f"select {i1} {is_zero}, {i} {constant('i16', 0x8001, n)}, {i} {down}")
    go_up, go_down = above, below
    if rounding == "rz":
        go_up = c.let(f"and {i1} {above}, {negative}")
        go_down = c.let(f"and {i1} {below}, {c.let(f'xor {i1} {negative}, {_true(n)}')}")
        nonzero = c.let(f"xor {i1} {is_zero}, {_true(n)}")
        go_up, go_down = (c.let(f"and {i1} {x}, {nonzero}") for x in (go_up, go_down))
    if rounding in ("rp", "rz"):
        bits = c.let(f"select {i1} {go_up}, {i} {up}, {i} {bits}")
    if rounding in ("rm", "rz"):
        bits = c.let(f"select {i1} {go_down}, {i} {down}, {i} {bits}")
    return c.cast("bitcast", i, bits, vector(scalar_type(target), n))


def _true(n: int) -> str:
    return constant("i1", 1, n)


def _relu_half(c: Code, target: str, n: int, value: str) -> str:
    i = vector("i16", n)
    bits = c.cast("bitcast", vector(scalar_type(target), n), value, i)
    infinity = 0xFC00 if target == "f16" else 0xFF80
    negative = c.let(f"icmp slt {i} {bits}, {constant('i16', 0, n)}")
    number = c.let(f"icmp ule {i} {bits}, {constant('i16', infinity, n)}")
    drop = c.let(f"and {vector('i1', n)} {negative}, {number}")
    kept = c.let(f"select {vector('i1', n)} {drop}, {i} {constant('i16', 0, n)}, {i} {bits}")
    return c.cast("bitcast", i, kept, vector(scalar_type(target), n))


def _pack_two(c: Code, op: Operation, n: int, a: Sequence[str]) -> str:
    """Two floats to a pair of halves; the first becomes the upper half."""
    base = op.type.removesuffix("x2")
    i16, i32 = vector("i16", n), vector("i32", n)
    halves = []
    for value in a:
        single = flush(c, n, value) if "ftz" in op else value
        wide = c.let(f"fpext {vector('float', n)} {single} to {vector('double', n)}")
        if "sat" in op:
            wide = saturate(c, "double", n, wide)
        half = _narrow(c, base, n, wide, op.get("rounding", "rn"))
        if "relu" in op:
            half = _relu_half(c, base, n, half)
        bits = c.cast("bitcast", vector(scalar_type(base), n), half, i16)
        halves.append(c.let(f"zext {i16} {bits} to {i32}"))
    upper = c.let(f"shl {i32} {halves[0]}, {constant('i32', 16, n)}")
    return c.let(f"or {i32} {upper}, {halves[1]}")
