"""What is in a fatbin: its entries, each PTX or machine code for one architecture.

NVIDIA does not document the format. What stands here was found by taking apart what nvcc 13.0 writes
in each of its compression modes, and agrees with what `cuobjdump` prints of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from gpufleet.fatbin.decompress import LARGEST_IMAGE, decompress_lz4, decompress_zstd
from gpufleet.fatbin.errors import FatbinError

MAGIC = 0xBA55ED50

# Magic, version, bytes of this header, bytes of all entries.
_FILE_HEADER = struct.Struct("<IHHQ")

# Kind, version, header bytes, stored bytes (padded to 8), compressed bytes (0 if plain), offset of the
# options, minor and major version, architecture, offset and length of the name, flags, a key that only
# LTO code has, raw bytes (0 if plain). Offsets count from the entry's first byte.
_ENTRY_HEADER = struct.Struct("<HHIQIIHHIIIQQQ")

_KINDS = {1: "ptx", 2: "cubin", 8: "lto"}
_KIND_NAMES = {"ptx": "PTX", "cubin": "machine code", "lto": "LTO code"}

_FLAG_LZ4 = 0x2000
_FLAG_ZSTD = 0x8000
_FLAG_SUFFIX_A = 0x100000
_FLAG_SUFFIX_F = 0x200000


@dataclass(frozen=True)
class Entry:
    """One image of a fatbin, still packed.

    Attributes
    ----------
    kind : str
        ``"ptx"``, ``"cubin"`` (machine code), ``"lto"``, or ``"kind-N"`` for a kind that is not known.
    arch : int
        The architecture: 90 is sm_90.
    arch_suffix : str
        ``"a"`` for code that only this architecture runs (sm_90a), ``"f"`` for its family, or ``""``.
    version : tuple of int
        The `.version` of PTX; the version of the code's format for other kinds.
    flags : int
        The flags as the file has them.
    name : str
        The source's file name in code built with ``-G`` or ``-lineinfo``, or the identifier given to
        nvFatbin; often empty.
    options : str
        The options for ptxas that go with PTX; often empty.
    compression : str
        ``"none"``, ``"lz4"`` or ``"zstd"``.
    stored : bytes
        The content as the file has it; `data` unpacks it.
    size : int
        Bytes of the content once unpacked. PTX ends with a NUL that counts, and plain content with up
        to 7 bytes of padding that count too.
    """

    kind: str
    arch: int
    arch_suffix: str
    version: tuple[int, int]
    flags: int
    name: str
    options: str
    compression: str
    stored: bytes = field(repr=False)
    size: int

    @property
    def target(self) -> str:
        """The architecture in the compiler's words, such as ``"sm_90a"``."""
        return f"sm_{self.arch}{self.arch_suffix}"

    def data(self) -> bytes:
        """Return the content, unpacked.

        Raises
        ------
        FatbinError
            The content is damaged, claims more than 1 GiB, or does not unpack to the length it claims.
        """
        if self.compression == "none":
            return self.stored
        unpack = decompress_zstd if self.compression == "zstd" else decompress_lz4
        try:
            return unpack(self.stored, self.size)
        except FatbinError as error:
            raise FatbinError(f"The {self} cannot be unpacked: {error}.") from error.__cause__

    def text(self) -> str:
        """Return the text of PTX, without the NUL that ends it.

        Raises
        ------
        FatbinError
            This is no PTX, or its content is damaged.
        """
        if self.kind != "ptx":
            raise FatbinError(f"The entry with {self} is no PTX and has no text.")
        try:
            return self.data().rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise FatbinError(f"The {self} is damaged: byte {error.start} is no text.") from None

    def __str__(self) -> str:
        kind = _KIND_NAMES.get(self.kind, self.kind)
        packed = "" if self.compression == "none" else f", {self.compression}"
        return f"{kind} for {self.target}, {_readable(self.size)}{packed}"


def read(data: bytes) -> list[Entry]:
    """Return the entries of all fatbins that lie one after another in `data`.

    Contents stay packed until `Entry.data` is called. Zero bytes between and after the fatbins are
    skipped, as linkers pad with them.

    Parameters
    ----------
    data : bytes
        One fatbin or several, from the first byte on. For a host binary use `read_host`; for bytes
        behind a pointer, whose end is not known, ask `length` first.

    Raises
    ------
    FatbinError
        The data is no fatbin, is cut short, or has a field that cannot be.
    """
    data = bytes(data)
    entries: list[Entry] = []
    offset = 0
    while offset < len(data):
        end = offset + _fatbin_length(data, offset)
        entries += _read_entries(data, offset + _header_length(data, offset), end)
        offset = _skip_zeros(data, end)
    if not data:
        raise FatbinError("This is no fatbin: it is empty.")
    return entries


def length(data: bytes) -> int:
    """Return how many bytes the first fatbin of `data` takes, reading only its 16-byte header.

    Raises
    ------
    FatbinError
        The header is missing or is none of a fatbin.
    """
    header_length = _header_length(data, 0)
    return header_length + int(_FILE_HEADER.unpack_from(data, 0)[3])


