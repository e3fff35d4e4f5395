"""Comparisons and selections (PTX ISA 9.7.6)."""

from __future__ import annotations

from collections.abc import Iterator

from .kernel import Kernel, each

_FLOAT = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
RELATIONS = {
    "b": ("eq", "ne"),
    "u": ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"),
    "s": ("eq", "ne", "lt", "le", "gt", "ge"),
    "f": _FLOAT,
}


def kernels() -> Iterator[Kernel]:
    for type in ("b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"):
        relations, two = RELATIONS[type[0]], f"{type} {type}"
        yield each(f"comparisons/setp.{type}", "pred", two, *(f"setp.{r}.{type}" for r in relations))
        some = relations[:3]
        yield each(
            f"comparisons/set.{type}",
            "b32",
            two,
            *(f"set.{r}.{result}.{type}" for r in some for result in ("u32", "s32", "f32")),
            f"setp.ne.{'b' if type[0] in 'bus' else 'f'}{type[1:]} %p1, %a, %a; "
            f"set.ne.or.u32.{type} %d, %a, %b, !%p1;",
        )
        yield each(
            f"comparisons/setp pair.{type}",
            "pred|pred",
            f"{two} b32",
            *(
                f"setp.gt.s32 %p1, %c, 7; setp.{r}.{join}.{type} %d|%e, %a, %b, {no}%p1;"
                for r, join, no in zip(some, ("and", "or", "xor"), ("", "!", ""), strict=False)
            ),
        )
    yield each("comparisons/setp.ftz", "pred", "f32 f32", *(f"setp.{r}.ftz.f32" for r in _FLOAT))
    for type in ("b16", "b32", "b64", "f32", "f64"):
        yield each(
            f"comparisons/selp.{type}",
            type,
            f"{type} {type} b32",
            f"setp.lt.s32 %p1, %c, 0; selp.{type} %d, %a, %b, %p1;",
        )
        yield each(f"comparisons/slct.{type}", type, f"{type} {type} s32", f"slct.{type}.s32")
        yield each(
            f"comparisons/slct by float.{type}",
            type,
            f"{type} {type} f32",
            f"slct.{type}.f32",
            f"slct.ftz.{type}.f32",
        )
