"""Barriers: a warp that waits gives up the CPU, and its registers wait in its frame.

Frames lie in the worker's arena, one per warp. The warps of a block run in turn on one CPU thread,
each up to its next barrier. Kernels whose only barrier is the plain `bar.sync 0` need no
bookkeeping: when every warp has had its turn, the barrier is complete. Others count arrivals per
barrier as the hardware does, in whole warps (PTX ISA 9.7.13.1), and `gf_release` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpufleet.virtual.jit.abi import BARRIERS, FAULT_MIXED_BARRIERS
from gpufleet.virtual.jit.nodes import Graph, is_barrier, is_wait
from gpufleet.virtual.jit.runtime_ir import (
    BARRIER_BYTES,
    FRAME_BARRIER,
    FRAME_HEADER,
    FRAME_LAST,
    FRAME_SITE,
    FRAME_STATE,
)
from gpufleet.virtual.jit.text import constant, number, vector
from gpufleet.virtual.ptx.syntax import Immediate, Instruction, Operand

if TYPE_CHECKING:
    from gpufleet.virtual.jit.converged import Converged
    from gpufleet.virtual.jit.diverged import Diverged
    from gpufleet.virtual.jit.lowering import Lowering
    from gpufleet.virtual.jit.unit import Unit

NEW, DONE, MASKED = 0, -1, 1
FIRST_RESUME = 2
"""State of a warp that goes on converged at node n: n + FIRST_RESUME."""


@dataclass
class Frame:
    """Where registers wait."""

    scalars: dict[int, int]
    vectors: dict[int, int]
    parked: dict[int, int]
    """Masks of the lanes parked before each node."""
    loads: dict[int, int]
    """Address that each load in a loop used last, by the index of the instruction (memory.py)."""
    bytes: int


def is_plain(instruction: Instruction) -> bool:
    """Whether a barrier is `bar.sync 0` for the whole block."""
    operation = instruction.operation
    if is_wait(instruction):
        return False
    if "cluster" in operation:
        return instruction.guard is None
    if "red" in operation or "arrive" in operation or instruction.guard is not None:
        return False
    first = instruction.operands[0]
    return len(instruction.operands) == 1 and isinstance(first, Immediate) and first.bits == 0


def all_plain(graph: Graph) -> bool:
    """Whether a kernel needs no bookkeeping."""
    return all(
        is_plain(i)
        for i in graph.body.instructions
        if is_wait(i) or (i.opcode in ("bar", "barrier") and "warp" not in i.operation)
    )


def resume_nodes(graph: Graph) -> list[int]:
    """Nodes that follow a barrier."""
    found = []
    for node in graph.nodes:
        if is_barrier(graph.body.instructions[node.stop - 1]) and node.next is not None:
            found.append(node.next)
    return sorted(set(found))


def frame_layout(unit: Unit, straight: list[int | None], masked: list[int | None]) -> Frame:
    """Give a place to every register that is needed after some barrier."""
    live = 0
    resume = resume_nodes(unit.graph)
    for node in resume:
        live |= unit.graph.live_in[node]
    frame = Frame({}, {}, {}, {}, FRAME_HEADER)
    for register in range(len(straight)):
        if not live >> register & 1:
            continue
        if straight[register] is None or masked[register] is None:
            size = unit.vector_bytes(register)
            frame.bytes = -(-frame.bytes // size) * size if size < 64 else -(-frame.bytes // 64) * 64
            frame.vectors[register] = frame.bytes
            frame.bytes += size
        if straight[register] is not None or masked[register] is not None:
            frame.bytes = -(-frame.bytes // 8) * 8
            frame.scalars[register] = frame.bytes
            frame.bytes += 8
    frame.bytes = -(-frame.bytes // 8) * 8
    for position in _loads_in_loops(unit.graph):
        frame.loads[position] = frame.bytes
        frame.bytes += 8
    for node in resume:
        frame.bytes = -(-frame.bytes // 64) * 64
        frame.parked[node] = frame.bytes
        frame.bytes += 4 * unit.lanes
    frame.bytes = -(-frame.bytes // 64) * 64
    return frame


def _loads_in_loops(graph: Graph) -> Iterator[int]:
    for node in graph.nodes:
        if node.in_loop:
            for position in range(node.start, node.stop):
                instruction = graph.body.instructions[position]
                if instruction.opcode == "ld" and instruction.operation.space == "global":
                    yield position


# ------------------------------------------------------------------------------ arriving, waiting


def suspend_converged(low: Converged, instruction: Instruction, following: int) -> None:
    """All lanes wait: save what the code behind the barrier needs, and let the next warp run."""
    c = low.code
    _move_registers(low, low.unit.graph.live_in[following], save=True)
    _set(low, FRAME_STATE, str(following + FIRST_RESUME))
    if not low.unit.plain_barriers and not is_wait(instruction):
        identity = _identity(low, instruction)
        _accumulate(low, instruction, identity, None)
        _arrive(low, instruction, identity)
    c.jump("warp.suspended")


def resume_converged(low: Converged, following: int, instruction: Instruction) -> None:
    """Code at which a converged warp goes on behind a barrier."""
    _move_registers(low, low.unit.graph.live_in[following], save=False)
    low.position = low.unit.graph.body.instructions.index(instruction)
    _write_reduction(low, instruction)
    low.code.jump(low.label(following))


def note_arrival(low: Diverged, instruction: Instruction, predicate: str) -> None:
    """Some lanes of a warp wait; the warp arrives when all have."""
    if low.unit.plain_barriers:
        return
    c = low.code
    identity = _identity(low, instruction)
    slot = low.unit.waiting_slot()
    before = c.let(f"load i32, ptr {slot}")
    first = c.let(f"icmp eq i32 {before}, -1")
    same = c.let(f"icmp eq i32 {before}, {identity}")
    good, bad = c.name("barrier"), c.name("mixed")
    c.branch(c.let(f"or i1 {first}, {same}"), good, bad)
    with c.cold(bad):
        from gpufleet.virtual.jit.diverged import fault

        fault(low, FAULT_MIXED_BARRIERS, low.unit.site(instruction), "0")
    c.label(good)
    c.do(f"store i32 {identity}, ptr {slot}")
    _accumulate(low, instruction, identity, predicate)
    arrive, skip = c.name("arrive"), c.name("arrived")
    c.branch(first, arrive, skip)
    c.label(arrive)
    _arrive(low, instruction, identity)
    c.jump(skip)
    c.label(skip)


def suspend_diverged(low: Diverged) -> None:
    """No lane can go on: end the warp, or wait if some are parked."""
    c, masks = low.code, low.masks
    parked = {node: c.let(f"load {masks.type}, ptr {slot}") for node, slot in low.parked.items()}
    everyone = masks.none
    for mask in parked.values():
        everyone = masks.either(c, everyone, mask)
    c.branch(masks.any(c, everyone), "warp.park", "warp.done")
    c.label("warp.park")
    frame = low.unit.frame
    live = 0
    for node, mask in parked.items():
        live |= low.unit.graph.live_in[node]
        c.do(f"store {masks.type} {mask}, ptr {_place(low, frame.parked[node])}")
    _move_registers(low, live, save=True)
    _set(low, FRAME_STATE, str(MASKED))
    c.jump("warp.suspended")


def resume_diverged(low: Diverged) -> None:
    """Lanes that were parked wait for the nodes behind their barriers now."""
    c, masks = low.code, low.masks
    frame = low.unit.frame
    live = 0
    for node in low.parked:
        live |= low.unit.graph.live_in[node]
    _move_registers(low, live, save=False)
    instructions = low.unit.graph.body.instructions
    for node in low.parked:
        mask = c.let(f"load {masks.type}, ptr {_place(low, frame.parked[node])}")
        low.wait_for(node, mask)
        for before in low.unit.graph.nodes[node].predecessors:
            position = low.unit.graph.nodes[before].stop - 1
            if is_barrier(instructions[position]) and "red" in instructions[position].operation:
                result, skip = c.name("result"), c.name("none")
                c.branch(masks.any(c, mask), result, skip)
                c.label(result)
                c.do(f"store {masks.type} {mask}, ptr {low.current}")
                low.position, low.node = position, before
                _write_reduction(low, instructions[position])
                c.jump(skip)
                c.label(skip)
    c.jump(low.test_label(0))


def arrive_only(low: Lowering, instruction: Instruction) -> None:
    """bar.arrive: be counted, and go on."""
    _arrive(low, instruction, _identity(low, instruction), waits=False)


# ----------------------------------------------------------------------------------- bookkeeping


def _operands(instruction: Instruction) -> dict[str, Operand]:
    """Operands by the names of the table: a (barrier), b (threads), c (predicate), d (result)."""
    shapes = instruction.operation.shapes or ()
    present = list(instruction.operands)
    names = [s.name for s in shapes if not s.optional or len(present) == len(shapes)]
    return dict(zip(names, present, strict=False))


def _first_lane(low: Lowering, operand: Operand) -> str:
    c = low.code
    if low.stride(operand) == 0:
        return low.fetch(operand, "u32", 1)
    value = low.fetch(operand, "u32", low.lanes)
    lane = "0"
    predicate = low.active_predicate()
    if predicate is not None:
        lane = c.intrinsic("cttz", "i32", ("i32", number(c, predicate, low.lanes)), ("i1", "false"))
    return c.let(f"extractelement {vector('i32', low.lanes)} {value}, i32 {lane}")


def _identity(low: Lowering, instruction: Instruction) -> str:
    number = _operands(instruction).get("a")
    if number is None:
        return "0"  # a cluster is one block here, and its barrier the block's
    value = _first_lane(low, number)
    return low.code.let(f"and i32 {value}, {BARRIERS - 1}")


def _barrier(low: Lowering, identity: str) -> str:
    c = low.code
    wide = c.let(f"zext i32 {identity} to i64")
    distance = c.let(f"mul i64 {wide}, {BARRIER_BYTES}")
    return c.let(f"getelementptr i8, ptr %barriers, i64 {distance}")


def _arrive(low: Lowering, instruction: Instruction, identity: str, waits: bool = True) -> None:
    c = low.code
    place = _barrier(low, identity)
    arrived = c.let(f"load i32, ptr {place}")
    c.do(f"store i32 {c.let(f'add i32 {arrived}, 32')}, ptr {place}")
    threads = _operands(instruction).get("b")
    if threads is not None:
        c.do(f"store i32 {_first_lane(low, threads)}, ptr {c.field(place, 4)}")
    if waits:
        _set(low, FRAME_BARRIER, identity)
        _set(low, FRAME_LAST, identity)
        _set(low, FRAME_SITE, str(low.unit.site(instruction)))


def _accumulate(low: Lowering, instruction: Instruction, identity: str, predicate: str | None) -> None:
    """bar.red: add this warp's lanes to the barrier's count, conjunction and disjunction."""
    if "red" not in instruction.operation:
        return
    c, n = low.code, low.lanes
    i1 = vector("i1", n)
    value = low.fetch(_operands(instruction)["c"], "pred", n)
    held = value if predicate is None else c.let(f"and {i1} {value}, {predicate}")
    missing = c.let(f"xor {i1} {value}, {constant('i1', 1, n)}")
    if predicate is not None:
        missing = c.let(f"and {i1} {missing}, {predicate}")
    place = _barrier(low, identity)
    count = c.intrinsic("ctpop", "i32", ("i32", number(c, held, n)))
    nobody = c.let(f"icmp eq i32 {number(c, missing, n)}, 0")
    somebody = c.let(f"icmp ne i32 {count}, 0")
    for distance, operation, amount in (
        (8, "add", count),
        (12, "and", c.let(f"zext i1 {nobody} to i32")),
        (16, "or", c.let(f"zext i1 {somebody} to i32")),
    ):
        field = c.field(place, distance)
        old = c.let(f"load i32, ptr {field}")
        c.do(f"store i32 {c.let(f'{operation} i32 {old}, {amount}')}, ptr {field}")


def _write_reduction(low: Lowering, instruction: Instruction) -> None:
    if "red" not in instruction.operation:
        return
    c = low.code
    identity = c.let(f"load i32, ptr {_place(low, FRAME_LAST)}")
    which = instruction.operation.get("reduction")
    distance = {"popc": 20, "and": 24, "or": 28}[which]
    value = c.let(f"load i32, ptr {c.field(_barrier(low, identity), distance)}")
    destination = _operands(instruction)["d"]
    if which == "popc":
        low.write(destination, value, "i32", 1)
    else:
        low.write(destination, c.let(f"icmp ne i32 {value}, 0"), "i1", 1)


# ---------------------------------------------------------------------------------------- frames


def _place(low: Lowering, distance: int) -> str:
    return low.code.field("%frame", distance)


def _set(low: Lowering, distance: int, value: str) -> None:
    low.code.do(f"store i32 {value}, ptr {_place(low, distance)}")


def _move_registers(low: Lowering, live: int, save: bool) -> None:
    """Between the frame and the registers."""
    while live:
        lowest = live & -live
        live ^= lowest
        register = lowest.bit_length() - 1
        if not save:
            _move(low, register, save=False)
        elif not (low.converged and is_saved_at_once(low, register)):
            _move(low, register, save=True)


def _move(low: Lowering, register: int, save: bool) -> None:
    unit, c = low.unit, low.code
    if low.shapes.strides[register] is None:
        slot, type = unit.vector_slot(register), unit.vector_type(register)
        place = _place(low, unit.frame.vectors[register])
    else:
        slot, type = unit.scalar_slot(register), unit.storage[register]
        place = _place(low, unit.frame.scalars[register])
    source, target = (slot, place) if save else (place, slot)
    c.do(f"store {type} {c.let(f'load {type}, ptr {source}')}, ptr {target}")


def is_saved_at_once(low: Lowering, register: int) -> bool:
    """Whether converged code saves a register where it is defined, and not at every barrier."""
    unit = low.unit
    if register not in unit.frame.scalars and register not in unit.frame.vectors:
        return False
    return (
        unit.facts.only(register) is not None and not unit.graph.nodes[unit.facts.node_of[register]].in_loop
    )


def save_at_once(low: Converged, register: int) -> None:
    """Put a register that was just defined into the frame, if that is the time to do so."""
    if is_saved_at_once(low, register):
        _move(low, register, save=True)
