"""Where a kernel's static shared and local memory lies, with that of the functions it calls."""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet.virtual.ptx.syntax import Function, Kernel, Module, Variable


@dataclass(frozen=True)
class SharedLayout:
    """Offsets in a block's shared memory."""

    offsets: dict[tuple[str, str], int]
    """By (function, variable); the function is "" for variables of the module."""
    static_bytes: int
    dynamic_offset: int
    """Where `extern` shared memory begins: the static bytes, aligned for it."""


def shared_layout(module: Module, kernel: Function) -> SharedLayout:
    """Place the shared variables that a kernel and its callees use, in order of declaration."""
    reached = reachable(module, kernel)
    used = frozenset().union(*(f.names_used for f in reached))
    variables: list[tuple[str, Variable]] = [
        ("", v) for v in module.variables.values() if v.space == "shared" and v.name in used
    ]
    variables += [(f.name, v) for f in reached for v in f.declared if v.space == "shared"]
    offsets: dict[tuple[str, str], int] = {}
    size = 0
    dynamic = [(owner, v) for owner, v in variables if v.external]
    for owner, variable in variables:
        if not variable.external:
            offset = -(-size // variable.align) * variable.align
            offsets[owner, variable.name] = offset
            size = offset + variable.size
    align = max((v.align for _, v in dynamic), default=1)
    dynamic_offset = -(-size // align) * align
    for owner, variable in dynamic:
        offsets[owner, variable.name] = dynamic_offset
    return SharedLayout(offsets, size, dynamic_offset)


def local_layout(function: Function) -> tuple[dict[str, int], int]:
    """Place a function's local variables in its stack frame; returns the offsets and the frame's size.

    Frames are multiples of 16 bytes, so that every frame on the stack is aligned.
    """
    offsets: dict[str, int] = {}
    size = function.local_area
    for variable in function.declared:
        if variable.space == "local":
            offset = -(-size // variable.align) * variable.align
            offsets[variable.name] = offset
            size = offset + variable.size
    return offsets, -(-size // 16) * 16


def reachable(module: Module, kernel: Function) -> list[Function]:
    """Return the kernel and every function it may call, also through tables of function pointers."""
    found: dict[str, Function] = {kernel.name: kernel}
    waiting = [kernel]
    seen_variables: set[str] = set()
    callable_names = module.functions.keys() | module.aliases.keys()
    while waiting:
        names = set(waiting.pop().names_used)
        tables = [v for name, v in module.variables.items() if name in names]
        while tables:
            variable = tables.pop()
            if variable.name not in seen_variables:
                seen_variables.add(variable.name)
                for _, symbol, _ in variable.relocations:
                    names.add(symbol)
                    if symbol in module.variables:
                        tables.append(module.variables[symbol])
        for name in sorted(names & callable_names):
            function = module.function(name)
            if function is not None and function.name not in found and not isinstance(function, Kernel):
                found[function.name] = function
                waiting.append(function)
    return list(found.values())
