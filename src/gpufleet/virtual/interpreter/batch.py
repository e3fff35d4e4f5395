"""Some blocks of a grid that are executed together: their memory, and where their lanes stand."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gpufleet.virtual.engine import Dim3, KernelFault, Launch
from gpufleet.virtual.interpreter.addresses import AddressInfo, GlobalMemory
from gpufleet.virtual.interpreter.code import Code
from gpufleet.virtual.interpreter.groups import Group
from gpufleet.virtual.interpreter.lanes import Geometry, Space
from gpufleet.virtual.interpreter.values import Array

_REMEMBERED = 16
_GRID_WORKSPACE = 32
"""Bytes; cooperative groups use the first eight (its details/driver_abi.h)."""
_STACK_LIMIT = 512 << 10
"""Local memory of a thread, as on every GPU (CUDA C++ Programming Guide, technical specifications)."""
_STACKS_LIMIT = 1 << 30
"""Local memory of all threads of a batch; with 32 Ki of them, deep recursion ends at 32 KiB of stack each."""


class Batch:
    """The blocks from `first_block` on, as many as the geometry says."""

    def __init__(
        self,
        kernel: Code,
        launch: Launch,
        memory: GlobalMemory,
        template: list[Array],
        geometry: Geometry,
        first_block: int,
        shared_bytes: int,
    ) -> None:
        self.kernel = kernel
        self.kernel_name = kernel.name
        self.launch = launch
        self.memory = memory
        self.geometry = geometry
        self.first_block = first_block
        self.root = Space(self, geometry.order, is_root=True)
        self.alive = geometry.lanes
        """Lanes that have not ended."""
        self._ended: list[Array] = []
        self._template = template
        self._shared_bytes = shared_bytes
        self._shared_stride = -(-shared_bytes // 16) * 16
        self._local_stride = -(-max(kernel.frame_bytes, 16) // 16) * 16
        self._views: dict[tuple[str, Any], Array] = {}
        self._bases: dict[tuple[str, int], Array] = {}
        self._infos: dict[tuple[int, int], tuple[Array, Array | None, AddressInfo]] = {}

    def template(self, code: Code) -> list[Array]:
        """Return the initial values of a function's slots, with the launch's parameters in them."""
        return self._template if code is self.kernel else code.template

    def first_group(self) -> Group:
        """Return all lanes, at the kernel's first instruction."""
        return Group(self, self.root, self.kernel, self._template.copy(), None, self.alive)

    def close(self) -> None:
        """Let go of what refers back to the batch, so that its arrays go without the garbage collector."""
        del self.root
        self._infos.clear()

    # ------------------------------------------------------------------------------------- memory

    def address_info(self, group: Group, addresses: Array) -> AddressInfo:
        """Return what is known about the addresses of a group's active lanes."""
        key = id(addresses), id(group.mask)
        known = self._infos.get(key)
        if known is not None:
            return known[2]
        if len(self._infos) >= _REMEMBERED:
            self._infos.clear()
        info = AddressInfo(group.picked(addresses), self.geometry)
        # The arrays are kept too, so that their ids cannot come to mean others.
        self._infos[key] = addresses, group.mask, info
        return info

    def size_of(self, space: str) -> int:
        """Return the bytes of a block's shared memory, a lane's local memory, or the parameters."""
        if space == "shared":
            return self._shared_bytes
        if space == "local":
            return self._local_stride
        return len(self.launch.parameters) if space == "param" else _GRID_WORKSPACE

    def start_of(self, space: str, lane: int) -> int:
        """Return where a lane's part of shared or local memory, or the parameters, begins, in bytes."""
        if space == "shared":
            return lane // self.geometry.threads * self._shared_stride
        return lane * self._local_stride if space == "local" else 0

    def view_of(self, space: str, dtype: np.dtype[Any]) -> Array:
        """Return all of a batch's shared or local memory, or the parameters, as an array."""
        view = self._views.get((space, dtype))
        if view is None:
            view = self._views[space, dtype] = self._bytes(space).view(dtype)
        return view

    def _bytes(self, space: str) -> Array:
        if space == "shared":
            return self._shared
        if space == "local":
            return self._local
        if space == "grid":
            return np.zeros(_GRID_WORKSPACE, np.uint8)
        padding = -len(self.launch.parameters) % 16
        return np.frombuffer(self.launch.parameters + bytes(padding), np.uint8)

    @cached_property
    def _shared(self) -> Array:
        return np.zeros(max(self._shared_stride * self.geometry.blocks, 16), np.uint8)

    @cached_property
    def _local(self) -> Array:
        try:
            return np.zeros(self._local_stride * self.geometry.lanes, np.uint8)
        except MemoryError:
            size = self._local_stride * self.geometry.lanes
            raise KernelFault(
                "LAUNCH_FAILED",
                f"kernel {self.kernel_name}: the host has no {size} bytes for the local memory of "
                f"{self.geometry.lanes} threads",
            ) from None

    def bases(self, group: Group, space: str, shift: int) -> Array | None:
        """Return where each active lane's part of shared or local memory begins; None if there is one part.

        The unit is an element of 2**shift bytes.
        """
        geometry = self.geometry
        if space not in ("shared", "local"):
            return None
        if (geometry.blocks if space == "shared" else geometry.lanes) == 1:
            return None
        whole = self._bases.get((space, shift))
        if whole is None:
            if space == "shared":
                whole = geometry.block_of * (self._shared_stride >> shift)
            else:
                whole = geometry.order * (self._local_stride >> shift)
            self._bases[space, shift] = whole
        stride = self._shared_stride if space == "shared" else self._local_stride
        found = group.space.pick(f"{space}{shift}:{stride}", whole)
        return found if group.mask is None else found.take(group.active, mode="wrap")

    def reserve_stack(self, size: int) -> bool:
        """Make room for local variables up to this many bytes per lane; False if that is too much."""
        if size <= self._local_stride:
            return True
        limit = min(_STACK_LIMIT, _STACKS_LIMIT // self.geometry.lanes) // 16 * 16
        if size > limit:
            return False
        stride = max(size, min(limit, 2 * self._local_stride))
        grown = np.zeros((self.geometry.lanes, stride), np.uint8)
        grown[:, : self._local_stride] = self._local.reshape(self.geometry.lanes, -1)
        self._local = grown.reshape(-1)
        self._local_stride = stride
        self._infos.clear()
        for key in [key for key in self._views if key[0] == "local"]:
            del self._views[key]
        for shifted in [key for key in self._bases if key[0] == "local"]:
            del self._bases[shifted]
        return True

    # -------------------------------------------------------------------------------------- lanes

    @cached_property
    def ctaid(self) -> tuple[Array, Array, Array]:
        """The three coordinates of each lane's block; uniform where the batch is one block."""
        grid = self.launch.grid
        numbers = np.arange(self.first_block, self.first_block + self.geometry.blocks)
        coordinates = numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])
        return tuple(self._per_lane(c.astype(np.uint32)) for c in coordinates)  # type: ignore[return-value]

    def _per_lane(self, per_block: Array) -> Array:
        if (per_block == per_block[0]).all():
            return per_block[:1]
        return np.repeat(per_block, self.geometry.threads)

    def locate(self, lane: int) -> tuple[Dim3, Dim3]:
        """Return the coordinates of a lane's block and thread."""
        block, thread = divmod(lane, self.geometry.threads)
        return _coordinates(self.first_block + block, self.launch.grid), _coordinates(
            thread, self.geometry.block
        )

    def end(self, group: Group) -> None:
        """Note that lanes have ended."""
        self.alive -= group.count
        self._ended.append(group.lanes)

    def alive_mask(self) -> Array:
        """Return which lanes have not ended."""
        mask = np.ones(self.geometry.lanes, np.bool_)
        for lanes in self._ended:
            mask[lanes] = False
        return mask


def _coordinates(number: int, shape: Dim3) -> Dim3:
    return number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1])
