"""Integer arithmetic, carry chains, bits and logic (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

from __future__ import annotations

from collections.abc import Iterator

from .kernel import Kernel, each

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")


def kernels() -> Iterator[Kernel]:
    yield from _arithmetic()
    yield from _carries()
    yield from _bits()
    yield from _logic()


def _arithmetic() -> Iterator[Kernel]:
    for type in TYPES:
        two, size = f"{type} {type}", int(type[1:])
        yield each(f"integers/add sub {type}", type, two, f"add.{type}", f"sub.{type}")
        yield each(f"integers/mul {type}", type, two, f"mul.lo.{type}", f"mul.hi.{type}")
        yield each(f"integers/mad {type}", type, f"{two} {type}", f"mad.lo.{type}", f"mad.hi.{type}")
        yield each(f"integers/min max {type}", type, two, f"min.{type}", f"max.{type}")
        yield each(f"integers/div rem {type}", type, two, f"div.{type}", f"rem.{type}")
        yield each(f"integers/sad {type}", type, f"{two} {type}", f"sad.{type}")
        if type[0] == "s":
            yield each(f"integers/abs neg {type}", type, type, f"abs.{type}", f"neg.{type}")
        if size < 64:
            wide = f"{type[0]}{2 * size}"
            yield each(
                f"integers/wide {type}",
                wide,
                f"{two} {wide}",
                f"mad.wide.{type}",
                f"mul.wide.{type} %d, %a, %b;",
            )
    yield each(
        "integers/saturating",
        "s32",
        "s32 s32 s32",
        "add.sat.s32 %d, %a, %b;",
        "sub.sat.s32 %d, %a, %b;",
        "mad.hi.sat.s32",
        "mad24.hi.sat.s32",
    )
    for type in ("u32", "s32"):
        three = f"{type} {type} {type}"
        yield each(
            f"integers/24 bits {type}",
            type,
            three,
            f"mul24.lo.{type} %d, %a, %b;",
            f"mul24.hi.{type} %d, %a, %b;",
            f"mad24.lo.{type}",
            f"mad24.hi.{type}",
        )
        for other in ("u32", "s32"):
            yield each(
                f"integers/dot products {type} {other}",
                "b32",
                "b32 b32 b32",
                f"dp4a.{type}.{other}",
                f"dp2a.lo.{type}.{other}",
                f"dp2a.hi.{type}.{other}",
            )
    for type in ("u16x2", "s16x2"):
        relu = (f"min.relu.{type}", f"max.relu.{type}") if type[0] == "s" else ()
        yield each(
            f"integers/pairs {type}",
            type,
            f"{type} {type}",
            f"add.{type}",
            f"min.{type}",
            f"max.{type}",
            *relu,
        )
    yield each("integers/relu", "s32", "s32 s32", "min.relu.s32", "max.relu.s32")


def _carries() -> Iterator[Kernel]:
    for size in (32, 64):
        for sign in "us":
            type = f"{sign}{size}"
            three = f"{type} {type} {type}"
            yield each(
                f"integers/carries {type}",
                type,
                three,
                f"add.cc.{type} %d, %a, %b; addc.{type} %d, %c, 0;",
                f"add.cc.{type} %d, %a, %b; addc.cc.{type} %d, %b, %c; addc.{type} %d, 0, 0;",
                f"sub.cc.{type} %d, %a, %b; subc.{type} %d, %c, 0;",
                f"sub.cc.{type} %d, %a, %b; subc.cc.{type} %d, %b, %c; subc.{type} %d, 0, 0;",
                f"mad.lo.cc.{type} %d, %a, %b, %c; madc.hi.{type} %d, %a, %b, %c;",
                f"mad.hi.cc.{type} %d, %a, %b, %c; madc.lo.cc.{type} %d, %a, %c, %b; addc.{type} %d, %a, 0;",
            )


def _bits() -> Iterator[Kernel]:
    for size in (32, 64):
        b = f"b{size}"
        yield each(
            f"integers/count bits {b}",
            "u32",
            b,
            f"popc.{b}",
            f"clz.{b}",
            f"bfind.u{size}",
            f"bfind.s{size}",
            f"bfind.shiftamt.u{size}",
            f"bfind.shiftamt.s{size}",
        )
        yield each(f"integers/brev {b}", b, b, f"brev.{b}", f"not.{b}", f"cnot.{b}")
        yield each(
            f"integers/bfe {b}", b, f"{b} u32=amounts u32=amounts", f"bfe.u{size}", f"bfe.s{size}", lanes=512
        )
        yield each(
            f"integers/bfi {b}",
            b,
            f"{b} {b} u32=amounts u32=amounts",
            f"bfi.{b} %d, %a, %b, %c, %x;",
            lanes=768,
        )
    yield each("integers/fns", "b32", "b32 b32=amounts s32=amounts", "fns.b32", lanes=512)
    yield each(
        "integers/bmsk szext",
        "b32",
        "b32=amounts b32=amounts",
        "bmsk.clamp.b32",
        "bmsk.wrap.b32",
        "szext.clamp.u32",
        "szext.clamp.s32",
        "szext.wrap.u32",
        "szext.wrap.s32",
    )
    yield each(
        "integers/szext values",
        "b32",
        "b32 b32=amounts",
        "szext.clamp.u32",
        "szext.clamp.s32",
        "szext.wrap.u32",
        "szext.wrap.s32",
    )


def _logic() -> Iterator[Kernel]:
    for size in (16, 32, 64):
        b = f"b{size}"
        yield each(
            f"logic/{b}",
            b,
            f"{b} {b}",
            f"and.{b}",
            f"or.{b}",
            f"xor.{b}",
            f"not.{b} %d, %a;",
            f"cnot.{b} %d, %a;",
        )
        yield each(
            f"logic/shifts {b}", b, f"{b} u32=amounts", f"shl.{b}", f"shr.{b}", f"shr.u{size}", f"shr.s{size}"
        )
    yield each(
        "logic/predicates",
        "pred",
        "b32 b32",
        *(
            f"setp.ne.u32 %p1, %a, 0; setp.gt.s32 %p2, %b, 0; {op}.pred %d, %p1, %p2;"
            for op in ("and", "or", "xor")
        ),
        "setp.ne.u32 %p1, %a, 0; not.pred %d, %p1;",
    )
    tables = (0x00, 0xFF, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x3C, 0x1B, 0x2D, 0x71, 0xB4)
    yield each(
        "logic/lop3", "b32", "b32 b32 b32", *(f"lop3.b32 %d, %a, %b, %c, {t:#x};" for t in tables), lanes=96
    )
    yield each(
        "logic/lop3 with a predicate",
        "b32|pred",
        "b32 b32 b32",
        "setp.lt.s32 %p1, %a, %b; lop3.or.b32 %d|%e, %a, %b, %c, 0x96, %p1;",
        "setp.lt.s32 %p1, %a, %b; lop3.and.b32 %d|%e, %a, %b, %c, 0x80, !%p1;",
    )
    yield each(
        "logic/funnel shifts",
        "b32",
        "b32 b32 u32=amounts",
        *(f"shf.{side}.{mode}.b32" for side in "lr" for mode in ("wrap", "clamp")),
        lanes=512,
    )
    yield each("logic/prmt", "b32", "b32 b32 b32", "prmt.b32", lanes=512)
    yield each(
        "logic/prmt modes",
        "b32",
        "b32 b32 b32",
        *(f"prmt.b32.{mode}" for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")),
    )
