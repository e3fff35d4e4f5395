"""PTX text to tokens.

An opcode with its modifiers is one token (`ld.global.nc.v4.f32`), so is a special register with its
component (`%tid.x`) and a directive (`.reg`). A pass over the lines with one regular expression
keeps this affordable for texts of many megabytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpufleet.virtual.ptx.errors import invalid

_TOKEN = re.compile(
    r"""//.*                                                    # dropped: it is outside the group
    | ( (?:[A-Za-z][\w$]*|[_$%][\w$]*) (?:\.[A-Za-z][\w$]*(?:::[\w$]+)*)*   # name, opcode, %tid.x
      | \.[A-Za-z_][\w$]*(?:::[\w$]+)*                          # directive or modifier
      | 0[fF][0-9A-Fa-f]{8} | 0[dD][0-9A-Fa-f]{16}              # bits of a float
      | 0[xX][0-9A-Fa-f]+U? | 0[bB][01]+U?
      | \d+\.\d*(?:[eE][+-]?\d+)? | \.\d+(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+
      | \d+U?
      | "(?:[^"\\]|\\.)*"
      | << | >> | <= | >= | == | != | && | \|\|
      | [^\s]
      )""",
    re.ASCII | re.VERBOSE,
)
_BLOCK_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|(/\*.*?(?:\*/|\Z))', re.DOTALL)
_MASK = (1 << 64) - 1
_PUNCTUATION = frozenset("{}()[]<>;:,@!|+-*/%?=&^~_") | {"<<", ">>", "<=", ">=", "==", "!=", "&&", "||"}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text and the 1-based line of each, closed by two "" that no rule accepts."""

    texts: list[str]
    lines: list[int]


def tokenize(text: str) -> Tokens:
    """Split a PTX text; raises `PtxError` for a character that PTX does not have."""
    text = text.split("\0", 1)[0]
    if "/*" in text:
        text = _BLOCK_COMMENT.sub(_keep_newlines, text)
    texts: list[str] = []
    lines: list[int] = []
    find = _TOKEN.findall
    for number, line in enumerate(text.split("\n"), 1):
        found = find(line)
        if "//" in line:
            found = [token for token in found if token]
        texts += found
        lines += [number] * len(found)
    _refuse_foreign_characters(texts, lines)
    last = lines[-1] if lines else 1
    return Tokens([*texts, "", ""], [*lines, last, last])


def integer(token: str) -> int | None:
    """Return the value of an integer literal, or None if the token is not one."""
    digits = token[:-1] if token.endswith("U") else token
    if not digits[:1].isdigit():
        return None
    try:
        if digits[:2] in ("0x", "0X"):
            return int(digits[2:], 16) & _MASK
        if digits[:2] in ("0b", "0B"):
            return int(digits[2:], 2) & _MASK
        if len(digits) > 1 and digits[0] == "0":
            return int(digits, 8) & _MASK
        return int(digits) & _MASK if len(digits) < 40 else None
    except ValueError:
        return None


def _keep_newlines(match: re.Match[str]) -> str:
    comment: str | None = match.group(1)
    return match.group() if comment is None else " " + "\n" * comment.count("\n")


def _refuse_foreign_characters(texts: list[str], lines: list[int]) -> None:
    for text in set(texts):
        if len(text) == 1 and not (text.isascii() and text.isalnum()) and text not in _PUNCTUATION:
            raise invalid(f"unexpected character {text!r}", lines[texts.index(text)])
