"""cvt between every pair of types (PTX ISA 9.7.9.21 and 22)."""

from __future__ import annotations

from collections.abc import Iterator

from .kernel import Kernel, each

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGRAL = ("rni", "rzi", "rmi", "rpi")


def kernels() -> Iterator[Kernel]:
    for source in INTEGERS:
        yield from _from_integer(source)
    for source in FLOATS:
        yield from _from_float(source)
    yield from _between_floats()
    yield from _packed()


def _widened(type: str) -> str:
    """cvt to 8 bits writes a 16-bit register, extended."""
    return {"u8": "u16", "s8": "s16"}.get(type, type)


def _holds(target: str, source: str) -> bool:
    """Whether a type has room for all values of another: ptxas then refuses .sat."""
    room = int(target[1:]) - (target[0] == "s") - int(source[1:]) + (source[0] == "s")
    return room >= 0 and (target[0] == "s" or source[0] == "u")


def _from_integer(source: str) -> Iterator[Kernel]:
    for target in INTEGERS:
        if target != source:
            forms = (
                f"cvt.{target}.{source}",
                *(() if _holds(target, source) else (f"cvt.sat.{target}.{source}",)),
            )
            yield each(f"conversions/{source} to {target}", _widened(target), source, *forms)
    for target in FLOATS:
        if target == "bf16" and source in ("u8", "s8"):
            continue
        if target == "bf16":
            forms = tuple(f"cvt.{r}.bf16.{source}" for r in ROUNDINGS)
        else:
            forms = tuple(f"cvt.{r}.{target}.{source}" for r in ROUNDINGS)
            forms += (f"cvt.rn.sat.{target}.{source}",)
        yield each(f"conversions/{source} to {target}", target, source, *forms)


def _from_float(source: str) -> Iterator[Kernel]:
    for target in INTEGERS:
        if source == "bf16" and target in ("u8", "s8"):
            continue
        forms = [f"cvt.{r}.{target}.{source}" for r in INTEGRAL]
        if source != "bf16":
            forms.append(f"cvt.rni.sat.{target}.{source}")
        if source == "f32":
            forms.append(f"cvt.rpi.ftz.{target}.f32")
        yield each(f"conversions/{source} to {target}", _widened(target), source, *forms)


def _between_floats() -> Iterator[Kernel]:
    yield each("conversions/f16 to f32", "f32", "f16", "cvt.f32.f16", "cvt.sat.f32.f16", "cvt.ftz.f32.f16")
    yield each("conversions/f16 to f64", "f64", "f16", "cvt.f64.f16", "cvt.sat.f64.f16")
    yield each("conversions/f16 to f16", "f16", "f16", *(f"cvt.{r}.f16.f16" for r in INTEGRAL))
    yield each(
        "conversions/f32 to f16",
        "f16",
        "f32",
        *(f"cvt.{r}.f16.f32" for r in ROUNDINGS),
        "cvt.rn.sat.f16.f32",
        "cvt.rn.ftz.f16.f32",
        "cvt.rn.relu.f16.f32",
        "cvt.rz.relu.f16.f32",
        lanes=192,
    )
    yield each("conversions/f64 to f16", "f16", "f64", *(f"cvt.{r}.f16.f64" for r in ROUNDINGS), lanes=192)
    yield each("conversions/f32 to f64", "f64", "f32", "cvt.f64.f32", "cvt.ftz.f64.f32", "cvt.sat.f64.f32")
    yield each(
        "conversions/f64 to f32",
        "f32",
        "f64",
        *(f"cvt.{r}.f32.f64" for r in ROUNDINGS),
        "cvt.rn.ftz.f32.f64",
        "cvt.rn.sat.f32.f64",
        lanes=192,
    )
    for type in ("f32", "f64"):
        yield each(
            f"conversions/{type} to integral",
            type,
            type,
            *(f"cvt.{r}.{type}.{type}" for r in INTEGRAL),
            f"cvt.rni.sat.{type}.{type}",
            f"cvt.sat.{type}.{type}",
            lanes=192,
        )
    yield each("conversions/bf16 to f32", "f32", "bf16", "cvt.f32.bf16", "cvt.rn.f32.bf16")
    yield each("conversions/bf16 to f64 f16", "f64", "bf16", "cvt.f64.bf16")
    yield each("conversions/bf16 to f16", "f16", "bf16", *(f"cvt.{r}.f16.bf16" for r in ROUNDINGS))
    yield each("conversions/f16 to bf16", "bf16", "f16", *(f"cvt.{r}.bf16.f16" for r in ROUNDINGS))
    yield each("conversions/f64 to bf16", "bf16", "f64", *(f"cvt.{r}.bf16.f64" for r in ROUNDINGS), lanes=192)
    yield each("conversions/bf16 to integral", "bf16", "bf16", *(f"cvt.{r}.bf16.bf16" for r in INTEGRAL))
    yield each(
        "conversions/f32 to bf16",
        "bf16",
        "f32",
        *(f"cvt.{r}.bf16.f32" for r in ROUNDINGS),
        "cvt.rn.relu.bf16.f32",
        "cvt.rz.relu.bf16.f32",
        lanes=192,
    )
    yield each(
        "conversions/f32 to tf32",
        "b32",
        "f32",
        "cvt.rna.tf32.f32",
        "cvt.rn.tf32.f32",
        "cvt.rz.tf32.f32",
        "cvt.rn.relu.tf32.f32",
        "cvt.rz.relu.tf32.f32",
        lanes=192,
    )


def _packed() -> Iterator[Kernel]:
    two = "f32 f32"
    for pair in ("f16x2", "bf16x2"):
        yield each(
            f"conversions/f32 to {pair}",
            pair,
            two,
            f"cvt.rn.{pair}.f32",
            f"cvt.rz.{pair}.f32",
            f"cvt.rn.relu.{pair}.f32",
            f"cvt.rz.relu.{pair}.f32",
            lanes=384,
        )
    for pair in ("e4m3x2", "e5m2x2"):
        yield each(
            f"conversions/f32 to {pair}",
            pair,
            two,
            f"cvt.rn.satfinite.{pair}.f32",
            f"cvt.rn.satfinite.relu.{pair}.f32",
            lanes=384,
        )
        yield each(
            f"conversions/f16x2 to {pair}",
            pair,
            "f16x2",
            f"cvt.rn.satfinite.{pair}.f16x2",
            f"cvt.rn.satfinite.relu.{pair}.f16x2",
            lanes=192,
        )
        yield each(
            f"conversions/{pair} to f16x2",
            "f16x2",
            "b16",
            f"cvt.rn.f16x2.{pair}",
            f"cvt.rn.relu.f16x2.{pair}",
            lanes=256,
        )
    yield each(
        "conversions/cvt.pack",
        "b32",
        "s32 s32 b32",
        *(f"cvt.pack.sat.{t}.s32.b32" for t in ("u8", "s8")),
        *(f"cvt.pack.sat.{t}.s32 %d, %a, %b;" for t in ("u16", "s16")),
    )
    yield each(
        "conversions/cvt.pack small",
        "b32",
        "s32 s32 b32",
        *(f"cvt.pack.sat.{t}.s32.b32" for t in ("u4", "s4", "u2", "s2")),
    )
