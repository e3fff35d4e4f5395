"""How a fatbin's entries are unpacked, from bytes that may be damaged or hostile.

Both functions allocate what the data really unpacks to, never what it merely claims.
"""

from __future__ import annotations

import sys

from gpufleet.fatbin.errors import FatbinError

LARGEST_IMAGE = 1 << 30
"""The most bytes that one entry may unpack to. Real ones have a few MiB at most."""

# Unpacked so many bytes at a time, so that the claimed size alone never allocates.
_STEP = 1 << 20

# 8 MiB: what RFC 8878 (3.1.1.1.2) wants every decoder to support, however small the content.
_LEAST_WINDOW_LOG = 23


def decompress_zstd(packed: bytes, size: int) -> bytes:
    """Return the `size` bytes that one zstd frame holds.

    Raises
    ------
    FatbinError
        The frame is damaged, or holds more or fewer bytes.
    """
    if packed[:4] != b"\x28\xb5\x2f\xfd":
        # nvcc 13 writes LTO code in a form that only NVIDIA's linker reads; its key is in the header.
        raise FatbinError("it is flagged as zstd but holds no zstd frame (LTO code is scrambled so)")
    from_library = _zstd_standard_library if sys.version_info >= (3, 14) else _zstd_package
    return _checked(from_library(packed, size), size, "zstd")


def decompress_lz4(packed: bytes, size: int) -> bytes:
    """Return the `size` bytes that one LZ4 block holds.

    The format: https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md

    Raises
    ------
    FatbinError
        The block is damaged, or holds more or fewer bytes.
    """
    out = bytearray()
    at = 0
    try:
        while at < len(packed):
            token = packed[at]
            literals, at = _lz4_length(packed, at + 1, token >> 4)
            if at + literals > len(packed):
                raise IndexError
            out += packed[at : at + literals]
            at += literals
            if at == len(packed) or len(out) > size:
                break
            distance = packed[at] | packed[at + 1] << 8
            count, at = _lz4_length(packed, at + 2, token & 15)
            count += 4
            if not 0 < distance <= len(out):
                raise FatbinError(f"its LZ4 block refers {distance} bytes back at byte {len(out)}")
            if len(out) + count > size:
                raise FatbinError(f"its LZ4 block holds more than the {size} bytes it should")
            start = len(out) - distance
            pattern = out[start : start + count]
            # A match may overlap what it writes: the pattern then repeats.
            out += (pattern * (count // len(pattern) + 1))[:count]
    except IndexError:
        raise FatbinError("its LZ4 block is cut short") from None
    return _checked(bytes(out), size, "LZ4")


def _lz4_length(packed: bytes, at: int, length: int) -> tuple[int, int]:
    """A length whose first 4 bits are given, and where the next field stands."""
    if length == 15:
        while True:
            length += packed[at]
            at += 1
            if packed[at - 1] != 255:
                break
    return length, at


def _zstd_standard_library(packed: bytes, size: int) -> bytes:
    """Unpack one frame, stopping one byte after `size`."""
    from compression import zstd

    limit = {zstd.DecompressionParameter.window_log_max: _window_log(size)}
    decompressor = zstd.ZstdDecompressor(options=limit)
    try:
        return bytes(decompressor.decompress(packed, size + 1))
    except zstd.ZstdError as error:
        raise FatbinError(f"its zstd frame is damaged ({error})") from None


def _zstd_package(packed: bytes, size: int) -> bytes:
    """Do the same before Python 3.14, with the package `zstandard`."""
    import zstandard

    # Not the one-shot call: it believes the frame's claim of its size and allocates that.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _window_log(size))
    out = bytearray()
    try:
        with decompressor.stream_reader(packed, read_across_frames=False) as reader:
            while len(out) <= size and (part := reader.read(min(_STEP, size + 1 - len(out)))):
                out += part
    except zstandard.ZstdError as error:
        raise FatbinError(f"its zstd frame is damaged ({error})") from None
    return bytes(out)


def _window_log(size: int) -> int:
    """The largest window to allow a frame: it claims that itself, and the decoder allocates it at once."""
    return max(_LEAST_WINDOW_LOG, (size - 1).bit_length())


def _checked(out: bytes, size: int, method: str) -> bytes:
    if len(out) == size:
        return out
    found = f"more than the {size}" if len(out) > size else f"{len(out)} of the {size}"
    raise FatbinError(f"its {method} data holds {found} bytes it should")
