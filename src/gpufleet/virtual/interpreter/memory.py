"""Where an access to memory lands, after its bounds and alignment were checked.

`locate` turns addresses into a `Place`: a typed view of a whole region, and indices into it that are
known to lie inside an allocation. Only then is the region touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.interpreter.addresses import AddressInfo
from gpufleet.virtual.interpreter.faults import access_fault
from gpufleet.virtual.interpreter.values import Array

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.ptx.syntax import Instruction

SHARED_WINDOW = 0x7C5A_0000_0000_0000
LOCAL_WINDOW = 0x7C10_0000_0000_0000
PARAMETER_WINDOW = 0x7C9A_0000_0000_0000
GRID_WINDOW = 0x7C66_0000_0000_0000
"""Where the spaces lie in generic addresses: beyond what a 64-bit CPU can map, so never a global address."""

WINDOW_BITS = 48
WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW, "grid": GRID_WINDOW}
"""`grid` is the workspace that cooperative groups find through %envreg1 and 2, for `grid.sync()`."""
_SPACE_OF_WINDOW = {window >> WINDOW_BITS: space for space, window in WINDOWS.items()}
_MASK = (1 << 64) - 1


class Place:
    """Elements of a typed view: `view[start + k]` for k in `indices`, or those from `start` on."""

    __slots__ = ("contiguous", "in_global", "indices", "start", "view")

    def __init__(
        self, view: Array, start: int, indices: Array | None, contiguous: int = 0, in_global: bool = False
    ) -> None:
        self.view = view
        self.start = start
        self.indices = indices
        """None: 0, 1, 2, ... up to `contiguous`, or if that is 0, the same element for all lanes."""
        self.contiguous = contiguous
        self.in_global = in_global

    def load(self, element: int = 0) -> Array:
        """Read element number `element` of each lane's vector."""
        start = self.start + element
        if self.indices is None:
            return self.view[start : start + (self.contiguous or 1)].copy()
        # The indices are known to be inside: "wrap" spares the check, 26 us instead of 50 for 32 Ki.
        return self.view[start:].take(self.indices, mode="wrap")

    def store(self, value: Array, element: int = 0) -> None:
        """Write one element per lane; of several lanes at one place the last wins."""
        start = self.start + element
        if self.indices is not None:
            self.view[start:][self.indices] = value
        elif self.contiguous:
            self.view[start : start + self.contiguous] = value
        else:
            self.view[start] = value[-1]

    def parts(self) -> list[tuple[Array | slice, Place]]:
        """Return the pieces that lie in one region each, with the lanes they belong to."""
        return [(slice(None), self)]

    def flat(self, count: int) -> Array:
        """Return the indices into `view` itself, one per lane."""
        if self.indices is not None:
            return self.indices + self.start
        return np.arange(self.start, self.start + count) if self.contiguous else np.full(count, self.start)


class MixedPlace:
    """A generic access whose lanes reach into different spaces."""

    __slots__ = ("_count", "_dtype", "_parts")

    def __init__(self, parts: list[tuple[Array | slice, Place]], count: int, dtype: np.dtype[Any]) -> None:
        self._parts = parts
        self._count = count
        self._dtype = dtype

    def parts(self) -> list[tuple[Array | slice, Place]]:
        """Return the pieces that lie in one region each, with the lanes they belong to."""
        return self._parts

    def load(self, element: int = 0) -> Array:
        """Read element number `element` of each lane's vector."""
        result = np.zeros(self._count, self._dtype)
        for lanes, place in self._parts:
            result[lanes] = place.load(element)
        return result

    def store(self, value: Array, element: int = 0) -> None:
        """Write one element per lane."""
        for lanes, place in self._parts:
            place.store(value if value.size == 1 else value[lanes], element)


