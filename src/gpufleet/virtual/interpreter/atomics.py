"""Atomic operations (PTX ISA 9.7.13.6 and 7).

All lanes of a group act in the order of their numbers. Where several lanes meet at one address,
each gets the value that the one before it left. The addresses are sorted, lanes of one address
make a *run*, and what the lanes of a run do one after the other is computed for all runs together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.accesses import Base
from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.floats import canonical, flush
from gpufleet.virtual.interpreter.memory import Access, Place
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.interpreter.warp import read

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group

_IN_PLACE = {"add": np.add, "min": np.minimum, "max": np.maximum}
"""Operations for which ufunc.at has a fast loop."""
_SCANNED: dict[str, np.ufunc] = {
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_FEW = 64


Kind = str | Callable[[Array, Array], Array]
"""The operation's name, or what computes the new value from the old one and the operand."""


def atomic(
    access: Access,
    kind: Kind,
    base: Base,
    operands: Sequence[Source],
    swap: Source | None,
    destinations: Sequence[Source],
    lock: threading.Lock,
) -> Operation:
    """Make an atomic operation; without destinations the old values are not computed.

    Of a vector each element is operated on by itself. The lock keeps launches that run at the same time
    apart.
    """
    address, offset = base

    def run(group: Group) -> None:
        place = access.locate(group, read(address, group), offset)
        other = group.picked(read(swap, group)) if swap is not None else None
        values = [group.picked(read(operand, group)) for operand in operands]
        for element, value in enumerate(values):
            old = np.zeros(group.count, access.dtype)
            for lanes, part in place.parts():
                count = group.count if isinstance(lanes, slice) else len(lanes)
                with lock:
                    found = _at(
                        part,
                        element,
                        kind,
                        value if value.size == 1 else value[lanes],
                        None if other is None else other if other.size == 1 else other[lanes],
                        count,
                        bool(destinations),
                    )
                if found is not None:
                    old[lanes] = found
            if destinations:
                slot, write = destinations[element]
                result = group.spread(old)
                group.registers[slot] = result if write is None else write(result)

    return run


def _flushing_sum(old: Array, value: Array) -> Array:
    """Sums of floats in global memory know no subnormals, those in shared memory do (PTX ISA 9.7.13.6)."""
    return flush(canonical(flush(old) + flush(value)))


def _is_tiny(old: Array, value: Array) -> bool:
    """Say whether any partial sum might be subnormal: sums of multiples of 2**-124 are 0 or larger."""
    return any(bool(((np.abs(x) < 2.0**-100) & (x != 0)).any()) for x in (old, value))


def _at(
    place: Place, element: int, kind: Kind, value: Array, other: Array | None, count: int, wants_old: bool
) -> Array | None:
    view = place.view
    indices = place.flat(count) + element
    if kind == "add" and view.dtype == np.float32 and place.in_global and _is_tiny(view[indices], value):
        kind = _flushing_sum
    if not wants_old and _update(view, indices, kind, value):
        return None
    values, others = _each(value, count), None if other is None else _each(other, count)
    if place.contiguous or count == 1:
        old = view[indices]
        view[indices] = _step(kind, old, values, others)
        return old
    return _in_order(view, indices, kind, values, others)


def _each(value: Array, count: int) -> Array:
    """Return one element per lane."""
    return value if value.size == count else np.repeat(value, count)


def _update(view: Array, indices: Array, kind: Kind, value: Array) -> bool:
    """Apply an operation whose old values nobody asks for, if that has a quick way."""
    function = _IN_PLACE.get(kind) if isinstance(kind, str) else None
    if function is None or (view.dtype.kind == "f" and kind != "add"):
        return False
    # ufunc.at goes through the lanes in order, so floats are added in order too.
    if np.may_share_memory(view, indices):
        # It would copy the view first: of all addresses of the process, where host memory is registered.
        places, back = np.unique(indices, return_inverse=True)
        some = view[places]
        function.at(some, back, value)
        view[places] = some
    else:
        function.at(view, indices, value)
    if view.dtype == np.float32:
        touched = view[indices]
        if np.isnan(touched).any():
            view[indices] = canonical(touched)
    return True


