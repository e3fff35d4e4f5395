"""Instructions that move data: mov, ld, st, atom, red, and conversions of addresses."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter import accesses, atomics, moves
from gpufleet.virtual.interpreter.arithmetic import computation
from gpufleet.virtual.interpreter.atomics import Kind
from gpufleet.virtual.interpreter.binding import bind, copy
from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.decoder import Decoder, Handler
from gpufleet.virtual.interpreter.memory import WINDOW_BITS, WINDOWS, Access
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.specials import special
from gpufleet.virtual.interpreter.values import DTYPES, Array, reader
from gpufleet.virtual.ptx.errors import invalid, unsupported
from gpufleet.virtual.ptx.instructions import INSTRUCTIONS
from gpufleet.virtual.ptx.scalars import SIZES
from gpufleet.virtual.ptx.syntax import Address, Discard, Instruction, Operand, Special, Symbol, Vector

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group


def _mov(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    destination, source = instruction.operands
    type, line = instruction.operation.type, instruction.line
    if "vector" in instruction.operation:
        if not isinstance(destination, Vector) or not isinstance(source, Vector):
            raise unsupported(f"{instruction} of what is no vector", line)
        pairs = zip(destination.elements, source.elements, strict=True)
        return [
            copy(*decoder.slots.destination(d, type, line), decoder.source(s, type, instruction))
            for d, s in pairs
        ]
    if isinstance(destination, Vector) and isinstance(source, Vector):
        raise unsupported(f"{instruction} from a vector to a vector", line)
    if isinstance(destination, Vector):
        part = _part_type(type, destination)
        places = [decoder.slots.destination(d, part, line) for d in destination.elements]
        return [moves.unpack(places, decoder.source(source, type, instruction), part)]
    place = decoder.slots.destination(destination, type, line)
    if isinstance(source, Vector):
        part = _part_type(type, source)
        return [
            moves.pack(place, [decoder.source(s, part, instruction) for s in source.elements], part, type)
        ]
    if isinstance(source, Special):
        return [moves.read_special(place, special(source.name, line), type)]
    if isinstance(source, Symbol) and source.space in ("local", "param"):
        (slot, _), before = decoder.address(source, instruction)
        return [*before, copy(*place, (slot, reader(DTYPES["u64"], type)))]
    return [copy(*place, decoder.source(source, type, instruction))]


def _part_type(type: str, vector: Vector) -> str:
    return f"b{8 * SIZES[type] // len(vector.elements)}"


# ----------------------------------------------------------------------------- loads and stores


def _ld(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation = instruction.operation
    operand, address = instruction.operands[:2]
    assert isinstance(address, Address)
    type = _memory_type(instruction)
    elements = decoder.elements(operand)
    places = [decoder.slots.destination(e, type, instruction.line) for e in elements]
    if operation.space == "param":
        found = _load_parameter(decoder, instruction, address, type, places)
        if found is not None:
            return found
    _check_space(decoder, instruction, address)
    access = Access(instruction, operation.space, DTYPES[type], len(elements), writes=False)
    base, before = decoder.address(address.base, instruction)
    return [*before, accesses.load(access, (base, address.offset), places)]


def _load_parameter(
    decoder: Decoder, instruction: Instruction, address: Address, type: str, places: list[Source]
) -> list[Operation] | None:
    """Read parameters whose place is known now; None for others, whose addresses are checked later."""
    base = address.base
    if not isinstance(base, Symbol):
        if decoder.is_kernel:
            return None
        raise unsupported(f"{instruction} with an address in a register, in a function", instruction.line)
    size = SIZES[type]
    block = decoder.slots.blocks.get(base.name)
    if block is not None:
        _check_block(decoder, instruction, block, address.offset + len(places) * size, address.offset)
        return [moves.load_block(places, block, address.offset, type)]
    offset = decoder.kernel_parameter(base, instruction) + address.offset
    limit = max((p.offset + p.size for p in decoder.function.parameters), default=0)
    if not 0 <= offset <= limit - size * len(places):
        return None  # to be found when it is executed: ptxas does not mind
    found = []
    for number, (slot, write) in enumerate(places):
        source = decoder.slots.launch_parameter(type, offset + number * size)
        found.append(copy(slot, write, (source, None)))
    return found


def _st(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation = instruction.operation
    address, operand = instruction.operands[:2]
    assert isinstance(address, Address)
    type = _memory_type(instruction)
    sources = [decoder.source(e, type, instruction) for e in decoder.elements(operand)]
    if operation.space == "param":
        base = address.base
        block = decoder.slots.blocks.get(base.name) if isinstance(base, Symbol) else None
        if block is None:
            raise unsupported(f"{instruction} to what is not a call's parameter", instruction.line)
        _check_block(decoder, instruction, block, address.offset + len(sources) * SIZES[type], address.offset)
        return [moves.store_block(sources, block, address.offset)]
    _check_space(decoder, instruction, address)
    access = Access(instruction, operation.space, DTYPES[type], len(sources), writes=True)
    base_source, before = decoder.address(address.base, instruction)
    return [*before, accesses.store(access, (base_source, address.offset), sources)]


def _memory_type(instruction: Instruction) -> str:
    return instruction.operation.type


def _check_block(decoder: Decoder, instruction: Instruction, block: int, end: int, start: int) -> None:
    if start < 0 or end > decoder.slots.template[block].shape[1]:
        raise invalid(f"{instruction} reaches past the parameter", instruction.line)


def _check_space(decoder: Decoder, instruction: Instruction, address: Address) -> None:
    """The variable must lie in the instruction's space; ptxas refuses anything else."""
    if not isinstance(address.base, Symbol):
        return
    space = instruction.operation.space
    named = address.base.space
    if space == named or (space == "" and named in ("global", "const")):
        return
    what = f"{instruction} with the address of {address.base.name!r}, which is in .{named}"
    raise invalid(what, instruction.line)


