"""How many lanes a kernel's vectors get, and how thread indices run through them."""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.virtual.jit.nodes import Graph, is_barrier
from gpufleet.virtual.jit.shapes import BlockShape, Facts, converged
from gpufleet.virtual.jit.warp import WARP_OPERATIONS
from gpufleet.virtual.ptx.scalars import SIZES
from gpufleet.virtual.ptx.syntax import Function, Instruction

WARP = 32


def block_shape(block: tuple[int, int, int], widest: int, whole_warps: bool) -> BlockShape:
    """Choose the number of lanes and say how thread indices run through them.

    Without operations between lanes the width is free; rows that are shorter than `widest` get vectors
    as short as they are.
    """
    x, y, z = block
    line = y == z == 1
    lanes = WARP if whole_warps else widest
    while not whole_warps and not line and lanes > 8 and x % lanes:
        lanes //= 2
    if not whole_warps and not line and x % lanes:
        lanes = min(widest, 16)
    return BlockShape("even" if line or x % lanes == 0 else "any", lanes)


def widest_vector(graph: Graph, known: Facts, vector_bytes: int) -> int:
    """Lanes that make the most of the vector registers.

    Two hardware vectors of 32-bit values hide the latency of floating-point operations; four also
    halve the cost of everything scalar, if the values alive at once still fit the registers: on
    Zen 3 a vector addition is 1.3 times faster with 32 lanes, mandelbrot 1.4 times with 16. Where even
    two do not fit by far, one is compiled in half the time.
    """
    hardware = vector_bytes // 4
    strides = converged(graph, known, BlockShape("even", 16)).strides
    words = {
        1 << r.index: max(SIZES[r.type] // 4, 1)
        for r in graph.body.registers
        if strides[r.index] is None and r.type != "pred"
    }
    varying = sum(words)
    most = max(sum(words[bit] for bit in _bits(live & varying)) for live in graph.live_in)
    registers = 32 if vector_bytes == 64 else 16
    instructions = graph.body.instructions
    doubles = sum(i.operation.type == "f64" for i in instructions)
    if most > registers or 4 * doubles > len(instructions):
        return hardware
    return min(4 * hardware, WARP) if 4 * most <= registers else 2 * hardware


def _bits(number: int) -> Iterator[int]:
    """The powers of two that make up a number."""
    while number:
        low = number & -number
        yield low
        number ^= low


def needs_whole_warps(function: Function) -> bool:
    """Whether the lanes of a warp must run in step.

    Where neighbouring lanes may touch the same address, a GPU, which runs whole warps, lets one
    instruction of all lanes happen before the next, also in programs that have no right to rely on it:
    two stores to global memory, or a load from shared memory and then a store.
    """
    instructions = function.body.instructions
    stores = sum(i.opcode == "st" and i.operation.space in ("", "global") for i in instructions)
    if stores > 1 or any(_crosses_lanes(instruction) for instruction in instructions):
        return True
    loaded = False
    for instruction in instructions:
        if is_barrier(instruction):
            loaded = False
        elif instruction.operation.space == "shared":
            if instruction.opcode == "st" and loaded:
                return True
            loaded = loaded or instruction.opcode == "ld"
    return False


def _crosses_lanes(instruction: Instruction) -> bool:
    """Operations between lanes, barriers that count warps, and old code that relies on lanes in step."""
    operation = instruction.operation
    if operation.name in WARP_OPERATIONS:
        return True
    if operation.name in ("bar", "barrier"):
        return (
            "warp" in operation
            or "red" in operation
            or "arrive" in operation
            or len(instruction.operands) > 1
        )
    return (
        operation.name in ("ld", "st")
        and operation.get("semantics") == "volatile"
        and operation.space == "shared"
    )
