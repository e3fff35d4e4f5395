"""From converged to diverged code: what a warp takes along when its lanes part.

The two forms of a kernel are two functions in two LLVM modules, so that the diverged one is only
compiled when lanes part for the first time. Converged code writes the registers that are still needed
into memory, in the form in which diverged code keeps them, and calls. Diverged code reads them, goes
on at that instruction, and returns when the warp has ended or waits at a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpufleet.virtual.jit.abi import FAULT_CANCELLED, Job, offset
from gpufleet.virtual.jit.diverged import Diverged, fault
from gpufleet.virtual.jit.shapes import Shapes
from gpufleet.virtual.jit.text import vector, width
from gpufleet.virtual.jit.unit import Unit

if TYPE_CHECKING:
    from gpufleet.virtual.jit.converged import Converged

DIVERGED = "gf_diverged"
RESUME = 0
"""In place of a place's number: go on behind a barrier, with what the frame holds."""
ENDED, SUSPENDED = 0, 1
"""What diverged code returns."""

_ARGUMENTS = (
    ("ptr", "%job"),
    ("ptr", "%worker"),
    ("ptr", "%state"),
    ("ptr", "%frame"),
    ("ptr", "%barriers"),
    ("ptr", "%tid.table"),
    ("i64", "%block"),
    ("i32", "%warp"),
    ("i32", "%ctaid.x"),
    ("i32", "%ctaid.y"),
    ("i32", "%ctaid.z"),
    ("i32", "%rest"),
    ("i32", "%where"),
    ("i32", "%lanes"),
    ("i32", "%others"),
)


def signature() -> str:
    """The head of the diverged function."""
    parameters = (f"{type}{' noalias' * (type == 'ptr')} {name}" for type, name in _ARGUMENTS)
    return f"define i32 @{DIVERGED}({', '.join(parameters)})"


@dataclass(frozen=True)
class Place:
    """Where converged code may hand over."""

    node: int
    position: int
    """The instruction that comes next."""
    elsewhere: int | None = None
    """Node that the warp's other lanes wait for."""


