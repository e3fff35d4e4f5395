"""How an instruction is written down in the table of instructions.

A form reads as a syntax line of the PTX ISA. It lists the types that may stand at the opcode's first
(second, third) type suffix, the operands, and the modifiers:

* types: alternatives separated by spaces, positions by commas: `"u8 s8, f32"`.
* operands: `d` has the first type; `a:2` the second; `b:u32` that type; `c:wide` twice the size; `s:u32|pred`
  one of two. `[a]` is a memory address, `!c` a predicate that may be negated, `d|q` may be a pair, `d*` may
  be a vector, `b?` may be missing. `label`, `call` and `table` are what branches and calls take.
* modifiers: a word of `CATEGORIES` allows one of its values, other words stand for themselves;
  `category=a|b` narrows a category; `?` says it may be missing. The order does not matter, as ptxas
  does not care either.

Instructions without forms are PTX that no engine carries out: they parse, with raw operands, and are
refused when a kernel that contains them is loaded into an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

CATEGORIES: dict[str, str] = {
    "rounding": "rn rz rm rp",
    "integral": "rni rzi rmi rpi",
    "compare": "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan",
    "boolean": "and or xor",
    "space": "const global local shared param shared::cta shared::cluster param::entry param::func",
    "semantics": "weak volatile relaxed acquire release acq_rel sc",
    "scope": "cta cluster gpu sys gl",
    "cache": "ca cg cs lu cv wb wt",
    "evict": "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    "evict2": "L2::evict_normal L2::evict_first L2::evict_last",
    "prefetch": "L2::64B L2::128B L2::256B",
    "hint": "L2::cache_hint",
    "vector": "v2 v4 v8",
    "part": "lo hi wide",
    "atomic": "add min max and or xor exch cas inc dec",
    "reduction": "add min max and or xor popc",
    "shuffle": "up down bfly idx",
    "vote": "all any uni ballot",
    "match": "any all",
    "permute": "f4e b4e rc8 ecl ecr rc16",
    "property": "finite infinite number notanumber normal subnormal",
    "wrapping": "wrap clamp",
    "direction": "l r",
}


@dataclass(frozen=True)
class Form:
    """One syntax line of an instruction."""

    types: str = ""
    operands: str = ""
    modifiers: str = ""
    wider: bool = False
    """Registers may be wider than the type (ld, st, cvt)."""


@dataclass(frozen=True)
class Spec:
    """One opcode."""

    name: str
    meaning: str
    forms: tuple[Form, ...] = ()


def instruction(name: str, meaning: str, *forms: Form) -> Spec:
    """Make an entry of the table."""
    return Spec(name, meaning, forms)
