"""A small kernel, its inputs, and what may be asked of its outputs; and values worth computing with."""

from __future__ import annotations

import itertools
import re
import zlib
from dataclasses import dataclass, field

import numpy as np

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"
SIZES = {
    **dict.fromkeys(("b8", "u8", "s8", "pred"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "u16x2", "s16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}
"""Bytes of a type; a predicate is stored as a byte."""


@dataclass(frozen=True)
class Bound:
    """How far the result of an `.approx` instruction may lie from the exact one."""

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """A PTX module with one kernel `k(out, in0, in1, ...)`, all pointers."""

    name: str
    """"family/what it shows"."""
    ptx: str
    rows: tuple[str, ...]
    """The type of each row of the output; a row has one element per lane."""
    lanes: int
    block: int
    inputs: tuple[np.ndarray, ...] = ()
    bounds: tuple[Bound | None, ...] = ()
    """For each row what its values may differ by; None, or nothing at all: not by one bit."""
    races: frozenset[int] = frozenset()
    """Rows whose values depend on which warp is faster; they are not compared."""
    dynamic_shared: int = 0
    start: bytes = field(default=b"", repr=False)
    """What the output holds before the launch; else zeros."""

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next: all rows have room for their largest type."""
        return self.lanes * max(SIZES[type] for type in self.rows)

    @property
    def output_bytes(self) -> int:
        return self.row_bytes * len(self.rows)

    def output_rows(self, output: bytes) -> list[np.ndarray]:
        """Take an output apart, as unsigned integers."""
        found = []
        for number, type in enumerate(self.rows):
            start = number * self.row_bytes
            row = output[start : start + self.lanes * SIZES[type]]
            found.append(np.frombuffer(row, f"u{SIZES[type]}"))
        return found


# -------------------------------------------------------------------------------------- values

_INTEGERS = {
    16: (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x100, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xA5A5),
    32: (
        *(0, 1, 2, 7, 31, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE),
        *(0xFFFFFFFF, 0x12345678, 0xA5A5A5A5, 0x00FF8001),
    ),
    64: (
        *(0, 1, 2, 63, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2),
        *((1 << 64) - 1, 0x123456789ABCDEF0, 0xA5A5A5A5A5A5A5A5, 0x80000000, (1 << 53) + 1, (1 << 62) + 511),
    ),
}
_FLOATS = {
    "f32": (
        *(0, 0x80000000, 0x3F800000, 0xBF800000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000),
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001),
        *(0x3F000000, 0x40490FDB, 0x3F800001, 0x33800000, 0x4B000001, 0xCF000000, 0x5F000000, 0x3EAAAAAB),
    ),
    "f64": (
        *(0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 1, (1 << 63) + 1, 0x000FFFFFFFFFFFFF),
        *(0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000),
        *(0xFFF0000000000000, 0x7FF8000000000000, 0x3FE0000000000000, 0x400921FB54442D18),
        *(0x3FF0000000000001, 0x3CA0000000000000, 0x4330000000000001, 0xC1E0000000000000),
        *(0x43E0000000000000, 0x3FD5555555555555, 0x47EFFFFFF0000000, 0x36A0000000000000, 0xB6B0000000000001),
    ),
    "f16": (
        *(0, 0x8000, 0x3C00, 0xBC00, 1, 0x8001, 0x03FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00),
        *(
            0x7E00,
            0xFE01,
            0x7C01,
            0x3800,
            0x4248,
            0x3C01,
            0x6401,
            0xE400,
            0x3555,
            0x1400,
            0x9401,
            0x7FFF,
            0xFFFF,
        ),
    ),
    "bf16": (
        *(0, 0x8000, 0x3F80, 0xBF80, 1, 0x8001, 0x007F, 0x0080, 0x8080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80),
        *(
            0x7FC0,
            0xFFC1,
            0x7F81,
            0x3F00,
            0x4049,
            0x3F81,
            0x4B01,
            0xCF00,
            0x3EAB,
            0x3380,
            0xB381,
            0x7FFF,
            0xFFFF,
        ),
    ),
}
AMOUNTS = (0, 1, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 255, 256, 0x10001, 0x80000000, 0xFFFFFFFF)
"""Shifts and field positions, also past every width."""


def edges(type: str) -> np.ndarray:
    """The bits of a type's special values."""
    size = 8 * SIZES[type]
    if type.endswith("x2") and type[:-2] in _FLOATS:
        halves = np.array(_FLOATS[type[:-2]], np.uint32)
        return halves | np.roll(halves, 8) << np.uint32(16)
    if type in ("u16x2", "s16x2"):
        halves = np.array(_INTEGERS[16], np.uint32)
        return halves | np.roll(halves, 5) << np.uint32(16)
    if size == 8:
        return np.array([0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF, 0x5A], np.uint8)
    return np.array(_FLOATS.get(type) or _INTEGERS[size], f"u{size // 8}")


def rng(name: str) -> np.random.Generator:
    """Random numbers that depend on a name alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def random_bits(type: str, count: int, generator: np.random.Generator) -> np.ndarray:
    """Random bits; of a float in two of three cases a moderate number."""
    size = SIZES[type]
    bits = generator.integers(0, 256, count * size, np.uint8).view(f"u{size}")
    if type not in ("f32", "f64"):
        return bits
    scale = generator.integers(-12, 13, count).astype(np.float64)
    moderate = (generator.uniform(-2, 2, count) * 2.0**scale).astype(f"f{size}").view(f"u{size}")
    return np.where(generator.integers(0, 3, count) > 0, moderate, bits)


def operands(name: str, types: tuple[str, ...], lanes: int) -> tuple[np.ndarray, ...]:
    """Columns of bits: half of the rows from the product of special values, half random.

    A type may be followed by its own values: `"u32=amounts"`.
    """
    generator = rng(name)
    plain = [type.partition("=")[0] for type in types]
    special = [np.array(AMOUNTS, np.uint32) if "=" in type else edges(type) for type in types]
    total = int(np.prod([len(column) for column in special]))
    wanted = min(total, lanes - lanes // 3)
    picked = np.arange(wanted) * total // wanted
    columns = []
    for type, text, column in zip(plain, types, special, strict=True):
        size = SIZES[type]
        values = column[picked % len(column)].astype(f"u{size}")
        picked = picked // len(column)
        if "=" in text:
            more = generator.integers(0, 72, lanes - wanted).astype(np.uint32)
        else:
            more = random_bits(type, lanes - wanted, generator)
        columns.append(np.concatenate((values, more)))
    return tuple(columns)


# ------------------------------------------------------------------------------------- kernels


def register(type: str) -> str:
    """The declaration type of a register that holds a type."""
    if type in ("pred", "f32", "f64"):
        return type
    return f"b{8 * max(SIZES[type], 2)}"


_DECLARED = (
    ".reg .pred %p<10>; .reg .b16 %h<10>; .reg .b32 %r<30>; .reg .b64 %q<30>; "
    ".reg .f32 %f<10>; .reg .f64 %g<10>;"
)


def module(body: str, inputs: int, outside: str = "", attributes: str = "") -> str:
    """PTX of a kernel: `%i` is the lane's number in the grid, `%out` and `%in0`, ... the pointers."""
    parameters = ", ".join(f".param .u64 p{n}" for n in range(inputs + 1))
    pointers = "\n".join(
        f"  .reg .b64 %{name}; ld.param.u64 %{name}, [p{n}]; cvta.to.global.u64 %{name}, %{name};"
        for n, name in enumerate(["out", *(f"in{n}" for n in range(inputs))])
    )
    return f"""{HEADER}{outside}
.visible .entry k({parameters}) {attributes}
{{
  {_DECLARED}
{pointers}
  .reg .b32 %i, %t, %nt, %cb;
  mov.u32 %t, %tid.x; mov.u32 %nt, %ntid.x; mov.u32 %cb, %ctaid.x;
  mad.lo.u32 %i, %cb, %nt, %t;
{body}
  ret;
}}
"""


def load(register_name: str, type: str, number: int) -> str:
    """Read the lane's element of an input."""
    address = f"mad.wide.u32 %q0, %i, {SIZES[type]}, %in{number};"
    if type == "pred":
        return f"{address} ld.global.u8 %h0, [%q0]; setp.ne.u16 {register_name}, %h0, 0;"
    kind = "u8" if SIZES[type] == 1 else f"b{8 * SIZES[type]}"
    return f"{address} ld.global.{kind} {register_name}, [%q0];"


def store(value: str, type: str, row: int, row_bytes: int) -> str:
    """Write the lane's element of a row."""
    address = f"mad.wide.u32 %q0, %i, {SIZES[type]}, %out;"
    place = f"[%q0+{row * row_bytes}]"
    if type == "pred":
        return f"{address} selp.b16 %h0, 1, 0, {value}; st.global.u8 {place}, %h0;"
    kind = "u8" if SIZES[type] == 1 else f"b{8 * SIZES[type]}"
    return f"{address} st.global.{kind} {place}, {value};"


def each(
    name: str,
    result: str,
    sources: str,
    *forms: str,
    lanes: int = 0,
    bound: Bound | None = None,
    inputs: tuple[np.ndarray, ...] | None = None,
    outside: str = "",
) -> Kernel:
    """A kernel that carries out each form, `add.s32 %d, %a, %b;`, on every lane's operands.

    `sources` are the types of %a, %b, %c, ..., `result` that of %d; a `|` in it adds the type of %e. A form
    without operands, `add.s32`, gets them all.
    """
    types = tuple(sources.split())
    plain = [type.partition("=")[0] for type in types]
    lanes = lanes or {1: 96, 2: 256}.get(len(types), 384)
    if inputs is None:
        inputs = operands(name, types, lanes)
    results = result.split("|")
    rows = tuple(results * len(forms))
    row_bytes = lanes * max(SIZES[type] for type in rows)
    lines = []
    for letter, type, number in zip("abcdefgh"[:3] + "xyz", plain, itertools.count()):
        lines.append(f"  .reg .{register(type)} %{letter}; {load(f'%{letter}', type, number)}")
    for letter, type in zip("de", results):  # noqa: B905
        lines.append(f"  .reg .{register(type)} %{letter};")
    for number, form in enumerate(forms):
        if "%" not in form:
            form = f"{form} %d, {', '.join(f'%{letter}' for letter in ('abc' + 'xyz')[: len(types)])};"
        lines.append(f"  {form}")
        for place, (letter, type) in enumerate(zip("de", results)):  # noqa: B905
            lines.append("  " + store(f"%{letter}", type, number * len(results) + place, row_bytes))
    text = module("\n".join(lines), len(types), outside)
    bounds = (bound,) * len(rows) if bound is not None else ()
    return Kernel(name, text, rows, lanes, 32, inputs, bounds)


_OUT = re.compile(r"\bout\.(\w+) ([%\w]+);")
_IN = re.compile(r"\bin(\d)\.(\w+) ([%\w]+);")


def program(
    name: str,
    body: str,
    inputs: tuple[np.ndarray, ...] = (),
    lanes: int = 64,
    block: int = 32,
    outside: str = "",
    bound: Bound | None = None,
    dynamic_shared: int = 0,
    races: frozenset[int] = frozenset(),
) -> Kernel:
    """A kernel with a body of its own.

    `in0.b32 %r1;` reads the lane's element of an input, `out.b32 %r1;` writes the next row; %q0 and %h0 are
    used by both.
    """
    rows = tuple(match[1] for match in _OUT.finditer(body))
    row_bytes = lanes * max(SIZES[type] for type in rows)
    numbers = iter(range(len(rows)))
    body = _IN.sub(lambda match: load(match[3], match[2], int(match[1])), body)
    body = _OUT.sub(lambda match: store(match[2], match[1], next(numbers), row_bytes), body)
    bounds = (bound,) * len(rows) if bound is not None else ()
    text = module(body, len(inputs), outside)
    return Kernel(name, text, rows, lanes, block, inputs, bounds, races, dynamic_shared)
