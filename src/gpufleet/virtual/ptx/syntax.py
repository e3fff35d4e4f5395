"""The syntax tree of a PTX module.

`parse` (see parser.py) reads declarations at once and function bodies at first use. Sizes and
alignments are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Parameter:
    """One `.param` of a kernel or function, placed in the parameter space as the driver lays it out."""

    name: str
    type: str
    """PTX type without the dot: u64, f32, b8 (an array of b8 for a struct)."""
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A module-scope variable."""

    name: str
    space: str
    """global, const or shared."""
    size: int
    align: int
    initial: bytes = b""
    """Initial bytes, zero-padded to `size` by the loader; empty: all zero."""
    relocations: tuple[tuple[int, str, int], ...] = ()
    """(offset, symbol, addend): at `offset` belongs the 8-byte address of `symbol` plus `addend`."""
    visible: bool = False


@dataclass
class Module:
    """One PTX text."""

    version: tuple[int, int]
    target: int
    """The number in sm_NN."""
    kernels: dict[str, object] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
