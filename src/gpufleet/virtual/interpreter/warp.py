"""Exchange between the lanes of a warp (PTX ISA 9.7.9.6 and 9.7.13.8 to 13).

Values are laid out densely, 32 places per warp of the batch, so that a warp is a row of a matrix.
For whole blocks of full warps that layout is the one the values already have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.floats import CANONICAL_NAN, larger, smaller
from gpufleet.virtual.interpreter.lanes import WARP
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group

_LANES = np.arange(WARP, dtype=np.uint32)
_BITS = np.uint32(1) << _LANES
_LANES.flags.writeable = _BITS.flags.writeable = False


class Warps:
    """A group's lanes as rows of 32."""

    def __init__(self, group: Group) -> None:
        geometry = group.batch.geometry
        self._group = group
        self._aligned = group.mask is None and group.space.is_root and geometry.whole_warps
        self.count = geometry.blocks * geometry.warps
        self._places = None
        if not self._aligned:
            self._places = group.picked(group.space.pick("warp_slot", geometry.warp_slot))

    def rows(self, value: Array) -> Array:
        """Lay a value out; places of absent lanes are zero."""
        if self._places is None:
            dense = value if value.size > 1 else np.repeat(value, WARP * self.count)
        else:
            dense = np.zeros(WARP * self.count, value.dtype)
            dense[self._places] = self._group.picked(value)
        return dense.reshape(self.count, WARP)

    def present(self) -> Array:
        """Say which places have a lane of the group."""
        return self.rows(np.ones(1, np.bool_))

    def to_lanes(self, rows: Array) -> Array:
        """Turn rows of 32 back into one element per slot."""
        dense = rows.reshape(-1)
        if self._places is None:
            return dense
        return self._group.spread(dense.take(self._places, mode="wrap"))

    def row_to_lanes(self, per_warp: Array) -> Array:
        """Turn one value per warp into one element per slot."""
        return self.to_lanes(np.repeat(per_warp, WARP))

    def ballot(self, predicate: Array) -> Array:
        """Return for each warp the lanes of the group whose predicate holds, as bits."""
        return _bits(self.rows(predicate))


def _bits(rows: Array) -> Array:
    return np.packbits(rows, axis=1, bitorder="little").view("<u4").reshape(-1)


def read(source: Source, group: Group) -> Array:
    """Return an operand's value."""
    slot, cast = source
    return group.registers[slot] if cast is None else cast(group.registers[slot])


def meeting(mask: Source) -> Callable[[Group], Array | None]:
    """Say which slots' warps still miss lanes that the member mask names and that have not ended."""

    def incomplete(group: Group) -> Array | None:
        warps = Warps(group)
        batch = group.batch
        alive = np.zeros(WARP * warps.count, np.bool_)
        alive[batch.geometry.warp_slot] = batch.alive_mask()
        absent = _bits(alive.reshape(warps.count, WARP)) & ~warps.ballot(np.ones(1, np.bool_))
        if not absent.any():
            return None
        missing = (warps.row_to_lanes(absent) & read(mask, group)) != 0
        if missing.size == 1:
            return missing if missing[0] else None
        return missing if missing[group.active].any() else None

    return incomplete


# ------------------------------------------------------------------------------------ shuffle


def shuffle(
    mode: str, value: Source, b: Source, c: Source, destination: Source, predicate: int | None
) -> Operation:
    """Return the value of another lane, and whether that lane lies within bounds."""
    slot, write = destination

    def run(group: Group) -> None:
        a, offset, clamp = read(value, group), read(b, group), read(c, group)
        warps = Warps(group)
        if offset.size == clamp.size == 1:
            sources, valid = _uniform_sources(group, mode, int(offset[0]), int(clamp[0]))
        else:
            sources, valid = _sources(mode, warps.rows(offset), warps.rows(clamp))
        registers = group.registers
        if a.size > 1:
            a = warps.to_lanes(warps.rows(a).reshape(-1).take(sources, mode="wrap"))
        registers[slot] = a if write is None else write(a)
        if predicate is not None:
            registers[predicate] = warps.to_lanes(valid)

    return run


def _uniform_sources(group: Group, mode: str, offset: int, clamp: int) -> tuple[Array, Array]:
    geometry = group.batch.geometry
    key = mode, offset, clamp
    found = geometry.shuffles.get(key)
    if found is None:
        rows = geometry.blocks * geometry.warps
        b, c = np.full((rows, WARP), offset, np.uint32), np.full((rows, WARP), clamp, np.uint32)
        found = geometry.shuffles[key] = _sources(mode, b, c)
    return found


