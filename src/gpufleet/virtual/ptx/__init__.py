"""PTX as a syntax tree.

`parse` reads a text; syntax.py says what comes out; instructions.py is the table of all
instructions, which the parser checks against and engines dispatch on.
"""

from __future__ import annotations

from gpufleet.virtual.ptx.errors import PtxError
from gpufleet.virtual.ptx.parser import parse
from gpufleet.virtual.ptx.syntax import Function, Kernel, Module, Parameter, Variable

__all__ = ["Function", "Kernel", "Module", "Parameter", "PtxError", "Variable", "parse"]
