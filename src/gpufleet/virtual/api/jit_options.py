"""The options of loading PTX: of all there are, the log buffers have an effect here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.host_pointers import host_address, write_bytes


class JitLogs:
    """Write to the caller's log buffers why a load inside the `with` block is refused.

    Parameters
    ----------
    count : int
        How many of the options count.
    options : sequence of CUjit_option, or None
    values : sequence, or None
        A buffer is given as `bytes` (which is overwritten in place, as the bindings do), as another
        buffer, or as an address; its size by the option with SIZE_BYTES.
    """

    def __init__(self, count: int, options: Sequence[Any] | None, values: Sequence[Any] | None) -> None:
        kinds = bindings().CUjit_option
        given = dict(zip(list(options or ())[:count], values or (), strict=False))
        self._error = _buffer(given, kinds.CU_JIT_ERROR_LOG_BUFFER, kinds.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        self._info = _buffer(given, kinds.CU_JIT_INFO_LOG_BUFFER, kinds.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES)

    def __enter__(self) -> JitLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _write(self._error, error.reason if isinstance(error, Refusal) else "")
        _write(
            self._info, "" if error else "gpufleet: loaded for a virtual device; kernels load at first use"
        )


_Buffer = tuple[Any, int]
"""What the caller gave, and its size."""


def _buffer(given: dict[Any, Any], buffer: Any, size: Any) -> _Buffer:
    return given.get(buffer), int(given.get(size, 0))


def _write(buffer: _Buffer, text: str) -> None:
    pointer, size = buffer
    if pointer is None or size < 1:
        return
    is_bytes = isinstance(pointer, bytes)
    address = ctypes.cast(pointer, ctypes.c_void_p).value if is_bytes else host_address(pointer)
    if address:
        write_bytes(address, text.encode()[: size - 1] + b"\0")
