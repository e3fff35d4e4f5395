"""An opcode with its suffixes, looked up in the table of instructions.

`operation("ld.global.nc.v4.f32")` gives the name, the types in order and the modifiers by category,
so that engines dispatch on meaning and never take strings apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache

from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.forms import CATEGORIES, Form, Spec
from gpufleet.virtual.ptx.instructions import INSTRUCTIONS
from gpufleet.virtual.ptx.scalars import SIZES, WIDER


@dataclass(frozen=True)
class OperandShape:
    """What may stand at one place of an instruction."""

    name: str
    kind: str
    """value, address, label, call or table."""
    type: str = ""
    """The type that the operand is read or written as; empty where it has none."""
    destination: bool = False
    optional: bool = False
    negatable: bool = False
    pair: bool = False
    vector: bool = False
    selectable: bool = False
    """May be followed by a selector of bytes or halves, as in `%r1.b3`."""


@dataclass(frozen=True)
class Operation:
    """An opcode with its modifiers and types."""

    spec: Spec
    text: str
    """As written: "setp.lt.and.s32"."""
    types: tuple[str, ...] = ()
    modifiers: Mapping[str, str] = field(default_factory=dict)
    """By category: {"compare": "lt", "boolean": "and"}; a flag stands for itself: {"ftz": "ftz"}."""
    shapes: tuple[OperandShape, ...] | None = None
    """The operands' shapes; None where the table does not list this form."""
    wider: bool = False
    """Registers may be wider than the type."""

    @property
    def name(self) -> str:
        """The opcode alone."""
        return self.spec.name

    @property
    def type(self) -> str:
        """The first type, or nothing."""
        return self.types[0] if self.types else ""

    def get(self, category: str, default: str = "") -> str:
        """Return the modifier of a category, or `default`."""
        return self.modifiers.get(category, default)

    def __contains__(self, flag: str) -> bool:
        """Say whether the modifier of that category (or that flag) is there."""
        return flag in self.modifiers

    @property
    def space(self) -> str:
        """State space of a memory operation without sub-qualifier; empty means generic."""
        return self.modifiers.get("space", "").split("::")[0]

    @property
    def lanes(self) -> int:
        """Elements of a vector operation: 1, 2, 4 or 8."""
        return int(self.modifiers.get("vector", "v1")[1:])


@lru_cache(maxsize=16384)
def operation(text: str) -> Operation:
    """Look up an opcode with its suffixes.

    Raises INVALID_PTX for an opcode or a modifier that PTX does not have. A combination of known
    words that the table does not list comes back without shapes: valid perhaps, and refused by engines.
    """
    name, *suffixes = text.split(".")
    spec = INSTRUCTIONS.get(name)
    if spec is None:
        raise invalid(f"PTX has no instruction {name!r}")
    for form in _forms(name):
        found = form.match(suffixes)
        if found is not None:
            types, modifiers = found
            return Operation(spec, text, types, modifiers, form.shapes(types), form.wider)
    if spec.forms:
        for suffix in suffixes:
            if suffix not in _words():
                raise invalid(f"PTX has no {text!r}: unknown suffix .{suffix}")
    return Operation(spec, text, tuple(s for s in suffixes if s in SIZES))


class _CompiledForm:
    """A form with its strings taken apart."""

    def __init__(self, form: Form) -> None:
        self.wider = form.wider
        self._types = [frozenset(part.split()) for part in form.types.split(",")] if form.types else []
        self._categories: dict[str, list[str]] = {}
        """By value; one that stands in two categories is of the first that has none yet."""
        self._required: set[str] = set()
        for word in form.modifiers.split():
            category, _, values = word.rstrip("?").partition("=")
            allowed = values.split("|") if values else CATEGORIES.get(category, category).split()
            for value in allowed:
                self._categories.setdefault(value, []).append(category)
            if not word.endswith("?"):
                self._required.add(category)
        self._operands = form.operands.split()

    def match(self, suffixes: list[str]) -> tuple[tuple[str, ...], dict[str, str]] | None:
        types: list[str] = []
        modifiers: dict[str, str] = {}
        for suffix in suffixes:
            free = [c for c in self._categories.get(suffix, ()) if c not in modifiers]
            if free:
                modifiers[free[0]] = suffix
            elif len(types) < len(self._types) and suffix in self._types[len(types)]:
                types.append(suffix)
            else:
                return None
        if len(types) < len(self._types) or not self._required <= modifiers.keys():
            return None
        return tuple(types), modifiers

    def shapes(self, types: tuple[str, ...]) -> tuple[OperandShape, ...]:
        return tuple(_shape(i, text, types) for i, text in enumerate(self._operands))


@cache
def _forms(name: str) -> tuple[_CompiledForm, ...]:
    return tuple(_CompiledForm(form) for form in INSTRUCTIONS[name].forms)


@cache
def _words() -> frozenset[str]:
    """Every suffix that PTX has for the instructions with forms, and those that only other forms have."""
    words = set(SIZES) | set(_UNLISTED_WORDS.split())
    for category in CATEGORIES.values():
        words.update(category.split())
    for spec in INSTRUCTIONS.values():
        for form in spec.forms:
            for word in form.modifiers.split():
                category, _, values = word.rstrip("?").partition("=")
                words.update(values.split("|") if values else [category])
    return frozenset(words)


_UNLISTED_WORDS = (
    "rna rs satfinite relu scale scaled pack sp async bulk multicast multimem proxy tensormap generic alias "
    "noinc noComplete expect_tx complete_tx shared texture surface pragma abs s2f6x2 e2m1x2 e2m3x2 e3m2x2 "
    "e2m1x4 e2m3x4 e3m2x4 e4m3x4 e5m2x4 tf32 u4 s4 b1 b6x16_p32 b4x16_p64 b6p2x16 b4x16 v1 v16 global const "
    "sync_restrict::shared::cta sync_restrict::shared::cluster tensormap::generic async::generic tile "
    # bulk and tensor copies
    "tensor reduce prefetch read bulk_group mbarrier::complete_tx::bytes multicast::cluster cp_mask "
    "ignore_oob im2col im2col_no_offs im2col::w im2col::w::128 tile::gather4 tile::scatter4 "
    "cta_group::1 cta_group::2 unicast fixed_address replace"
)


def _shape(index: int, text: str, types: tuple[str, ...]) -> OperandShape:
    if text in ("label", "call", "table"):
        return OperandShape(text, text)
    if text.startswith("["):
        return OperandShape(text.strip("[]"), "address")
    text, optional = text.rstrip("?"), text.endswith("?")
    body, _, type = text.partition(":")
    first = types[0] if types else ""
    if type == "":
        type = first
    elif type.isdigit():
        type = types[int(type) - 1]
    elif type == "wide":
        type = WIDER[first]
    name = body.lstrip("!~").split("|")[0].rstrip("*")
    return OperandShape(
        name,
        "value",
        type,
        destination=index == 0 and name in ("d", "f"),
        optional=optional,
        negatable=body.startswith("!"),
        pair="|" in body,
        vector=body.endswith("*"),
        selectable=body.startswith("~"),
    )
