"""16-bit floats, alone and in pairs (PTX ISA 9.7.4, 9.7.7)."""

from __future__ import annotations

from collections.abc import Iterator

from .kernel import Bound, Kernel, each

RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def kernels() -> Iterator[Kernel]:
    for type in ("f16", "f16x2", "bf16", "bf16x2"):
        yield from _arithmetic(type)
        yield from _comparisons(type)


def _arithmetic(type: str) -> Iterator[Kernel]:
    two, three, is_f16 = f"{type} {type}", f"{type} {type} {type}", type[0] == "f"
    for name in ("add", "sub", "mul"):
        more = (f"{name}.ftz.{type}", f"{name}.sat.{type}", f"{name}.ftz.sat.{type}") if is_f16 else ()
        yield each(f"halves/{name}.{type}", type, two, f"{name}.{type}", f"{name}.rn.{type}", *more)
    more = (f"fma.rn.ftz.{type}", f"fma.rn.sat.{type}", f"fma.rn.ftz.relu.{type}") if is_f16 else ()
    yield each(f"halves/fma.{type}", type, three, f"fma.rn.{type}", f"fma.rn.relu.{type}", *more, lanes=512)
    yield each(f"halves/fma.oob.{type}", type, three, f"fma.rn.oob.{type}", f"fma.rn.oob.relu.{type}")
    more = (f"neg.ftz.{type}", f"abs.ftz.{type}") if is_f16 else ()
    yield each(f"halves/neg abs.{type}", type, type, f"neg.{type}", f"abs.{type}", *more)
    ways = ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs", *((".ftz", ".ftz.NaN") if is_f16 else ()))
    yield each(
        f"halves/min max.{type}",
        type,
        two,
        *(f"{name}{how}.{type}" for name in ("min", "max") for how in ways),
    )
    bound = Bound(relative=2.0**-10.987) if is_f16 else Bound(relative=2.0**-8)
    yield each(f"approx/tanh.{type}", type, type, f"tanh.approx.{type}", bound=bound, lanes=192)
    ex2 = f"ex2.approx.{type}" if is_f16 else f"ex2.approx.ftz.{type}"
    bound = Bound(relative=2.0**-9.9) if is_f16 else Bound(relative=2.0**-7)
    yield each(f"approx/ex2.{type}", type, type, ex2, bound=bound, lanes=192)


def _comparisons(type: str) -> Iterator[Kernel]:
    two, pair = f"{type} {type}", type.endswith("x2")
    if pair:
        yield each(
            f"halves/setp.{type}", "pred|pred", two, *(f"setp.{r}.{type} %d|%e, %a, %b;" for r in RELATIONS)
        )
        yield each(
            f"halves/setp joined.{type}",
            "pred|pred",
            f"{two} b32",
            *(
                f"setp.gt.s32 %p1, %c, 0; setp.{r}.{type} %d|%e, %a, %b, {p}%p1;"
                for r, p in (("lt.and", ""), ("ge.or", "!"), ("neu.xor", ""))
            ),
        )
    else:
        yield each(f"halves/setp.{type}", "pred", two, *(f"setp.{r}.{type}" for r in RELATIONS))
    results = {"f16": "f16 b16", "bf16": "bf16 b16", "f16x2": "f16x2 b32", "bf16x2": "bf16x2 b32"}[type]
    own, bits = results.split()
    yield each(f"halves/set to itself.{type}", own, two, *(f"set.{r}.{own}.{type}" for r in RELATIONS[:8]))
    if pair:
        yield each(
            f"halves/set to bits.{type}",
            bits,
            two,
            *(f"set.{r}.{result}.{type}" for r in RELATIONS[6:10] for result in ("u32", "s32")),
        )
        return
    yield each(f"halves/set to u16.{type}", "b16", two, *(f"set.{r}.u16.{type}" for r in RELATIONS[6:10]))
    yield each(
        f"halves/set to u32.{type}",
        "b32",
        two,
        *(f"set.{r}.u32.{type}" for r in RELATIONS[6:10]),
        f"setp.ne.b16 %p1, %a, 0; set.lt.and.s32.{type} %d, %a, %b, %p1;",
    )
    if type == "f16":
        yield each(
            "halves/ftz comparisons", "pred", two, "setp.eq.ftz.f16", "setp.lt.ftz.f16", "setp.ne.ftz.f16"
        )