def _step(kind: Kind, old: Array, value: Array, other: Array | None) -> Array:
    """Return what one operation leaves, for lanes at different addresses."""
    if not isinstance(kind, str):
        return kind(old, value)
    if kind == "cas":
        assert other is not None
        return np.where(_are_equal(old, value), other, old)
    if kind == "exch":
        return value
    if kind == "inc":
        return np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))
    if kind == "dec":
        return np.where((old == 0) | (old > value), value, old - old.dtype.type(1))
    if kind == "add":
        total = old + value
        return canonical(total) if total.dtype == np.float32 else total
    return _SCANNED[kind](old, value)


def _are_equal(a: Array, b: Array) -> Array:
    if a.dtype.itemsize <= 8:
        return a == b
    # 128 bits are held as complex numbers, which compare otherwise.
    rows = (value.view(np.uint64).reshape(-1, 2) for value in (a, b))
    return (next(rows) == next(rows)).all(axis=1)


class _Runs:
    """Lanes sorted by address; lanes of one address keep their order."""

    def __init__(self, indices: Array) -> None:
        self.order = _stable_order(indices)
        sorted_indices = indices[self.order]
        new = np.empty(len(indices), np.bool_)
        new[0] = True
        np.not_equal(sorted_indices[1:], sorted_indices[:-1], out=new[1:])
        self.starts = np.flatnonzero(new)
        self.lengths = np.diff(self.starts, append=len(indices))
        self.of = np.cumsum(new) - 1
        """Number of each lane's run."""
        self.addresses = sorted_indices[self.starts]
        self.longest = int(self.lengths.max())
        self.last = self.starts + self.lengths - 1


def _stable_order(indices: Array) -> Array:
    """Sort by address; 16-bit distances are sorted ten times faster than whole indices."""
    low = indices.min()
    if indices.max() - low < 1 << 16:
        return (indices - low).astype(np.uint16).argsort(kind="stable")
    return indices.argsort(kind="stable")


def _in_order(view: Array, indices: Array, kind: Kind, values: Array, other: Array | None) -> Array:
    """Carry out an operation lane by lane and return the old values."""
    runs = _Runs(indices)
    value = values[runs.order]
    first = view[runs.addresses]
    if runs.longest == 1:
        old = first
        new = _step(kind, first, value, None if other is None else other[runs.order])
    elif kind == "add" and view.dtype.kind != "f":
        old, new = _integer_sums(runs, first, value)
    elif kind == "exch":
        old = np.concatenate((value[:1], value[:-1]))
        old[runs.starts] = first
        new = value[runs.last]
    elif isinstance(kind, str) and kind in _SCANNED:
        old, new = _scan(runs, first, value, _SCANNED[kind])
    elif kind == "cas":
        assert other is not None
        old, new = _compare_and_swap(runs, first, value, other[runs.order])
    elif kind in ("inc", "dec") and _same_in_runs(runs, value):
        old, new = (_increments if kind == "inc" else _decrements)(runs, first, value)
    elif kind == "add" and len(runs.starts) <= _FEW:
        old, new = _float_sums(runs, first, value)
    else:
        old, new = _rank_by_rank(runs, first, value, kind)
    view[runs.addresses] = new
    result = np.empty_like(old)
    result[runs.order] = old
    return result


def _integer_sums(runs: _Runs, first: Array, value: Array) -> tuple[Array, Array]:
    total = np.cumsum(value, dtype=value.dtype)
    before = total - value
    old = first[runs.of] + (before - before[runs.starts][runs.of])
    return old, old[runs.last] + value[runs.last]


