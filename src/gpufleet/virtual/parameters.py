"""A kernel's parameter space, from either form in which a launch passes parameters."""

from __future__ import annotations

import ctypes
import enum
import struct
from typing import Any

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.host_pointers import host_address, read_bytes, read_pointers
from gpufleet.virtual.ptx import Kernel

BUFFER_POINTER = 1
BUFFER_SIZE = 2
END = 0
"""CU_LAUNCH_PARAM_*: the keys in the array `extra`."""
_MOST_EXTRA = 16


class ParameterSpace:
    """How the parameters of one kernel lie in memory, and how a launch's arguments get there."""

    def __init__(self, kernel: Kernel) -> None:
        self._name = kernel.name
        self._size = kernel.parameter_bytes
        self._parameters = kernel.parameters
        self._sizes = [parameter.size for parameter in kernel.parameters]
        # "s" cuts bytes to its length or fills them up with zeros.
        layout, end = "<", 0
        for parameter in kernel.parameters:
            layout += f"{parameter.offset - end}x{parameter.size}s"
            end = parameter.offset + parameter.size
        self._layout = struct.Struct(layout)

    def read(self, kernel_params: Any, extra: Any) -> bytes:
        """Return a launch's parameters as the kernel finds them.

        Parameters
        ----------
        kernel_params : None, int, buffer, or tuple
            The address of an array of pointers, a buffer that holds one, or (values, ctypes types) as the
            bindings take it.
        extra : None, int, or buffer
            The address of an array BUFFER_POINTER, pointer, BUFFER_SIZE, pointer to the size, END, or a
            buffer that holds one.

        Raises
        ------
        Refusal
            INVALID_VALUE for both forms at once, for none where there are parameters, and for fewer values
            than parameters; LAUNCH_OUT_OF_RESOURCES for a buffer that is too long. One that is too short is
            taken, as by driver 580; what is missing is zero here.
        """
        if isinstance(kernel_params, tuple) and _is_null(extra):
            return self._from_values(kernel_params)
        if _is_null(kernel_params):
            if not _is_null(extra):
                return self._from_buffer(host_address(extra))
            if self._sizes:
                raise Refusal("INVALID_VALUE", f"none of {self._name!r}'s {len(self._sizes)} parameters came")
            return b""
        if not _is_null(extra):
            raise Refusal("INVALID_VALUE", "parameters come as kernelParams or as extra, not both")
        return self._from_pointers(host_address(kernel_params))

    def pointers(self, parameters: bytes) -> tuple[Any, Any]:
        """Return an array of pointers to a launch's parameters, and the copy that they point into."""
        values = ctypes.create_string_buffer(parameters, max(len(parameters), 1))
        start = ctypes.addressof(values)
        offsets = [parameter.offset for parameter in self._parameters]
        return (ctypes.c_void_p * max(len(offsets), 1))(*(start + offset for offset in offsets)), values

    def _from_pointers(self, address: int) -> bytes:
        pointers = read_pointers(address, len(self._sizes))
        if 0 in pointers:
            raise Refusal("INVALID_VALUE", f"the pointer to parameter {pointers.index(0)} is NULL")
        return self._layout.pack(*map(read_bytes, pointers, self._sizes))

    def _from_buffer(self, address: int) -> bytes:
        pointer, size = _packed(address)
        if size > self._size:
            raise Refusal(
                "LAUNCH_OUT_OF_RESOURCES",
                f"{self._name!r} takes {self._size} bytes of parameters, {size} came",
            )
        if size and not pointer:
            raise Refusal("INVALID_VALUE", "the pointer to the packed parameters is NULL")
        return read_bytes(pointer, size).ljust(self._size, b"\0")

    def _from_values(self, arguments: tuple[Any, ...]) -> bytes:
        if len(arguments) != 2 or len(arguments[0]) != len(arguments[1]):
            raise TypeError("kernelParams as a tuple is (values, types), both of the same length")
        if len(arguments[0]) < len(self._sizes):
            raise Refusal(
                "INVALID_VALUE",
                f"{self._name!r} takes {len(self._sizes)} parameters, {len(arguments[0])} came",
            )
        return self._layout.pack(*map(_value, *arguments, self._sizes))


def _is_null(argument: Any) -> bool:
    return argument is None or (isinstance(argument, int) and argument == 0)


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
