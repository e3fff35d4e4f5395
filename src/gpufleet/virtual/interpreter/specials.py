"""Special registers (PTX ISA 10)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.lanes import WARP
from gpufleet.virtual.interpreter.memory import GRID_WINDOW
from gpufleet.virtual.interpreter.values import Array, constant
from gpufleet.virtual.ptx.errors import unsupported

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group

Special = Callable[["Group"], Array]
"""Gives the value of a special register for a group."""

POLLING = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"})
"""Registers that change while a thread runs."""


def special(name: str, line: int) -> Special:
    """Return how to read a special register; raises `PtxError` for one that is not carried out."""
    found = _SPECIALS.get(name)
    if found is None:
        raise unsupported(f"the special register {name}", line)
    return found


def _coordinate(axis: int) -> Special:
    name = f"tid{axis}"
    return lambda group: group.space.pick(name, group.batch.geometry.tid[axis])


def _block_coordinate(axis: int) -> Special:
    name = f"ctaid{axis}"
    return lambda group: group.space.pick(name, group.batch.ctaid[axis])


def _block_size(axis: int) -> Special:
    return lambda group: np.array([group.batch.geometry.block[axis]], np.uint32)


def _grid_size(axis: int) -> Special:
    return lambda group: np.array([group.batch.launch.grid[axis]], np.uint32)


def _workspace(shift: int) -> Special:
    """Half of the address of a cooperative launch's workspace, 0 in other launches."""
    half = constant(GRID_WINDOW >> shift & 0xFFFFFFFF, "u32")
    nothing = constant(0, "u32")
    return lambda group: half if group.batch.launch.cooperative else nothing


def _fixed(value: int, type: str = "u32") -> Special:
    array = constant(value, type)
    return lambda group: array


def _lane_id(group: Group) -> Array:
    return group.space.pick("lane_id", group.batch.geometry.lane_id)


def _warp_id(group: Group) -> Array:
    return group.space.pick("warp_id", group.batch.geometry.thread // np.uint32(WARP))


def _processor(group: Group) -> Array:
    batch = group.batch
    numbers = (batch.first_block + np.arange(batch.geometry.blocks)) % batch.launch.multiprocessors
    return group.space.pick("smid", numbers.astype(np.uint32).take(batch.geometry.block_of))


def _ticks(group: Group) -> int:
    """Kilohertz times nanoseconds is millions of ticks."""
    return time.perf_counter_ns() * group.batch.launch.clock_rate // 1_000_000


def _clock(group: Group) -> Array:
    return np.array([_ticks(group) & 0xFFFFFFFF], np.uint32)


def _clock_high(group: Group) -> Array:
    return np.array([_ticks(group) >> 32 & 0xFFFFFFFF], np.uint32)


def _clock_64(group: Group) -> Array:
    return np.array([_ticks(group)], np.uint64)


def _timer(shift: int, type: str) -> Special:
    return lambda group: constant(time.time_ns() >> shift, type)


def _lane_mask(relation: Callable[[Array], Array]) -> Special:
    return lambda group: relation(_lane_id(group).astype(np.uint64)).astype(np.uint32)


_ONE = np.uint64(1)
_SPECIALS: dict[str, Special] = {
    **{f"%tid.{axis}": _coordinate(i) for i, axis in enumerate("xyz")},
    **{f"%ctaid.{axis}": _block_coordinate(i) for i, axis in enumerate("xyz")},
    **{f"%ntid.{axis}": _block_size(i) for i, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": _grid_size(i) for i, axis in enumerate("xyz")},
    **{f"%{name}.w": _fixed(0) for name in ("tid", "ctaid")},
    **{f"%{name}.w": _fixed(1) for name in ("ntid", "nctaid")},
    **{f"%envreg{i}": _fixed(0) for i in range(32)},
    "%envreg1": _workspace(32),
    "%envreg2": _workspace(0),
    "%laneid": _lane_id,
    "%warpid": _warp_id,
    "%nwarpid": lambda group: np.array([group.batch.geometry.warps], np.uint32),
    "%smid": _processor,
    "%nsmid": lambda group: np.array([group.batch.launch.multiprocessors], np.uint32),
    # Without clusters every block is one (PTX ISA 10, %is_explicit_cluster).
    "%is_explicit_cluster": _fixed(0, "pred"),
    "%cluster_ctarank": _fixed(0),
    "%cluster_nctarank": _fixed(1),
    **{f"%clusterid.{axis}": _block_coordinate(i) for i, axis in enumerate("xyz")},
    **{f"%nclusterid.{axis}": _grid_size(i) for i, axis in enumerate("xyz")},
    **{f"%cluster_ctaid.{axis}": _fixed(0) for axis in "xyz"},
    **{f"%cluster_nctaid.{axis}": _fixed(1) for axis in "xyz"},
    "%gridid": _fixed(0, "u64"),
    "%clock": _clock,
    "%clock_hi": _clock_high,
    "%clock64": _clock_64,
    "%globaltimer": _timer(0, "u64"),
    "%globaltimer_lo": _timer(0, "u32"),
    "%globaltimer_hi": _timer(32, "u32"),
    "%lanemask_eq": _lane_mask(lambda lane: _ONE << lane),
    "%lanemask_lt": _lane_mask(lambda lane: (_ONE << lane) - _ONE),
    "%lanemask_le": _lane_mask(lambda lane: (np.uint64(2) << lane) - _ONE),
    "%lanemask_ge": _lane_mask(lambda lane: ~((_ONE << lane) - _ONE)),
    "%lanemask_gt": _lane_mask(lambda lane: ~((np.uint64(2) << lane) - _ONE)),
    "%dynamic_smem_size": lambda group: np.array([group.batch.launch.dynamic_shared], np.uint32),
    "%total_smem_size": lambda group: np.array([group.batch.size_of("shared")], np.uint32),
}
