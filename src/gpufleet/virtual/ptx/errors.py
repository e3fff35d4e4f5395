"""What can be wrong with a PTX text."""

from __future__ import annotations


class PtxError(Exception):
    """A PTX text that cannot be used.

    `code` is the name of a `CUresult` without its `CUDA_ERROR_` prefix: INVALID_PTX (malformed, or an
    opcode that PTX does not have), UNSUPPORTED_PTX_VERSION (`.version` newer than is known), or
    NOT_SUPPORTED (valid PTX that gpufleet does not carry out; the message starts with "unsupported PTX").
    `line` is the 1-based line of the text, 0 where there is none.
    """

    def __init__(self, code: str, message: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.code = code
        self.line = line
        self.message = message

    def __reduce__(self) -> tuple[type[PtxError], tuple[str, str, int]]:
        return PtxError, (self.code, self.message, self.line)


def invalid(message: str, line: int = 0) -> PtxError:
    """Make the error for a text that is not PTX."""
    return PtxError("INVALID_PTX", message, line)


def unsupported(message: str, line: int = 0) -> PtxError:
    """Make the error for PTX that gpufleet does not carry out."""
    return PtxError("NOT_SUPPORTED", f"unsupported PTX: {message}", line)
