"""How many blocks of a kernel run at once on one multiprocessor."""

from __future__ import annotations

import ctypes
from typing import Any

from gpufleet.virtual.api.functions import function_of
from gpufleet.virtual.bindings import number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.modules import Function
from gpufleet.virtual.state import State

REGISTERS = 65_536
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system takes of each block."""


@call(outputs=1, context=True)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    state: State, current: Context, func: Any, blockSize: int, dynamicSMemSize: int
) -> int:
    """Return how many blocks run at once on one multiprocessor."""
    return active_blocks(function_of(state, func), blockSize, dynamicSMemSize)


@call(outputs=1, context=True)
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    state: State, current: Context, func: Any, blockSize: int, dynamicSMemSize: int, flags: int
) -> int:
    """Return how many blocks run at once on one multiprocessor."""
    _check_flags(flags)
    return active_blocks(function_of(state, func), blockSize, dynamicSMemSize)


@call(outputs=2)
def cuOccupancyMaxPotentialBlockSize(
    state: State, func: Any, blockSizeToDynamicSMemSize: Any, dynamicSMemSize: int, blockSizeLimit: int
) -> tuple[int, int]:
    """Return the least grid that fills the device, and the block size with the most threads at once."""
    return _best(function_of(state, func), blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit)


@call(outputs=2)
def cuOccupancyMaxPotentialBlockSizeWithFlags(
    state: State,
    func: Any,
    blockSizeToDynamicSMemSize: Any,
    dynamicSMemSize: int,
    blockSizeLimit: int,
    flags: int,
) -> tuple[int, int]:
    """Return the least grid that fills the device, and the block size with the most threads at once."""
    _check_flags(flags)
    return _best(function_of(state, func), blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit)


@call(outputs=1)
def cuOccupancyAvailableDynamicSMemPerBlock(state: State, func: Any, numBlocks: int, blockSize: int) -> int:
    """Return how much dynamic shared memory each of so many blocks of a multiprocessor can have."""
    function = function_of(state, func)
    if numBlocks < 1 or blockSize < 1:
        raise Refusal("INVALID_VALUE", f"{numBlocks} blocks of {blockSize} threads: expected at least 1")
    if numBlocks > active_blocks(function, blockSize, 0):
        raise Refusal("INVALID_VALUE", f"{numBlocks} blocks of {blockSize} threads do not run at once")
    limits = function.context.device.limits
    share = limits.shared_per_multiprocessor // numBlocks - RESERVED_SHARED - function.kernel.static_shared
    return max(0, min(share, limits.shared_per_block_optin - function.kernel.static_shared))


def _check_flags(flags: int) -> None:
    if flags not in (0, 1):
        raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected 0 or 1")


def active_blocks(function: Function, threads: int, dynamic_shared: int) -> int:
    """Return how many blocks of so many threads run at once on one multiprocessor."""
    if threads < 1:
        raise Refusal("INVALID_VALUE", f"a block of {threads} threads: expected at least 1")
    if threads > function.max_threads:
        return 0
    kernel, limits = function.kernel, function.context.device.limits
    shared = kernel.static_shared + dynamic_shared
    if shared > limits.shared_per_block_optin:
        return 0
    whole_warps = -(-threads // 32) * 32
    return min(
        limits.blocks_per_multiprocessor,
        limits.threads_per_multiprocessor // whole_warps,
        REGISTERS // (max(kernel.registers, 1) * whole_warps),
        limits.shared_per_multiprocessor // (shared + RESERVED_SHARED),
    )


def _best(function: Function, shared_of: Any, dynamic_shared: int, limit: int) -> tuple[int, int]:
    """The least grid and the block size with the most threads at once; of equals, the largest block."""
    most = min(limit or function.max_threads, function.max_threads)
    shared_at = _shared_function(shared_of, dynamic_shared)
    blocks, size = max(
        ((active_blocks(function, size, shared_at(size)), size) for size in _sizes(most)),
        key=lambda found: (found[0] * found[1], found[1]),
    )
    return blocks * function.context.device.multiprocessors, size


def _sizes(most: int) -> list[int]:
    return list(range(32, most + 1, 32)) or [most]


def _shared_function(function: Any, constant: int) -> Any:
    address = number(function)
    if not address:
        return lambda threads: constant
    return ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(address)
