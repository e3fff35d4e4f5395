"""Loads and stores, and the checks that keep them inside the virtual device's memory.

Every access is checked before it happens: that it lies inside its window, and that it is aligned,
which x86 does not ask for but a GPU does. A uniform or affine address is checked once per vector.
Accesses through the same register that are sure to follow each other are checked at the first of
them, as one range: if the range is out of bounds, one of them is, and nothing that happens between
could be seen, since a fault ends the context.

Windows: global, constant and generic addresses are host addresses inside one reserved region;
unmapped pages in it fault in hardware (runtime_ir.py). Shared, local and parameter addresses are
offsets. The generic address of shared and local memory is its host address in the worker's arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpufleet.virtual.jit import calls, helpers
from gpufleet.virtual.jit.abi import FAULT_RANGE
from gpufleet.virtual.jit.lanes import each_lane
from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.storage import scalar_type
from gpufleet.virtual.jit.text import constant, number, vector
from gpufleet.virtual.ptx.flow import reads_and_writes
from gpufleet.virtual.ptx.scalars import SIZES, is_signed
from gpufleet.virtual.ptx.syntax import Address, Instruction, Operand, Register, Symbol, Vector

_ENDS_GROUP = frozenset({"bar", "barrier", "call", "trap", "exit", "ret", "bra", "brx"})


@dataclass
class Window:
    """A range of addresses that a state space gives access to."""

    pointer: str
    """Its first byte."""
    origin: str
    """The address of that byte as i64; "0" where addresses are offsets."""
    bytes: str
    """Its size, i64."""


@dataclass
class Reach:
    """Where an access goes, after the checks."""

    pointer: str
    """A pointer (lane 0), or a vector of pointers."""
    stride: int | None
    """Bytes from lane to lane; None for a vector of pointers."""
    check: helpers.Check | None = None
    """Checks that are still to be made; then `pointer` is a vector of offsets in the window."""

    def lanes(self, low: Lowering) -> tuple[str, str]:
        """Type and vector of what `pointer_of` wants of each lane."""
        if self.check is not None:
            return "i64", self.pointer
        return "ptr", low.code.splat("ptr", self.pointer, low.lanes) if self.stride == 0 else _pointers(
            low, self
        )

    def pointer_of(self, low: Lowering, element: str) -> str:
        """One lane's pointer, checked."""
        return element if self.check is None else checked_pointer(low, element, self.check)


@dataclass
class Group:
    """Accesses that one check covers."""

    low: int
    high: int
    align: int
    members: list[tuple[int, int, Instruction]]
    """(offset, size, instruction)"""
    positions: set[int]


def window(low: Lowering, space: str) -> Window:
    """The window of a state space."""
    unit = low.unit
    if space in ("global", "const", ""):
        return Window(unit.job("memory", "ptr"), unit.memory_base(), unit.job("memory_bytes", "i64"))
    if space == "shared":
        return Window(unit.arena(), "0", unit.shared_bytes())
    if space == "param":
        size = sum_parameters(low)
        return Window(unit.job("parameters", "ptr"), "0", str(size))
    raise low.unit.refuse(low.instruction, f"(state space {space})")


def sum_parameters(low: Lowering) -> int:
    """Size of the kernel's parameter space."""
    return max((p.offset + p.size for p in low.unit.function.parameters), default=0)


# ---------------------------------------------------------------------------------------- reaching


def reach(low: Lowering, instruction: Instruction, address: Address, size: int, align: int) -> Reach:
    """Check an access of `size` bytes per lane and return where it goes."""
    space = _space(instruction, address)
    if space == "local":
        return _reach_local(low, instruction, address, size, align)
    base, offset = address.base, address.offset
    if isinstance(base, Symbol) and base.space in ("shared", "param"):
        place = _as_integer(low.symbol_offset(base))
        if place is not None:
            return _reach_constant(low, instruction, space, place + offset, size, align)
    stride = 0 if base is None else low.stride(base)
    if stride is not None and (stride == 0 or (low.converged and stride % align == 0)):
        return _reach_run(low, instruction, address, space, stride, size, align)
    if not low.converged and space:
        return _reach_checked_later(low, instruction, address, space, size, align)
    return _reach_each(low, instruction, address, space, size, align)


