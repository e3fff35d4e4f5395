"""Instructions between the lanes of a warp, and trap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpufleet.virtual.interpreter import warp
from gpufleet.virtual.interpreter.code import Operation
from gpufleet.virtual.interpreter.decoder import Decoder, Handler
from gpufleet.virtual.interpreter.faults import fault
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.ptx.syntax import Instruction

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group


def meeting(decoder: Decoder, instruction: Instruction) -> Callable[[Group], Array | None]:
    """Return what finds lanes whose warps are not complete; the member mask is the last operand."""
    return warp.meeting(decoder.source(instruction.operands[-1], "b32", instruction))


def _places(decoder: Decoder, instruction: Instruction) -> tuple[Source, int | None]:
    """Return the destination and, for a pair, the slot of its predicate."""
    shapes = instruction.operation.shapes or ()
    first, *second = decoder.destinations(instruction.operands[0], shapes[0], instruction)
    return first, second[0][0] if second else None


def _sources(decoder: Decoder, instruction: Instruction) -> list[Source]:
    shapes = instruction.operation.shapes or ()
    pairs = zip(instruction.operands[1:], shapes[1:], strict=False)
    return [decoder.source(operand, shape.type, instruction) for operand, shape in pairs]


def _shfl(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    place, predicate = _places(decoder, instruction)
    value, offset, clamp, *_ = _sources(decoder, instruction)
    return [warp.shuffle(instruction.operation.get("shuffle"), value, offset, clamp, place, predicate)]


def _vote(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    place, _ = _places(decoder, instruction)
    predicate, *mask = _sources(decoder, instruction)
    return [warp.vote(instruction.operation.get("vote"), predicate, mask[0] if mask else None, place)]


def _match(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    place, predicate = _places(decoder, instruction)
    value, mask = _sources(decoder, instruction)
    return [warp.match(instruction.operation.get("match"), value, mask, place, predicate)]


def _redux(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    operation = instruction.operation
    place, _ = _places(decoder, instruction)
    value, mask = _sources(decoder, instruction)
    if operation.type == "f32":
        which, passes_nan = operation.get("reduction"), "NaN" in operation
        return [warp.redux_floats(which, value, mask, place, "abs" in operation, passes_nan)]
    return [warp.redux(operation.get("reduction"), value, mask, place)]


def _activemask(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    return [warp.activemask(_places(decoder, instruction)[0])]


def _elect(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    place, predicate = _places(decoder, instruction)
    return [warp.elect(_sources(decoder, instruction)[0], place, predicate)]


def _warp_barrier(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    """The meeting at the start of the block is all there is to `bar.warp.sync`."""
    return []


def _trap(decoder: Decoder, instruction: Instruction) -> list[Operation]:
    def trap(group: Group) -> None:
        raise fault("LAUNCH_FAILED", "trap", group, instruction, int(group.active[0]))

    return [trap]


HANDLERS: dict[str, Handler] = {
    "shfl": _shfl,
    "vote": _vote,
    "match": _match,
    "redux": _redux,
    "activemask": _activemask,
    "elect": _elect,
    "bar": _warp_barrier,
    "trap": _trap,
}
