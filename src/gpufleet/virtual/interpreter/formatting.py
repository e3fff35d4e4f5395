"""The conversions of printf, as CUDA has them."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

_SPECIFIER = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?P<precision>\.(?:\*|\d*))?(?P<size>hh|h|ll|l|z|t|j)?"
    rb"(?P<kind>[diouxXcsfFeEgGaAp%])"
)
_WIDEST = 1 << 16


def format_message(
    template: bytes, arguments: int, read: Callable[[int, int], bytes], string: Callable[[int], bytes]
) -> tuple[bytes, int]:
    """Return a message and how many arguments it took.

    Parameters
    ----------
    template : bytes
        The format.
    arguments : int
        Address of the arguments, which lie as in a C struct: int at 4, double and long long at 8 bytes.
    read, string : callable
        Return so many bytes at an address, and the bytes there up to a 0.
    """
    values = _Arguments(arguments, read)
    parts: list[bytes] = []
    position = 0
    for found in _SPECIFIER.finditer(template):
        parts.append(template[position : found.start()])
        position = found.end()
        parts.append(_convert(found, values, string))
    parts.append(template[position:])
    return b"".join(parts), values.count


class _Arguments:
    """Walks through the arguments."""

    def __init__(self, address: int, read: Callable[[int, int], bytes]) -> None:
        self._start = self._address = address
        self._read = read
        self.count = 0

    def take(self, code: str) -> int | float:
        size = struct.calcsize(code)
        offset = -(-(self._address - self._start) // size) * size
        self._address = self._start + offset + size
        self.count += 1
        value: int | float = struct.unpack(f"<{code}", self._read(self._start + offset, size))[0]
        return value

    def integer(self, code: str) -> int:
        return int(self.take(code))


def _convert(found: re.Match[bytes], values: _Arguments, string: Callable[[int], bytes]) -> bytes:
    kind = found["kind"].decode()
    if kind == "%":
        return b"%"
    flags = found["flags"].decode()
    width = _number(found["width"], values)
    if width < 0:
        flags, width = f"{flags}-", -width
    given = found["precision"]
    precision = None if given is None else max(_number(given[1:], values), 0)
    width = min(width, _WIDEST)
    precision = None if precision is None else min(precision, _WIDEST)
    long = (found["size"] or b"") in (b"l", b"ll", b"z", b"t", b"j")
    if kind in "di":
        body = _signed(values.integer("q" if long else "i"), flags, width, precision)
    elif kind in "ouxX":
        body = _unsigned(values.integer("Q" if long else "I"), kind, flags, width, precision)
    elif kind == "c":
        return _padded(bytes([values.integer("i") & 0xFF]), flags, width)
    elif kind == "s":
        return _padded(string(values.integer("Q"))[:precision], flags, width)
    elif kind == "p":
        body = f"0x{values.integer('Q'):x}"
    else:
        body = _floating(float(values.take("d")), kind, flags, width, precision)
    return _padded(body.encode(), flags, width)


def _number(text: bytes | None, values: _Arguments) -> int:
    if not text:
        return 0
    return values.integer("i") if text == b"*" else min(int(text), _WIDEST)


def _padded(text: bytes, flags: str, width: int) -> bytes:
    return text.ljust(width) if "-" in flags else text.rjust(width)


def _signed(value: int, flags: str, width: int, precision: int | None) -> str:
    sign = "-" if value < 0 else "+" if "+" in flags else " " if " " in flags else ""
    return sign + _digits(str(abs(value)), flags, width - len(sign), precision)


def _unsigned(value: int, kind: str, flags: str, width: int, precision: int | None) -> str:
    text = {"o": f"{value:o}", "u": str(value), "x": f"{value:x}", "X": f"{value:X}"}[kind]
    if "#" in flags and kind == "o" and not text.startswith("0"):
        text = f"0{text}"
    prefix = f"0{kind}" if "#" in flags and kind in "xX" and value else ""
    return prefix + _digits(text, flags, width - len(prefix), precision)


def _digits(text: str, flags: str, width: int, precision: int | None) -> str:
    if precision is not None:
        return "" if precision == 0 and text == "0" else text.zfill(precision)
    return text.zfill(width) if "0" in flags and "-" not in flags else text


def _floating(value: float, kind: str, flags: str, width: int, precision: int | None) -> str:
    sign = "-" if math.copysign(1, value) < 0 else "+" if "+" in flags else " " if " " in flags else ""
    magnitude = abs(value)
    if not math.isfinite(magnitude):
        text = "inf" if math.isinf(magnitude) else "nan"
        return sign + (text.upper() if kind.isupper() else text)
    if kind in "aA":
        text = _hexadecimal(magnitude, precision)
        text = text.upper() if kind == "A" else text
    else:
        text = f"%{'#' if '#' in flags else ''}.{6 if precision is None else precision}{kind}" % magnitude
    if "0" in flags and "-" not in flags:
        text = text.zfill(width - len(sign))
    return sign + text


def _hexadecimal(value: float, precision: int | None) -> str:
    """Shorten Python's 13 digits as C does: no trailing zeros, unless a precision asks for them."""
    mantissa, exponent = value.hex().split("p")
    head, _, digits = mantissa.partition(".")
    if precision is None:
        digits = digits.rstrip("0")
    elif precision < len(digits):
        scaled = round(int(head[2:] + digits, 16) / 16 ** (len(digits) - precision))
        whole = f"{scaled:x}".rjust(precision + 1, "0")
        head, digits = f"0x{whole[: len(whole) - precision]}", whole[len(whole) - precision :]
    else:
        digits = digits.ljust(precision, "0")
    return f"{head}.{digits}p{exponent}" if digits else f"{head}p{exponent}"
