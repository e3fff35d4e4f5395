"""What a function may do because a function that it calls does it: wait at a barrier, end threads."""

from __future__ import annotations

from gpufleet.virtual.jit.nodes import is_barrier
from gpufleet.virtual.ptx.syntax import CallTarget, Function, Instruction, Module, Register, Symbol


def functions_with_barriers(module: Module, functions: list[Function]) -> set[str]:
    """Names of the functions that wait at a barrier, or call one that does."""
    found = {f.name for f in functions if f.build is not None and any(map(is_barrier, f.body.instructions))}
    return _with_callers(module, functions, found, any_pointer=False)


def functions_that_end_threads(module: Module, functions: list[Function]) -> set[str]:
    """Names of the functions that `exit`, or may call one that does: not all lanes come back from them."""
    found = {
        f.name
        for f in functions
        if f.build is not None and any(i.opcode == "exit" for i in f.body.instructions)
    }
    return _with_callers(module, functions, found, any_pointer=True)


def direct_target(module: Module, instruction: Instruction) -> Function | None:
    """Return the function that an instruction calls by its name, if it does."""
    if instruction.opcode != "call":
        return None
    call = instruction.operands[0]
    if isinstance(call, CallTarget) and isinstance(call.target, Symbol):
        return module.function(call.target.name)
    return None


def fits(call: CallTarget, function: Function) -> bool:
    """Say whether a call through a pointer may mean a function, by what it takes and returns."""
    if call.candidates and function.name not in call.candidates:
        return False
    if call.prototype is None:
        return (len(function.parameters), len(function.results)) == (len(call.arguments), len(call.results))
    wanted = [[p.size for p in side] for side in (call.prototype.parameters, call.prototype.results)]
    return wanted == [[p.size for p in side] for side in (function.parameters, function.results)]


def indirect_targets(instruction: Instruction, functions: list[Function]) -> list[Function]:
    """Return which of some functions an instruction may call through a pointer."""
    if instruction.opcode != "call":
        return []
    call = instruction.operands[0]
    if not isinstance(call, CallTarget) or not isinstance(call.target, Register):
        return []
    return [f for f in functions if f.build is not None and fits(call, f)]


def _with_callers(module: Module, functions: list[Function], found: set[str], any_pointer: bool) -> set[str]:
    """The functions `found`, and all that call one of them; through a pointer, any or one that fits."""
    found = set(found)
    changed = bool(found)
    while changed:
        changed = False
        for function in functions:
            if function.build is None or function.name in found:
                continue
            for instruction in function.body.instructions:
                target = direct_target(module, instruction)
                if (
                    (target is not None and target.name in found)
                    or (any_pointer and _is_indirect(instruction))
                    or any(f.name in found for f in indirect_targets(instruction, functions))
                ):
                    found.add(function.name)
                    changed = True
                    break
    return found


def _is_indirect(instruction: Instruction) -> bool:
    if instruction.opcode != "call":
        return False
    call = instruction.operands[0]
    return isinstance(call, CallTarget) and isinstance(call.target, Register)
