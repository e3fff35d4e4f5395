"""Copy device functions that contain barriers into their callers.

A warp that waits at a barrier returns to the scheduler (kernel.py), which no native call stack
survives. So the kernel must contain the barrier itself. Register numbers, labels and names are made
unique; `ret` becomes a branch behind the call; the callee's parameters become those of the call. Where a
call through a pointer may mean such functions, each is asked for by its address, and copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpufleet.virtual.jit.callers import direct_target, indirect_targets
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.flow import basic_blocks, leaders
from gpufleet.virtual.ptx.layout import reachable
from gpufleet.virtual.ptx.operations import operation
from gpufleet.virtual.ptx.syntax import (
    Address,
    Body,
    CallTarget,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Targets,
    Variable,
    Vector,
)


@dataclass
class _Copy:
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[int, list[str]] = field(default_factory=dict)
    owners: dict[str, tuple[str, str]] = field(default_factory=dict)
    copies: int = 0
    candidates: list[Function] = field(default_factory=list)
    """The functions that are copied."""


def inline(module: Module, kernel: Function, names: set[str]) -> tuple[Body, dict[str, tuple[str, str]]]:
    """Copy the functions called `names` into a kernel.

    Returns the new body, and for each variable that came from a function the pair of function and
    variable that `shared_layout` knows it by.
    """
    copy = _Copy(candidates=[f for f in reachable(module, kernel) if f.name in names])
    _append(module, copy, kernel, names, {}, [kernel.name])
    starts = leaders(copy.instructions, copy.labels)
    place = {start: index for index, start in enumerate(starts)}
    for instruction in copy.instructions:
        instruction.operands = tuple(_resolved(o, place) for o in instruction.operands)
    blocks = basic_blocks(copy.instructions, starts, copy.labels)
    return Body(copy.instructions, copy.registers, copy.variables, blocks), copy.owners


def _append(
    module: Module,
    copy: _Copy,
    function: Function,
    names: set[str],
    symbols: dict[str, Symbol],
    path: list[str],
) -> None:
    """Append a function's instructions; labels hold positions in the copy until all are known."""
    body = function.body
    number = copy.copies
    copy.copies += 1
    first = len(copy.registers)
    copy.registers += [replace(r, index=first + r.index) for r in body.registers]
    if number:
        for variable in body.variables.values():
            symbols[variable.name] = Symbol(f"{variable.name}@{number}", variable.space)
            copy.owners[f"{variable.name}@{number}"] = (function.name, variable.name)
    for variable in body.variables.values():
        name = symbols[variable.name].name if variable.name in symbols else variable.name
        copy.variables[name] = replace(variable, name=name)
    positions: dict[int, int] = {}
    pending: list[tuple[Instruction, int]] = []
    returns: list[Instruction] = []
    starts = {block.start: block.index for block in body.blocks}
    for index, instruction in enumerate(body.instructions):
        if index in starts:
            positions[starts[index]] = len(copy.instructions)
            copy.labels.setdefault(len(copy.instructions), []).append(f"b{number}.{starts[index]}")
        callee = direct_target(module, instruction)
        if callee is not None and callee.name in names:
            _append_call(module, copy, instruction, callee, names, symbols, first, path)
            continue
        targets = indirect_targets(instruction, copy.candidates)
        if targets:
            _append_choice(module, copy, instruction, targets, names, symbols, first, path)
            continue
        new = _clone(instruction, lambda o: _renamed(o, first, symbols, copy.registers))
        if number and instruction.opcode == "ret":
            new.operation = operation("bra")
            returns.append(new)
        elif instruction.opcode in ("bra", "brx"):
            pending.append((new, number))
        copy.instructions.append(new)
    end = len(copy.instructions)
    if number:
        copy.labels.setdefault(end, []).append(f"end{number}")
    for new, _ in pending:
        new.operands = tuple(_relocated(o, positions) for o in new.operands)
    for new in returns:
        new.operands = (Label(f"end{number}", -1 - end),)


