"""A place in a list of tokens, and the few questions a parser asks there."""

from __future__ import annotations

from gpufleet.virtual.ptx.errors import PtxError, invalid
from gpufleet.virtual.ptx.tokens import Tokens, integer

_NAME_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_$%")


def is_name(token: str) -> bool:
    """Say whether a token is an identifier (an opcode is one too)."""
    return token[:1] in _NAME_START and token != "%"


class Cursor:
    """Reads tokens in order; every refusal is a `PtxError` with the line."""

    __slots__ = ("_end", "position", "texts", "tokens")

    def __init__(self, tokens: Tokens, position: int = 0) -> None:
        self.tokens = tokens
        self.texts = tokens.texts
        self.position = position
        self._end = len(tokens.texts) - 2

    @property
    def line(self) -> int:
        """Line of the next token."""
        return self.tokens.lines[self.position]

    @property
    def at_end(self) -> bool:
        """Whether every token has been read."""
        return self.position >= self._end

    def peek(self, ahead: int = 0) -> str:
        """Return the next token, or one further ahead, but not beyond a "", which stands at the end."""
        return self.texts[self.position + ahead]

    def next(self) -> str:
        """Read one token; "" at the end."""
        text = self.texts[self.position]
        if text:
            self.position += 1
        return text

    def accept(self, text: str) -> bool:
        """Read the next token if it is `text`."""
        if self.texts[self.position] == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Read the next token, which must be `text`."""
        if not self.accept(text):
            raise self.error(f"expected {text!r}")

    def name(self, what: str = "a name") -> str:
        """Read an identifier."""
        if not is_name(self.peek()):
            raise self.error(f"expected {what}")
        return self.next()

    def integer(self, what: str = "an integer") -> int:
        """Read an unsigned integer literal."""
        value = integer(self.peek())
        if value is None:
            raise self.error(f"expected {what}")
        self.position += 1
        return value

    def skip_past(self, text: str) -> None:
        """Read up to and with the next `text`."""
        try:
            self.position = self.texts.index(text, self.position) + 1
        except ValueError:
            raise self.error(f"expected {text!r} before the end of the text") from None

    def skip_braces(self) -> None:
        """Read a balanced `{ ... }`."""
        self.expect("{")
        depth = 1
        while depth:
            token = self.next()
            if token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
            elif not token:
                raise self.error("expected '}'")

    def error(self, message: str) -> PtxError:
        """Make an INVALID_PTX error about the next token."""
        token = self.peek()
        return invalid(
            f"{message}, found {token!r}" if token else f"{message}, found the end of the text", self.line
        )
