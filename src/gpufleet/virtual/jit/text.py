"""LLVM IR as text, line by line, and the few shapes of expression that the compiler needs.

A value is its name or constant; its type is a string. Every operation exists for scalars and for
vectors of `n` lanes, and only the type's text differs, so one emitter serves both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_ALLOWED = frozenset(
    [
        "ctlz",
        "cttz",
        "ctpop",
        "bitreverse",
        "bswap",
        "fshl",
        "fshr",
        "abs",
        "smin",
        "smax",
        "umin",
        "umax",
        "sadd.sat",
        "uadd.sat",
        "ssub.sat",
        "usub.sat",
        "sadd.with.overflow",
        "uadd.with.overflow",
        "fabs",
        "copysign",
        "sqrt",
        "fma",
        "floor",
        "ceil",
        "trunc",
        "roundeven",
        "rint",
        "minimumnum",
        "maximumnum",
        "fptosi.sat",
        "fptoui.sat",
        "ldexp",
        "is.fpclass",
        "masked.load",
        "masked.store",
        "masked.gather",
        "masked.scatter",
        "masked.compressstore",
        "vector.reduce.or",
        "vector.reduce.and",
        "vector.reduce.add",
        "vector.reduce.xor",
        "vector.reduce.umax",
        "vector.reduce.umin",
        "vector.reduce.smax",
        "vector.reduce.smin",
        "x86.avx2.permd",
        "x86.avx512.permvar.si.512",
        "readcyclecounter",
        "prefetch.p0",
        "memset.p0.i64",
        "memcpy.p0.p0.i64",
    ]
)
"""LLVM ends the process on an intrinsic that it cannot select, so only these are ever emitted."""


def vector(type: str, n: int) -> str:
    """The type of `n` lanes of `type`; one lane is a scalar."""
    return type if n == 1 else f"<{n} x {type}>"


def width(type: str) -> int:
    """Bits of a scalar type."""
    if type[0] == "i":
        return int(type[1:])
    return {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}[type]


def is_float(type: str) -> bool:
    """Say whether a scalar type is a floating-point one."""
    return type in ("half", "bfloat", "float", "double")


def constant(type: str, bits: int, n: int = 1) -> str:
    """Write a constant by its bits, in every lane."""
    text = _scalar_constant(type, bits)
    return text if n == 1 else f"splat ({type} {text})"


def _scalar_constant(type: str, bits: int) -> str:
    if type == "i1":
        return "true" if bits & 1 else "false"
    if type[0] == "i":
        size = width(type)
        bits &= (1 << size) - 1
        return str(bits - (1 << size) if bits >> (size - 1) else bits)
    if type == "double":
        return f"0x{bits & (1 << 64) - 1:016X}"
    if type == "half":
        return f"0xH{bits & 0xFFFF:04X}"
    if type == "bfloat":
        return f"0xR{bits & 0xFFFF:04X}"
    if (bits & 0x7FFFFFFF) > 0x7F800000:  # a NaN's payload does not survive being written as a double
        return f"bitcast (i32 {_scalar_constant('i32', bits)} to float)"
    wide = struct.unpack(
        "<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])
    )[0]
    return f"0x{wide:016X}"


def float_constant(type: str, value: float, n: int = 1) -> str:
    """Write a floating-point constant, rounded to the type."""
    if type == "double":
        return constant(type, struct.unpack("<Q", struct.pack("<d", value))[0], n)
    return constant(type, struct.unpack("<I", struct.pack("<f", value))[0], n)


class Code:
    """The body of one LLVM function under construction."""

    def __init__(self, declarations: set[str]) -> None:
        self.lines: list[str] = []
        self.entry: list[str] = []
        """What belongs at the start of the function: stack slots, values that never change."""
        self._declarations = declarations
        self._count = 0
        self._cold: list[str] = []

    def name(self, stem: str = "v") -> str:
        """A fresh name, without sigil."""
        self._count += 1
        return f"{stem}.{self._count}"

    def let(self, text: str) -> str:
        """Emit `%x = text` and return %x."""
        self._count += 1
        name = f"%v.{self._count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Emit an instruction without a result."""
        self.lines.append(f"  {text}")

    def label(self, name: str) -> None:
        """Begin a block."""
        self.lines.append(f"{name}:")

    def slot(self, type: str, align: int = 0) -> str:
        """A stack slot, made once per call of the function."""
        self._count += 1
        name = f"%slot.{self._count}"
        self.entry.append(f"  {name} = alloca {type}" + (f", align {align}" if align else ""))
        return name

    def once(self, text: str) -> str:
        """A value computed at the start of the function."""
        self._count += 1
        name = f"%c.{self._count}"
        self.entry.append(f"  {name} = {text}")
        return name

    @contextmanager
    def cold(self, label: str) -> Iterator[None]:
        """Emit a block that is rarely reached; it lies behind everything else."""
        lines, self.lines = self.lines, []
        self.label(label)
        yield
        self._cold += self.lines
        self.lines = lines

    def branch(self, condition: str, yes: str, no: str) -> None:
        """Go one of two ways."""
        self.do(f"br i1 {condition}, label %{yes}, label %{no}")

    def jump(self, label: str) -> None:
        """Go on at a label."""
        self.do(f"br label %{label}")

    def text(self, header: str) -> str:
        """The whole function."""
        first = [f"{header} {{", "entry:", *self.entry, "  br label %start", "start:"]
        return "\n".join([*first, *self.lines, *self._cold, "}"])

    # ---------------------------------------------------------------------------------- operations

    def intrinsic(self, name: str, result: str, *arguments: tuple[str, str]) -> str:
        """Call an allowed LLVM intrinsic; `name` is without `llvm.` and the types' suffix."""
        text = self._intrinsic(name, result, arguments)
        return self.let(text)

    def intrinsic_void(self, name: str, *arguments: tuple[str, str]) -> None:
        """Call an allowed LLVM intrinsic that returns nothing."""
        self.do(self._intrinsic(name, "void", arguments))

    def _intrinsic(self, name: str, result: str, arguments: Sequence[tuple[str, str]]) -> str:
        assert name in _ALLOWED, name
        plain = [_plain(type) for type, _ in arguments]
        full = f"llvm.{name}{_overload(name, result, plain)}"
        signature = ", ".join(plain)
        self._declarations.add(f"declare {result} @{full}({signature})")
        return f"call {result} @{full}({', '.join(f'{type} {value}' for type, value in arguments)})"

    def declare(self, text: str) -> None:
        """Add a declaration, or the definition of a function, to the module."""
        self._declarations.add(text)

    def function(self, name: str, result: str, *arguments: tuple[str, str], tail: str = "") -> str:
        """Call one of the runtime's functions."""
        self._declarations.add(f"declare {result} @{name}({', '.join(type for type, _ in arguments)}){tail}")
        text = f"call {result} @{name}({', '.join(f'{type} {value}' for type, value in arguments)})"
        if result == "void":
            self.do(text)
            return ""
        return self.let(text)

    def cast(self, operation: str, source: str, value: str, target: str) -> str:
        """Convert, unless the types are the same."""
        return value if source == target else self.let(f"{operation} {source} {value} to {target}")

    def resize(self, value: str, source: str, target: str, n: int, signed: bool) -> str:
        """Truncate or extend an integer."""
        a, b = width(source), width(target)
        if a == b:
            return value
        operation = "trunc" if a > b else "sext" if signed else "zext"
        return self.let(f"{operation} {vector(source, n)} {value} to {vector(target, n)}")

    def splat(self, type: str, value: str, n: int) -> str:
        """The same value in every lane."""
        if n == 1:
            return value
        if value[0] != "%":
            return f"splat ({type} {value})"
        v = vector(type, n)
        first = self.let(f"insertelement {v} poison, {type} {value}, i64 0")
        return self.let(f"shufflevector {v} {first}, {v} poison, <{n} x i32> zeroinitializer")

    def lanes(self, type: str, stride: int, n: int) -> str:
        """The constant 0, stride, 2 * stride, ..."""
        return "<" + ", ".join(f"{type} {_scalar_constant(type, stride * i)}" for i in range(n)) + ">"

    def field(self, base: str, offset: int) -> str:
        """The address of a field of a structure."""
        return self.let(f"getelementptr i8, ptr {base}, i64 {offset}")


