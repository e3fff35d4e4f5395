"""Integer instructions against plain Python, at the edges of their types and in between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import divide, remainder, signed, unsigned
from snippet import run

from gpufleet.virtual.ptx.scalars import SIZES


def bits_of(type: str) -> int:
    return 8 * SIZES[type]


def edges(type: str) -> list[int]:
    if type == "pred":
        return [0, 1]
    width = bits_of(type)
    if type.startswith("s"):
        top = 1 << (width - 1)
        return [0, 1, -1, 2, -7, 10, top - 1, -top, -top + 1, top // 3]
    top = 1 << width
    return [
        0,
        1,
        2,
        7,
        31,
        32,
        33,
        63,
        64,
        65,
        200,
        255,
        256,
        top // 2 - 1,
        top // 2,
        top - 1,
        top - 2,
        top // 3,
    ]


def fit(value: int, type: str) -> int:
    if type == "pred":
        return int(bool(value))
    return signed(value, bits_of(type)) if type.startswith("s") else unsigned(value, bits_of(type))


def numbers(type: str) -> st.SearchStrategy[int]:
    if type == "pred":
        return st.integers(0, 1)
    width = bits_of(type)
    low, high = (
        (-(1 << (width - 1)), (1 << (width - 1)) - 1) if type.startswith("s") else (0, (1 << width) - 1)
    )
    return st.one_of(st.sampled_from([e for e in edges(type) if low <= e <= high]), st.integers(low, high))


Case = tuple[str, str, tuple[str, ...], Callable[..., int]]
CASES: list[Case] = []


def case(instruction: str, result: str, sources: str, meaning: Callable[..., int]) -> None:
    CASES.append((instruction, result, tuple(sources.split()), meaning))


def saturated(value: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, value))


for t in ("u16", "u32", "u64", "s16", "s32", "s64"):
    w = bits_of(t)
    case(f"add.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: a + b)
    case(f"sub.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: a - b)
    case(f"mul.lo.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: a * b)
    case(f"mul.hi.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b, w=w: a * b >> w)
    case(f"mad.lo.{t} %d, %a, %b, %c;", t, f"{t} {t} {t}", lambda a, b, c: a * b + c)
    case(f"mad.hi.{t} %d, %a, %b, %c;", t, f"{t} {t} {t}", lambda a, b, c, w=w: (a * b >> w) + c)
    case(f"sad.{t} %d, %a, %b, %c;", t, f"{t} {t} {t}", lambda a, b, c: c + abs(a - b))
    case(f"div.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: divide(a, b) if b else -1)
    case(f"rem.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: remainder(a, b) if b else -1)
    case(f"min.{t} %d, %a, %b;", t, f"{t} {t}", min)
    case(f"max.{t} %d, %a, %b;", t, f"{t} {t}", max)
    case(
        f"shr.{t} %d, %a, %b;",
        t,
        f"{t} u32",
        lambda a, b, w=w: a >> min(b, w) if a >= 0 else a >> min(b, w - 1),
    )
    for relation, python in (
        ("lt", "<"),
        ("le", "<="),
        ("gt", ">"),
        ("ge", ">="),
        ("eq", "=="),
        ("ne", "!="),
    ):
        meaning = eval(f"lambda a, b: int(a {python} b)")
        case(f"setp.{relation}.{t} %d, %a, %b;", "pred", f"{t} {t}", meaning)
    if w < 64:
        wide = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}[t]
        case(f"mul.wide.{t} %d, %a, %b;", wide, f"{t} {t}", lambda a, b: a * b)
        case(f"mad.wide.{t} %d, %a, %b, %c;", wide, f"{t} {t} {wide}", lambda a, b, c: a * b + c)
    if t.startswith("s"):
        case(f"abs.{t} %d, %a;", t, t, abs)
        case(f"neg.{t} %d, %a;", t, t, lambda a: -a)

for t in ("b16", "b32", "b64"):
    w = bits_of(t)
    case(f"and.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: a & b)
    case(f"or.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: a | b)
    case(f"xor.{t} %d, %a, %b;", t, f"{t} {t}", lambda a, b: a ^ b)
    case(f"not.{t} %d, %a;", t, t, lambda a: ~a)
    case(f"cnot.{t} %d, %a;", t, t, lambda a: int(a == 0))
    case(f"shl.{t} %d, %a, %b;", t, f"{t} u32", lambda a, b, w=w: a << b if b < w else 0)
    case(f"selp.{t} %d, %a, %b, %c;", t, f"{t} {t} pred", lambda a, b, c: a if c else b)
    case(f"selp.{t} %d, %a, %b, !%c;", t, f"{t} {t} pred", lambda a, b, c: b if c else a)

case("and.pred %d, %a, %b;", "pred", "pred pred", lambda a, b: a & b)
case("xor.pred %d, %a, %b;", "pred", "pred pred", lambda a, b: a ^ b)
case("or.pred %d, %a, %b;", "pred", "pred pred", lambda a, b: a | b)
case("not.pred %d, %a;", "pred", "pred", lambda a: 1 - a)
case("setp.lt.and.s32 %d, %a, %b, %c;", "pred", "s32 s32 pred", lambda a, b, c: int(a < b) & c)
case("setp.lo.xor.u32 %p1|%d, %a, %b, !%c;", "pred", "u32 u32 pred", lambda a, b, c: int(a >= b) ^ (1 - c))
case("set.gt.u32.s32 %d, %a, %b;", "u32", "s32 s32", lambda a, b: -int(a > b))
case("slct.u32.s32 %d, %a, %b, %c;", "u32", "u32 u32 s32", lambda a, b, c: a if c >= 0 else b)
case("add.sat.s32 %d, %a, %b;", "s32", "s32 s32", lambda a, b: saturated(a + b))
case("sub.sat.s32 %d, %a, %b;", "s32", "s32 s32", lambda a, b: saturated(a - b))
case("mad.hi.sat.s32 %d, %a, %b, %c;", "s32", "s32 s32 s32", lambda a, b, c: saturated((a * b >> 32) + c))
case("mul24.lo.s32 %d, %a, %b;", "s32", "s32 s32", lambda a, b: signed(a, 24) * signed(b, 24))
case("mul24.hi.u32 %d, %a, %b;", "u32", "u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16)
case(
    "mad24.lo.u32 %d, %a, %b, %c;", "u32", "u32 u32 u32", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c
)


def reverse(value: int, width: int) -> int:
    return int(f"{value:0{width}b}"[::-1], 2)


for t in ("b32", "b64"):
    w = bits_of(t)
    case(f"popc.{t} %d, %a;", "u32", t, lambda a: a.bit_count())
    case(f"clz.{t} %d, %a;", "u32", t, lambda a, w=w: w - a.bit_length())
    case(f"brev.{t} %d, %a;", t, t, lambda a, w=w: reverse(a, w))
for t in ("u32", "u64", "s32", "s64"):
    w = bits_of(t)

    def bfind(a: int) -> int:
        return (~a if a < 0 else a).bit_length() - 1

    case(f"bfind.{t} %d, %a;", "u32", t, bfind)
    case(f"bfind.shiftamt.{t} %d, %a;", "u32", t, lambda a, w=w: w - 1 - bfind(a) if bfind(a) >= 0 else -1)

    def bfe(a: int, b: int, c: int, t: str = t, w: int = w) -> int:
        """The pseudo code of the PTX ISA, bit by bit; of 64 bits an H200 reads all of b and c."""
        start, length = (b & 0xFF, c & 0xFF) if w == 32 else (min(b, 255), min(c, 255))
        last = w - 1
        at = a >> min(start + length - 1, last) & 1 if t.startswith("s") and length else 0
        picked = [a >> start + i & 1 if i < length and start + i <= last else at for i in range(w)]
        return sum(bit << i for i, bit in enumerate(picked))

    case(f"bfe.{t} %d, %a, %b, %c;", t, f"{t} u32 u32", bfe)
for t in ("b32", "b64"):
    w = bits_of(t)

    def bfi(a: int, b: int, c: int, d: int, w: int = w) -> int:
        start, length = (c & 0xFF, d & 0xFF) if w == 32 else (min(c, 255), min(d, 255))
        result = b
        for i in range(length):
            if start + i < w:
                result = result & ~(1 << start + i) | (a >> i & 1) << start + i
        return result

    case(f"bfi.{t} %d, %a, %b, %c, %e;", t, f"{t} {t} u32 u32", bfi)


def funnel(a: int, b: int, count: int, left: bool) -> int:
    pair = b << 32 | a
    return pair << count >> 32 if left else pair >> count


for direction, left in (("l", True), ("r", False)):
    case(
        f"shf.{direction}.wrap.b32 %d, %a, %b, %c;",
        "b32",
        "b32 b32 u32",
        lambda a, b, c, left=left: funnel(a, b, c & 31, left),
    )
    case(
        f"shf.{direction}.clamp.b32 %d, %a, %b, %c;",
        "b32",
        "b32 b32 u32",
        lambda a, b, c, left=left: funnel(a, b, min(c, 32), left),
    )


def permuted(a: int, b: int, c: int) -> int:
    pair, result = b << 32 | a, 0
    for place in range(4):
        selector = c >> 4 * place & 15
        byte = pair >> 8 * (selector & 7) & 255
        if selector & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * place
    return result


case("prmt.b32 %d, %a, %b, %c;", "b32", "b32 b32 b32", permuted)
case("lop3.b32 %d, %a, %b, %c, 0x96;", "b32", "b32 b32 b32", lambda a, b, c: a ^ b ^ c)
case("lop3.b32 %d, %a, %b, %c, 0xE8;", "b32", "b32 b32 b32", lambda a, b, c: a & b | b & c | a & c)
case("bmsk.clamp.b32 %d, %a, %b;", "b32", "b32 b32", lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32))
case("bmsk.wrap.b32 %d, %a, %b;", "b32", "b32 b32", lambda a, b: ((1 << (b & 31)) - 1) << (a & 31))
case("szext.clamp.s32 %d, %a, %b;", "s32", "s32 u32", lambda a, b: signed(a, min(b, 32)) if b else 0)
case("szext.wrap.u32 %d, %a, %b;", "u32", "u32 u32", lambda a, b: unsigned(a, b & 31))


def dot(a: int, b: int, c: int, first: Callable[[int, int], int], second: Callable[[int, int], int]) -> int:
    return c + sum(first(a >> s, 8) * second(b >> s, 8) for s in (0, 8, 16, 24))


for x, y in product(("u32", "s32"), repeat=2):
    f, g = (signed if type == "s32" else unsigned for type in (x, y))
    case(f"dp4a.{x}.{y} %d, %a, %b, %c;", "b32", "b32 b32 b32", lambda a, b, c, f=f, g=g: dot(a, b, c, f, g))
    case(
        f"dp2a.hi.{x}.{y} %d, %a, %b, %c;",
        "b32",
        "b32 b32 b32",
        lambda a, b, c, f=f, g=g: c + f(a, 16) * g(b >> 16, 8) + f(a >> 16, 16) * g(b >> 24, 8),
    )

for target, source in product(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"), repeat=2):
    result = target if SIZES[target] > 1 else target[0] + "16"
    given_type = source if SIZES[source] > 1 else source[0] + "16"
    case(
        f"cvt.{target}.{source} %d, %a;",
        result,
        given_type,
        lambda a, target=target, source=source: fit(fit(a, source), target),
    )
    if target != source:

        def clamp(a: int, target: str = target, source: str = source) -> int:
            width, low = bits_of(target), 0
            high = (1 << width) - 1
            if target.startswith("s"):
                low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
            return max(low, min(high, fit(a, source)))

        case(f"cvt.sat.{target}.{source} %d, %a;", result, given_type, clamp)


def check(chosen: Case, rows: list[tuple[int, ...]]) -> None:
    instruction, result, sources, meaning = chosen
    columns = zip(*rows, strict=True)
    given = [
        (_unsigned_name(type), np.array([unsigned(v, bits_of(type)) for v in column], _word(type)))
        for type, column in zip(sources, columns, strict=True)
    ]
    found = run(instruction, result, *given)
    for row, value in zip(rows, found.tolist(), strict=True):
        assert value == fit(meaning(*row), result), f"{instruction} of {row}"


def _word(type: str) -> Any:
    return np.uint8 if type == "pred" else np.dtype(f"u{SIZES[type]}")


def _unsigned_name(type: str) -> str:
    return type if type == "pred" else f"b{bits_of(type)}"


@pytest.mark.parametrize("chosen", CASES, ids=lambda c: c[0].split(" ")[0])
def test_edges(chosen: Case) -> None:
    rows = list(product(*(sorted({fit(e, type) for e in edges(type)}) for type in chosen[2])))
    if len(rows) > 4000:
        rows = rows[:: len(rows) // 4000 + 1]
    check(chosen, rows)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_numbers(data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(CASES))
    check(chosen, data.draw(st.lists(st.tuples(*map(numbers, chosen[2])), min_size=1, max_size=40)))


def words(value: int, count: int) -> list[int]:
    return [unsigned(value >> 32 * i, 32) for i in range(count)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(numbers("u64"), numbers("u64"), numbers("u64")), min_size=1, max_size=30))
def test_carry_chains(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
    low, high = (
        [(c & np.uint64(0xFFFFFFFF)).astype(np.uint32) for c in columns],
        [(c >> np.uint64(32)).astype(np.uint32) for c in columns],
    )
    pair = [("b32", low[0]), ("b32", high[0]), ("b32", low[1]), ("b32", high[1])]
    both = "mov.b64 %d, {%r5, %r6};"
    total = run(f"add.cc.u32 %r5, %a, %c; addc.u32 %r6, %b, %e; {both}", "b64", *pair)
    assert total.tolist() == [unsigned(a + b, 64) for a, b, _ in rows]
    difference = run(f"sub.cc.u32 %r5, %a, %c; subc.u32 %r6, %b, %e; {both}", "b64", *pair)
    assert difference.tolist() == [unsigned(a - b, 64) for a, b, _ in rows]
    wide = [("b64", column) for column in columns]
    out = run("add.cc.u64 %rd5, %a, %b; addc.cc.u64 %rd6, %c, -1; addc.u64 %d, 0, 0;", "b64", *wide)
    assert out.tolist() == [(c + (1 << 64) - 1 + (a + b >> 64)) >> 64 for a, b, c in rows]
    borrow = run("sub.cc.u64 %rd5, %a, %b; subc.cc.u64 %rd6, %c, 5; subc.u64 %d, 0, 0;", "b64", *wide)
    assert borrow.tolist() == [unsigned(-int(c - 5 - (a < b) < 0), 64) for a, b, c in rows]
    # A 64-bit product out of 32-bit pieces, as nvcc writes it.
    product_text = (
        "mul.lo.u32 %r5, %a, %c; mul.hi.u32 %r6, %a, %c;"
        "mad.lo.cc.u32 %r6, %a, %e, %r6; madc.hi.u32 %r7, %a, %e, 0;"
        "mad.lo.cc.u32 %r6, %b, %c, %r6; madc.hi.cc.u32 %r7, %b, %c, %r7; addc.u32 %r8, 0, 0;"
        "mad.lo.cc.u32 %r7, %b, %e, %r7; madc.hi.u32 %r8, %b, %e, %r8; mov.b64 %d, {%r7, %r8};"
    )
    assert run(product_text, "b64", *pair).tolist() == [a * b >> 64 for a, b, _ in rows]
