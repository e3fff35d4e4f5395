"""What are a kernel's parameters? Read from PTX, or from a signature in words.

>>> from gpufleet.signature import parse, read_ptx
>>> [str(p) for p in parse("int32, float64, pointer")]
['int32', 'float64', 'pointer']
>>> text = ".visible .entry add(.param .u64 .ptr .align 1 add_param_0, .param .f32 add_param_1)"
>>> [str(p) for p in read_ptx(text)["add"]]
['u64', 'f32']
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpufleet.errors import KernelArgumentError

Kind = Literal["integer", "signed", "unsigned", "float", "bfloat16", "pointer", "word", "bits", "bytes"]
"""What a parameter's bytes mean, as far as is known.

`integer`: signed or unsigned, as PTX of NVRTC does not tell (`.u32` is written for `int` too). `word`:
64 bits that are an integer or a pointer (`.u64` is written for both). `bits`: only the size is known.
`bytes`: a structure, passed by value.
"""


@dataclass(frozen=True)
class ParameterType:
    """One parameter's meaning and size in bytes; `str()` is how PTX or the signature writes it."""

    kind: Kind
    size: int
    text: str

    def __str__(self) -> str:
        return self.text


Signature = str | Sequence[Any]
"""Names separated by commas, such as "int32, float64, pointer"; or a sequence of such names, NumPy dtypes
and ctypes structures, such as `["pointer", np.float32, my_structured_dtype]`.
"""


def parse(signature: Signature) -> tuple[ParameterType, ...]:
    """Read a signature, the caller's own word on a kernel's parameters.

    The names: int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, bfloat16, float32,
    float64, pointer, and bytes[N] for a structure of N bytes. C++'s `bool` is a uint8.

    Raises
    ------
    KernelArgumentError
        If a name is none of these.
    """
    items: Sequence[Any] = signature.split(",") if isinstance(signature, str) else signature
    if isinstance(signature, str) and not signature.strip():
        return ()
    return tuple(_named(item.strip()) if isinstance(item, str) else _dtype(item) for item in items)


def read_ptx(text: str) -> dict[str, tuple[ParameterType, ...] | None]:
    """Return the parameters of every kernel that PTX text declares, by the kernel's name.

    None instead of parameters where one has a type that is not known here (`.texref` and its like):
    then only the driver knows their sizes.
    """
    # PTX ISA, "Kernel and Function Directives: .entry". Strings go too: a file name may hold anything.
    code = _COMMENT_OR_STRING.sub(" ", text)
    return {found[1]: _declared(found[2] or "") for found in _ENTRY.finditer(code)}


def unknown(size: int) -> ParameterType:
    """Return the type of a parameter of which only the driver's table tells, and that only the size."""
    return ParameterType("bits", size, "unknown type")


_COMMENT_OR_STRING = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^()]*)\))?")
_TOKEN = re.compile(r"\.\w+|\[\s*\w+\s*\]")

_SCALARS: dict[str, ParameterType] = {
    **{f".u{8 * size}": ParameterType("integer", size, f"u{8 * size}") for size in (1, 2, 4)},
    **{f".s{8 * size}": ParameterType("signed", size, f"s{8 * size}") for size in (1, 2, 4, 8)},
    **{f".b{8 * size}": ParameterType("bits", size, f"b{8 * size}") for size in (1, 2, 4, 8, 16)},
    **{f".f{8 * size}": ParameterType("float", size, f"f{8 * size}") for size in (2, 4, 8)},
    ".u64": ParameterType("word", 8, "u64"),
    ".f16x2": ParameterType("bits", 4, "f16x2"),
    ".bf16": ParameterType("bfloat16", 2, "bf16"),
}

_NAMES: dict[str, ParameterType] = {
    **{f"int{8 * size}": ParameterType("signed", size, f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": ParameterType("unsigned", size, f"uint{8 * size}") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": ParameterType("float", size, f"float{8 * size}") for size in (2, 4, 8)},
    "bfloat16": ParameterType("bfloat16", 2, "bfloat16"),
    "pointer": ParameterType("pointer", 8, "pointer"),
}


def _declared(parameters: str) -> tuple[ParameterType, ...] | None:
    """Read what stands between an entry's parentheses."""
    found = [_one(text) for text in parameters.split(",") if text.strip()]
    known = tuple(each for each in found if each is not None)
    return known if len(known) == len(found) else None


def _one(parameter: str) -> ParameterType | None:
    """Read one declaration, such as ``.param .align 16 .b8 name[32]``."""
    tokens = _TOKEN.findall(parameter)
    scalar = next((_SCALARS[token] for token in tokens if token in _SCALARS), None)
    if scalar is None:
        return None
    lengths = [token.strip("[] \t\r\n") for token in tokens if token[0] == "["]
    if lengths:
        if not all(re.fullmatch(r"[1-9]\d*U?|0[xX][0-9a-fA-F]+U?", length) for length in lengths):
            return None  # not a length: the driver will say what is wrong with this text
        size = scalar.size
        for length in lengths:
            size *= int(length.rstrip("U"), 0)
        return ParameterType("bytes", size, f"{scalar.text}[{size // scalar.size}]")
    if ".ptr" in tokens:
        return ParameterType("pointer", scalar.size, scalar.text)
    return scalar


def _named(name: str) -> ParameterType:
    known = _NAMES.get(name)
    if known is not None:
        return known
    structure = re.fullmatch(r"bytes\[\s*(\d+)\s*\]", name)
    if structure is None:
        raise KernelArgumentError(
            f"the signature names {name!r}: expected {', '.join(_NAMES)}, or bytes[N] for a structure of N "
            "bytes"
        )
    return ParameterType("bytes", int(structure[1]), f"bytes[{structure[1]}]")


def _dtype(item: Any) -> ParameterType:
    import numpy as np

    try:
        dtype = np.dtype(item)
    except TypeError:
        raise KernelArgumentError(
            f"the signature holds {item!r}: expected a name such as 'int32', a NumPy dtype or a ctypes "
            "structure"
        ) from None
    if dtype.name in _NAMES:
        return _NAMES[dtype.name]
    if dtype.kind == "b":
        return _NAMES["uint8"]
    return ParameterType("bytes", dtype.itemsize, f"{dtype.name}, bytes[{dtype.itemsize}]")
