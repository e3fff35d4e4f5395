"""Libraries: device code that is loaded into a context when one of its kernels is used there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpufleet.virtual.api.jit_options import JitLogs
from gpufleet.virtual.api.modules import enter_module, read_file, syntax_tree, text, variable_of
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.images import read_image
from gpufleet.virtual.libraries import Library, LibraryKernel
from gpufleet.virtual.lifetimes import unload
from gpufleet.virtual.modules import Function, Module
from gpufleet.virtual.state import State


@call(outputs=1)
def cuLibraryLoadData(
    state: State,
    code: Any,
    jitOptions: Sequence[Any] | None,
    jitOptionsValues: Sequence[Any] | None,
    numJitOptions: int,
    libraryOptions: Sequence[Any] | None,
    libraryOptionValues: Sequence[Any] | None,
    numLibraryOptions: int,
) -> Any:
    """Read an image."""
    with JitLogs(numJitOptions, jitOptions, jitOptionsValues):
        return _enter(state, read_image(code))


@call(outputs=1)
def cuLibraryLoadFromFile(
    state: State,
    fileName: Any,
    jitOptions: Sequence[Any] | None,
    jitOptionsValues: Sequence[Any] | None,
    numJitOptions: int,
    libraryOptions: Sequence[Any] | None,
    libraryOptionValues: Sequence[Any] | None,
    numLibraryOptions: int,
) -> Any:
    """Read a file."""
    with JitLogs(numJitOptions, jitOptions, jitOptionsValues):
        return _enter(state, read_file(fileName))


@call(by_finalizers=True)
def cuLibraryUnload(state: State, library: Any) -> None:
    """End a library in all contexts, after their work."""
    found = _library(state, library)
    with state.lock:
        state.libraries.pop(found.handle, None)
        for kernel in found.kernels.values():
            state.kernels.pop(kernel.handle, None)
        modules = [module for module in found.modules.values() if module.handle in state.modules]
    for module in modules:
        state.wait(module.context)
        unload(state, module)


@call(outputs=1)
def cuLibraryGetKernel(state: State, library: Any, name: bytes) -> Any:
    """Return a kernel of a library."""
    found, key = _library(state, library), text(name)
    if key not in found.kernels:
        known = ", ".join(found.kernels) or "none"
        raise Refusal("NOT_FOUND", f"the library has no kernel {key!r}; it has: {known}")
    return bindings().CUkernel(found.kernels[key].handle)


@call(outputs=1)
def cuLibraryGetKernelCount(state: State, lib: Any) -> int:
    """Return the number of kernels."""
    return len(_library(state, lib).kernels)


@call(outputs=1)
def cuLibraryEnumerateKernels(state: State, numKernels: int, lib: Any) -> list[Any]:
    """Return the first kernels."""
    kernels = list(_library(state, lib).kernels.values())[:numKernels]
    return [bindings().CUkernel(kernel.handle) for kernel in kernels]


@call(outputs=1, context=True)
def cuLibraryGetModule(state: State, current: Context, library: Any) -> Any:
    """Return the module that a library is in the current context."""
    return bindings().CUmodule(_module(state, _library(state, library), current).handle)


@call(outputs=2, context=True)
def cuLibraryGetGlobal(state: State, current: Context, library: Any, name: bytes) -> tuple[Any, int]:
    """Return address and size of a variable in the current context."""
    return variable_of(_module(state, _library(state, library), current), name)


@call(outputs=1, context=True)
def cuKernelGetFunction(state: State, current: Context, kernel: Any) -> Any:
    """Return the function that a kernel is in the current context."""
    function = kernel_function(state, kernel_of(state, kernel), current)
    function.load()
    return bindings().CUfunction(function.handle)


@call(outputs=1)
def cuKernelGetLibrary(state: State, kernel: Any) -> Any:
    """Return the library of a kernel."""
    return bindings().CUlibrary(kernel_of(state, kernel).library.handle)


@call(outputs=1)
def cuKernelGetName(state: State, hfunc: Any) -> bytes:
    """Return the name of a kernel."""
    return kernel_of(state, hfunc).name.encode()


@call(outputs=2)
def cuKernelGetParamInfo(state: State, kernel: Any, paramIndex: int) -> tuple[int, int]:
    """Return offset and size of a parameter."""
    found = kernel_of(state, kernel)
    parameters = found.tree.parameters
    if not 0 <= paramIndex < len(parameters):
        raise Refusal("INVALID_VALUE", f"{found.name!r} has {len(parameters)} parameters")
    return parameters[paramIndex].offset, parameters[paramIndex].size


@call(outputs=1)
def cuKernelGetParamCount(state: State, kernel: Any) -> int:
    """Return the number of parameters."""
    return len(kernel_of(state, kernel).tree.parameters)


def kernel_function(state: State, kernel: LibraryKernel, context: Context) -> Function:
    """Return the function that a kernel of a library is in a context."""
    return _module(state, kernel.library, context).functions[kernel.name]


def _enter(state: State, data: bytes) -> Any:
    library = Library(syntax_tree(state, data))
    with state.lock:
        state.libraries[library.handle] = library
        for kernel in library.kernels.values():
            state.kernels[kernel.handle] = kernel
    return bindings().CUlibrary(library.handle)


def _module(state: State, library: Library, context: Context) -> Module:
    context = context.home
    with library.lock:
        module = library.module_of(context)
        if module is None:
            module = library.modules[context.id] = enter_module(state, context, library.tree)
            module.library = library
            for name, function in module.functions.items():
                function.settings = dict(library.kernels[name].settings.get(context.device.ordinal, {}))
        return module


def _library(state: State, handle: Any) -> Library:
    library = state.libraries.get(number(handle))
    if library is None:
        raise Refusal("INVALID_HANDLE", f"{number(handle):#x} is no library")
    return library


def kernel_of(state: State, handle: Any) -> LibraryKernel:
    """Return the kernel of a CUkernel."""
    kernel = state.kernels.get(number(handle))
    if kernel is None:
        raise Refusal("INVALID_HANDLE", f"{number(handle):#x} is no kernel")
    return kernel