def _append_call(
    module: Module,
    copy: _Copy,
    instruction: Instruction,
    callee: Function,
    names: set[str],
    symbols: dict[str, Symbol],
    first: int,
    path: list[str],
) -> None:
    call = instruction.operands[0]
    assert isinstance(call, CallTarget)
    if callee.name in path:
        raise unsupported("a recursive function with a barrier", instruction.line)
    skip = None
    if instruction.guard is not None:
        skip = _clone(instruction, lambda o: _renamed(o, first, symbols, copy.registers))
        skip.operation, skip.operands, skip.guard_negated = operation("bra"), (), not skip.guard_negated
        copy.instructions.append(skip)
    inner: dict[str, Symbol] = {}
    pairs = [
        *zip(call.arguments, callee.parameters, strict=False),
        *zip(call.results, callee.results, strict=False),
    ]
    for operand, parameter in pairs:
        if not isinstance(operand, Symbol) or parameter.register:
            raise unsupported("a register parameter of a function with a barrier", instruction.line)
        outer = symbols.get(operand.name, operand)
        inner[parameter.name] = Symbol(outer.name, "param", operand.offset)
    _append(module, copy, callee, names, inner, [*path, callee.name])
    if skip is not None:
        _land(copy, [skip], "skip")


def _append_choice(
    module: Module,
    copy: _Copy,
    instruction: Instruction,
    targets: list[Function],
    names: set[str],
    symbols: dict[str, Symbol],
    first: int,
    path: list[str],
) -> None:
    """A call through a pointer: `if (pointer == f) f(); else ...`, and the call for all other functions."""
    call = instruction.operands[0]
    assert isinstance(call, CallTarget)
    pointer = _renamed(call.target, first, symbols, copy.registers)
    done: list[Instruction] = []

    def emit(text: str, *operands: Operand, guard: Register | None = None) -> Instruction:
        new = Instruction(operation(text), operands, guard, False, instruction.line, instruction.source)
        copy.instructions.append(new)
        return new

    for target in targets:
        differs = Register(f"%differs{len(copy.registers)}", "pred", len(copy.registers))
        copy.registers.append(differs)
        emit("setp.ne.u64", differs, pointer, Immediate(module.code_addresses[target.name], "u64"))
        other = emit("bra", guard=differs)
        _append_call(module, copy, instruction, target, names, symbols, first, path)
        done.append(emit("bra"))
        _land(copy, [other], "other")
    copy.instructions.append(_clone(instruction, lambda o: _renamed(o, first, symbols, copy.registers)))
    _land(copy, done, "called")


def _land(copy: _Copy, branches: list[Instruction], stem: str) -> None:
    """Let branches lead to what comes next."""
    position = len(copy.instructions)
    label = f"{stem}.{position}"
    copy.labels.setdefault(position, []).append(label)
    for branch in branches:
        branch.operands = (Label(label, -1 - position),)


def _clone(instruction: Instruction, rename: Any) -> Instruction:
    guard = instruction.guard
    return Instruction(
        instruction.operation,
        tuple(rename(o) for o in instruction.operands),
        rename(guard) if guard is not None else None,
        instruction.guard_negated,
        instruction.line,
        instruction.source,
    )


def _renamed(operand: Any, first: int, symbols: dict[str, Symbol], registers: list[Register]) -> Any:
    """The operand with this copy's registers and names."""

    def again(o: Any) -> Any:
        return _renamed(o, first, symbols, registers)

    if isinstance(operand, Register):
        return registers[first + operand.index]
    if isinstance(operand, Symbol) and operand.name in symbols:
        new = symbols[operand.name]
        return Symbol(new.name, new.space, new.offset + operand.offset)
    if isinstance(operand, Address):
        return Address(again(operand.base), operand.offset)
    if isinstance(operand, Vector):
        return Vector(tuple(again(e) for e in operand.elements))
    if isinstance(operand, Pair):
        return Pair(again(operand.first), again(operand.second))
    if isinstance(operand, Negated):
        return Negated(again(operand.register))
    if isinstance(operand, CallTarget):
        return replace(
            operand,
            target=again(operand.target),
            results=tuple(again(o) for o in operand.results),
            arguments=tuple(again(o) for o in operand.arguments),
        )
    return operand


def _relocated(operand: Operand, positions: dict[int, int]) -> Operand:
    """A label by its position in the copy, kept as -1 - position until blocks are numbered."""
    if isinstance(operand, Label):
        return Label(operand.name, -1 - positions[operand.block])
    if isinstance(operand, Targets):
        return Targets(tuple(Label(t.name, -1 - positions[t.block]) for t in operand.labels))
    return operand


def _resolved(operand: Operand, place: dict[int, int]) -> Operand:
    if isinstance(operand, Label):
        return Label(operand.name, place[-1 - operand.block])
    if isinstance(operand, Targets):
        return Targets(tuple(Label(t.name, place[-1 - t.block]) for t in operand.labels))
    return operand
