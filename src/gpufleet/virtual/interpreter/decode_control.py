"""Instructions that end a block: branches, calls, returns, barriers."""

from __future__ import annotations

from gpufleet.virtual.interpreter import calls, control
from gpufleet.virtual.interpreter.barriers import MOST_BARRIERS, Reduction, barrier
from gpufleet.virtual.interpreter.code import Block, End
from gpufleet.virtual.interpreter.decoder import Decoder, EndHandler
from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.syntax import CallTarget, Immediate, Instruction, Label, Targets


def _bra(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    (label,) = instruction.operands
    assert isinstance(label, Label)
    target = decoder.target(label.block)
    if instruction.guard is None:
        return control.jump(block, target)
    assert following is not None
    return control.branch(block, decoder.condition(instruction), target, following)


def _brx(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    index, table = instruction.operands
    assert isinstance(table, Targets)
    targets = [decoder.target(label.block) for label in table.labels]
    return control.choose(block, decoder.source(index, "u32", instruction), targets, instruction)


def _ret(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    return control.finish if decoder.is_kernel else control.leave()


def _exit(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    return control.finish


def _call(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    (target,) = instruction.operands
    assert isinstance(target, CallTarget)
    return calls.decode_call(decoder, instruction, target, block, following)


def _bar(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    operation = instruction.operation
    if "cluster" in operation:
        return _cluster(decoder, instruction, block, following)
    operands = dict(zip((shape.name for shape in _present(instruction)), instruction.operands, strict=True))
    if following is None:
        raise invalid(f"{operation.text} at the end of a function", instruction.line)
    if isinstance(operands["a"], Immediate) and operands["a"].bits >= MOST_BARRIERS:
        raise invalid(f"barrier {operands['a'].bits} of {MOST_BARRIERS}", instruction.line)
    number = decoder.source(operands["a"], "u32", instruction)
    threads = decoder.source(operands["b"], "u32", instruction) if "b" in operands else None
    reduction = None
    if "red" in operation:
        destination, write = decoder.slots.destination(operands["d"], operation.type, instruction.line)
        predicate = decoder.source(operands["c"], "pred", instruction)
        reduction = Reduction(operation.get("reduction"), predicate, destination, write)
    return barrier(number, threads, reduction, "arrive" in operation, following, instruction)


def _cluster(decoder: Decoder, instruction: Instruction, block: Block, following: Block | None) -> End:
    """A cluster is one block here: its threads wait for each other where they wait, not where they arrive."""
    if following is None:
        raise invalid(f"{instruction} at the end of a function", instruction.line)
    if "arrive" in instruction.operation:
        return control.jump(block, following)
    return barrier((decoder.slots.constant(0, "u32"), None), None, None, False, following, instruction)


def _present(instruction: Instruction) -> list:  # type: ignore[type-arg]
    """Return the shapes of the operands that are there; the thread count may be missing."""
    shapes = list(instruction.operation.shapes or ())
    if len(instruction.operands) < len(shapes):
        shapes = [shape for shape in shapes if not shape.optional]
    return shapes


ENDS: dict[str, EndHandler] = {
    "bra": _bra,
    "brx": _brx,
    "ret": _ret,
    "exit": _exit,
    "call": _call,
    "bar": _bar,
    "barrier": _bar,
}
