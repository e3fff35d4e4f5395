"""Which PTX of an image does a device run? Images are PTX texts, fatbins and cubins."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from typing import Any

from gpufleet import fatbin
from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.host_pointers import host_address, read_bytes

WRAPPER_MAGIC = 0x466243B1
"""First word of the structure (magic, version, pointer to the fatbin) that nvcc leaves in host programs."""
_WRAPPER = struct.Struct("<IIQ")
_ELF_SECTIONS = struct.Struct("<Q10xHHH")
"""e_shoff, and e_shentsize, e_shnum, e_shstrndx, from byte 40 of an ELF header on."""


def read_image(image: Any) -> bytes:
    """Return the bytes of an image given as bytes, another buffer, or an address.

    Behind an address, the image's own headers say where it ends; PTX ends at a NUL.
    """
    if isinstance(image, (bytes, bytearray)):
        data = bytes(image)
    else:
        address = host_address(image)
        if not address:
            raise Refusal("INVALID_VALUE", "the image is NULL")
        data = _read_at(address) if isinstance(image, int) or hasattr(image, "getPtr") else _read_all(image)
    if len(data) >= _WRAPPER.size and _first_word(data) == WRAPPER_MAGIC:
        return _read_at(_WRAPPER.unpack_from(data)[2])
    return data


def select_ptx(data: bytes, capability: tuple[int, int]) -> str:
    """Return the text of the newest PTX in an image that a device of this compute capability accepts.

    Which error a bad image gets is what driver 580 answers: INVALID_IMAGE for garbage, a damaged file or
    no bytes at all, NO_BINARY_FOR_GPU where nothing in the image is for the device. There is no machine
    code for virtual devices.
    """
    kind = fatbin.identify(data)
    if kind == "ptx":
        return _text(data)
    try:
        if kind == "fatbin":
            return _newest(fatbin.read(data), capability)
        if kind == "cubin":
            count = len(fatbin.cubin_kernels(data))
            raise _nothing_for(capability, f"a cubin for sm_{fatbin.cubin_arch(data)}, {count} kernels")
    except fatbin.FatbinError as error:
        raise Refusal("INVALID_IMAGE", str(error)) from error
    raise Refusal("INVALID_IMAGE", f"the image is no PTX, fatbin or cubin: it starts with {data[:16]!r}")


def accepts(capability: tuple[int, int], target: int, features: str) -> bool:
    """Say whether a device runs PTX for a target.

    Plain targets run on every later device; sm_90a on 9.0 alone; sm_100f on devices of the family, which
    have the same major version (CUDA Programming Guide, "Compute Capability and Family-Specific Targets").
    """
    wanted = divmod(target, 10)
    if features == "a":
        return capability == wanted
    if features == "f":
        return capability[0] == wanted[0] and capability[1] >= wanted[1]
    return capability >= wanted


def _newest(entries: Iterable[fatbin.Entry], capability: tuple[int, int]) -> str:
    entries = list(entries)
    fitting = [
        entry
        for entry in entries
        if entry.kind == "ptx" and accepts(capability, entry.arch, entry.arch_suffix)
    ]
    if not fitting:
        contents = ", ".join(str(entry) for entry in entries) or "nothing"
        raise _nothing_for(capability, contents)
    return _text(max(fitting, key=lambda entry: (entry.arch, entry.arch_suffix)).data())


def _nothing_for(capability: tuple[int, int], contents: str) -> Refusal:
    major, minor = capability
    return Refusal(
        "NO_BINARY_FOR_GPU",
        f"a virtual device of compute capability {major}.{minor} runs PTX for sm_{major}{minor} or older, "
        f"and the image holds {contents}: build it with PTX (gpufleet build --ptx 75)",
    )


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")


def _first_word(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


def _read_all(buffer: Any) -> bytes:
    return memoryview(buffer).tobytes()


def _read_at(address: int) -> bytes:
    head = ctypes.string_at(address, 4)  # the shortest image, an empty text, is read up to its NUL
    if b"\0" in head or not (_first_word(head) == WRAPPER_MAGIC or head in (_ELF_MAGIC, _FATBIN_MAGIC)):
        return ctypes.string_at(address)
    if head == _FATBIN_MAGIC:
        return read_bytes(address, fatbin.length(read_bytes(address, 16)))
    if head == _ELF_MAGIC:
        offset, size, count, _ = _ELF_SECTIONS.unpack(read_bytes(address + 40, _ELF_SECTIONS.size))
        return read_bytes(address, max(64, offset + size * count))
    return read_bytes(address, _WRAPPER.size)


_ELF_MAGIC = b"\x7fELF"
_FATBIN_MAGIC = bytes.fromhex("50ed55ba")
