"""PTX as a syntax tree."""

from __future__ import annotations

from gpufleet.virtual.ptx.syntax import Module
from gpufleet.virtual.ptx.errors import PtxError

__all__ = ["Module", "PtxError"]
