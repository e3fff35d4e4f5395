"""Words that a stream writes, or waits for, in its order."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from gpufleet.virtual.bindings import number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.operations import Operation
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream, enqueue
from gpufleet.virtual.transfers import Side, fill, locate, transfer

CONDITIONS: dict[int, Callable[[int, int, int], bool]] = {
    # The difference counts as a signed number, so that counters may wrap (cuda.h, CUstreamWaitValue_flags).
    0: lambda found, wanted, bits: ((found - wanted) >> (bits - 1)) & 1 == 0,
    1: lambda found, wanted, bits: found == wanted,
    2: lambda found, wanted, bits: found & wanted != 0,
    3: lambda found, wanted, bits: ~(found | wanted) & ((1 << bits) - 1) != 0,
}
"""CU_STREAM_WAIT_VALUE_GEQ, _EQ, _AND and _NOR, of (value found, value wanted, bits)."""
FLUSH = 1 << 30
"""CU_STREAM_WAIT_VALUE_FLUSH: without effect here."""
NO_MEMORY_BARRIER = 1
"""CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER: without effect here."""
NAP = 0.0002


@call()
def cuStreamWriteValue32(state: State, stream: Any, addr: Any, value: Any, flags: int) -> None:
    """Write a 32-bit word in the order of a stream."""
    _write(state, state.stream(stream), number(addr), number(value), 4, flags)


@call()
def cuStreamWriteValue64(state: State, stream: Any, addr: Any, value: Any, flags: int) -> None:
    """Write a 64-bit word in the order of a stream."""
    _write(state, state.stream(stream), number(addr), number(value), 8, flags)


@call()
def cuStreamWaitValue32(state: State, stream: Any, addr: Any, value: Any, flags: int) -> None:
    """Let later work of a stream wait for a 32-bit word."""
    _wait(state, state.stream(stream), number(addr), number(value), 4, flags)


@call()
def cuStreamWaitValue64(state: State, stream: Any, addr: Any, value: Any, flags: int) -> None:
    """Let later work of a stream wait for a 64-bit word."""
    _wait(state, state.stream(stream), number(addr), number(value), 8, flags)


def _write(state: State, stream: Stream, address: int, value: int, size: int, flags: int) -> None:
    if flags & ~NO_MEMORY_BARRIER:
        raise Refusal("INVALID_VALUE", f"{flags:#x} are no flags of a write")
    memory, side = state.memory, _word(state, stream, address, size)
    operation = transfer(stream.context, lambda: fill(memory, side, value, size), side)
    enqueue(state.scheduler, stream, operation, kind="BATCH_MEM_OP")


def _wait(state: State, stream: Stream, address: int, value: int, size: int, flags: int) -> None:
    condition = CONDITIONS.get(flags & ~FLUSH)
    if condition is None:
        raise Refusal("INVALID_VALUE", f"{flags:#x} are no flags of a wait")
    side = _word(state, stream, address, size)
    kind = ctypes.c_uint32 if size == 4 else ctypes.c_uint64

    def run() -> None:
        while not state.cancelled.is_set():
            with state.lock:
                is_there = state.memory.find(address, size) is side.allocation
                found = kind.from_address(address).value if is_there else value
            if not is_there or condition(found, value, 8 * size):
                return
            time.sleep(NAP)

    operation = Operation(stream.context.device.ordinal, run, on_worker=True)
    enqueue(state.scheduler, stream, operation, kind="BATCH_MEM_OP")


def _word(state: State, stream: Stream, address: int, size: int) -> Side:
    if address % size:
        raise Refusal("INVALID_VALUE", f"{address:#x} is no multiple of {size}")
    side = Side(address, size, 1, size, must_be_known=True)
    locate(state.memory, stream.context, side, for_graph=stream.capture is not None)
    return side
