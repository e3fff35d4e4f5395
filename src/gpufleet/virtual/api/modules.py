"""Modules: loaded from images, searched for kernels and variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpufleet.virtual.api.jit_options import JitLogs
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.images import read_image, select_ptx
from gpufleet.virtual.lifetimes import unload
from gpufleet.virtual.modules import Module, parse
from gpufleet.virtual.ptx import Module as Tree
from gpufleet.virtual.state import State


@call(outputs=1, context=True)
def cuModuleLoad(state: State, current: Context, fname: Any) -> Any:
    """Load a file into the current context."""
    return _load(state, current, read_file(fname))


@call(outputs=1, context=True)
def cuModuleLoadData(state: State, current: Context, image: Any) -> Any:
    """Load an image into the current context."""
    return _load(state, current, read_image(image))


@call(outputs=1, context=True)
def cuModuleLoadDataEx(
    state: State,
    current: Context,
    image: Any,
    numOptions: int,
    options: Sequence[Any] | None,
    optionValues: Sequence[Any] | None,
) -> Any:
    """Load an image into the current context; what is wrong with it goes to the error log buffer."""
    with JitLogs(numOptions, options, optionValues):
        return _load(state, current, read_image(image))


@call(outputs=1, context=True)
def cuModuleLoadFatBinary(state: State, current: Context, fatCubin: Any) -> Any:
    """Load a fatbin into the current context."""
    return _load(state, current, read_image(fatCubin))


@call(by_finalizers=True)
def cuModuleUnload(state: State, hmod: Any) -> None:
    """End a module, after the work of its context."""
    module = _module(state, hmod)
    if module.library is not None:
        raise Refusal("NOT_PERMITTED", "the module is that of a library, which unloads it")
    state.wait(module.context)
    unload(state, module)


@call(outputs=1)
def cuModuleGetFunction(state: State, hmod: Any, name: bytes) -> Any:
    """Return a kernel, made executable: one the engine cannot run is refused here."""
    module, key = _module(state, hmod), text(name)
    if not key:
        raise Refusal("INVALID_VALUE", "the name of the kernel is empty")
    function = module.functions.get(key)
    if function is None:
        known = ", ".join(module.functions) or "none"
        raise Refusal("NOT_FOUND", f"the module has no kernel {key!r}; it has: {known}")
    function.load()
    return bindings().CUfunction(function.handle)


@call(outputs=2)
def cuModuleGetGlobal(state: State, hmod: Any, name: bytes) -> tuple[Any, int]:
    """Return address and size of a variable in global or constant memory."""
    return variable_of(_module(state, hmod), name)


@call(outputs=1)
def cuModuleGetFunctionCount(state: State, mod: Any) -> int:
    """Return the number of kernels."""
    return len(_module(state, mod).functions)


@call(outputs=1)
def cuModuleEnumerateFunctions(state: State, numFunctions: int, mod: Any) -> list[Any]:
    """Return the first kernels; they become executable when they are first used."""
    functions = list(_module(state, mod).functions.values())[:numFunctions]
    return [bindings().CUfunction(function.handle) for function in functions]


@call(outputs=1)
def cuModuleGetLoadingMode(state: State) -> Any:
    """Return that kernels become executable when they are first used."""
    return bindings().CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING


def read_file(name: Any) -> bytes:
    """Return the bytes of a file that is named as the driver takes it."""
    path = Path(os.fsdecode(name.partition(b"\0")[0] if isinstance(name, bytes) else name))
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refusal("FILE_NOT_FOUND", f"{path}: {error.strerror}") from None


def syntax_tree(state: State, data: bytes) -> Tree:
    """Return the PTX of an image that the virtual devices run."""
    capability = state.configuration.compute_capability
    return parse(select_ptx(data, capability), capability)


def enter_module(state: State, context: Context, tree: Tree) -> Module:
    """Make a module of a syntax tree in a context; nothing is left where that fails."""
    module = Module(context.home, tree, state.engine())
    try:
        module.place_variables(state.memory)
    except Refusal:
        unload(state, module)
        raise
    with state.lock:
        state.modules[module.handle] = module
        module.context.modules[module.handle] = module
        for function in module.functions.values():
            state.functions[function.handle] = function
    return module


def variable_of(module: Module, name: bytes) -> tuple[Any, int]:
    """Return address and size of a variable in global or constant memory."""
    allocation = module.variables.get(text(name))
    if text(name) in module.functions:
        raise Refusal("INVALID_VALUE", f"{text(name)!r} is a kernel, no variable")
    if allocation is None:
        known = ", ".join(module.variables) or "none"
        raise Refusal("NOT_FOUND", f"the module has no variable {text(name)!r}; it has: {known}")
    return bindings().CUdeviceptr(allocation.start), allocation.size


def text(name: Any) -> str:
    """Return a name given as bytes, which a NUL ends."""
    return name.partition(b"\0")[0].decode(errors="replace") if isinstance(name, bytes) else str(name)


def _load(state: State, context: Context, data: bytes) -> Any:
    module = enter_module(state, context, syntax_tree(state, data))
    return bindings().CUmodule(module.handle)


def _module(state: State, handle: Any) -> Module:
    module = state.modules.get(number(handle))
    if module is None:
        raise Refusal("INVALID_HANDLE", f"{number(handle):#x} is no module")
    return module
