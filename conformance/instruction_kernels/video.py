"""Video instructions (PTX ISA 9.7.17): CUDA's SIMD intrinsics are made of them."""

from __future__ import annotations

from collections.abc import Iterator

from .kernel import Kernel, each


def kernels() -> Iterator[Kernel]:
    yield from _packed()
    yield from _scalar()


def _packed() -> Iterator[Kernel]:
    for count in (2, 4):
        for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax"):
            forms = []
            for types in ("u32.u32.u32", "s32.s32.s32", "s32.u32.s32"):
                forms.append(f"{name}{count}.{types}{'' if name == 'vavrg' else '.sat'} %d, %a, %b, %r1;")
                forms.append(f"{name}{count}.{types}.add %d, %a, %b, %c;")
                forms.append(f"{name}{count}.{types} %d, %a, %b, %c;")
            forms[0] = f"mov.u32 %r1, 0; {forms[0]}"
            yield each(f"video/{name}{count}", "b32", "b32 b32 b32", *forms, lanes=128)
        forms = [
            f"vset{count}.{sign}32.{sign}32.{r}{add} %d, %a, %b, {c};"
            for sign in "us"
            for r in ("eq", "ne", "lt", "le", "gt", "ge")
            for add, c in (("", "%r1"), (".add", "%c"))
        ]
        forms[0] = f"mov.u32 %r1, 0; {forms[0]}"
        yield each(f"video/vset{count}", "b32", "b32 b32 b32", *forms, lanes=96)
    yield each(
        "video/lanes and masks",
        "b32",
        "b32 b32 b32",
        "vadd4.u32.u32.u32 %d.b30, %a.b7501, %b.b2310, %c;",
        "vadd2.s32.s32.s32.sat %d.h1, %a.h30, %b.h21, %c;",
        "vmax4.s32.s32.s32 %d.b210, %a, %b, %c;",
    )


def _scalar() -> Iterator[Kernel]:
    types = ("u32.u32.u32", "s32.s32.s32", "s32.u32.s32", "u32.s32.s32")
    for name in ("vadd", "vsub", "vabsdiff", "vmin", "vmax"):
        forms = []
        for t in types:
            forms += [
                f"{name}.{t} %d, %a, %b;",
                f"{name}.{t}.sat %d, %a, %b;",
                f"{name}.{t}.add %d, %a, %b, %c;",
                f"{name}.{t}.sat.min %d, %a.b1, %b.h1, %c;",
                f"{name}.{t} %d.h0, %a, %b, %c;",
            ]
        yield each(f"video/{name}", "b32", "b32 b32 b32", *forms, lanes=96)
    for name in ("vshl", "vshr"):
        forms = [
            f"{name}.{t}.u32{sat}.{mode} %d, %a, %b;"
            for t in ("u32.u32", "s32.s32")
            for sat in ("", ".sat")
            for mode in ("clamp", "wrap")
        ]
        yield each(f"video/{name}", "b32", "b32 b32=amounts", *forms, lanes=128)
    forms = [
        f"vmad.{t}{sat}{scale} %d, %a.{x}, %b.{y}, %c;"
        for t, x, y in (("u32.u32.u32", "h0", "h1"), ("s32.s32.s32", "h1", "b3"), ("s32.u32.s32", "b0", "h0"))
        for sat in ("", ".sat")
        for scale in ("", ".shr7", ".shr15")
    ]
    yield each("video/vmad", "b32", "b32 b32 b32", *forms, lanes=96)
    forms = [
        f"vset.{t}.{r} %d, %a, %b;" for t in ("u32.u32", "s32.s32", "u32.s32") for r in ("eq", "lt", "ge")
    ]
    forms += [
        f"vset.s32.s32.{r}.{op} %d, %a.h1, %b.b0, %c;" for r in ("ne", "gt") for op in ("add", "min", "max")
    ]
    yield each("video/vset", "b32", "b32 b32 b32", *forms, lanes=96)
