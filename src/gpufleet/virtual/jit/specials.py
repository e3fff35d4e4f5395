"""Special registers (PTX ISA 10) in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpufleet.virtual.jit.text import constant, vector

if TYPE_CHECKING:
    from gpufleet.virtual.jit.lowering import Lowering
    from gpufleet.virtual.jit.unit import Unit

_AXES = "xyzw"


def special(low: Lowering, name: str, n: int) -> tuple[str, str]:
    """A special register and its LLVM type; with n = 1, lane 0."""
    base, _, axis = name[1:].partition(".")
    if base == "tid":
        return _thread_index(low, axis, n), "i32"
    if base in _BY_AXIS:
        value = (
            _BY_AXIS[base](low.unit, _AXES.index(axis)) if axis != "w" else ("0" if base == "ctaid" else "1")
        )
        return low.code.splat("i32", value, n), "i32"
    if base == "laneid":
        return _lane(low, n), "i32"
    if base.startswith("lanemask_"):
        return _lane_mask(low, base[9:], n), "i32"
    if base == "warpid":
        return _warp(low, n), "i32"
    if base in _CLOCKS:
        value, type = _clock(low, *_CLOCKS[base])
        return low.code.splat(type, value, n), type
    if base == "cluster_nctarank":
        return low.code.splat("i32", "1", n), "i32"
    if base in _SIMPLE:
        field, type = _SIMPLE[base]
        value = low.unit.job(field, type) if field else "0"
        return low.code.splat(type, value, n), type
    raise low.unit.refuse(low.instruction, f"(special register {name})")


def _thread_index(low: Lowering, axis: str, n: int) -> str:
    """From the launch's table: the indices of thread 0, 1, ... along each axis."""
    c = low.code
    if axis == "w":
        return constant("i32", 0, n)
    place = _AXES.index(axis)
    table = "%tid.table"
    if place:
        stride = low.unit.job("thread_id_stride", "i64")
        distance = c.let(f"mul i64 {stride}, {place}")
        table = c.let(f"getelementptr i8, ptr {table}, i64 {distance}")
    return c.let(f"load {vector('i32', n)}, ptr {table}, align 4, !invariant.load !0")


_BY_AXIS: dict[str, Callable[[Unit, int], str]] = {
    "ntid": lambda unit, i: unit.job("block", "i32", i),
    "nctaid": lambda unit, i: unit.job("grid", "i32", i),
    "ctaid": lambda unit, i: f"%ctaid.{_AXES[i]}",
    "clusterid": lambda unit, i: f"%ctaid.{_AXES[i]}",
    "nclusterid": lambda unit, i: unit.job("grid", "i32", i),
    "cluster_ctaid": lambda unit, i: "0",
    "cluster_nctaid": lambda unit, i: "1",
}

_SIMPLE = {
    "nwarpid": ("warps32", "i32"),
    "smid": ("", "i32"),
    "nsmid": ("multiprocessors", "i32"),
    "gridid": ("grid_id", "i64"),
    "dynamic_smem_size": ("dynamic_shared", "i32"),
    "total_smem_size": ("shared_total", "i32"),
    "aggr_smem_size": ("shared_total", "i32"),
    "cluster_ctarank": ("", "i32"),
    # Cooperative launches, which find their workspace in two of these, are interpreted (engine.py).
    **{f"envreg{i}": ("", "i32") for i in range(32)},
    "is_explicit_cluster": ("", "i1"),
}

_CLOCKS = {
    "clock": ("rate", 0, "i32"),
    "clock_hi": ("rate", 32, "i32"),
    "clock64": ("rate", 0, "i64"),
    "globaltimer": ("time", 0, "i64"),
    "globaltimer_lo": ("time", 0, "i32"),
    "globaltimer_hi": ("time", 32, "i32"),
}


def _clock(low: Lowering, kind: str, shift: int, type: str) -> tuple[str, str]:
    """The wall clock in nanoseconds, or in ticks of the device's clock."""
    c = low.code
    now = c.function("gf_clock", "i64", ("i32", "1" if kind == "rate" else "0"))
    if kind == "rate":
        rate = low.unit.job("clock_rate", "i64")
        whole = c.let(f"mul i64 {c.let(f'udiv i64 {now}, 1000000')}, {rate}")
        rest = c.let(f"mul i64 {c.let(f'urem i64 {now}, 1000000')}, {rate}")
        now = c.let(f"add i64 {whole}, {c.let(f'udiv i64 {rest}, 1000000')}")
    if shift:
        now = c.let(f"lshr i64 {now}, {shift}")
    return (c.let(f"trunc i64 {now} to i32"), "i32") if type == "i32" else (now, "i64")


def _first_thread(low: Lowering) -> str:
    return low.code.let(f"mul i32 %warp, {low.lanes}")


def _lane(low: Lowering, n: int) -> str:
    """Position in the hardware warp of 32, which may be several vectors."""
    c = low.code
    first = c.let(f"and i32 {_first_thread(low)}, 31")
    return first if n == 1 else low.spread(first, "i32", 1)


def _warp(low: Lowering, n: int) -> str:
    c = low.code
    return c.splat("i32", c.let(f"lshr i32 {_first_thread(low)}, 5"), n)


def _lane_mask(low: Lowering, relation: str, n: int) -> str:
    c, t = low.code, vector("i32", n)
    one = constant("i32", 1, n)
    bit = c.let(f"shl {t} {one}, {_lane(low, n)}")
    if relation == "eq":
        return bit
    below = c.let(f"sub {t} {bit}, {one}")
    if relation == "lt":
        return below
    upto = c.let(f"or {t} {bit}, {below}")
    if relation == "le":
        return upto
    return c.let(f"xor {t} {upto if relation == 'gt' else below}, {constant('i32', -1, n)}")
