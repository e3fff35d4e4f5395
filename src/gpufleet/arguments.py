"""How do Python values become kernel parameters?

=========================  =====================================================================
parameter                  takes
=========================  =====================================================================
integer (PTX u32, int32)   a Python int or bool in range; a NumPy or ctypes integer of its size
floating (f32, float64)    a Python float, or an int that it holds exactly; a NumPy float of its size
pointer (u64, pointer)     a `DeviceBuffer`, an object with ``__cuda_array_interface__`` or DLPack on
                           a GPU, None for null, or an address as int (u64: any 64-bit integer)
structure (b8[16])         bytes, a NumPy scalar (structured, float16, complex) or a ctypes structure,
                           of exactly its size
only the size is known     a NumPy or ctypes scalar, or bytes, of exactly that size; 8 bytes: a
                           pointer too
=========================  =====================================================================

Nothing is lost on the way but a Python float's last digits in a shorter float.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpufleet.array import DeviceArray
from gpufleet.errors import KernelArgumentError
from gpufleet.managed import ManagedBuffer
from gpufleet.memory import DeviceBuffer
from gpufleet.pinned_memory import PinnedBuffer
from gpufleet.pointers import buffer_address, foreign_address
from gpufleet.signature import ParameterType

if TYPE_CHECKING:
    from gpufleet.queue import Queue


class Native(NamedTuple):
    """What is the usual case of a parameter, as `native/launch.c` knows it?

    Attributes
    ----------
    common : str
        "i": an int from `lowest` to `highest`; "f": a float nearer to 0 than `bound`; "p": a buffer that
        may be used without asking, None, or an int as for "i"; "s": bytes of the parameter's size; "-":
        always `convert`.
    """

    common: str
    lowest: int = 0
    highest: int = 0
    bound: float = 0.0


NONE = Native("-")
MOST_IN_C = (1 << 63) - 1
"""Larger ints are left to `convert`."""


class Conversion(NamedTuple):
    """How one parameter's values are converted.

    Attributes
    ----------
    code : str
        What `struct` packs it with.
    convert : callable
        From a value, and the stream that the launch goes to, to what `struct` packs.
    is_common, common : str
        The most usual case as Python expressions in ``value`` and ``context`` (the stream's): whether
        this is it, and what `struct` packs then. Layouts write them into the function that packs all
        parameters, where they take 0.1 us, while a call of `convert` takes 0.5.
    note : str
        A statement in ``value`` and ``queue`` for the usual case, if any.
    native : Native
        The usual case, for the launch in C.
    """

    code: str
    convert: Callable[[Any, Queue], Any]
    is_common: str
    common: str
    note: str = ""
    native: Native = NONE


@dataclass(frozen=True)
class Parameter:
    """One parameter of one kernel, for the errors to name."""

    kernel: str
    index: int
    type: ParameterType

    def misfit(self, value: Any, expected: str) -> KernelArgumentError:
        """Return the error that says what the parameter is and what it was given."""
        size = f"{self.type.size} byte{'s' if self.type.size != 1 else ''}"
        return KernelArgumentError(
            f"parameter {self.index} of kernel {self.kernel!r} ({self.type}, {size}) got "
            f"{_describe(value)}: expected {expected}"
        )


def conversion(parameter: Parameter) -> Conversion:
    """Return how a parameter's values are converted."""
    return _MAKERS[parameter.type.kind](parameter)


# Integers

_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _integer(parameter: Parameter) -> Conversion:
    """Integers, packed as their unsigned bit pattern."""
    lowest, highest = _range(parameter.type)
    mask = (1 << 8 * parameter.type.size) - 1
    usual = _numpy_integers(parameter.type)

    def convert(value: Any, queue: Queue) -> int:
        number = int(value) if type(value) in usual else _as_int(value, parameter)
        if not lowest <= number <= highest:
            raise parameter.misfit(value, f"an integer from {lowest} to {highest}")
        return number & mask

    is_common = f"type(value) is int and {lowest} <= value <= {highest}"
    native = Native("i", lowest, min(highest, MOST_IN_C))
    return Conversion(_UNSIGNED[parameter.type.size], convert, is_common, f"value & {mask}", native=native)


def _range(kind: ParameterType) -> tuple[int, int]:
    bits = 8 * kind.size
    lowest = 0 if kind.kind in ("unsigned", "pointer") else -(1 << bits - 1)
    highest = (1 << bits - 1) - 1 if kind.kind == "signed" else (1 << bits) - 1
    return lowest, highest


def _as_int(value: Any, parameter: Parameter) -> int:
    if isinstance(value, int):
        return int(value)
    scalar = _as_scalar(value)
    if scalar is None:
        raise parameter.misfit(value, "an integer")
    if _is_integer_of(scalar, parameter.type):
        return int(scalar)
    raise parameter.misfit(value, f"an integer of its size, such as {_named_integer(parameter.type)}")


def _is_integer_of(scalar: np.generic, kind: ParameterType) -> bool:
    kinds = {"signed": "ib", "unsigned": "ub", "pointer": "u"}.get(kind.kind, "iub")
    return scalar.dtype.itemsize == kind.size and scalar.dtype.kind in kinds


def _numpy_integers(kind: ParameterType) -> frozenset[type]:
    """Return the usual types of the scalars that fit; C has more, such as `long long` beside `long`."""
    kinds = {"signed": "i", "unsigned": "u", "pointer": "u"}.get(kind.kind, "iu")
    return frozenset(np.dtype(f"{letter}{kind.size}").type for letter in kinds)


def _named_integer(kind: ParameterType) -> str:
    return f"numpy.{'uint' if kind.kind in ('unsigned', 'pointer') else 'int'}{8 * kind.size}(...)"


# Floating point


class _Format(NamedTuple):
    """A floating point format: binary digits, and the first number that rounds to infinity."""

    digits: int
    bound: float


_HALF = _Format(11, 65520.0)
_BFLOAT16 = _Format(8, (2 - 2.0**-8) * 2.0**127)
_SINGLE = _Format(24, (2 - 2.0**-24) * 2.0**127)
_DOUBLE = _Format(53, math.inf)

_FLOATS: dict[int, tuple[str, _Format, type[np.floating[Any]]]] = {
    2: ("e", _HALF, np.float16),
    4: ("f", _SINGLE, np.float32),
    8: ("d", _DOUBLE, np.float64),
}


def _float(parameter: Parameter) -> Conversion:
    code, form, scalar_type = _FLOATS[parameter.type.size]

    def convert(value: Any, queue: Queue) -> float:
        return float(value) if type(value) is scalar_type else _as_float(value, parameter, form)

    # Infinity and what is no number are left to `convert`.
    is_common = f"type(value) is float and {-form.bound!r} < value < {form.bound!r}"
    native = Native("f", bound=form.bound) if code in "fd" else NONE
    return Conversion(code, convert, is_common.replace("inf", "infinity"), "value", native=native)


def _bfloat16(parameter: Parameter) -> Conversion:
    """The upper half of a float32. NumPy has no such type; that of `ml_dtypes` is taken."""

    def convert(value: Any, queue: Queue) -> int:
        if isinstance(value, np.generic) and value.dtype.name == "bfloat16":
            return int.from_bytes(value.tobytes(), "little")
        return _round_to_bfloat16(_as_float(value, parameter, _BFLOAT16))

    return Conversion("H", convert, "False", "value")


def _round_to_bfloat16(value: float) -> int:
    if math.isnan(value):
        return 0x7FC0
    packed = struct.pack("<f", value)
    (bits,) = struct.unpack("<I", packed)
    (single,) = struct.unpack("<f", packed)
    odd = bits >> 16 & 1
    half = bits & 0xFFFF
    # The float32 has been rounded already: at a tie, `value` itself tells on which side of it it lies.
    is_above = half > 0x8000 or (half == 0x8000 and abs(value) > abs(single))
    is_tie = half == 0x8000 and value == single
    return int(bits >> 16) + int(is_above or (is_tie and odd))


def _as_float(value: Any, parameter: Parameter, form: _Format) -> float:
    if isinstance(value, (np.generic, np.ndarray, ctypes._SimpleCData)):
        scalar = _as_scalar(value)
        if scalar is None or scalar.dtype.kind != "f" or scalar.dtype.itemsize != parameter.type.size:
            raise parameter.misfit(value, f"a float of its size, such as {_numpy_float(parameter.type)}")
        return float(scalar)
    if isinstance(value, int) and not isinstance(value, bool):
        if not _holds(form, value):
            raise parameter.misfit(value, f"a float, or an int that {parameter.type} holds exactly")
        return float(value)
    if not isinstance(value, float):
        raise parameter.misfit(value, "a float")
    if math.isfinite(value) and not -form.bound < value < form.bound:
        raise parameter.misfit(value, f"a float of a size below {form.bound:.6g}")
    return value


def _holds(form: _Format, value: int) -> bool:
    """Whether an integer is in the format's range and has no more binary digits than it."""
    largest = min(form.bound, 2.0**1023)
    return -largest < value < largest and (
        value == 0 or (abs(value) // (value & -value)).bit_length() <= form.digits
    )


def _numpy_float(kind: ParameterType) -> str:
    return "ml_dtypes.bfloat16(...)" if kind.kind == "bfloat16" else f"numpy.float{8 * kind.size}(...)"


# Pointers


def _pointer(parameter: Parameter) -> Conversion:
    """Pointers, and the 64-bit integers that PTX writes in the same way."""
    lowest, highest = _range(parameter.type)
    mask = (1 << 64) - 1

    def convert(value: Any, queue: Queue) -> int:
        number = _as_address(value, queue, parameter)
        if not lowest <= number <= highest:
            raise parameter.misfit(value, f"a device buffer, None, or an integer from {lowest} to {highest}")
        return number & mask

    native = Native("p", lowest, min(highest, MOST_IN_C))
    # That the context itself is open, the launch has found out before.
    is_common = "type(value) is DeviceBuffer and value.usable_in is context"
    return Conversion("Q", convert, is_common, "value.address", "value.uses[queue.key] = queue", native)


def _as_address(value: Any, queue: Queue, parameter: Parameter) -> int:
    if isinstance(value, DeviceBuffer):
        return buffer_address(value, queue)
    if isinstance(value, DeviceArray):
        buffer_address(value.buffer, queue)
        return value.address
    if isinstance(value, (PinnedBuffer, ManagedBuffer)):
        return value.address_for(queue)
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value)
    scalar = _as_scalar(value)
    if scalar is not None:
        if not _is_integer_of(scalar, parameter.type):
            raise parameter.misfit(value, f"a device buffer, or {_named_integer(parameter.type)}")
        return int(scalar)
    if isinstance(value, ctypes.c_void_p):
        return value.value or 0
    try:
        address = foreign_address(value, queue)
    except (TypeError, ValueError) as error:  # of our own checks, or of the other library
        raise parameter.misfit(value, f"a device buffer ({error})") from error
    if address is None:
        raise parameter.misfit(value, _ON_HOST if _is_on_host(value) else "a device buffer, None, or an int")
    return address


_ON_HOST = "memory of the GPU: allocate it with context.alloc(nbytes), fill it with buffer.copy_from(array)"


def _is_on_host(value: Any) -> bool:
    if isinstance(value, (str, bytes, bytearray, memoryview, list, tuple, ctypes.Array)):
        return True
    return hasattr(type(value), "__array_interface__") or hasattr(type(value), "__dlpack__")


# Structures, and what is known by its size only


def _bytes(parameter: Parameter) -> Conversion:
    size = parameter.type.size
    expected = f"a structure of exactly {size} bytes: bytes, a NumPy structured scalar or a ctypes structure"

    def convert(value: Any, queue: Queue) -> bytes:
        content = _content(value)
        if content is None or len(content) != size:
            hint = " (an array has its own in array.tobytes())" if isinstance(value, np.ndarray) else ""
            raise parameter.misfit(value, expected + hint)
        return content

    is_common = f"type(value) is bytes and len(value) == {size}"
    return Conversion(f"{size}s", convert, is_common, "value", native=Native("s"))


def _bits(parameter: Parameter) -> Conversion:
    size = parameter.type.size
    pointer = _pointer(parameter) if size == 8 else None
    expected = (
        f"a NumPy scalar of exactly {size} bytes{', or a device buffer' if pointer else ''} (only its size "
        'is known: with program.kernel(name, signature="int32, pointer") Python numbers fit too)'
    )

    def convert(value: Any, queue: Queue) -> bytes:
        content = _content(value)
        if content is None and pointer is not None and not isinstance(value, (int, float)):
            address: int = pointer.convert(value, queue)
            return address.to_bytes(8, "little")
        if content is None or len(content) != size:
            raise parameter.misfit(value, expected)
        return content

    if pointer is None:
        return Conversion(f"{size}s", convert, "False", "value")
    common = "value.address.to_bytes(8, 'little')"
    no_ints = Native("p", lowest=1, highest=0)
    return Conversion("8s", convert, pointer.is_common, common, pointer.note, no_ints)


def _content(value: Any) -> bytes | None:
    """Return the bytes of a value that is a plain piece of memory; None for anything else."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    scalar = _as_scalar(value)
    if scalar is not None:
        return scalar.tobytes()
    if isinstance(value, memoryview) and value.contiguous:
        return value.tobytes()
    if isinstance(value, (ctypes.Structure, ctypes.Union, ctypes.Array)):
        return bytes(value)
    return None


def _as_scalar(value: Any) -> np.generic | None:
    """Return the NumPy scalar that a NumPy scalar, 0-dimensional array or ctypes number is."""
    if isinstance(value, np.generic):
        return value
    if isinstance(value, ctypes._SimpleCData):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, NotImplementedError):  # of a c_void_p or c_char_p
            return None
    if not isinstance(value, np.ndarray) or value.ndim:
        return None
    element = value[()]
    return element if isinstance(element, np.generic) else None


def _describe(value: Any) -> str:
    """Say what a value is, in a few words."""
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape} and type {value.dtype}"
    if isinstance(value, np.generic):
        return f"numpy.{value.dtype.name} {str(value)[:40]}"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)):
        return f"a {type(value).__name__} of {ctypes.sizeof(value)} bytes"
    if value is None or isinstance(value, (int, float, DeviceBuffer)):
        text = repr(value)
        return text if isinstance(value, DeviceBuffer) or len(text) <= 60 else f"{text[:56]}..."
    return f"an object of type {type(value).__name__}"


_MAKERS: dict[str, Callable[[Parameter], Conversion]] = {
    "integer": _integer,
    "signed": _integer,
    "unsigned": _integer,
    "float": _float,
    "bfloat16": _bfloat16,
    "pointer": _pointer,
    "word": _pointer,
    "bits": _bits,
    "bytes": _bytes,
}
