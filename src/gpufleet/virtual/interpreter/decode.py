"""A function's syntax tree to blocks of closures over slots.

What an instruction becomes is looked up by its opcode: in arithmetic.py for those that only turn
values into values, else in the handlers of decode_memory, decode_warp and decode_control.
"""

from __future__ import annotations

from gpufleet.virtual.interpreter import (
    control,
    decode_async,
    decode_control,
    decode_memory,
    decode_warp,
    integers,
    video,
)
from gpufleet.virtual.interpreter.arithmetic import computation
from gpufleet.virtual.interpreter.binding import bind, guard
from gpufleet.virtual.interpreter.code import Block, End, Operation
from gpufleet.virtual.interpreter.decoder import Decoder, Handler
from gpufleet.virtual.interpreter.liveness import live_slots
from gpufleet.virtual.interpreter.segments import Segment, ends_segment, is_meeting
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.specials import POLLING
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.syntax import Instruction, Raw, Selected, Special
from gpufleet.virtual.ptx.video import VIDEO

_HANDLERS: dict[str, Handler] = decode_memory.HANDLERS | decode_warp.HANDLERS | decode_async.HANDLERS
_POLLING_LOADS = frozenset({"volatile", "relaxed", "acquire"})


def decode(decoder: Decoder) -> None:
    """Fill in the decoder's code; raises `PtxError` for what is not carried out."""
    code = decoder.code
    for segment in decoder.segments:
        _decode_segment(decoder, segment)
    code.template = decoder.slots.template
    code.launch_slots = decoder.slots.launch_slots
    live = live_slots(decoder.body, decoder.function, decoder.slots, decoder.segments)
    for block, slots in zip(code.blocks, live, strict=True):
        block.live = slots


def _decode_segment(decoder: Decoder, segment: Segment) -> None:
    block = decoder.code.blocks[segment.index]
    instructions = decoder.body.instructions[segment.start : segment.stop]
    blocks = decoder.code.blocks
    following = blocks[segment.index + 1] if segment.index + 1 < len(blocks) else None
    block.first = instructions[0]
    block.polls = any(map(_polls, instructions))
    if is_meeting(instructions[0]) and instructions[0].guard is None:
        block.meeting = decode_warp.meeting(decoder, instructions[0])
    *before, last = instructions
    if not ends_segment(last):
        before = instructions
    operations: list[Operation] = []
    for instruction in before:
        operations += _operations(decoder, instruction)
    block.operations = tuple(operations)
    if ends_segment(last):
        block.end = _end(decoder, last, block, following)
    else:
        block.end = control.finish if following is None else control.jump(block, following)
    block.is_exit = not operations and block.end is control.finish


def _operations(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    _check_shape(instruction)
    handler = _HANDLERS.get(instruction.opcode)
    found = handler(decoder, instruction) if handler is not None else [_arithmetic(decoder, instruction)]
    found = decoder.take_before() + found
    predicate = instruction.guard
    if predicate is None:
        return found
    written = decoder.written(instruction)
    return [guard(operation, predicate.index, instruction.guard_negated, written) for operation in found]


def _end(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    _check_shape(instruction)
    end = decode_control.ENDS[instruction.opcode](decoder, instruction, block, following)
    if instruction.guard is None or instruction.opcode == "bra":
        return end
    assert following is not None
    return control.guarded(decoder.condition(instruction), end, following)


def _arithmetic(decoder: Decoder, instruction: Instruction) -> Operation:
    operation, operands = instruction.operation, instruction.operands
    shapes = operation.shapes or ()
    if operation.name in _VIDEO:
        return _video(decoder, instruction)
    sources = [decoder.source(o, s.type, instruction) for o, s in zip(operands[1:], shapes[1:], strict=False)]
    carry = _carry_chain(decoder, instruction, sources)
    if carry is not None:
        return carry
    destinations = decoder.destinations(operands[0], shapes[0], instruction)
    return bind(computation(operation, len(destinations) > 1), destinations, sources)


_VIDEO = frozenset(spec.name for spec in VIDEO)


def _video(decoder: Decoder, instruction: Instruction) -> Operation:
    """Operands may be bytes or halves of registers."""
    operation = instruction.operation
    selectors = [o.selector if isinstance(o, Selected) else "" for o in instruction.operands[:3]]
    destination, *sources = (o.register if isinstance(o, Selected) else o for o in instruction.operands)
    place = decoder.slots.destination(destination, "b32", instruction.line)
    read = [decoder.source(source, "b32", instruction) for source in sources]
    return bind(video.computation(operation, selectors), [place], read)


def _carry_chain(decoder: Decoder, instruction: Instruction, sources: list[Source]) -> Operation | None:
    operation = instruction.operation
    reads = operation.name in ("addc", "subc", "madc")
    if not reads and "cc" not in operation:
        return None
    compute = integers.CARRY_CHAINS[operation.name](operation, reads)
    destinations = decoder.destinations(instruction.operands[0], (operation.shapes or ())[0], instruction)
    keeps = decoder.slots.carry if "cc" in operation else decoder.slots.discarded
    if reads:
        sources = [*sources, (decoder.slots.carry, None)]
    return bind(compute, [*destinations, (keeps, None)], sources)


def _check_shape(instruction: Instruction) -> None:
    """Refuse what the table of instructions does not list."""
    operation = instruction.operation
    if operation.shapes is None or any(isinstance(operand, Raw) for operand in instruction.operands):
        raise unsupported(operation.text, instruction.line)


def _polls(instruction: Instruction) -> bool:
    operation = instruction.operation
    if operation.name in ("atom", "nanosleep") or "test_wait" in operation or "try_wait" in operation:
        return True
    if operation.name == "ld":
        return operation.get("semantics") in _POLLING_LOADS
    return any(isinstance(o, Special) and o.name in POLLING for o in instruction.operands)