class Handover:
    """The places, and where registers lie on the way."""

    def __init__(self, unit: Unit, shapes: Shapes) -> None:
        """Prepare for the diverged code of a unit, in which registers have these shapes."""
        self.shapes = shapes
        self.places: dict[Place, int] = {}
        self._unit = unit
        self._offsets: dict[int, int] = {}
        self._blocks: dict[str, int] = {}
        self._bytes = 4
        """Of the state; it begins with the carry flags."""
        self._with_carry = any(
            "cc" in i.operation or i.opcode in ("addc", "subc", "madc") for i in unit.graph.body.instructions
        )

    def layout(self) -> list[list[int]]:
        """All that both functions must agree on."""
        places = [[p.node, p.position, -1 if p.elsewhere is None else p.elsewhere] for p in self.places]
        return [*places, list(self._offsets), list(self._offsets.values()), list(self._blocks.values())]

    def place_of_block(self, name: str, size: int) -> int:
        """Where both functions keep the words of a call's parameter."""
        if name not in self._blocks:
            self._blocks[name] = -(-self._bytes // 64) * 64
            self._bytes = self._blocks[name] + size
        return self._blocks[name]

    def _slot(self, register: int) -> tuple[int, str, int]:
        """Offset, LLVM type and alignment of a register in the state."""
        if self.shapes.strides[register] is None:
            type, size = self._unit.vector_type(register), self._unit.vector_bytes(register)
        else:
            type = self._unit.storage[register]
            size = max(width(type) // 8, 8)
        if register not in self._offsets:
            align = min(size, 64)
            start = -(-self._bytes // align) * align
            self._offsets[register], self._bytes = start, start + size
        return self._offsets[register], type, 1 if type == "i1" else min(size, 64)

    # -------------------------------------------------------------------------- converged code

    def leave(self, low: Converged, place: Place, live: int, mask: str, others: str | None = None) -> None:
        """Go on in diverged code: the lanes of a mask at a place, others where it says."""
        c, unit = low.code, low.unit
        number = self.places.setdefault(place, len(self.places) + 1)
        for register in _members(live):
            start, type, align = self._slot(register)
            stride, kept = low.shapes.strides[register], unit.storage[register]
            if stride is None:
                value = c.let(f"load {type}, ptr {unit.vector_slot(register)}")
            else:
                value = c.let(f"load {kept}, ptr {unit.scalar_slot(register)}")
                if self.shapes.strides[register] is None:
                    value = low.spread(value, kept, stride)
                    value = low.masks.make(c, value) if kept == "i1" else value
            c.do(f"store {type} {value}, ptr {c.field('%state', start)}, align {align}")
        if self._with_carry:
            carry = c.let(f"load {vector('i1', unit.lanes)}, ptr {unit.carry_slot()}")
            c.do(f"store {vector('i1', unit.lanes)} {carry}, ptr %state, align 4")
        c.do(f"store i32 {number}, ptr %where")
        c.do(f"store i32 {low.masks.number(c, mask)}, ptr %lanes")
        if others is not None:
            c.do(f"store i32 {low.masks.number(c, others)}, ptr %others")
        c.jump("hand.over")

    def resume(self, low: Converged) -> None:
        """Go on in diverged code where the warp waited at a barrier."""
        low.code.do(f"store i32 {RESUME}, ptr %where")
        low.code.jump("hand.over")

    def emit_call(self, low: Converged, has_barriers: bool) -> None:
        """The one place from which diverged code is called, or compiled if it does not exist yet."""
        c = low.code
        slots = [f"  {name} = alloca i32" for name in ("%where", "%lanes", "%others")]
        c.entry[:0] = [f"  %state = alloca [{self._bytes} x i8], align 64", *slots]
        c.label("hand.over")
        place = c.field("%job", offset(Job, "diverged"))
        c.do(f"%code.there = load atomic ptr, ptr {place} acquire, align 8")
        c.branch(c.let("icmp eq ptr %code.there, null"), "hand.ask", "hand.go")
        c.label("hand.ask")
        asked = c.function("gf_compile", "ptr", ("ptr", "%job"))
        c.branch(c.let(f"icmp eq ptr {asked}, null"), "hand.fail", "hand.go")
        c.label("hand.fail")
        fault(low, FAULT_CANCELLED, 0, "0")
        c.label("hand.go")
        code = c.let(f"phi ptr [%code.there, %hand.over], [{asked}, %hand.ask]")
        given = []
        for type, name in _ARGUMENTS:
            if name in ("%where", "%lanes", "%others"):
                name = c.let(f"load i32, ptr {name}")
            elif name in ("%frame", "%barriers") and not has_barriers:
                name = "null"
            given.append(f"{type} {name}")
        result = c.let(f"call i32 {code}({', '.join(given)})")
        if has_barriers:
            c.branch(c.let(f"icmp eq i32 {result}, {SUSPENDED}"), "warp.suspended", "warp.done")
        else:
            c.jump("warp.done")

    # --------------------------------------------------------------------------- diverged code

    def arrive(self, low: Diverged, resume: str) -> None:
        """Take what converged code gave, and go on where it left."""
        c, unit = low.code, low.unit
        nodes = unit.graph.nodes
        again = {p for p in self.places if nodes[p.node].in_loop and nodes[p.node].stop - p.position <= _REST}
        low.entries = {(place.node, place.position) for place in self.places if place not in again}
        for register in self._offsets:
            start, type, align = self._slot(register)
            value = c.let(f"load {type}, ptr {c.field('%state', start)}, align {align}")
            varying = self.shapes.strides[register] is None
            slot = unit.vector_slot(register) if varying else unit.scalar_slot(register)
            c.do(f"store {type} {value}, ptr {slot}")
        if self._with_carry:
            carry = c.let(f"load {vector('i1', unit.lanes)}, ptr %state, align 4")
            c.do(f"store {vector('i1', unit.lanes)} {carry}, ptr {unit.carry_slot()}")
        mask = low.masks.from_number(c, "%lanes")
        c.do(f"store {low.masks.type} {mask}, ptr {low.current}")
        cases = " ".join(f"i32 {number}, label %place.{number}" for number in self.places.values())
        c.do(f"switch i32 %where, label %{resume} [{cases}]")
        for place, number in self.places.items():
            c.label(f"place.{number}")
            if place.elsewhere is not None:
                low.wait_for(place.elsewhere, low.masks.from_number(c, "%others"))
            if place in again:
                low.emit_rest(place.node, place.position)
            else:
                c.jump(low.entry_label(place.node, place.position))


_REST = 16
"""Instructions up to which the rest of a node is repeated for who comes in there: a jump into the middle
of a loop would keep LLVM from seeing that it is one (1.6 times slower for mandelbrot)."""


def _members(bits: int) -> Iterator[int]:
    """The registers of a set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
