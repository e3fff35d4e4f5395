"""Single and double precision (PTX ISA 9.7.3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .kernel import Bound, Kernel, each, edges, rng

ROUNDINGS = ("rn", "rz", "rm", "rp")


def kernels() -> Iterator[Kernel]:
    yield from _arithmetic()
    yield from _division()
    yield from _order()
    yield from _approximations()


def _arithmetic() -> Iterator[Kernel]:
    for type in ("f32", "f64"):
        two, three = f"{type} {type}", f"{type} {type} {type}"
        for name in ("add", "sub", "mul"):
            yield each(f"floats/{name}.{type}", type, two, *(f"{name}.{r}.{type}" for r in ROUNDINGS))
        yield each(f"floats/fma.{type}", type, three, *(f"fma.{r}.{type}" for r in ROUNDINGS), lanes=512)
        yield each(f"floats/mad.{type}", type, three, *(f"mad.{r}.{type}" for r in ROUNDINGS))
    for name in ("add", "sub", "mul"):
        yield each(f"floats/{name}.ftz.f32", "f32", "f32 f32", *(f"{name}.{r}.ftz.f32" for r in ROUNDINGS))
        yield each(
            f"floats/{name}.sat.f32",
            "f32",
            "f32 f32",
            *(f"{name}.{r}.sat.f32" for r in ROUNDINGS),
            f"{name}.ftz.sat.f32",
        )
    three = "f32 f32 f32"
    yield each("floats/fma.ftz.f32", "f32", three, *(f"fma.{r}.ftz.f32" for r in ROUNDINGS))
    yield each(
        "floats/fma.sat.f32", "f32", three, *(f"fma.{r}.sat.f32" for r in ROUNDINGS), "fma.rn.ftz.sat.f32"
    )


def _division() -> Iterator[Kernel]:
    for type in ("f32", "f64"):
        yield each(f"floats/div.{type}", type, f"{type} {type}", *(f"div.{r}.{type}" for r in ROUNDINGS))
        yield each(
            f"floats/rcp sqrt.{type}",
            type,
            type,
            *(f"{name}.{r}.{type}" for name in ("rcp", "sqrt") for r in ROUNDINGS),
            lanes=192,
        )
    yield each("floats/div.ftz.f32", "f32", "f32 f32", *(f"div.{r}.ftz.f32" for r in ROUNDINGS))
    yield each(
        "floats/rcp sqrt.ftz.f32",
        "f32",
        "f32",
        *(f"{name}.{r}.ftz.f32" for name in ("rcp", "sqrt") for r in ROUNDINGS),
    )


def _order() -> Iterator[Kernel]:
    yield each("floats/abs neg f32", "f32", "f32", "abs.f32", "neg.f32", "abs.ftz.f32", "neg.ftz.f32")
    yield each("floats/abs neg f64", "f64", "f64", "abs.f64", "neg.f64")
    yield each(
        "floats/min max f32",
        "f32",
        "f32 f32",
        *(f"{name}{how}.f32" for name in ("min", "max") for how in ("", ".ftz", ".NaN", ".ftz.NaN")),
    )
    yield each(
        "floats/min max xorsign f32",
        "f32",
        "f32 f32",
        *(f"{name}{how}.xorsign.abs.f32" for name in ("min", "max") for how in ("", ".ftz", ".NaN")),
    )
    yield each("floats/min max f64", "f64", "f64 f64", "min.f64", "max.f64")
    for type in ("f32", "f64"):
        yield each(
            f"floats/testp.{type}",
            "pred",
            type,
            *(
                f"testp.{p}.{type}"
                for p in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
            ),
        )
        yield each(f"floats/copysign.{type}", type, f"{type} {type}", f"copysign.{type}")


def _approximations() -> Iterator[Kernel]:
    """With the bounds that the PTX ISA states."""
    yield each(
        "approx/div",
        "f32",
        "f32 f32",
        "div.approx.f32",
        "div.approx.ftz.f32",
        "div.full.f32",
        "div.full.ftz.f32",
        bound=Bound(relative=2.0**-22),
    )
    yield each(
        "approx/rcp",
        "f32",
        "f32",
        "rcp.approx.f32",
        "rcp.approx.ftz.f32",
        bound=Bound(relative=2.0**-23),
        lanes=192,
    )
    yield each(
        "approx/sqrt",
        "f32",
        "f32",
        "sqrt.approx.f32",
        "sqrt.approx.ftz.f32",
        bound=Bound(relative=2.0**-23),
        lanes=192,
    )
    yield each(
        "approx/rsqrt",
        "f32",
        "f32",
        "rsqrt.approx.f32",
        "rsqrt.approx.ftz.f32",
        bound=Bound(relative=2.0**-22.9),
        lanes=192,
    )
    yield each(
        "approx/ex2",
        "f32",
        "f32",
        "ex2.approx.f32",
        "ex2.approx.ftz.f32",
        bound=Bound(relative=2.0**-22),
        lanes=192,
    )
    yield each(
        "approx/lg2",
        "f32",
        "f32",
        "lg2.approx.f32",
        "lg2.approx.ftz.f32",
        bound=Bound(relative=2.0**-22, absolute=2.0**-22),
        lanes=192,
    )
    yield each("approx/tanh", "f32", "f32", "tanh.approx.f32", bound=Bound(relative=2.0**-11), lanes=192)
    angles = np.concatenate(
        (
            rng("angles").uniform(-np.pi, np.pi, 160).astype(np.float32).view(np.uint32),
            [
                bits
                for bits in edges("f32")
                if abs(float(np.array(bits).view(np.float32))) < 3.2
                or not np.isfinite(np.array(bits).view(np.float32))
            ],
        )
    ).astype(np.uint32)[:160]
    angles = np.resize(np.concatenate((angles, edges("f32")[:9])), 192)
    yield each(
        "approx/sin cos",
        "f32",
        "f32",
        "sin.approx.f32",
        "sin.approx.ftz.f32",
        "cos.approx.f32",
        "cos.approx.ftz.f32",
        bound=Bound(absolute=2.0**-20.5),
        lanes=192,
        inputs=(angles,),
    )
    yield each(
        "approx/f64",
        "f64",
        "f64",
        "rcp.approx.ftz.f64",
        "rsqrt.approx.ftz.f64",
        bound=Bound(relative=2.0**-20),
        lanes=192,
    )