def _plain(type: str) -> str:
    """A parameter's type without attributes such as `align 4`."""
    return type[: type.rindex(">") + 1] if type[0] == "<" else type.split()[0]


def _short(type: str) -> str:
    """How a type is written in an intrinsic's name."""
    type = _plain(type)
    if type[0] == "<":
        count, _, element = type[1:-1].partition(" x ")
        return f"v{count}{_short(element)}"
    return {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}.get(type, type)


def _overload(name: str, result: str, arguments: Sequence[str]) -> str:
    """The suffix that says which overload of an intrinsic is meant."""
    if name.startswith(("x86.", "mem", "readcycle", "prefetch")):
        return ""
    if name in ("masked.load", "masked.gather"):
        return f".{_short(result)}.{_short(arguments[0])}"
    if name in ("masked.store", "masked.scatter"):
        return f".{_short(arguments[0])}.{_short(arguments[1])}"
    if name in ("fptosi.sat", "fptoui.sat", "ldexp"):
        return f".{_short(result)}.{_short(arguments[-1] if name == 'ldexp' else arguments[0])}"
    if name.startswith("vector.reduce") or name == "is.fpclass":
        return f".{_short(arguments[0])}"
    return f".{_short(arguments[0])}"


class Masks:
    """How a set of active lanes is kept: in vectors of i32 with AVX2, in mask registers with AVX-512.

    A <16 x i1> that lives across blocks is widened by LLVM to bytes and back at every use on AVX2
    (measured on Zen 3: 3 instructions instead of 11 for "is any lane active").
    """

    def __init__(self, lanes: int, bits: bool) -> None:
        self.lanes = lanes
        self.bits = bits
        self.type = f"<{lanes} x i1>" if bits else f"<{lanes} x i32>"
        self.i1 = f"<{lanes} x i1>"
        self.full = "splat (i1 true)" if bits else "splat (i32 -1)"
        self.none = "zeroinitializer"

    def make(self, c: Code, predicate: str) -> str:
        """From a vector of i1."""
        return predicate if self.bits else c.let(f"sext {self.i1} {predicate} to {self.type}")

    def predicate(self, c: Code, mask: str) -> str:
        """To a vector of i1."""
        return mask if self.bits else c.let(f"icmp slt {self.type} {mask}, zeroinitializer")

    def both(self, c: Code, a: str, b: str) -> str:
        """Lanes in both."""
        return c.let(f"and {self.type} {a}, {b}")

    def either(self, c: Code, a: str, b: str) -> str:
        """Lanes in one of them."""
        return c.let(f"or {self.type} {a}, {b}")

    def without(self, c: Code, a: str, b: str) -> str:
        """Lanes in the first only."""
        inverse = c.let(f"xor {self.type} {b}, {self.full}")
        return c.let(f"and {self.type} {a}, {inverse}")

    def any(self, c: Code, mask: str) -> str:
        """Whether a lane is in it, as i1."""
        element = "i1" if self.bits else "i32"
        found = c.intrinsic("vector.reduce.or", element, (self.type, mask))
        return found if self.bits else c.let(f"icmp ne i32 {found}, 0")

    def number(self, c: Code, mask: str) -> str:
        """As an i32, lane 0 in bit 0."""
        predicate = self.predicate(c, mask)
        return number(c, predicate, self.lanes)

    def from_number(self, c: Code, value: str) -> str:
        """From the low bits of an i32."""
        size = f"i{self.lanes}"
        low = value if self.lanes == 32 else c.let(f"trunc i32 {value} to {size}")
        return self.make(c, c.let(f"bitcast {size} {low} to {self.i1}"))


def number(c: Code, predicate: str, lanes: int) -> str:
    """A vector of i1 as an i32, lane 0 in bit 0."""
    low = c.let(f"bitcast <{lanes} x i1> {predicate} to i{lanes}")
    return low if lanes == 32 else c.let(f"zext i{lanes} {low} to i32")