def _sources(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Return each place's source, and whether it lies within bounds (pseudo code of PTX ISA 9.7.9.6)."""
    lane = _LANES.astype(np.int64)
    offset = (b & np.uint32(31)).astype(np.int64)
    clamp = (c & np.uint32(31)).astype(np.int64)
    segment = ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    lowest = lane & segment
    limit = lowest | (clamp & ~segment)
    if mode == "up":
        source = lane - offset
        valid = source >= limit
    else:
        if mode == "down":
            source = lane + offset
        elif mode == "bfly":
            source = lane ^ offset
        else:
            source = lowest | (offset & ~segment)
        valid = source <= limit
    source = np.where(valid, source, lane)
    start = WARP * np.arange(len(source))[:, None]
    return (start + source).reshape(-1), valid.reshape(-1)


# -------------------------------------------------------------------------- vote, match, redux


def vote(kind: str, predicate: Source, mask: Source | None, destination: Source) -> Operation:
    """Return a predicate reduced over the lanes of the warp that the mask names."""
    slot, write = destination
    decide = _VOTES[kind]

    def run(group: Group) -> None:
        warps = Warps(group)
        held = warps.row_to_lanes(warps.ballot(read(predicate, group)))
        members = warps.row_to_lanes(warps.ballot(np.ones(1, np.bool_)))
        if mask is not None:
            members = members & read(mask, group)
        held = held & members
        result = decide(held, members)
        group.registers[slot] = result if write is None else write(result)

    return run


_VOTES: dict[str, Callable[[Array, Array], Array]] = {
    "ballot": lambda held, members: held,
    "any": lambda held, members: held != 0,
    "all": lambda held, members: held == members,
    "uni": lambda held, members: (held == members) | (held == 0),
}


def activemask(destination: Source) -> Operation:
    """Return the lanes of the warp that are in the group."""
    slot, write = destination

    def run(group: Group) -> None:
        warps = Warps(group)
        result = warps.row_to_lanes(warps.ballot(np.ones(1, np.bool_)))
        group.registers[slot] = result if write is None else write(result)

    return run


def match(kind: str, value: Source, mask: Source, destination: Source, predicate: int | None) -> Operation:
    """Return the lanes of the warp whose value is the same."""
    slot, write = destination

    def run(group: Group) -> None:
        warps = Warps(group)
        rows = warps.rows(read(value, group))
        equal = rows[:, :, None] == rows[:, None, :]
        same = np.packbits(equal, axis=2, bitorder="little").view("<u4").reshape(-1)
        members = warps.row_to_lanes(warps.ballot(np.ones(1, np.bool_))) & read(mask, group)
        result = warps.to_lanes(same) & members
        if kind == "all":
            everyone = result == members
            result = np.where(everyone, members, np.uint32(0))
            if predicate is not None:
                group.registers[predicate] = everyone
        group.registers[slot] = result if write is None else write(result)

    return run


_REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _identity(kind: str, dtype: np.dtype[Any]) -> Any:
    """Return the value that changes nothing."""
    limits = np.iinfo(dtype)
    return dtype.type({"min": limits.max, "max": limits.min, "and": limits.max}.get(kind, 0))


def redux(kind: str, value: Source, mask: Source, destination: Source) -> Operation:
    """Return an integer reduced over the lanes of the warp that the mask names."""
    slot, write = destination
    function = _REDUCTIONS[kind]

    def run(group: Group) -> None:
        warps = Warps(group)
        rows = warps.rows(read(value, group))
        present = warps.present()
        masks = read(mask, group)
        result = np.zeros(1, rows.dtype)
        for one in np.unique(group.picked(masks)):
            taking_part = present & ((one & _BITS) != 0)
            values = np.where(taking_part, rows, _identity(kind, rows.dtype))
            reduced = warps.row_to_lanes(function.reduce(values, axis=1).astype(rows.dtype))
            result = np.where(masks == one, reduced, result)
        group.registers[slot] = result if write is None else write(result)

    return run


def redux_floats(
    kind: str, value: Source, mask: Source, destination: Source, of_magnitudes: bool, passes_nan: bool
) -> Operation:
    """Return the smallest or largest float of the lanes of the warp that the mask names."""
    slot, write = destination
    choose = smaller if kind == "min" else larger
    # What changes nothing: a NaN, which every number beats, or where NaNs pass, an infinity.
    nothing = CANONICAL_NAN
    if passes_nan:
        nothing = np.float32(np.inf if kind == "min" else -np.inf)

    def run(group: Group) -> None:
        warps = Warps(group)
        given = read(value, group)
        rows = warps.rows(np.abs(given) if of_magnitudes else given)
        present = warps.present()
        masks = read(mask, group)
        result = np.zeros(1, np.float32)
        for one in np.unique(group.picked(masks)):
            values = np.where(present & ((one & _BITS) != 0), rows, nothing)
            while values.shape[1] > 1:
                half = values.shape[1] // 2
                values = choose(values[:, :half], values[:, half:], passes_nan)
            reduced = np.where(np.isnan(values), CANONICAL_NAN, values).reshape(-1)
            result = np.where(masks == one, warps.row_to_lanes(reduced), result)
        group.registers[slot] = result if write is None else write(result)

    return run


def elect(mask: Source, destination: Source, predicate: int | None) -> Operation:
    """Return the lowest lane that the mask names, and whether that is this one."""
    slot, write = destination

    def run(group: Group) -> None:
        bits = read(mask, group)
        lowest = np.bitwise_and(bits, np.negative(bits))
        leader = np.frexp(lowest.astype(np.float64))[1].astype(np.uint32) - np.uint32(1)
        group.registers[slot] = leader if write is None else write(leader)
        if predicate is not None:
            lane = group.space.pick("lane_id", group.batch.geometry.lane_id)
            group.registers[predicate] = lane == leader

    return run
