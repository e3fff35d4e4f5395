"""Functions that the CUDA runtime provides to kernels: printf, failed assertions, malloc and free.

They take generic addresses; the arguments of printf lie one after the other as in a C struct (CUDA C++
Programming Guide, "Formatted Output" and "Assertion").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter.code import Block, End
from gpufleet.virtual.interpreter.faults import fault
from gpufleet.virtual.interpreter.formatting import format_message
from gpufleet.virtual.interpreter.memory import WINDOW_BITS, WINDOWS
from gpufleet.virtual.interpreter.moves import as_rows
from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.kernel_heap import KernelHeap
from gpufleet.virtual.ptx.errors import invalid, unsupported
from gpufleet.virtual.ptx.parser import HEAP, HEAP_BYTES
from gpufleet.virtual.ptx.syntax import CallTarget, Function, Instruction, Symbol

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.decoder import Decoder
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.interpreter.scheduler import Scheduler

_LONGEST_STRING = 1 << 16
_PARAMETERS = {"vprintf": (8, 8), "__assertfail": (8, 8, 4, 8, 8), "malloc": (8,), "free": (8,)}
"""Sizes of the parameters of each function."""


def decode_builtin(
    decoder: Decoder, instruction: Instruction, call: CallTarget, function: Function, following: Block
) -> End:
    """Return how a call of a function without a body leaves its block."""
    sizes = _PARAMETERS.get(function.name)
    if sizes is None:
        raise unsupported(f"a call of {function.name!r}, which is declared but not defined", instruction.line)
    slots = [_block(decoder, instruction, operand) for operand in call.arguments]
    if tuple(decoder.slots.template[slot].shape[1] for slot in slots) != sizes:
        raise invalid(f"{function.name!r} is called with the wrong arguments", instruction.line)
    if function.name == "__assertfail":
        return _assertion(slots, instruction)
    if function.name == "free":
        return _free(slots[0], _heap(decoder), instruction, following)
    result = _block(decoder, instruction, call.results[0]) if call.results else None
    if function.name == "malloc":
        return _malloc(slots[0], result, _heap(decoder), following)
    return _printf(slots, result, instruction, following)


def _block(decoder: Decoder, instruction: Instruction, operand: object) -> int:
    if isinstance(operand, Symbol) and operand.name in decoder.slots.blocks:
        return decoder.slots.blocks[operand.name]
    raise unsupported(f"an argument of {instruction} that is no parameter block", instruction.line)


def _printf(slots: list[int], result: int | None, instruction: Instruction, following: Block) -> End:
    def end(group: Group, scheduler: Scheduler) -> Group:
        formats, arguments = (_per_lane(group, slot) for slot in slots)
        texts = []
        counts = np.zeros(group.count, np.int32)
        for index, slot in enumerate(group.active):
            lane = _Lane(group, int(slot), instruction)
            template = lane.string(int(formats[index]))
            text, count = format_message(template, int(arguments[index]), lane.read, lane.string)
            texts.append(text)
            counts[index] = count
        group.batch.launch.output(b"".join(texts))
        if result is not None:
            group.registers[result] = as_rows(group.spread(counts))
        group.block = following
        return group

    return end


def _heap(decoder: Decoder) -> KernelHeap:
    return KernelHeap(decoder.slots.address(Symbol(HEAP, "global"), 0), HEAP_BYTES)


def _malloc(slot: int, result: int | None, heap: KernelHeap, following: Block) -> End:
    def end(group: Group, scheduler: Scheduler) -> Group:
        pointers = [heap.allocate(int(size)) for size in _per_lane(group, slot)]
        if result is not None:
            group.registers[result] = as_rows(group.spread(np.array(pointers, np.uint64)))
        group.block = following
        return group

    return end


def _free(slot: int, heap: KernelHeap, instruction: Instruction, following: Block) -> End:
    def end(group: Group, scheduler: Scheduler) -> Group:
        for index, pointer in enumerate(_per_lane(group, slot)):
            if not heap.release(int(pointer)):
                what = f"free of {int(pointer):#x}, which malloc of this module has not returned"
                raise fault("ILLEGAL_ADDRESS", what, group, instruction, int(group.active[index]))
        group.block = following
        return group

    return end


def _assertion(slots: list[int], instruction: Instruction) -> End:
    def end(group: Group, scheduler: Scheduler) -> Group:
        message, file, line, function, _ = (_per_lane(group, slot) for slot in slots)
        first = b""
        for index, slot in enumerate(group.active):
            lane = _Lane(group, int(slot), instruction)
            block, thread = group.batch.locate(int(group.space.lanes[slot]))
            text = b"%b:%d: %b: block: [%d,%d,%d], thread: [%d,%d,%d] Assertion `%b` failed.\n" % (
                *(lane.string(int(file[index])), int(line[index]), lane.string(int(function[index]))),
                *(*block, *thread, lane.string(int(message[index]))),
            )
            group.batch.launch.output(text)
            first = first or text
        what = first.decode(errors="replace").strip()
        raise fault("ASSERT", what, group, instruction, int(group.active[0]))

    return end


def _per_lane(group: Group, slot: int) -> Array:
    """Return the numbers in a parameter block, one per active lane."""
    rows = np.ascontiguousarray(group.registers[slot])
    values = rows.view(f"u{rows.shape[1]}").reshape(-1)
    return np.broadcast_to(group.picked(values), group.count)


class _Lane:
    """Reads memory at generic addresses for one thread."""

    def __init__(self, group: Group, slot: int, instruction: Instruction) -> None:
        self._group = group
        self._slot = slot
        self._instruction = instruction

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes there; raises `KernelFault` if they are not all the thread's to read."""
        return self._available(address, size)[:size].tobytes()

    def string(self, address: int) -> bytes:
        """Return the bytes up to the next 0."""
        available = self._available(address, 1)[:_LONGEST_STRING]
        ends = np.flatnonzero(available == 0)
        return available[: ends[0] if len(ends) else None].tobytes()

    def _available(self, address: int, size: int) -> Array:
        """Return what lies from an address to the end of its allocation."""
        batch = self._group.batch
        window = address >> WINDOW_BITS
        for space in ("shared", "local", "param"):
            if WINDOWS[space] >> WINDOW_BITS == window:
                offset, limit = address - WINDOWS[space], batch.size_of(space)
                start = batch.start_of(space, int(self._group.space.lanes[self._slot]))
                if offset + size <= limit:
                    return batch.view_of(space, np.dtype(np.uint8))[start + offset : start + limit]
        end = batch.memory.end_of(address)
        if address + size > end:
            what = f"{self._instruction} reads outside of memory at address {address:#x}"
            raise fault("ILLEGAL_ADDRESS", what, self._group, self._instruction, self._slot)
        base = batch.memory.base
        return batch.memory.view(np.dtype(np.uint8))[address - base : end - base]
