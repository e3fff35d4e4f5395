"""Work that has to be done lane by lane, in the lanes' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.text import number, vector

Body = Callable[[Sequence[str]], Sequence[str]]


def each_lane(
    low: Lowering, inputs: Sequence[tuple[str, str]], results: Sequence[str], body: Body
) -> Sequence[str]:
    """Run `body` for every active lane.

    Parameters
    ----------
    inputs : (scalar type, vector) pairs
        `body` gets the lane's elements.
    results : scalar types
        Of what `body` returns.

    Returns
    -------
    sequence of str
        The results as vectors; lanes that are not active hold nothing in particular.
    """
    predicate = low.active_predicate()
    if predicate is None:
        return _unrolled(low, inputs, results, body)
    return _loop(low, predicate, inputs, results, body)


def _unrolled(
    low: Lowering, inputs: Sequence[tuple[str, str]], results: Sequence[str], body: Body
) -> Sequence[str]:
    c, n = low.code, low.lanes
    whole = ["poison"] * len(results)
    for lane in range(n):
        elements = [c.let(f"extractelement {vector(t, n)} {v}, i64 {lane}") for t, v in inputs]
        values = body(elements)
        whole = [
            c.let(f"insertelement {vector(t, n)} {w}, {t} {v}, i64 {lane}")
            for t, w, v in zip(results, whole, values, strict=False)
        ]
    return whole


def _loop(
    low: Lowering,
    predicate: str,
    inputs: Sequence[tuple[str, str]],
    results: Sequence[str],
    body: Body,
) -> Sequence[str]:
    c, n = low.code, low.lanes
    arrays = []
    for type, value in inputs:
        arrays.append(c.slot(vector(type, n)))
        c.do(f"store {vector(type, n)} {value}, ptr {arrays[-1]}")
    outputs = [c.slot(vector(type, n)) for type in results]
    for type, slot in zip(results, outputs, strict=False):
        c.do(f"store {vector(type, n)} zeroinitializer, ptr {slot}")
    bits = number(c, predicate, n)
    rest = c.slot("i32")
    c.do(f"store i32 {bits}, ptr {rest}")
    loop, done = c.name("lane"), c.name("lanes")
    c.branch(c.let(f"icmp ne i32 {bits}, 0"), loop, done)
    c.label(loop)
    left = c.let(f"load i32, ptr {rest}")
    lane = c.intrinsic("cttz", "i32", ("i32", left), ("i1", "true"))
    elements = []
    for (type, _), slot in zip(inputs, arrays, strict=False):
        place = c.let(f"getelementptr {type}, ptr {slot}, i32 {lane}")
        elements.append(c.let(f"load {type}, ptr {place}"))
    values = body(elements)
    for type, slot, value in zip(results, outputs, values, strict=False):
        place = c.let(f"getelementptr {type}, ptr {slot}, i32 {lane}")
        c.do(f"store {type} {value}, ptr {place}")
    without = c.let(f"and i32 {left}, {c.let(f'sub i32 {left}, 1')}")
    c.do(f"store i32 {without}, ptr {rest}")
    c.branch(c.let(f"icmp ne i32 {without}, 0"), loop, done)
    c.label(done)
    return [
        c.let(f"load {vector(type, n)}, ptr {slot}") for type, slot in zip(results, outputs, strict=False)
    ]