def summary(data: bytes) -> list[str]:
    """Say in one line per entry what a fatbin holds, such as "PTX for sm_75, 1.2 KiB, zstd"."""
    return [str(entry) for entry in read(data)]


def _header_length(data: bytes, offset: int) -> int:
    """Bytes of the file header at `offset`, which is checked to be one."""
    where = f" at byte {offset}" if offset else ""
    if len(data) - offset < _FILE_HEADER.size:
        raise FatbinError(
            f"This is no fatbin{where}: {len(data) - offset} bytes are left, its header alone takes 16."
        )
    magic, version, header_length, _ = _FILE_HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise FatbinError(f"This is no fatbin{where}: it starts with {magic:#010x}, not {MAGIC:#010x}.")
    if version != 1 or header_length < _FILE_HEADER.size:
        raise FatbinError(
            f"The fatbin's header{where} has version {version} and {header_length} bytes; "
            "gpufleet knows version 1 with at least 16."
        )
    return int(header_length)


def _fatbin_length(data: bytes, offset: int) -> int:
    """Bytes of the fatbin at `offset`, which is checked to be there as a whole."""
    announced = _header_length(data, offset) + int(_FILE_HEADER.unpack_from(data, offset)[3])
    present = len(data) - offset
    if announced > present:
        raise FatbinError(
            f"The fatbin is cut short: its header announces {announced} bytes, {present} are there. "
            "Copy or build the file again."
        )
    return announced


def _read_entries(data: bytes, offset: int, end: int) -> list[Entry]:
    entries = []
    while offset < end:
        entry, offset = _read_entry(data, offset, end)
        entries.append(entry)
    return entries


def _read_entry(data: bytes, offset: int, end: int) -> tuple[Entry, int]:
    """The entry at `offset`, and where the next one starts."""
    if end - offset < _ENTRY_HEADER.size:
        raise _damage(offset, f"{end - offset} bytes are left, its header alone takes {_ENTRY_HEADER.size}")
    (
        kind_number,
        _,
        header_length,
        stored_length,
        compressed_length,
        options_offset,
        minor,
        major,
        arch,
        name_offset,
        name_length,
        flags,
        _,
        raw_length,
    ) = _ENTRY_HEADER.unpack_from(data, offset)
    if not _ENTRY_HEADER.size <= header_length <= end - offset:
        raise _damage(offset, f"its header claims {header_length} bytes")
    start = offset + header_length
    if stored_length > end - start:
        raise _damage(offset, f"it claims {stored_length} bytes of content, {end - start} are left")

    compression = "zstd" if flags & _FLAG_ZSTD else "lz4" if flags & _FLAG_LZ4 else "none"
    if compression == "none":
        used, size = stored_length, stored_length
    else:
        used, size = compressed_length, raw_length
        if used > stored_length:
            raise _damage(offset, f"it claims {used} compressed bytes in {stored_length} stored ones")
        if size > LARGEST_IMAGE:
            raise _damage(offset, f"it claims to unpack to {size} bytes, the most is {LARGEST_IMAGE}")

    header = data[offset:start]
    kind = _KINDS.get(kind_number, f"kind-{kind_number}")
    entry = Entry(
        kind=kind,
        arch=arch,
        arch_suffix="f" if flags & _FLAG_SUFFIX_F else "a" if flags & _FLAG_SUFFIX_A else "",
        version=(major, minor),
        flags=flags,
        name=_text_at(header, name_offset, name_length, offset, "name"),
        # A cubin's options are a binary table (seen for sm_100f), not text.
        options="" if kind == "cubin" else _options(header, options_offset, offset),
        compression=compression,
        stored=data[start : start + used],
        size=size,
    )
    return entry, start + stored_length


def _options(header: bytes, options_offset: int, entry_offset: int) -> str:
    if not options_offset:
        return ""
    if options_offset + 8 > len(header):
        raise _damage(entry_offset, f"its options lie at {options_offset}, beyond its header")
    text_offset, text_length = struct.unpack_from("<II", header, options_offset)
    return _text_at(header, text_offset, text_length, entry_offset, "options")


def _text_at(header: bytes, start: int, count: int, entry_offset: int, what: str) -> str:
    if not count:
        return ""
    if start + count > len(header):
        raise _damage(entry_offset, f"its {what} of {count} bytes at {start} lies beyond its header")
    return header[start : start + count].rstrip(b"\0").decode(errors="replace").strip()


def _damage(offset: int, what: str) -> FatbinError:
    return FatbinError(f"The fatbin is damaged: of the entry at byte {offset}, {what}.")


def _skip_zeros(data: bytes, offset: int) -> int:
    """Where the next byte that is not zero stands, or the end."""
    block = 4096
    while offset < len(data):
        rest = data[offset : offset + block].lstrip(b"\0")
        if rest:
            return min(offset + block, len(data)) - len(rest)
        offset += block
    return len(data)


def _readable(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    if size < 1024 * 1024:
        return f"{size / 1024:.1f} KiB"
    return f"{size / (1024 * 1024):.1f} MiB"