# ------------------------------------------------------------------------------------- atomics


def _atom(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    destination, address, operand, *others = instruction.operands
    swap = others[0] if instruction.operation.get("atomic") == "cas" else None
    return _atomic(decoder, instruction, destination, address, operand, swap)


_COMBINED = frozenset({"f16", "f16x2", "bf16", "bf16x2"})
"""Types whose atomic operations are computed as the instruction of the same name does."""


def _red(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    address, operand = instruction.operands[:2]
    return _atomic(decoder, instruction, Discard(), address, operand, None)


def _atomic(
    decoder: Decoder,
    instruction: Instruction,
    destination: Operand,
    address: Operand,
    operand: Operand,
    swap: Operand | None,
) -> list[Operation]:
    operation = instruction.operation
    type = operation.type
    kind: Kind = operation.get("atomic")
    if operation.space not in ("", "global", "shared"):
        raise unsupported(operation.text, instruction.line)
    if type in _COMBINED and kind not in ("exch", "cas"):
        kind = computation(replace(operation, spec=INSTRUCTIONS[operation.get("atomic")]), False)
    assert isinstance(address, Address)
    _check_space(decoder, instruction, address)
    operands, destinations = decoder.elements(operand), decoder.elements(destination)
    access = Access(instruction, operation.space, DTYPES[type], len(operands), writes=True)
    base, before = decoder.address(address.base, instruction)
    unused = not any(decoder.is_read(d) for d in destinations if not isinstance(d, Discard))
    made = atomics.atomic(
        access,
        kind,
        (base, address.offset),
        [decoder.source(o, type, instruction) for o in operands],
        None if swap is None else decoder.source(swap, type, instruction),
        [] if unused else [decoder.slots.destination(d, type, instruction.line) for d in destinations],
        decoder.linker.lock,
    )
    return [*before, made]


# ----------------------------------------------------------------------------------- addresses


def _cvta(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation = instruction.operation
    destination, source = instruction.operands
    if operation.type != "u64":
        raise unsupported(operation.text, instruction.line)
    place = decoder.slots.destination(destination, "u64", instruction.line)
    before: list[Operation] = []
    if isinstance(source, Symbol):
        address, before = decoder.address(source, instruction)
    else:
        address = decoder.source(source, "u64", instruction)
    window = WINDOWS.get(operation.space)
    if window is None:
        return [*before, copy(*place, address)]
    distance = np.uint64(window)
    convert = (lambda a: a - distance) if "to" in operation else (lambda a: a + distance)
    return [*before, bind(convert, [place], [address])]


def _isspacep(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation = instruction.operation
    destination, source = instruction.operands
    window = WINDOWS.get(operation.space)
    windows = np.array([w >> WINDOW_BITS for w in WINDOWS.values()], np.uint64)
    is_const = operation.space == "const"
    constants = [
        (decoder.slots.address(Symbol(v.name, "const"), instruction.line), v.size)
        for v in decoder.linker.module.variables.values()
        if v.space == "const" and not v.external
    ]

    def in_constants(address: Array) -> Array:
        """Constants lie among the global variables here."""
        found = np.zeros(1, np.bool_)
        for start, size in constants:
            found = found | (address - np.uint64(start) < np.uint64(size))
        return found

    def test(address: Array) -> Array:
        high = address >> np.uint64(WINDOW_BITS)
        if is_const:
            return in_constants(address)
        if window is None:
            return ~np.isin(high, windows) & ~in_constants(address)
        return high == np.uint64(window >> WINDOW_BITS)

    place = decoder.slots.destination(destination, "pred", instruction.line)
    return [bind(test, [place], [decoder.source(source, "u64", instruction)])]


# --------------------------------------------------------------------------- without an effect


def _nothing(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    """Fences, prefetches, hints: memory is in order, there are no caches, and grids follow one another."""
    return []


def _nanosleep(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    slot, cast = decoder.source(instruction.operands[0], "u32", instruction)

    def sleep(group: Group) -> None:
        value = group.registers[slot] if cast is None else cast(group.registers[slot])
        time.sleep(min(int(value[0]), 1_000_000) * 1e-9)

    return [sleep]


def _policy(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    """createpolicy: there are no caches, so one policy is as good as another."""
    place = decoder.slots.destination(instruction.operands[0], "b64", instruction.line)
    return [copy(*place, (decoder.slots.constant(0, "b64"), None))]


def _mapa(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    """A cluster is one block here: its shared memory is the block's own."""
    type = instruction.operation.type
    place = decoder.slots.destination(instruction.operands[0], type, instruction.line)
    return [copy(*place, decoder.source(instruction.operands[1], type, instruction))]


def _rank(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    place = decoder.slots.destination(instruction.operands[0], "u32", instruction.line)
    return [copy(*place, (decoder.slots.constant(0, "u32"), None))]


HANDLERS: dict[str, Handler] = {
    "mov": _mov,
    "ld": _ld,
    "ldu": _ld,
    "st": _st,
    "atom": _atom,
    "red": _red,
    "cvta": _cvta,
    "isspacep": _isspacep,
    "membar": _nothing,
    "griddepcontrol": _nothing,
    "fence": _nothing,
    "prefetch": _nothing,
    "prefetchu": _nothing,
    "applypriority": _nothing,
    "discard": _nothing,
    "createpolicy": _policy,
    "mapa": _mapa,
    "getctarank": _rank,
    "pmevent": _nothing,
    "brkpt": _nothing,
    "nanosleep": _nanosleep,
}
