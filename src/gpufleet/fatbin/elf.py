"""What is in an ELF file: the sections of host binaries, and the facts that a cubin states of itself.

Only 64-bit little-endian files, which is what every platform of CUDA 13 writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gpufleet.fatbin.errors import FatbinError

EM_CUDA = 190

# Up to the field e_shstrndx: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")

_TYPE_SYMBOLS = 2
_TYPE_NO_BITS = 8
_SYMBOL_FUNCTION = 2
_SYMBOL_UNDEFINED = 0
# Marks a `__global__` function, as against a `__device__` one, in the symbol's st_other byte.
_OTHER_ENTRY = 0x10


@dataclass(frozen=True)
class Header:
    """The fields of an ELF header that matter here."""

    machine: int
    abi_version: int
    flags: int
    sections_offset: int
    section_count: int
    names_index: int


@dataclass(frozen=True)
class Section:
    """One section: where it lies, and what kind it is."""

    name: str
    kind: int
    link: int
    data: memoryview


def is_elf(data: bytes) -> bool:
    """Say whether the data starts as an ELF file does."""
    return data[:4] == b"\x7fELF"


def read_header(data: bytes) -> Header:
    """Read the header of an ELF file.

    Raises
    ------
    FatbinError
        It is no ELF file, is cut short, or is not 64-bit little-endian.
    """
    if not is_elf(data):
        raise FatbinError("This is no ELF file.")
    if len(data) < _HEADER.size:
        raise FatbinError(f"The ELF file is cut short: it has {len(data)} bytes, its header alone takes 64.")
    (
        _,
        width,
        order,
        _,
        _,
        abi_version,
        _,
        machine,
        _,
        _,
        _,
        sections_offset,
        flags,
        _,
        _,
        _,
        _,
        count,
        names,
    ) = _HEADER.unpack_from(data)
    if (width, order) != (2, 1):
        raise FatbinError("The ELF file is not 64-bit little-endian, as all code for CUDA 13 is.")
    return Header(machine, abi_version, flags, sections_offset, count, names)


def read_sections(data: bytes) -> list[Section]:
    """Return all sections of an ELF file.

    Raises
    ------
    FatbinError
        The file is damaged.
    """
    header = read_header(data)
    if not header.sections_offset:
        return []
    raw = _section_headers(data, header)
    names_index = raw[0][6] if header.names_index == 0xFFFF else header.names_index
    if names_index >= len(raw):
        raise FatbinError(f"The ELF file is damaged: its names are in section {names_index} of {len(raw)}.")
    names = bytes(_section_data(data, names_index, raw[names_index]))
    return [
        Section(_string(names, fields[0]), fields[1], fields[6], _section_data(data, index, fields))
        for index, fields in enumerate(raw)
    ]


def cubin_arch(data: bytes) -> int:
    """Return the architecture that a cubin is for, such as 90.

    Raises
    ------
    FatbinError
        The data is no cubin.
    """
    header = _cubin_header(data)
    # ABI version 8 (CUDA 13) moved the architecture from the lowest byte of e_flags to the second.
    return header.flags >> 8 & 0xFF if header.abi_version >= 8 else header.flags & 0xFF


def cubin_kernels(data: bytes) -> list[str]:
    """Return the names of the kernels in a cubin, in the symbol table's order.

    C++ kernels have their mangled names.

    Raises
    ------
    FatbinError
        The data is no cubin, or is damaged.
    """
    _cubin_header(data)
    sections = read_sections(data)
    table = next((section for section in sections if section.kind == _TYPE_SYMBOLS), None)
    if table is None:
        return []
    if table.link >= len(sections):
        raise FatbinError(
            f"The cubin is damaged: its symbols' names are in section {table.link} of {len(sections)}."
        )
    names = bytes(sections[table.link].data)
    whole = table.data[: len(table.data) // _SYMBOL.size * _SYMBOL.size]
    starts = [
        name
        for name, info, other, section, _, _ in _SYMBOL.iter_unpack(whole)
        if info & 15 == _SYMBOL_FUNCTION and other & _OTHER_ENTRY and section != _SYMBOL_UNDEFINED
    ]
    return _strings(names, starts)


def _cubin_header(data: bytes) -> Header:
    header = read_header(data)
    if header.machine != EM_CUDA:
        raise FatbinError(f"The ELF file is no cubin: it is for machine {header.machine}, not {EM_CUDA}.")
    return header


def _section_headers(data: bytes, header: Header) -> list[tuple[int, ...]]:
    first = header.sections_offset
    count = header.section_count
    if not count and first + _SECTION.size <= len(data):
        # More sections than 16 bits count: the number stands in the size field of the first.
        count = _SECTION.unpack_from(data, first)[5]
    if not count or first + count * _SECTION.size > len(data):
        raise FatbinError(
            f"The ELF file is cut short: {count} section headers at byte {first} exceed {len(data)} bytes."
        )
    return list(_SECTION.iter_unpack(memoryview(data)[first : first + count * _SECTION.size]))


def _section_data(data: bytes, index: int, fields: tuple[int, ...]) -> memoryview:
    _, kind, _, _, offset, size, *_ = fields
    if kind in (0, _TYPE_NO_BITS):
        return memoryview(b"")
    if offset + size > len(data):
        raise FatbinError(
            f"The ELF file is cut short: section {index} has {size} bytes at {offset}, the file {len(data)}."
        )
    return memoryview(data)[offset : offset + size]


def _strings(table: bytes, starts: list[int]) -> list[str]:
    strings = []
    left = len(table)
    for start in starts:
        strings.append(_string(table, start))
        left -= len(strings[-1])
        if left < 0:
            # A hostile table can name all tails of one long string, whose lengths add up to gigabytes.
            raise FatbinError("The ELF file is damaged: its symbols' names overlap.")
    return strings


def _string(table: bytes, start: int) -> str:
    end = table.find(b"\0", start)
    if start >= len(table) or end < 0:
        raise FatbinError(
            f"The ELF file is damaged: no name ends after byte {start} of its {len(table)} bytes of names."
        )
    return table[start:end].decode(errors="replace")