def _float_sums(runs: _Runs, first: Array, value: Array) -> tuple[Array, Array]:
    """Sums of floats depend on their order: accumulate keeps it."""
    old = np.empty_like(value)
    new = np.empty_like(first)
    for number, (start, length) in enumerate(zip(runs.starts, runs.lengths, strict=True)):
        chain = np.add.accumulate(np.concatenate((first[number : number + 1], value[start : start + length])))
        if chain.dtype == np.float32:
            chain = canonical(chain)
        old[start : start + length] = chain[:-1]
        new[number] = chain[-1]
    return old, new


def _scan(runs: _Runs, first: Array, value: Array, function: np.ufunc) -> tuple[Array, Array]:
    """Running results of an associative operation, by doubling the reach of each lane."""
    position = np.arange(len(value)) - runs.starts[runs.of]
    reach = value.copy()
    distance = 1
    while distance < runs.longest:
        at = np.flatnonzero(position >= distance)
        reach[at] = function(reach[at], reach[at - distance])
        distance *= 2
    after = function(first[runs.of], reach)
    old = np.concatenate((after[:1], after[:-1]))
    old[runs.starts] = first
    return old, after[runs.last]


def _compare_and_swap(runs: _Runs, first: Array, compare: Array, swap: Array) -> tuple[Array, Array]:
    """From one swap to the next, as few as there are: in between nothing changes."""
    count = len(compare)
    current = first.copy()
    old = np.empty_like(compare)
    place = np.arange(count)
    begin = runs.starts.copy()
    changes = ~_are_equal(compare, swap)
    while True:
        hit = _are_equal(compare, current[runs.of]) & changes & (place >= begin[runs.of])
        nearest = np.minimum.reduceat(np.where(hit, place, count), runs.starts)
        until = np.where(nearest < count, nearest, runs.last)
        between = (place >= begin[runs.of]) & (place <= until[runs.of])
        old[between] = current[runs.of[between]]
        swapping = np.flatnonzero(nearest < count)
        if len(swapping) == 0:
            return old, current
        current[swapping] = swap[nearest[swapping]]
        begin = until + 1


def _same_in_runs(runs: _Runs, value: Array) -> bool:
    return bool((value == value[runs.starts][runs.of]).all())


def _increments(runs: _Runs, first: Array, limit: Array) -> tuple[Array, Array]:
    """Count up modulo limit + 1; a start beyond the limit is followed by 0."""
    wide = np.uint64
    position = (np.arange(len(limit)) - runs.starts[runs.of]).astype(wide)
    period = limit.astype(wide) + wide(1)
    start = first[runs.of].astype(wide)
    beyond = start > limit
    counted = np.where(beyond, position - wide(1), start + position) % period
    old = np.where(beyond & (position == 0), start, counted).astype(first.dtype)
    return old, _step("inc", old[runs.last], limit[runs.last], None)


def _decrements(runs: _Runs, first: Array, limit: Array) -> tuple[Array, Array]:
    """Count down modulo limit + 1; a start beyond the limit is followed by the limit."""
    wide = np.int64
    position = np.arange(len(limit)) - runs.starts[runs.of]
    period = limit.astype(wide) + 1
    start = first[runs.of].astype(wide)
    beyond = start > limit
    counted = np.where(beyond, limit - (position - 1), start - position) % period
    old = np.where(beyond & (position == 0), start, counted).astype(first.dtype)
    return old, _step("dec", old[runs.last], limit[runs.last], None)


def _rank_by_rank(runs: _Runs, first: Array, value: Array, kind: Kind) -> tuple[Array, Array]:
    """The first lane of every run, then the second of every run that has one, and so on."""
    current = first.copy()
    old = np.empty_like(value)
    for rank in range(runs.longest):
        which = np.flatnonzero(runs.lengths > rank)
        at = runs.starts[which] + rank
        old[at] = current[which]
        current[which] = _step(kind, current[which], value[at], None)
    return old, current
