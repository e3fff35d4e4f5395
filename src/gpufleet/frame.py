"""How do a kernel's parameters lie in memory, and how is the driver told where?

The driver takes them in two ways (CUDA Driver API, `cuLaunchKernel`): as an array of the addresses of
the values ("pointers"), or as one buffer in which they lie at their offsets ("packed").
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpufleet.arguments import Conversion, Parameter, conversion
from gpufleet.errors import ImageError, KernelArgumentError, LaunchError
from gpufleet.memory import DeviceBuffer
from gpufleet.signature import ParameterType, unknown

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.queue import Queue

Types = Sequence[ParameterType]
Table = Sequence[tuple[int, int]]
"""Offset and size of each parameter."""


class Layout:
    """The parameters of one kernel: how each value is converted, and where its bytes go.

    Parameters
    ----------
    kernel : str
        Its name, for messages.
    table : sequence of (offset, size)
        What the driver says.
    said, read : sequence of ParameterType
        What the caller's signature and the PTX say, or None. The signature is preferred.

    Attributes
    ----------
    table : sequence of (offset, size)
    conversions : list of Conversion
    count : int
    offsets : tuple of int
    pack : Pack
    size : int
        Bytes of a packed buffer: up to the end of the last parameter, without padding behind it. The
        driver refuses a longer one, and takes a shorter one without a word (both seen on driver 580).
    """

    def __init__(self, kernel: str, table: Table, said: Types | None, read: Types | None) -> None:
        types = _checked_types(kernel, table, said, read)
        conversions = [conversion(Parameter(kernel, index, kind)) for index, kind in enumerate(types)]
        self.table = table
        self.conversions = conversions
        self.count = len(table)
        self.offsets = tuple(offset for offset, _ in table)
        self.size = table[-1][0] + table[-1][1] if table else 0
        self.pack: Pack = _pack_function(kernel, _codes(table, conversions), conversions)


Pack = Callable[[bytearray, "Queue", "tuple[Any, ...]"], None]
"""Converts as many arguments as there are parameters, for a launch on a stream, into the memory's start."""


def _codes(table: Table, conversions: Sequence[Conversion]) -> str:
    """Return the `struct` format of all parameters, each at its offset."""
    codes, end = "<", 0
    for (offset, size), each in zip(table, conversions, strict=True):
        codes += f"{offset - end}x{each.code}"
        end = offset + size
    return codes


def _pack_function(kernel: str, codes: str, conversions: Sequence[Conversion]) -> Pack:
    """Write the `Pack` function of a kernel.

    The general form, a loop over the conversions, takes 2 to 4 us for two parameters, since CPython
    does not specialise a call that goes to another function each time; this one 0.5 us.
    """
    lines = ["def pack(memory, queue, arguments):", " context = queue.context"]
    for index, each in enumerate(conversions):
        lines += [
            f" value = arguments[{index}]",
            f" if {each.is_common}: v{index} = {each.common}{f'; {each.note}' if each.note else ''}",
            f" else: v{index} = convert{index}(value, queue)",
        ]
    values = "".join(f", v{index}" for index in range(len(conversions)))
    lines.append(f" pack_into(memory, 0{values})")
    names: dict[str, Any] = {f"convert{index}": each.convert for index, each in enumerate(conversions)}
    names |= {"pack_into": struct.Struct(codes).pack_into, "DeviceBuffer": DeviceBuffer, "infinity": math.inf}
    exec(compile("\n".join(lines), f"<parameters of {kernel}>", "exec"), names)
    pack: Pack = names["pack"]
    return pack


class Frame:
    """Memory for one launch's parameters, and the two ways to point the driver at it.

    One block holds the values, and behind them the size, the `extra` list and the array of addresses
    that refer to them. The driver reads it only during the launch call, so that it can be used again
    and again, but by one thread at a time.

    Attributes
    ----------
    memory : bytearray
        The block.
    packed, pointers : tuple
        The last two arguments of `cuLaunchKernel`, by style.
    """

    __slots__ = ("_export", "memory", "packed", "pointers")

    def __init__(self, layout: Layout) -> None:
        values = -(-layout.size // 8) * 8
        behind = struct.Struct(f"<Q5Q{layout.count}Q")
        self.memory = bytearray(values + behind.size)
        self._export = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        start = ctypes.addressof(self._export)
        size_at = start + values
        extra_at = size_at + 8
        pointers_at = extra_at + 5 * 8
        extra = (BUFFER_POINTER, start, BUFFER_SIZE, size_at, END)
        addresses = (start + offset for offset in layout.offsets)
        behind.pack_into(self.memory, values, layout.size, *extra, *addresses)
        self.packed: tuple[int | None, int] = (None, extra_at) if layout.count else (None, 0)
        self.pointers: tuple[int | None, int] = (pointers_at, 0) if layout.count else (None, 0)

    def form(self, style: str) -> tuple[int | None, int]:
        """Return the last two arguments of `cuLaunchKernel` for a style."""
        if style == "packed":
            return self.packed
        check_style(style)
        return self.pointers


STYLES = ("packed", "pointers")


def check_style(style: str) -> None:
    """Raise `LaunchError` if parameters cannot be passed so."""
    if style not in STYLES:
        raise LaunchError(f"style is {style!r}: expected 'packed' or 'pointers'")


# CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE of cuda.h: the keys of the `extra` list.
END, BUFFER_POINTER, BUFFER_SIZE = 0, 1, 2


INVALID_VALUE = 1
"""CUDA_ERROR_INVALID_VALUE."""


def parameter_table(context: Context, function: Any) -> list[tuple[int, int]]:
    """Ask the driver for the offset and size of each of a kernel's parameters."""
    driver = context.driver
    table: list[tuple[int, int]] = []
    with context:
        while True:
            error, offset, size = driver.raw.cuFuncGetParamInfo(function, len(table))
            if error == INVALID_VALUE:  # an index behind the last parameter
                return table
            if error:
                raise driver.failure(error, "cuFuncGetParamInfo")
            table.append((int(offset), int(size)))


def counted(count: int) -> str:
    """Write a number of parameters."""
    return f"{count} parameter{'s' if count != 1 else ''}"


def _checked_types(kernel: str, table: Table, said: Types | None, read: Types | None) -> Types:
    """Return what is known of the parameters, if it agrees with the driver's table."""
    sizes = [size for _, size in table]
    if said is not None:
        _compare(kernel, sizes, said, "its signature", KernelArgumentError)
        return said
    if read is not None:
        _compare(kernel, sizes, read, "its PTX", ImageError)
        return read
    return [unknown(size) for size in sizes]


def _compare(kernel: str, sizes: list[int], types: Types, source: str, error: type[Exception]) -> None:
    if len(types) != len(sizes):
        raise error(
            f"kernel {kernel!r} takes {counted(len(sizes))} by the driver's table, but {source} names "
            f"{len(types)}"
        )
    for index, (size, kind) in enumerate(zip(sizes, types, strict=True)):
        if kind.size != size:
            raise error(
                f"parameter {index} of kernel {kernel!r} has {size} bytes by the driver's table, but by "
                f"{source} it is {kind}, of {kind.size} bytes"
            )
