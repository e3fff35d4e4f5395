"""Functions that generated code calls out of line, defined in the kernel's own module when first needed.

A masked gather or scatter becomes sixteen branches where the CPU has none; inlined at every access of
a large kernel, with the checks before it, that made LLVM take twenty seconds. A loop over the active
lanes that checks and accesses, once per type, costs a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpufleet.virtual.jit.abi import FAULT_RANGE
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.text import number, vector


@dataclass
class Check:
    """What an access by offset must fulfil."""

    pointer: str
    """Start of the window."""
    origin: str
    """Its address."""
    room: str
    """Offsets must be less, as unsigned numbers."""
    align: int
    site: int


def load(
    low: Lowering, element: str, size: int, places: str, check: Check | None, count: int, ordered: bool
) -> Sequence[str]:
    """Load `count` neighbours in every active lane; other lanes get 0.

    `places` are pointers, or, with a check, offsets in its window.
    """
    c, n = low.code, low.lanes
    name = f"load.{'at' if check else 'from'}.{element}.{count}{'.ordered' if ordered else ''}"
    keyword = "load volatile" if ordered else "load"
    whole = vector(element, n)
    result = whole if count == 1 else "{" + ", ".join([whole] * count) + "}"
    if name not in low.unit.program.helpers:
        lines, stores, ends = [], [], []
        for k in range(count):
            lines.append(f"  %to{k} = alloca {whole}\n  store {whole} zeroinitializer, ptr %to{k}")
            stores.append(
                f"  %q{k} = getelementptr i8, ptr %p, i64 {k * size}\n"
                f"  %x{k} = {keyword} {element}, ptr %q{k}, align {size}\n"
                f"  %r{k} = getelementptr {element}, ptr %to{k}, i32 %i\n"
                f"  store {element} %x{k}, ptr %r{k}"
            )
            ends.append(f"  %all{k} = load {whole}, ptr %to{k}")
        if count == 1:
            ends.append(f"  ret {whole} %all0")
        else:
            last = "poison"
            for k in range(count):
                ends.append(f"  %part{k} = insertvalue {result} {last}, {whole} %all{k}, {k}")
                last = f"%part{k}"
            ends.append(f"  ret {result} {last}")
        _define(low, name, result, check is not None, [], lines, stores, ends)
    found = c.let(f"call {result} @{name}({_arguments(low, places, check)})")
    if count == 1:
        return [found]
    return [c.let(f"extractvalue {result} {found}, {k}") for k in range(count)]


def store(
    low: Lowering,
    element: str,
    size: int,
    places: str,
    values: Sequence[str],
    check: Check | None,
    ordered: bool,
) -> None:
    """Store neighbours in every active lane, lowest lane first."""
    c, n = low.code, low.lanes
    count = len(values)
    name = f"store.{'at' if check else 'from'}.{element}.{count}{'.ordered' if ordered else ''}"
    keyword = "store volatile" if ordered else "store"
    whole = vector(element, n)
    if name not in low.unit.program.helpers:
        lines, stores = [], []
        for k in range(count):
            lines.append(f"  %from{k} = alloca {whole}\n  store {whole} %value{k}, ptr %from{k}")
            stores.append(
                f"  %r{k} = getelementptr {element}, ptr %from{k}, i32 %i\n"
                f"  %x{k} = load {element}, ptr %r{k}\n"
                f"  %q{k} = getelementptr i8, ptr %p, i64 {k * size}\n"
                f"  {keyword} {element} %x{k}, ptr %q{k}, align {size}"
            )
        parameters = [f"{whole} %value{k}" for k in range(count)]
        _define(low, name, "void", check is not None, parameters, lines, stores, ["  ret void"])
    passed = "".join(f", {whole} {value}" for value in values)
    c.do(f"call void @{name}({_arguments(low, places, check)}{passed})")


def _arguments(low: Lowering, places: str, check: Check | None) -> str:
    c, n = low.code, low.lanes
    predicate = low.active_predicate()
    bits = str((1 << n) - 1) if predicate is None else number(c, predicate, n)
    if check is None:
        return f"{vector('ptr', n)} {places}, i32 {bits}"
    return (
        f"{vector('i64', n)} {places}, i32 {bits}, ptr %worker, ptr {check.pointer}, i64 {check.origin}, "
        f"i64 {check.room}, i64 {check.align - 1}, i32 {check.site}"
    )


def _define(
    low: Lowering,
    name: str,
    result: str,
    checked: bool,
    parameters: Sequence[str],
    lines: Sequence[str],
    work: Sequence[str],
    ends: Sequence[str],
) -> None:
    """Define a loop over the active lanes around `work`, which finds its pointer in %p, its lane in %i."""
    program = low.unit.program
    program.declarations.add("declare i32 @llvm.cttz.i32(i32, i1)")
    program.declarations.add("declare void @gf_fault(ptr, i32, i32, i64, i32) noreturn")
    places = vector("i64" if checked else "ptr", low.lanes)
    more = (
        ["ptr %worker", "ptr %base", "i64 %origin", "i64 %room", "i64 %low", "i32 %site"] if checked else []
    )
    signature = ", ".join([f"{places} %places", "i32 %bits", *more, *parameters])
    text = [
        f"define internal {result} @{name}({signature}) noinline nounwind {{",
        "entry:",
        f"  %all = alloca {places}",
        f"  store {places} %places, ptr %all",
        *lines,
        "  %some = icmp ne i32 %bits, 0",
        "  br i1 %some, label %lane, label %done",
        "lane:",
        "  %rest = phi i32 [%bits, %entry], [%less, %go]",
        "  %i = call i32 @llvm.cttz.i32(i32 %rest, i1 true)",
    ]
    if checked:
        text += [
            "  %o = getelementptr i64, ptr %all, i32 %i",
            "  %place = load i64, ptr %o",
            "  %outside = icmp uge i64 %place, %room",
            "  %odd = and i64 %place, %low",
            "  %skew = icmp ne i64 %odd, 0",
            "  %wrong = or i1 %outside, %skew",
            "  br i1 %wrong, label %bad, label %go",
            "bad:",
            "  %address = add i64 %place, %origin",
            f"  call void @gf_fault(ptr %worker, i32 {FAULT_RANGE}, i32 %site, i64 %address, i32 %i)",
            "  unreachable",
            "go:",
            "  %p = getelementptr i8, ptr %base, i64 %place",
        ]
    else:
        text += [
            "  br label %go",
            "go:",
            "  %o = getelementptr ptr, ptr %all, i32 %i",
            "  %p = load ptr, ptr %o",
        ]
    text += [
        *work,
        "  %one = sub i32 %rest, 1",
        "  %less = and i32 %rest, %one",
        "  %more = icmp ne i32 %less, 0",
        "  br i1 %more, label %lane, label %done",
        "done:",
        *ends,
        "}",
    ]
    program.helpers[name] = "\n".join(text)