def _reach_checked_later(
    low: Lowering, instruction: Instruction, address: Address, space: str, size: int, align: int
) -> Reach:
    """In diverged code the loop over the active lanes checks each lane's address itself (helpers.py)."""
    c, n = low.code, low.lanes
    t = vector("i64", n)
    w = window(low, space)
    start = _address(low, address.base, n)
    if w.origin != "0":
        start = c.let(f"sub {t} {start}, {c.splat('i64', w.origin, n)}")
    if address.offset:
        start = c.let(f"add {t} {start}, {constant('i64', address.offset, n)}")
    single = _single(instruction, 0, size, align)
    check = helpers.Check(
        w.pointer, w.origin, _room(low, w.bytes, size), align, _site(low, single, space, None)
    )
    return Reach(start, None, check)


def _space(instruction: Instruction, address: Address) -> str:
    space = instruction.operation.space
    if not space and isinstance(address.base, Symbol):
        return address.base.space
    return space


def _as_integer(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None


def _reach_constant(
    low: Lowering, instruction: Instruction, space: str, place: int, size: int, align: int
) -> Reach:
    """A variable's own address: checked here and now where the window's size is known."""
    w = window(low, space)
    known = _as_integer(w.bytes)
    if place % align or place < 0 or (known is not None and place + size > known):
        site = _site(low, _single(instruction, 0, size, align), space, 0)
        low.code.function(
            "gf_fault", "void", *_fault_arguments(FAULT_RANGE, site, str(place), "0"), tail=" noreturn"
        )
    elif known is None:
        enough = low.code.let(f"icmp uge i64 {w.bytes}, {place + size}")
        _guard(low, enough, _single(instruction, 0, size, align), str(place), space, 0)
    return Reach(low.code.let(f"getelementptr i8, ptr {w.pointer}, i64 {place}"), 0)


def _address(low: Lowering, base: Operand | None, n: int) -> str:
    """The base of an address as i64; one of 32 bits wraps around with its offset, so it has a sign."""
    if base is None:
        return constant("i64", 0, n)
    if isinstance(base, Register) and SIZES[base.type] == 4:
        value = low.fetch(base, "u32", n)
        return low.code.let(f"sext {vector('i32', n)} {value} to {vector('i64', n)}")
    return low.fetch(base, "u64", n)


def _reach_run(
    low: Lowering, instruction: Instruction, address: Address, space: str, stride: int, size: int, align: int
) -> Reach:
    """A uniform or affine address: the first and the last lane bound all others."""
    c = low.code
    w = window(low, space)
    base = _address(low, address.base, 1)
    start = c.let(f"sub i64 {base}, {w.origin}") if w.origin != "0" else base
    if not _already_checked(low, address, space):
        group = _group(low, instruction, address, space, size, align)
        if stride and low.active() is not None:
            inside = _part_inside(low, group, w, space, base, start, stride)
        else:
            extent = (low.lanes - 1) * stride
            first = group.low + min(extent, 0)
            lowest = c.let(f"add i64 {start}, {first}") if first else start
            span = group.high - group.low + abs(extent)
            inside = c.let(f"icmp ult i64 {lowest}, {_room(low, w.bytes, span)}")
            if not space:
                inside = _or_other_windows(low, inside, c.let(f"add i64 {base}, {first}"), span)
        if group.align > 1:
            placed = c.let(f"add i64 {start}, {address.offset}") if address.offset % align else start
            low_bits = c.let(f"and i64 {placed}, {group.align - 1}")
            aligned = c.let(f"icmp eq i64 {low_bits}, 0")
            inside = c.let(f"and i1 {inside}, {aligned}")
        _guard(low, inside, group, base, space, stride)
    place = c.let(f"add i64 {start}, {address.offset}") if address.offset else start
    return Reach(c.let(f"getelementptr i8, ptr {w.pointer}, i64 {place}"), stride)


def _part_inside(
    low: Lowering, group: Group, w: Window, space: str, base: str, start: str, stride: int
) -> str:
    """Whether affine accesses of some lanes are inside: the first and the last active lane bound them."""
    c = low.code
    predicate = low.active_predicate()
    assert predicate is not None
    bits = number(c, predicate, low.lanes)
    first = c.intrinsic("cttz", "i32", ("i32", bits), ("i1", "false"))
    last = c.let(f"sub i32 31, {c.intrinsic('ctlz', 'i32', ('i32', bits), ('i1', 'false'))}")
    lowest, highest = (first, last) if stride > 0 else (last, first)
    inside = ""
    for lane, offset in ((lowest, group.low), (highest, group.high)):
        distance = c.let(f"mul i64 {c.let(f'sext i32 {lane} to i64')}, {stride}")
        place = c.let(f"add i64 {start}, {c.let(f'add i64 {distance}, {offset}')}")
        within = c.let(f"icmp ule i64 {place}, {w.bytes}")
        if not space:
            full = c.let(f"add i64 {base}, {c.let(f'add i64 {distance}, {offset}')}")
            within = c.let(f"or i1 {within}, {_in_arena(low, full, 0)}")
        inside = within if not inside else c.let(f"and i1 {inside}, {within}")
    return inside


def _room(low: Lowering, bytes: str, span: int) -> str:
    """How many first addresses an access of `span` bytes may have."""
    known = _as_integer(bytes)
    if known is not None:
        return str(max(known + 1 - span, 0))
    key = f"room.{bytes}.{span}"
    plus = low.unit.once(f"plus.{bytes}", f"add i64 {bytes}, 1")
    low.unit.program.declarations.add("declare i64 @llvm.usub.sat.i64(i64, i64)")
    return low.unit.once(key, f"call i64 @llvm.usub.sat.i64(i64 {plus}, i64 {span})")


def _or_other_windows(low: Lowering, inside: str, lowest: str, span: int) -> str:
    """A generic address outside the region may be in the arena: shared or local memory."""
    c = low.code
    other, done, here = c.name("window"), c.name("known"), c.name("region")
    c.jump(here)
    c.label(here)
    c.branch(inside, done, other)
    with c.cold(other):
        found = _in_arena(low, lowest, span)
        c.jump(done)
    c.label(done)
    return c.let(f"phi i1 [true, %{here}], [{found}, %{other}]")


def _in_arena(low: Lowering, address: str, span: int, n: int = 1) -> str:
    """Whether addresses lie in the block's shared memory, its threads' local memory, or the parameters."""
    c, unit = low.code, low.unit
    t, i1 = vector("i64", n), vector("i1", n)
    windows = [(unit.arena_base(), unit.shared_bytes())]
    if unit.program.local_bytes:
        windows.append((_locals_base(low), _locals_bytes(low)))
    parameters = sum_parameters(low)
    if parameters and low.unit.facts.is_kernel and _reads(low.instruction):
        base = unit.once("params.base", f"ptrtoint ptr {unit.job('parameters', 'ptr')} to i64")
        windows.append((base, str(parameters)))
    result = ""
    for base, bytes in windows:
        start = c.let(f"sub {t} {address}, {c.splat('i64', base, n)}")
        room = c.splat("i64", _room(low, bytes, span), n)
        inside = c.let(f"icmp ult {t} {start}, {room}")
        result = inside if not result else c.let(f"or {i1} {result}, {inside}")
    return result


def _locals_base(low: Lowering) -> str:
    return low.unit.once("locals.base", f"ptrtoint ptr {low.unit.locals()} to i64")


def _locals_bytes(low: Lowering) -> str:
    threads = low.unit.once("threads.wide", f"zext i32 {low.unit.job('threads', 'i32')} to i64")
    return low.unit.once("locals.bytes", f"mul i64 {threads}, {low.unit.program.local_bytes}")


def _reach_each(
    low: Lowering, instruction: Instruction, address: Address, space: str, size: int, align: int
) -> Reach:
    """Any address per lane."""
    c, n = low.code, low.lanes
    t, i1 = vector("i64", n), vector("i1", n)
    w = window(low, space)
    base = _address(low, address.base, n)
    start = c.let(f"sub {t} {base}, {c.splat('i64', w.origin, n)}") if w.origin != "0" else base
    if not _already_checked(low, address, space):
        group = _group(low, instruction, address, space, size, align)
        lowest = c.let(f"add {t} {start}, {constant('i64', group.low, n)}") if group.low else start
        span = group.high - group.low
        inside = c.let(f"icmp ult {t} {lowest}, {c.splat('i64', _room(low, w.bytes, span), n)}")
        if not space:
            full = c.let(f"add {t} {base}, {constant('i64', group.low, n)}") if group.low else base
            inside = c.let(f"or {i1} {inside}, {_in_arena(low, full, span, n)}")
        if group.align > 1:
            placed = lowest if address.offset % align else start
            low_bits = c.let(f"and {t} {placed}, {constant('i64', group.align - 1, n)}")
            aligned = c.let(f"icmp eq {t} {low_bits}, {constant('i64', 0, n)}")
            inside = c.let(f"and {i1} {inside}, {aligned}")
        _guard_each(low, inside, group, base, space)
    place = c.let(f"add {t} {start}, {constant('i64', address.offset, n)}") if address.offset else start
    return Reach(c.let(f"getelementptr i8, ptr {w.pointer}, {t} {place}"), None)


def lane_locals(low: Lowering) -> str:
    """Generic addresses of the lanes' local memory."""
    c, n = low.code, low.lanes
    return c.let(f"add {vector('i64', n)} {c.splat('i64', _locals_base(low), n)}, {_lane_places(low)}")


def _lane_places(low: Lowering) -> str:
    """Where each lane's local memory begins in that of the block."""
    c, n = low.code, low.lanes
    size = low.unit.program.local_bytes
    warp = c.let("zext i32 %warp to i64")
    first = c.let(f"mul i64 {warp}, {n * size}")
    return c.let(f"add {vector('i64', n)} {c.splat('i64', first, n)}, {c.lanes('i64', size, n)}")


def _reach_local(low: Lowering, instruction: Instruction, address: Address, size: int, align: int) -> Reach:
    """Local addresses are offsets in a thread's own local memory."""
    c, n = low.code, low.lanes
    t, i1 = vector("i64", n), vector("i1", n)
    total = low.unit.program.local_bytes
    base = address.base
    if isinstance(base, Symbol):
        offset = c.splat("i64", low.symbol_offset(base), n)
        value = _as_integer(low.symbol_offset(base))
        known = None if value is None else value + address.offset
        uniform = True
    else:
        known, uniform = None, base is None or low.stride(base) == 0
        offset = _address(low, base, 1 if uniform else n)
    if known is not None and 0 <= known <= total - size and known % align == 0:
        offset = constant("i64", known, n)
    else:
        m = 1 if uniform and not isinstance(base, Symbol) else n
        mt, mi1 = vector("i64", m), vector("i1", m)
        place = (
            c.let(f"add {mt} {offset}, {constant('i64', address.offset, m)}") if address.offset else offset
        )
        inside = c.let(f"icmp ult {mt} {place}, {constant('i64', max(total + 1 - size, 0), m)}")
        if align > 1:
            low_bits = c.let(f"and {mt} {place}, {constant('i64', align - 1, m)}")
            aligned = c.let(f"icmp eq {mt} {low_bits}, {constant('i64', 0, m)}")
            inside = c.let(f"and {mi1} {inside}, {aligned}")
        single = _single(instruction, address.offset, size, align)
        if m == 1:
            _guard(low, inside, single, offset, "local", 0)
            place = c.splat("i64", place, n)
        else:
            _guard_each(low, inside, single, offset, "local")
        offset = place
    del i1
    places = c.let(f"add {t} {_lane_places(low)}, {offset}")
    return Reach(c.let(f"getelementptr i8, ptr {low.unit.locals()}, {t} {places}"), None)


# ------------------------------------------------------------------------------------------ checks


def _already_checked(low: Lowering, address: Address, space: str) -> bool:
    if not isinstance(address.base, Register):
        return False
    return low.position in low.checked.get((address.base.index, space), ())


def _single(instruction: Instruction, offset: int, size: int, align: int) -> Group:
    return Group(offset, offset + size, align, [(offset, size, instruction)], set())


def _group(
    low: Lowering, instruction: Instruction, address: Address, space: str, size: int, align: int
) -> Group:
    """Collect the accesses through the same register that are sure to follow in this node."""
    group = _single(instruction, address.offset, size, align)
    register = address.base
    if not isinstance(register, Register) or instruction.guard is not None or address.offset % align:
        return group
    body, node = low.unit.graph.body, low.unit.graph.nodes[low.node]
    if register.index in reads_and_writes(instruction)[1]:
        return group
    for position in range(low.position + 1, node.stop):
        other = body.instructions[position]
        if other.guard is not None or other.opcode in _ENDS_GROUP:
            break
        for operand in other.operands:
            if isinstance(operand, Address) and operand.base == register and other.opcode in _SIZED:
                if _space(other, operand) != space or (not space and _reads(other) != _reads(instruction)):
                    continue
                other_size, other_align = access_size(other)
                if operand.offset % other_align == 0 and abs(operand.offset) < 1 << 20:
                    group.low = min(group.low, operand.offset)
                    group.high = max(group.high, operand.offset + other_size)
                    group.align = max(group.align, other_align)
                    group.members.append((operand.offset, other_size, other))
                    group.positions.add(position)
        if register.index in reads_and_writes(other)[1]:
            break
    low.checked[register.index, space] = group.positions
    return group


def _reads(instruction: Instruction) -> bool:
    """Whether an access only reads: it may go to the kernel's parameters too."""
    return instruction.opcode in ("ld", "ldu")


_SIZED = frozenset({"ld", "ldu", "st", "atom", "red"})


def access_size(instruction: Instruction) -> tuple[int, int]:
    """Bytes that an access touches per lane, and the alignment it needs: PTX wants all of a vector's."""
    operation = instruction.operation
    size = SIZES[operation.type] * operation.lanes
    return size, size


def _guard(low: Lowering, inside: str, group: Group, base: str, space: str, stride: int) -> None:
    """Fault unless `inside`; `base` is what the group's offsets are added to."""
    c = low.code
    good, bad = c.name("ok"), c.name("bad")
    site = _site(low, group, space, stride)
    c.branch(inside, good, bad)
    with c.cold(bad):
        lane = "0"
        predicate = low.active_predicate()
        if predicate is not None:
            bits = number(c, predicate, low.lanes)
            lane = c.intrinsic("cttz", "i32", ("i32", bits), ("i1", "false"))
        c.function("gf_fault", "void", *_fault_arguments(FAULT_RANGE, site, base, lane), tail=" noreturn")
        c.do("unreachable")
    c.label(good)


def _guard_each(low: Lowering, inside: str, group: Group, base: str, space: str) -> None:
    """Fault unless `inside` holds in every active lane."""
    c, n = low.code, low.lanes
    i1, t = vector("i1", n), vector("i64", n)
    outside = c.let(f"xor {i1} {inside}, {constant('i1', 1, n)}")
    predicate = low.active_predicate()
    if predicate is not None:
        outside = c.let(f"and {i1} {outside}, {predicate}")
    some = low.masks.any(c, low.masks.make(c, outside))
    good, bad = c.name("ok"), c.name("bad")
    site = _site(low, group, space, None)
    c.branch(some, bad, good)
    with c.cold(bad):
        lane = c.intrinsic("cttz", "i32", ("i32", number(c, outside, n)), ("i1", "false"))
        address = c.let(f"extractelement {t} {base}, i32 {lane}")
        c.function("gf_fault", "void", *_fault_arguments(FAULT_RANGE, site, address, lane), tail=" noreturn")
        c.do("unreachable")
    c.label(good)


def single_site(low: Lowering, instruction: Instruction, offset: int, size: int, space: str) -> int:
    """Number of the place of one access, for faults."""
    return _site(low, _single(instruction, offset, size, size), space, None)


def address_lanes(low: Lowering, address: Address) -> str:
    """The base of an address in every lane, as i64 in its own space; without the constant offset."""
    base = address.base
    if isinstance(base, Symbol) and base.space in ("shared", "param"):
        return low.code.splat("i64", low.symbol_offset(base), low.lanes)
    return _address(low, base, low.lanes)


def _site(low: Lowering, group: Group, space: str, stride: int | None) -> int:
    first = group.members[0][2]
    accesses = [[offset, size, i.line, str(i)] for offset, size, i in group.members]
    return low.unit.site(first, accesses=accesses, space=space, stride=stride)


def _fault_arguments(kind: int, site: int, address: str, lane: str) -> list[tuple[str, str]]:
    return [
        ("ptr", "%worker"),
        ("i32", str(kind)),
        ("i32", str(site)),
        ("i64", address),
        ("i32", lane),
    ]


def checked_pointer(low: Lowering, place: str, check: helpers.Check) -> str:
    """One lane's pointer from its offset in a window, or a fault."""
    c = low.code
    outside = c.let(f"icmp uge i64 {place}, {check.room}")
    odd = c.let(f"icmp ne i64 {c.let(f'and i64 {place}, {check.align - 1}')}, 0")
    good, bad = c.name("ok"), c.name("bad")
    c.branch(c.let(f"or i1 {outside}, {odd}"), bad, good)
    with c.cold(bad):
        address = c.let(f"add i64 {place}, {check.origin}")
        arguments = _fault_arguments(FAULT_RANGE, check.site, address, "0")
        c.function("gf_fault", "void", *arguments, tail=" noreturn")
        c.do("unreachable")
    c.label(good)
    return c.let(f"getelementptr i8, ptr {check.pointer}, i64 {place}")


def in_space(low: Lowering, address: str, space: str, n: int, instruction: Instruction) -> str:
    """Whether generic addresses lie in a window."""
    c, unit = low.code, low.unit
    t = vector("i64", n)
    if space == "const":
        return _in_constants(low, address, n)
    if space == "global":
        base, bytes = unit.memory_base(), unit.job("memory_bytes", "i64")
        start = c.let(f"sub {t} {address}, {c.splat('i64', base, n)}")
        inside = c.let(f"icmp ult {t} {start}, {c.splat('i64', bytes, n)}")
        others = c.let(f"xor {vector('i1', n)} {_in_constants(low, address, n)}, {constant('i1', 1, n)}")
        return c.let(f"and {vector('i1', n)} {inside}, {others}")
    if space == "shared":
        base, bytes = unit.arena_base(), unit.shared_bytes()
    elif space == "local":
        if not unit.program.local_bytes:
            return constant("i1", 0, n)
        base, bytes = _locals_base(low), _locals_bytes(low)
    else:
        raise unit.refuse(instruction)
    start = c.let(f"sub {t} {address}, {c.splat('i64', base, n)}")
    return c.let(f"icmp ult {t} {start}, {c.splat('i64', bytes, n)}")


def _in_constants(low: Lowering, address: str, n: int) -> str:
    """Constants lie among the global variables here."""
    c, t, i1 = low.code, vector("i64", n), vector("i1", n)
    found = constant("i1", 0, n)
    for variable in low.unit.program.module.variables.values():
        if variable.space == "const" and not variable.external and variable.size:
            base = c.splat("i64", low.unit.symbol_address(variable.name), n)
            start = c.let(f"sub {t} {address}, {base}")
            here = c.let(f"icmp ult {t} {start}, {constant('i64', variable.size, n)}")
            found = c.let(f"or {i1} {found}, {here}")
    return found


# ------------------------------------------------------------------------------------ instructions


def _load(low: Lowering, instruction: Instruction) -> None:
    operation = instruction.operation
    destination, address = instruction.operands[:2]
    assert isinstance(address, Address)
    targets = destination.elements if isinstance(destination, Vector) else (destination,)
    if operation.type == "b128":
        _load_128_bits(low, instruction, address)
        return
    block = calls.parameter_access(low, instruction, address)
    if block is not None:
        calls.load_parameter(low, instruction, *block)
        return
    ordered = operation.get("semantics", "weak") != "weak"
    values, n = load_values(low, instruction, address, len(targets), ordered)
    for target, value in zip(targets, values, strict=False):
        low.write(target, value, scalar_type(operation.type), n, 0, is_signed(operation.type))


def _load_128_bits(low: Lowering, instruction: Instruction, address: Address) -> None:
    """Lane by lane: vectors of such integers are nothing that a CPU has."""
    c = low.code
    place = reach(low, instruction, address, 16, 16)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        return [c.let(f"load i128, ptr {place.pointer_of(low, scalars[0])}, align 16")]

    found = each_lane(low, [place.lanes(low)], ["i128"], one)
    low.write(instruction.operands[0], found[0], "i128", low.lanes)


def _store_128_bits(low: Lowering, instruction: Instruction, address: Address, source: Operand) -> None:
    c = low.code
    place = reach(low, instruction, address, 16, 16)

    def one(scalars: Sequence[str]) -> Sequence[str]:
        c.do(f"store i128 {scalars[1]}, ptr {place.pointer_of(low, scalars[0])}, align 16")
        return []

    each_lane(low, [place.lanes(low), ("i128", low.fetch(source, "b128", low.lanes))], [], one)


def load_values(
    low: Lowering, instruction: Instruction, address: Address, count: int, ordered: bool
) -> tuple[Sequence[str], int]:
    """Load `count` neighbours; returns them and their number of lanes."""
    c, n = low.code, low.lanes
    element = scalar_type(instruction.operation.type)
    size = SIZES[instruction.operation.type]
    place = reach(low, instruction, address, *access_size(instruction))
    keyword = "load volatile" if ordered else "load"
    if place.stride == 0:
        pointers = [place.pointer if not k else c.field(place.pointer, k * size) for k in range(count)]
        constantly = ", !invariant.load !0" if _space(instruction, address) == "param" else ""
        return [c.let(f"{keyword} {element}, ptr {p}, align {size}{constantly}") for p in pointers], 1
    if place.stride == size * count and low.active() is None:
        whole = f"<{n * count} x {element}>"
        if _space(instruction, address) == "global":
            _fetch_ahead(low, place.pointer, n * count * size)
        value = c.let(f"{keyword} {whole}, ptr {place.pointer}, align {size}")
        return [_every_nth(low, whole, value, k, count) for k in range(count)], n
    if place.stride == size and count == 1 and size >= 4 and not ordered:
        t = vector(element, n)
        mask = low.active_predicate() or ""
        part = (vector("i1", n), mask)
        found = c.intrinsic(
            "masked.load", t, (f"ptr align {size}", place.pointer), part, (t, "zeroinitializer")
        )
        return [found], n
    if place.check is not None:
        return helpers.load(low, element, size, place.pointer, place.check, count, ordered), n
    lanes = _pointers(low, place)
    if ordered:
        return _load_in_order(low, element, size, lanes, count), n
    return [_gather(low, element, size, _beside(low, lanes, k * size)) for k in range(count)], n


def _fetch_ahead(low: Lowering, pointer: str, size: int) -> None:
    """Ask for memory that will be loaded soon, where the CPU does not notice by itself.

    Outside loops: for a warp some way ahead, since neighbouring warps load neighbouring memory; where a
    block does much between its loads, they come too seldom for the CPU to see that. In a loop with
    barriers: for this warp's next round, as far from here as this round is from the last.
    """
    c = low.code
    if not low.unit.graph.nodes[low.node].in_loop:
        distance = str(_AHEAD)
    elif low.position in low.unit.frame.loads:
        slot = c.field("%frame", low.unit.frame.loads[low.position])
        here = c.let(f"ptrtoint ptr {pointer} to i64")
        distance = c.let(f"sub i64 {here}, {c.let(f'load i64, ptr {slot}')}")
        c.do(f"store i64 {here}, ptr {slot}")
    else:
        return
    start = c.let(f"getelementptr i8, ptr {pointer}, i64 {distance}")
    for line in range(0, size, 64):
        place = c.field(start, line) if line else start
        c.intrinsic_void("prefetch.p0", ("ptr", place), ("i32", "0"), ("i32", "3"), ("i32", "1"))


_AHEAD = 2048
"""Bytes: 512 threads that load four each. 1024 and 4096 measure the same."""


def _every_nth(low: Lowering, type: str, value: str, first: int, count: int) -> str:
    if count == 1:
        return value
    places = ", ".join(f"i32 {first + count * i}" for i in range(low.lanes))
    return low.code.let(f"shufflevector {type} {value}, {type} poison, <{low.lanes} x i32> <{places}>")


def _pointers(low: Lowering, place: Reach) -> str:
    """One pointer per lane."""
    if place.stride is None:
        return place.pointer
    c = low.code
    steps = c.lanes("i64", place.stride, low.lanes)
    return c.let(f"getelementptr i8, ptr {place.pointer}, {vector('i64', low.lanes)} {steps}")


def _beside(low: Lowering, pointers: str, distance: int) -> str:
    if not distance:
        return pointers
    return low.code.let(f"getelementptr i8, {vector('ptr', low.lanes)} {pointers}, i64 {distance}")


def _gather(low: Lowering, element: str, size: int, pointers: str) -> str:
    c, n = low.code, low.lanes
    if low.active() is not None or _is_out_of_line(low):
        return helpers.load(low, element, size, pointers, None, 1, False)[0]
    t = vector(element, n)
    return c.intrinsic(
        "masked.gather",
        t,
        (f"{vector('ptr', n)} align {size}", pointers),
        (vector("i1", n), constant("i1", 1, n)),
        (t, "zeroinitializer"),
    )


def _is_out_of_line(low: Lowering) -> bool:
    """Whether the next gather or scatter of all lanes is a call, because its function has many already.

    Without mask registers each becomes an access per lane: in line that runs twice as fast as the call,
    but 52 of them made localarr.cu of the corpus take 3.1 s to compile; so it is 1.2 s.
    """
    if low.masks.bits:
        return False
    low.unit.spelled_out += 1
    return low.unit.spelled_out > _MOST_SPELLED_OUT


_MOST_SPELLED_OUT = 8
"""Enough for what an ordinary kernel does in its loops; its run time is then what it was."""


def _load_in_order(low: Lowering, element: str, size: int, pointers: str, count: int) -> Sequence[str]:
    """Volatile and atomic loads, lane by lane."""
    c = low.code

    def one(scalars: Sequence[str]) -> Sequence[str]:
        places = [scalars[0] if not k else c.field(scalars[0], k * size) for k in range(count)]
        return [c.let(f"load volatile {element}, ptr {p}, align {size}") for p in places]

    return each_lane(low, [("ptr", pointers)], [element] * count, one)


def _store(low: Lowering, instruction: Instruction) -> None:
    operation = instruction.operation
    address, source = instruction.operands[:2]
    assert isinstance(address, Address)
    if operation.type == "b128":
        _store_128_bits(low, instruction, address, source)
        return
    block = calls.parameter_access(low, instruction, address)
    if block is not None:
        calls.store_parameter(low, instruction, *block)
        return
    sources = source.elements if isinstance(source, Vector) else (source,)
    ordered = operation.get("semantics", "weak") != "weak"
    ptx = "b32" if operation.type == "f32" else operation.type
    element, size, count = scalar_type(ptx), SIZES[ptx], len(sources)
    place = reach(low, instruction, address, *access_size(instruction))
    c, n = low.code, low.lanes
    keyword = "store volatile" if ordered else "store"
    if place.stride == 0:
        for k, operand in enumerate(sources):
            pointer = place.pointer if not k else c.field(place.pointer, k * size)
            c.do(f"{keyword} {element} {_last(low, operand, ptx)}, ptr {pointer}, align {size}")
        return
    values = [low.fetch(operand, ptx, n) for operand in sources]
    if place.stride == size * count and low.active() is None:
        whole = f"<{n * count} x {element}>"
        c.do(f"{keyword} {whole} {_interleave(low, element, values)}, ptr {place.pointer}, align {size}")
        return
    if place.stride == size and count == 1 and size >= 4 and not ordered:
        part = (vector("i1", n), low.active_predicate() or "")
        target = (f"ptr align {size}", place.pointer)
        c.intrinsic_void("masked.store", (vector(element, n), values[0]), target, part)
        return
    if place.check is not None:
        helpers.store(low, element, size, place.pointer, values, place.check, ordered)
        return
    pointers = _pointers(low, place)
    for k, value in enumerate(values):
        _scatter(low, element, size, _beside(low, pointers, k * size), value, ordered)


def _last(low: Lowering, operand: Operand, ptx: str) -> str:
    """What the highest active lane stores: the hardware leaves open which lane wins."""
    if low.stride(operand) == 0:
        return low.fetch(operand, ptx, 1)
    c, n = low.code, low.lanes
    value = low.fetch(operand, ptx, n)
    predicate = low.active_predicate()
    if predicate is None:
        return c.let(f"extractelement {vector(scalar_type(ptx), n)} {value}, i32 {n - 1}")
    bits = number(c, predicate, n)
    zeros = c.intrinsic("ctlz", "i32", ("i32", bits), ("i1", "false"))
    lane = c.let(f"sub i32 31, {zeros}")
    return c.let(f"extractelement {vector(scalar_type(ptx), n)} {value}, i32 {lane}")


def _interleave(low: Lowering, element: str, values: Sequence[str]) -> str:
    c = low.code
    count, n = len(values), low.lanes
    if count == 1:
        return values[0]
    parts, lanes = list(values), n
    # Concatenate pairwise, then pick: lane i of value k stands at i * count + k.
    while len(parts) > 1:
        t = f"<{lanes} x {element}>"
        order = ", ".join(f"i32 {i}" for i in range(2 * lanes))
        parts = [
            c.let(f"shufflevector {t} {a}, {t} {b}, <{2 * lanes} x i32> <{order}>")
            for a, b in zip(parts[::2], parts[1::2], strict=False)
        ]
        lanes *= 2
    t = f"<{lanes} x {element}>"
    order = ", ".join(f"i32 {k * n + i}" for i in range(n) for k in range(count))
    return c.let(f"shufflevector {t} {parts[0]}, {t} poison, <{lanes} x i32> <{order}>")


def _scatter(low: Lowering, element: str, size: int, pointers: str, value: str, ordered: bool) -> None:
    n = low.lanes
    if ordered:

        def one(scalars: Sequence[str]) -> Sequence[str]:
            low.code.do(f"store volatile {element} {scalars[1]}, ptr {scalars[0]}, align {size}")
            return []

        each_lane(low, [("ptr", pointers), (element, value)], [], one)
        return
    if low.active() is not None or _is_out_of_line(low):
        helpers.store(low, element, size, pointers, [value], None, False)
        return
    low.code.intrinsic_void(
        "masked.scatter",
        (vector(element, n), value),
        (f"{vector('ptr', n)} align {size}", pointers),
        (vector("i1", n), constant("i1", 1, n)),
    )


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {"ld": _load, "ldu": _load, "st": _store}
"""Loads and stores, by opcode."""