class Access:
    """One instruction's way to memory: what all its executions have in common."""

    __slots__ = ("align", "dtype", "instruction", "shift", "size", "space", "writes")

    def __init__(
        self, instruction: Instruction, space: str, dtype: np.dtype[Any], elements: int, writes: bool
    ) -> None:
        self.instruction = instruction
        self.space = "global" if space == "const" else space
        """global, shared, local, param, or nothing for generic addresses."""
        self.dtype = dtype
        self.shift = dtype.itemsize.bit_length() - 1
        self.size = dtype.itemsize * elements
        self.align = self.size - 1
        self.writes = writes

    def locate(self, group: Group, addresses: Array, offset: int) -> Place | MixedPlace:
        """Check the access for every active lane and say where it lands.

        Raises `KernelFault` for the first lane that reaches outside its allocation or is not aligned
        to the size of the access (PTX ISA 6.4.1).
        """
        if addresses.size == 1:
            return self._one(group, (int(addresses[0]) + offset) & _MASK)
        info = group.batch.address_info(group, addresses)
        if (info.bits | offset) & self.align:
            if info.bits & self.align and offset & self.align:
                return self._with_exact_addresses(group, addresses, offset)
            raise self._misaligned(group, info.addresses + np.uint64(offset & _MASK))
        low, high = info.low + offset, info.high + offset + self.size
        if offset and not (low >= 0 and high <= _MASK):
            return self._with_exact_addresses(group, addresses, offset)
        if self.space:
            return self._place(group, info, offset, self.space)
        window = low >> WINDOW_BITS
        if window != (high - 1) >> WINDOW_BITS:
            return self._mixed(group, info, addresses, offset)
        space = _SPACE_OF_WINDOW.get(window, "global")
        return self._place(group, info, offset - WINDOWS.get(space, 0), space)

    def _place(self, group: Group, info: AddressInfo, offset: int, space: str) -> Place:
        """Say where aligned addresses land in a space, given the offset from its beginning."""
        batch = group.batch
        low, high = info.low + offset, info.high + offset + self.size
        if space == "global":
            return self._in_global(group, info, offset, low, high)
        if low < 0 or high > batch.size_of(space):
            raise self._outside(group, info.addresses + np.uint64(offset & _MASK), space)
        if space == "param":
            self._refuse_writing(group, info.addresses + np.uint64(offset & _MASK))
        indices = info.based(self.shift, space, batch.bases(group, space, self.shift))
        return Place(batch.view_of(space, self.dtype), low >> self.shift, indices)

    def _in_global(self, group: Group, info: AddressInfo, offset: int, low: int, high: int) -> Place:
        memory = group.batch.memory
        if not memory.contains(low, high):
            exact = info.addresses + np.uint64(offset & _MASK)
            if not memory.inside(exact, self.size).all():
                raise self._outside(group, exact, "global")
        start = (low - memory.base) >> self.shift
        view = memory.view(self.dtype)
        if info.stride == self.dtype.itemsize:
            return Place(view, start, None, len(info.addresses), in_global=True)
        return Place(view, start, info.relative(self.shift), in_global=True)

    def _one(self, group: Group, address: int) -> Place:
        """All lanes use one address; in shared and local memory that still is one place per block or lane."""
        space = self.space or _SPACE_OF_WINDOW.get(address >> WINDOW_BITS, "global")
        if not self.space:
            address -= WINDOWS.get(space, 0)
        if address & self.align:
            raise self._misaligned(group, np.array([address], np.uint64))
        batch = group.batch
        if space == "global":
            memory = batch.memory
            if not memory.contains(address, address + self.size):
                raise self._outside(group, np.array([address], np.uint64), space)
            return Place(memory.view(self.dtype), (address - memory.base) >> self.shift, None, in_global=True)
        if address + self.size > batch.size_of(space):
            raise self._outside(group, np.array([address], np.uint64), space)
        if space == "param":
            self._refuse_writing(group, np.array([address], np.uint64))
        bases = batch.bases(group, space, self.shift)
        return Place(batch.view_of(space, self.dtype), address >> self.shift, bases)

    def _with_exact_addresses(self, group: Group, addresses: Array, offset: int) -> Place | MixedPlace:
        return self.locate(group, addresses + np.uint64(offset & _MASK), 0)

    def _mixed(self, group: Group, info: AddressInfo, addresses: Array, offset: int) -> MixedPlace:
        """Part the lanes by the windows that they reach into; what is in none is global."""
        windows = (info.addresses + np.uint64(offset & _MASK)) >> np.uint64(WINDOW_BITS)
        parts: list[tuple[Array | slice, Place]] = []
        remaining = np.ones(len(windows), np.bool_)
        for space, base in (*WINDOWS.items(), ("global", 0)):
            chosen = remaining if space == "global" else windows == np.uint64(base >> WINDOW_BITS)
            if not chosen.any():
                continue
            remaining = remaining & ~chosen
            lanes = np.flatnonzero(chosen)
            mask = np.zeros(group.space.size, np.bool_)
            mask[group.active[lanes]] = True
            part = group.narrowed(mask, len(lanes))
            parts.append(
                (lanes, self._place(part, group.batch.address_info(part, addresses), offset - base, space))
            )
        return MixedPlace(parts, len(info.addresses), self.dtype)

    # ------------------------------------------------------------------------------------ faults

    def _misaligned(self, group: Group, addresses: Array) -> KernelFault:
        which = int(np.flatnonzero(addresses & np.uint64(self.align))[0])
        address = int(addresses[which])
        note = f"not a multiple of {self.size}"
        return self._fault("MISALIGNED_ADDRESS", f"misaligned {self._what()}", group, which, address, note)

    def _outside(self, group: Group, addresses: Array, space: str) -> KernelFault:
        batch = group.batch
        limit = batch.size_of(space) - self.size if space != "global" else 0
        if space == "global":
            inside = batch.memory.inside(addresses, self.size)
        elif limit >= 0:
            inside = addresses <= np.uint64(limit)
        else:
            inside = np.zeros(len(addresses), np.bool_)
        which = int(np.flatnonzero(~inside)[0])
        address = int(addresses[which])
        if space == "global":
            note = batch.memory.memory.describe(address)
        else:
            note = f"{_OWNER[space]} has {batch.size_of(space)} bytes of {space} memory"
        return self._fault(
            "ILLEGAL_ADDRESS", f"{self._what(space)} out of bounds", group, which, address, note
        )

    def _refuse_writing(self, group: Group, addresses: Array) -> None:
        if self.writes:
            note = "kernel parameters are read-only"
            raise self._fault("ILLEGAL_ADDRESS", self._what("param"), group, 0, int(addresses[0]), note)

    def _what(self, space: str = "") -> str:
        space = space or self.space or "generic"
        kind = (
            "atomic operation"
            if self.instruction.opcode in ("atom", "red")
            else "store"
            if self.writes
            else "load"
        )
        return f"{space} {kind} of {self.size} byte{'s' if self.size > 1 else ''}"

    def _fault(self, code: str, what: str, group: Group, which: int, address: int, note: str) -> KernelFault:
        slot = int(group.active[which])
        return access_fault(code, what, group, self.instruction, slot, address, note)


_OWNER = {"shared": "the block", "local": "the thread", "param": "the kernel", "grid": "the grid"}
