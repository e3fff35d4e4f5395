"""Kernels: what they are called, what they take and what they need."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from gpufleet.virtual.api.libraries import kernel_function, kernel_of
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.devices import Device
from gpufleet.virtual.modules import DYNAMIC_SHARED, Function, default_dynamic_shared, max_threads
from gpufleet.virtual.ptx import Kernel
from gpufleet.virtual.ptx import Module as Tree
from gpufleet.virtual.state import State


@call(outputs=1)
def cuFuncGetName(state: State, hfunc: Any) -> bytes:
    """Return the name of a kernel."""
    return _asked(state, hfunc).kernel.name.encode()


@call(outputs=1)
def cuFuncGetModule(state: State, hfunc: Any) -> Any:
    """Return the module of a kernel."""
    return bindings().CUmodule(function_of(state, hfunc).module.handle)


@call(outputs=2)
def cuFuncGetParamInfo(state: State, func: Any, paramIndex: int) -> tuple[int, int]:
    """Return offset and size of a parameter."""
    return parameter_info(_asked(state, func), paramIndex)


@call(outputs=1)
def cuFuncGetParamCount(state: State, func: Any) -> int:
    """Return the number of parameters."""
    return len(function_of(state, func).kernel.parameters)


@call(outputs=1)
def cuFuncGetAttribute(state: State, attrib: Any, hfunc: Any) -> int:
    """Return what a kernel needs or may have."""
    function = function_of(state, hfunc)
    return attribute(
        function.module.tree, function.kernel, function.context.device, function.settings, attrib
    )


@call()
def cuFuncSetAttribute(state: State, hfunc: Any, attrib: Any, value: int) -> None:
    """Allow a kernel more dynamic shared memory; other settable attributes are remembered."""
    function = function_of(state, hfunc)
    set_attribute(function.kernel, function.context.device, function.settings, attrib, value)


@call(outputs=1)
def cuKernelGetAttribute(state: State, attrib: Any, kernel: Any, dev: Any) -> int:
    """Return what a kernel of a library needs or may have on a device."""
    device, found = state.device(dev), kernel_of(state, kernel)
    settings = found.settings.get(device.ordinal, {})
    return attribute(found.library.tree, found.tree, device, settings, attrib)


@call()
def cuKernelSetAttribute(state: State, attrib: Any, val: int, kernel: Any, dev: Any) -> None:
    """Set what functions that a kernel of a library is from now on, on a device, begin with."""
    device, found = state.device(dev), kernel_of(state, kernel)
    settings = found.settings.setdefault(device.ordinal, {})
    set_attribute(found.tree, device, settings, attrib, val)


@call()
def cuKernelSetCacheConfig(state: State, kernel: Any, config: Any, dev: Any) -> None:
    """Do nothing: virtual devices have no cache."""
    kernel_of(state, kernel)
    state.device(dev)


@call()
def cuFuncSetCacheConfig(state: State, hfunc: Any, config: Any) -> None:
    """Do nothing: virtual devices have no cache."""
    function_of(state, hfunc)


@call()
def cuFuncSetSharedMemConfig(state: State, hfunc: Any, config: Any) -> None:
    """Do nothing: virtual devices have no banks of shared memory."""
    function_of(state, hfunc)


@call()
def cuFuncLoad(state: State, function: Any) -> None:
    """Make a kernel executable."""
    function_of(state, function).load()


@call(outputs=1)
def cuFuncIsLoaded(state: State, function: Any) -> Any:
    """Return whether a kernel was made executable."""
    states = bindings().CUfunctionLoadingState
    if function_of(state, function).is_loaded:
        return states.CU_FUNCTION_LOADING_STATE_LOADED
    return states.CU_FUNCTION_LOADING_STATE_UNLOADED


def function_of(state: State, handle: Any) -> Function:
    """Return the function of a CUfunction, or, of a CUkernel, its function in the current context."""
    function = state.functions.get(number(handle))
    if function is not None:
        return function
    kernel = state.kernels.get(number(handle))
    if kernel is None:
        raise Refusal("INVALID_HANDLE", f"{number(handle):#x} is no kernel")
    return kernel_function(state, kernel, state.current())


def parameter_info(function: Function, index: int) -> tuple[int, int]:
    """Return offset and size of a parameter."""
    parameters = function.kernel.parameters
    if not 0 <= index < len(parameters):
        raise Refusal("INVALID_VALUE", f"{function.kernel.name!r} has {len(parameters)} parameters")
    return parameters[index].offset, parameters[index].size


def attribute(tree: Tree, kernel: Kernel, device: Device, settings: dict[str, int], attrib: Any) -> int:
    """Return the value of a CUfunction_attribute of a kernel on a device."""
    major, minor = device.capability
    values = {
        "MAX_THREADS_PER_BLOCK": max_threads(kernel),
        "SHARED_SIZE_BYTES": kernel.static_shared,
        "LOCAL_SIZE_BYTES": kernel.local_bytes,
        "NUM_REGS": min(kernel.registers, 255),
        "PTX_VERSION": tree.target,
        "BINARY_VERSION": 10 * major + minor,
        DYNAMIC_SHARED: default_dynamic_shared(kernel),
        "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
    }
    name = _attribute_name(attrib)
    return settings.get(name, values.get(name, 0))


def set_attribute(kernel: Kernel, device: Device, settings: dict[str, int], attrib: Any, value: int) -> None:
    """Set a CUfunction_attribute that can be set."""
    name = _attribute_name(attrib)
    if name == "NON_PORTABLE_CLUSTER_SIZE_ALLOWED":
        settings[name] = int(bool(value))
        return
    allowed = _SETTABLE.get(name, ())
    if name == DYNAMIC_SHARED:
        allowed = range(device.limits.shared_per_block_optin - kernel.static_shared + 1)
    if value not in allowed:
        raise Refusal("INVALID_VALUE", f"{name} cannot be set to {value} (allowed: {allowed or 'nothing'})")
    settings[name] = value


_SETTABLE: dict[str, Container[int]] = {
    "PREFERRED_SHARED_MEMORY_CARVEOUT": range(-1, 101),
    "REQUIRED_CLUSTER_WIDTH": range(2**31),
    "REQUIRED_CLUSTER_HEIGHT": range(2**31),
    "REQUIRED_CLUSTER_DEPTH": range(2**31),
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE": range(3),
}
"""What is remembered, and may have which values."""


def _asked(state: State, handle: Any) -> Function:
    if not number(handle):
        raise Refusal("INVALID_VALUE", "the kernel is NULL")
    return function_of(state, handle)


def _attribute_name(attrib: Any) -> str:
    try:
        name = str(bindings().CUfunction_attribute(int(attrib)).name).removeprefix("CU_FUNC_ATTRIBUTE_")
    except ValueError:
        name = "MAX"
    if name == "MAX":
        raise Refusal("INVALID_VALUE", f"{int(attrib)} is no CUfunction_attribute")
    return name
