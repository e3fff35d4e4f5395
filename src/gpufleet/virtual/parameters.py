"""A kernel's parameter space, from either form in which a launch passes parameters."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import Any

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.host_pointers import host_address, read_bytes, read_pointers
from gpufleet.virtual.ptx import Kernel

BUFFER_POINTER = 1
BUFFER_SIZE = 2
END = 0
"""CU_LAUNCH_PARAM_*: the keys in the array `extra`."""
_MOST_EXTRA = 16


def parameter_space(kernel: Kernel, kernel_params: Any, extra: Any) -> bytes:
    """Return the kernel's parameters as they lie in its parameter space.

    Parameters
    ----------
    kernel_params : None, int, buffer, or tuple
        The address of an array of pointers, a buffer that holds one, or (values, ctypes types) as the
        bindings take it.
    extra : None, int, or buffer
        The address of an array BUFFER_POINTER, pointer, BUFFER_SIZE, pointer to the size, END, or a buffer
        that holds one.

    Raises
    ------
    Refusal
        INVALID_VALUE for both forms at once, for none where there are parameters, and for fewer values than
        parameters; LAUNCH_OUT_OF_RESOURCES for a buffer that is too long. One that is too short is taken,
        as by driver 580; what is missing is zero here.
    """
    is_packed = not _is_null(extra)
    if not _is_null(kernel_params):
        if is_packed:
            raise Refusal("INVALID_VALUE", "parameters come as kernelParams or as extra, not both")
        if isinstance(kernel_params, tuple):
            return _from_values(kernel, kernel_params)
        return _from_pointers(kernel, host_address(kernel_params))
    if is_packed:
        return _from_buffer(kernel, host_address(extra))
    if kernel.parameters:
        raise Refusal("INVALID_VALUE", f"none of {kernel.name!r}'s {len(kernel.parameters)} parameters came")
    return b""


def _is_null(argument: Any) -> bool:
    return argument is None or (isinstance(argument, int) and argument == 0)


def _from_pointers(kernel: Kernel, address: int) -> bytes:
    parameters = kernel.parameters
    pointers = read_pointers(address, len(parameters))
    if 0 in pointers:
        raise Refusal("INVALID_VALUE", f"the pointer to parameter {pointers.index(0)} is NULL")
    return _assembled(
        kernel, [read_bytes(at, parameter.size) for at, parameter in zip(pointers, parameters, strict=True)]
    )


def _from_buffer(kernel: Kernel, address: int) -> bytes:
    pointer, size = _packed(address)
    expected = kernel.parameter_bytes
    if size > expected:
        raise Refusal(
            "LAUNCH_OUT_OF_RESOURCES", f"{kernel.name!r} takes {expected} bytes of parameters, {size} came"
        )
    if size and not pointer:
        raise Refusal("INVALID_VALUE", "the pointer to the packed parameters is NULL")
    return read_bytes(pointer, size).ljust(expected, b"\0")


def _packed(address: int) -> tuple[int, int]:
    """Pointer and size that an array `extra` holds."""
    pointer = size = 0
    for index in range(_MOST_EXTRA):
        (key,) = read_pointers(address + 16 * index, 1)
        if key == END:
            break
        (value,) = read_pointers(address + 16 * index + 8, 1)
        if key == BUFFER_POINTER:
            pointer = value
        elif key == BUFFER_SIZE and value:
            (size,) = read_pointers(value, 1)
        else:
            raise Refusal("INVALID_VALUE", f"{key}, {value:#x} make no entry of the array extra")
    return pointer, size


def _from_values(kernel: Kernel, arguments: tuple[Any, ...]) -> bytes:
    if len(arguments) != 2 or len(arguments[0]) != len(arguments[1]):
        raise TypeError("kernelParams as a tuple is (values, types), both of the same length")
    values, types = arguments
    if len(values) < len(kernel.parameters):
        raise Refusal(
            "INVALID_VALUE", f"{kernel.name!r} takes {len(kernel.parameters)} parameters, {len(values)} came"
        )
    return _assembled(
        kernel,
        [
            _value(value, kind, parameter.size)
            for value, kind, parameter in zip(values, types, kernel.parameters, strict=False)
        ],
    )


def _value(value: Any, kind: Any, size: int) -> bytes:
    """The bytes of one value, as the bindings hand it to the driver."""
    if kind is None:
        if callable(getattr(value, "getPtr", None)):
            return read_bytes(value.getPtr(), size)
        if isinstance(value, enum.Enum):
            return bytes(ctypes.c_int(value.value))
        if isinstance(value, ctypes.Structure):
            return bytes(value)
        raise TypeError(f"{value!r} without a type is neither a structure nor has it getPtr()")
    if isinstance(value, kind):
        return bytes(value)
    if kind is ctypes.c_void_p and not isinstance(value, int):
        if not callable(getattr(value, "getPtr", None)):
            raise TypeError(f"{value!r} is no pointer: expected an int, c_void_p or an object with getPtr()")
        value = value.getPtr()  # the address of the structure, not what is in it: so do the bindings
    elif isinstance(value, ctypes._SimpleCData):
        value = value.value
    return bytes(kind(value))


def _assembled(kernel: Kernel, values: Sequence[bytes]) -> bytes:
    """The parameter space with each value at its place, cut or filled with zeros to its size."""
    space = bytearray(kernel.parameter_bytes)
    for parameter, value in zip(kernel.parameters, values, strict=True):
        end = parameter.offset + min(parameter.size, len(value))
        space[parameter.offset : end] = value[: parameter.size]
    return bytes(space)
