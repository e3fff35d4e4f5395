"""Kernels: what they are called, what they take and what they need."""

from __future__ import annotations

from typing import Any

from gpufleet.virtual.api.libraries import kernel_function
from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.modules import Function
from gpufleet.virtual.state import State


@call(outputs=1)
def cuFuncGetName(state: State, hfunc: Any) -> bytes:
    """Return the name of a kernel."""
    return function_of(state, hfunc).kernel.name.encode()


@call(outputs=1)
def cuFuncGetModule(state: State, hfunc: Any) -> Any:
    """Return the module of a kernel."""
    return bindings().CUmodule(function_of(state, hfunc).module.handle)


@call(outputs=2)
def cuFuncGetParamInfo(state: State, func: Any, paramIndex: int) -> tuple[int, int]:
    """Return offset and size of a parameter."""
    return parameter_info(function_of(state, func), paramIndex)


@call(outputs=1)
def cuFuncGetParamCount(state: State, func: Any) -> int:
    """Return the number of parameters."""
    return len(function_of(state, func).kernel.parameters)


@call(outputs=1)
def cuFuncGetAttribute(state: State, attrib: Any, hfunc: Any) -> int:
    """Return what a kernel needs or may have."""
    return attribute(state, function_of(state, hfunc), attrib)


@call()
def cuFuncSetAttribute(state: State, hfunc: Any, attrib: Any, value: int) -> None:
    """Allow a kernel more dynamic shared memory; other settable attributes are remembered."""
    set_attribute(function_of(state, hfunc), attrib, value)


@call()
def cuFuncSetCacheConfig(state: State, hfunc: Any, config: Any) -> None:
    """Do nothing: virtual devices have no cache."""
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


def attribute(state: State, function: Function, attrib: Any) -> int:
    """Return the value of a CUfunction_attribute."""
    kernel, device = function.kernel, function.context.device
    major, minor = device.capability
    values = {
        "MAX_THREADS_PER_BLOCK": function.max_threads,
        "SHARED_SIZE_BYTES": kernel.static_shared,
        "LOCAL_SIZE_BYTES": kernel.local_bytes,
        "NUM_REGS": min(kernel.registers, 255),
        "PTX_VERSION": function.module.tree.target,
        "BINARY_VERSION": 10 * major + minor,
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": function.max_dynamic_shared,
        "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
    }
    name = _attribute_name(attrib)
    return function.attributes.get(name, values.get(name, 0))


def set_attribute(function: Function, attrib: Any, value: int) -> None:
    """Set a CUfunction_attribute that can be set."""
    name = _attribute_name(attrib)
    if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
        most = function.context.device.limits.shared_per_block_optin - function.kernel.static_shared
        if not 0 <= value <= most:
            raise Refusal("INVALID_VALUE", f"{value} bytes of shared memory: the device has {most}")
        function.max_dynamic_shared = value
    elif name in _SETTABLE:
        function.attributes[name] = value
    else:
        raise Refusal("INVALID_VALUE", f"{name} cannot be set")


_SETTABLE = (
    "PREFERRED_SHARED_MEMORY_CARVEOUT",
    "REQUIRED_CLUSTER_WIDTH",
    "REQUIRED_CLUSTER_HEIGHT",
    "REQUIRED_CLUSTER_DEPTH",
    "NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
)


def _attribute_name(attrib: Any) -> str:
    try:
        name = str(bindings().CUfunction_attribute(int(attrib)).name).removeprefix("CU_FUNC_ATTRIBUTE_")
    except ValueError:
        name = "MAX"
    if name == "MAX":
        raise Refusal("INVALID_VALUE", f"{int(attrib)} is no CUfunction_attribute")
    return name
