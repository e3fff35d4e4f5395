"""What kind of file is this? Told from its content, never from its name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from gpufleet.fatbin.container import MAGIC, Entry, read
from gpufleet.fatbin.elf import EM_CUDA, is_elf, read_sections
from gpufleet.fatbin.errors import FatbinError

# Fatbins of whole programs, and of objects that nvcc compiled with -rdc=true.
_HOST_SECTIONS = (".nv_fatbin", "__nv_relfatbin")

# `.version` comes first in PTX, after blanks and comments (PTX ISA, "PTX Module Directives").
_BLANK = re.compile(rb"[ \t\r\n\f\v]+|//[^\n]*(?:\n|$)|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/")
_VERSION = re.compile(rb"\.version[ \t]")


def identify(data: bytes) -> Literal["ptx", "cubin", "fatbin", "unknown"]:
    """Say what an image is, from its first bytes: it may still be damaged further on."""
    if data[:4] == MAGIC.to_bytes(4, "little"):
        return "fatbin"
    if is_elf(data):
        return "cubin" if data[18:20] == EM_CUDA.to_bytes(2, "little") else "unknown"
    return "ptx" if _starts_like_ptx(data) else "unknown"


def read_file(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries of a fatbin file, or of all fatbins in an executable, library or object file.

    Raises
    ------
    FatbinError
        The file is damaged, or has no fatbin in it.
    OSError
        The file cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        return read_host(data) if is_elf(data) else read(data)
    except FatbinError as error:
        raise FatbinError(f"{path}: {error}") from error.__cause__


def read_host(data: bytes) -> list[Entry]:
    """Return the entries of all fatbins in an executable, library or object file (ELF).

    Raises
    ------
    FatbinError
        The file is damaged, or has no device code.
    """
    if identify(data) == "cubin":
        raise FatbinError("This is a cubin, not a fatbin: it is machine code for one architecture.")
    found = [section for section in read_sections(data) if section.name in _HOST_SECTIONS]
    if not found:
        raise FatbinError("This host binary has no device code: no section is named .nv_fatbin.")
    return [entry for section in found for entry in read(bytes(section.data)) if section.data]


def _starts_like_ptx(data: bytes) -> bool:
    at = 0
    while blank := _BLANK.match(data, at):
        at = blank.end()
    return _VERSION.match(data, at) is not None
