"""The enums and handle types of `cuda.bindings.driver`, loaded when the first of them is needed."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def bindings() -> Any:
    """Return the module `cuda.bindings.driver`; importing it takes about 0.2 s and needs no GPU."""
    from cuda.bindings import driver

    return driver


@functools.cache
def result(code: str) -> Any:
    """Return the `CUresult` that is called `code` without its CUDA_ERROR_ prefix ("SUCCESS" for success)."""
    name = "CUDA_SUCCESS" if code == "SUCCESS" else f"CUDA_ERROR_{code}"
    return getattr(bindings().CUresult, name)


def number(handle: Any) -> int:
    """Return the integer behind a handle, which may be an int, a bindings' handle or None (0)."""
    return 0 if handle is None else int(handle)
