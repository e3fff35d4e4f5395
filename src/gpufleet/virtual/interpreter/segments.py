"""Where a group must look at other groups: basic blocks cut at calls, barriers and warp exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet.virtual.ptx.flow import ENDS_BLOCK
from gpufleet.virtual.ptx.syntax import Body, Instruction

_MEETING = frozenset({"vote", "shfl", "match", "redux", "elect"})


@dataclass(frozen=True)
class Segment:
    """Instructions `start` to `stop` (exclusive) that a group executes in one go."""

    index: int
    start: int
    stop: int
    successors: tuple[int, ...]


def ends_segment(instruction: Instruction) -> bool:
    """Say whether control may leave, wait or enter a function here."""
    if instruction.opcode in ("bar", "barrier"):
        return "warp" not in instruction.operation
    return (instruction.opcode in ENDS_BLOCK and instruction.opcode != "trap") or instruction.opcode == "call"


def is_meeting(instruction: Instruction) -> bool:
    """Say whether the lanes that a mask names must execute this together."""
    if "sync" not in instruction.operation:
        return False
    return instruction.opcode in _MEETING or (instruction.opcode == "bar" and "warp" in instruction.operation)


def segments(body: Body) -> tuple[list[Segment], list[int]]:
    """Cut a body; returns the segments in order and, for each basic block, its first segment."""
    cuts: list[list[tuple[int, int]]] = []
    for block in body.blocks:
        pieces: list[tuple[int, int]] = []
        start = block.start
        for position in range(block.start, block.stop):
            instruction = body.instructions[position]
            if is_meeting(instruction) and position > start:
                pieces.append((start, position))
                start = position
            if ends_segment(instruction):
                pieces.append((start, position + 1))
                start = position + 1
        if start < block.stop:
            pieces.append((start, block.stop))
        cuts.append(pieces)
    first: list[int] = []
    count = 0
    for pieces in cuts:
        first.append(count)
        count += len(pieces)
    found: list[Segment] = []
    for block, pieces in zip(body.blocks, cuts, strict=True):
        for number, (start, stop) in enumerate(pieces):
            if number + 1 < len(pieces):
                following: tuple[int, ...] = (len(found) + 1,)
            else:
                following = tuple(first[successor] for successor in block.successors)
            found.append(Segment(len(found), start, stop, following))
    return found, first
