"""Calls of functions, direct and through addresses (PTX ISA 9.7.12.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpufleet.virtual.interpreter import builtins
from gpufleet.virtual.interpreter.code import Block, Code, End, Frame
from gpufleet.virtual.interpreter.decoder import Decoder
from gpufleet.virtual.interpreter.faults import fault
from gpufleet.virtual.interpreter.moves import as_rows
from gpufleet.virtual.interpreter.slots import Source
from gpufleet.virtual.interpreter.values import Cast
from gpufleet.virtual.interpreter.warp import read
from gpufleet.virtual.ptx.errors import invalid, unsupported
from gpufleet.virtual.ptx.syntax import (
    CallTarget,
    Function,
    Instruction,
    Operand,
    Parameter,
    Prototype,
    Register,
    Symbol,
)

if TYPE_CHECKING:
    from gpufleet.virtual.interpreter.groups import Group
    from gpufleet.virtual.interpreter.scheduler import Scheduler

_DEEPEST = 4096
"""Nested calls. Functions with local variables reach the end of the stack sooner."""


@dataclass(frozen=True)
class _Site:
    """Where a call stands."""

    source: Block
    resume: Block
    instruction: Instruction
    frame_bytes: int


@dataclass(frozen=True)
class _Target:
    """A function that a call may enter, and what goes in and out."""

    code: Code
    arguments: tuple[tuple[Source, int], ...]
    """(how to read it here, slot of the callee)."""
    results: tuple[tuple[int, int], ...]
    """(slot of the callee, slot here)."""


def decode_call(
    decoder: Decoder, instruction: Instruction, call: CallTarget, block: Block, following: Block | None
) -> End:
    """Return how a call leaves its block."""
    if following is None:
        raise invalid("a call at the end of a function", instruction.line)
    site = _Site(block, following, instruction, decoder.code.frame_bytes)
    if isinstance(call.target, Register):
        return _indirect(decoder, instruction, call, site)
    function = decoder.linker.module.function(call.target.name)
    if function is None:
        raise invalid(f"unknown function {call.target.name!r}", instruction.line)
    if function.build is None:
        return builtins.decode_builtin(decoder, instruction, call, function, following)
    target = _target(decoder, instruction, call, function)

    def end(group: Group, scheduler: Scheduler) -> Group:
        _enter(group, target, site)
        return group

    return end


def _indirect(decoder: Decoder, instruction: Instruction, call: CallTarget, site: _Site) -> End:
    assert isinstance(call.target, Register)
    module = decoder.linker.module
    addresses = module.code_addresses
    targets: dict[int, _Target] = {}
    for function in decoder.linker.candidates():
        if _matches(call, function):
            targets[addresses[function.name]] = _target(decoder, instruction, call, function)
    for alias, name in module.aliases.items():
        if addresses.get(name) in targets:
            targets[addresses[alias]] = targets[addresses[name]]
    pointer = decoder.source(call.target, "u64", instruction)

    def end(group: Group, scheduler: Scheduler) -> Group | None:
        value = read(pointer, group)
        rest: Group | None = group
        for address in np.unique(value if value.size == 1 else value[group.active]):
            assert rest is not None
            part, rest = rest.split(value == address)
            assert part is not None
            target = targets.get(int(address))
            if target is None:
                what = f"call of address {int(address):#x}, where no function of this type is"
                raise fault("ILLEGAL_INSTRUCTION", what, part, instruction, int(part.active[0]))
            _enter(part, target, site)
            scheduler.add(part)
        return None

    return end


def _matches(call: CallTarget, function: Function) -> bool:
    """Say whether a function takes and returns what an indirect call's prototype says."""
    if call.candidates and function.name not in call.candidates:
        return False
    if call.prototype is None:
        return len(function.parameters) == len(call.arguments) and len(function.results) == len(call.results)
    return _sizes(call.prototype) == _sizes(function)


def _sizes(callable: Function | Prototype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(p.size for p in callable.parameters), tuple(p.size for p in callable.results)


def _target(decoder: Decoder, instruction: Instruction, call: CallTarget, function: Function) -> _Target:
    if len(call.arguments) != len(function.parameters) or len(call.results) != len(function.results):
        raise invalid(f"{function.name!r} is called with the wrong number of arguments", instruction.line)
    code = decoder.linker.code(function)
    pairs = zip(call.arguments, function.parameters, code.parameter_slots, strict=True)
    arguments = tuple((_argument(decoder, instruction, given, wanted), slot) for given, wanted, slot in pairs)
    triples = zip(call.results, function.results, code.result_slots, strict=True)
    results = tuple((slot, _result(decoder, instruction, place, given)) for place, given, slot in triples)
    return _Target(code, arguments, results)


def _argument(decoder: Decoder, instruction: Instruction, operand: Operand, parameter: Parameter) -> Source:
    if isinstance(operand, Symbol) and operand.name in decoder.slots.blocks:
        slot = decoder.slots.blocks[operand.name]
        if parameter.register or decoder.slots.template[slot].shape[1] != parameter.size:
            raise invalid(f"{operand.name!r} does not fit parameter {parameter.name!r}", instruction.line)
        return slot, None
    source, cast = decoder.source(operand, parameter.type, instruction)
    if parameter.register:
        return source, cast
    return source, _then_rows(cast)


def _then_rows(cast: Cast | None) -> Cast:
    if cast is None:
        return as_rows
    first = cast
    return lambda value: as_rows(first(value))


def _result(decoder: Decoder, instruction: Instruction, operand: Operand, result: Parameter) -> int:
    if isinstance(operand, Symbol) and operand.name in decoder.slots.blocks:
        slot = decoder.slots.blocks[operand.name]
        if not result.register and decoder.slots.template[slot].shape[1] == result.size:
            return slot
    elif isinstance(operand, Register) and result.register:
        return operand.index
    raise unsupported(f"where the result {result.name!r} of a call goes", instruction.line)


def _enter(group: Group, target: _Target, site: _Site) -> None:
    """Make the callee the group's function."""
    code = target.code
    base = group.frame_base + site.frame_bytes
    if len(group.stack) >= _DEEPEST or not group.batch.reserve_stack(base + code.frame_bytes):
        raise fault("LAUNCH_FAILED", "stack overflow", group, site.instruction, int(group.active[0]))
    old = group.registers
    fresh = group.batch.template(code).copy()
    for source, slot in target.arguments:
        index, cast = source
        fresh[slot] = old[index] if cast is None else cast(old[index])
    frame = Frame(group.code, old, site.resume, target.results, group.frame_base)
    group.stack = (*group.stack, frame)
    group.path = (*group.path, site.source.index, code.number)
    group.registers = fresh
    group.code = code
    group.block = code.entry
    group.frame_base = base
    group.origin = None
