"""What kernels say: the text of `printf`, and the words of a failed assertion.

The format and its arguments are read as the CUDA runtime lays them out: each argument at the next
multiple of its size, 4 bytes for int, 8 for double, long long and pointers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

_SPECIFIER = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?"
    rb"(?P<length>hh|h|ll|l|z|j|t|L)?(?P<kind>[a-zA-Z%])"
)
Read = Callable[[int, int], bytes]
"""(address, bytes) -> what is there; may return less."""


def format_text(template: bytes, arguments: bytes, read_string: Callable[[int], bytes]) -> tuple[bytes, int]:
    """Carry out `printf`; returns the text and how many arguments were used."""
    reader = _Arguments(arguments)

    def replace(match: re.Match[bytes]) -> bytes:
        kind = match["kind"]
        if kind == b"%":
            return b"%"
        width = _number(match["width"], reader)
        precision = _number(match["precision"], reader)
        return _converted(match, kind, width, precision, reader, read_string)

    return _SPECIFIER.sub(replace, template), reader.count


class _Arguments:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0
        self.count = 0

    def next(self, size: int, code: str) -> int | float:
        self._place = -(-self._place // size) * size
        data = self._data[self._place : self._place + size].ljust(size, b"\0")
        self._place += size
        self.count += 1
        value: int | float = struct.unpack(f"<{code}", data)[0]
        return value


def _number(text: bytes | None, reader: _Arguments) -> int | None:
    if text is None:
        return None
    if text == b"*":
        return int(reader.next(4, "i"))
    return int(text or b"0")


def _converted(
    match: re.Match[bytes],
    kind: bytes,
    width: int | None,
    precision: int | None,
    reader: _Arguments,
    read_string: Callable[[int], bytes],
) -> bytes:
    flags = match["flags"].decode()
    if width is not None and width < 0:
        flags, width = flags + "-", -width
    wide = match["length"] in (b"ll", b"l", b"z", b"j", b"t")
    letter = kind.decode()
    spec = "%" + flags + (str(width) if width is not None else "")
    if precision is not None and precision >= 0:
        spec += f".{precision}"
    if letter in "di":
        return (spec + "d").encode() % int(reader.next(8 if wide else 4, "q" if wide else "i"))
    if letter in "uoxX":
        value = int(reader.next(8 if wide else 4, "Q" if wide else "I"))
        return (spec + ("d" if letter == "u" else letter)).encode() % value
    if letter == "c":
        return (spec + "c").encode() % (int(reader.next(4, "i")) & 255)
    if letter == "p":
        return (spec + "s").encode() % f"{int(reader.next(8, 'Q')):#x}".encode()
    if letter == "s":
        return (spec + "s").encode() % read_string(int(reader.next(8, "Q")))
    if letter in "eEfFgG":
        return (spec + letter).encode() % reader.next(8, "d")
    if letter in "aA":
        return float(reader.next(8, "d")).hex().encode()
    return match[0]
