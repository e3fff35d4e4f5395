"""The video instructions (PTX ISA 9.7.17): bytes and halves of words, alone and several at once.

Everything is computed with 64 bits, which hold the operands and their sums exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpufleet.virtual.jit.lowering import Lowering
from gpufleet.virtual.jit.text import Code, constant, vector
from gpufleet.virtual.ptx.operations import Operation
from gpufleet.virtual.ptx.syntax import Instruction, Operand, Selected
from gpufleet.virtual.ptx.video import VIDEO, mask_of, picks

_RELATIONS = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_WIDE = "i64"


def _video(low: Lowering, instruction: Instruction) -> None:
    operation = instruction.operation
    selectors = [o.selector if isinstance(o, Selected) else "" for o in instruction.operands[:3]]
    destination, *sources = (_plain(o) for o in instruction.operands)
    n = 1 if all(low.stride(source) == 0 for source in sources) else low.lanes
    values = [low.fetch(source, "b32", n) for source in sources]
    work = _Work(low.code, operation, n, selectors)
    if operation.name[-1] in "24":
        result = work.packed(int(operation.name[-1]), values)
    else:
        result = work.multiply_add(values) if operation.name == "vmad" else work.scalar(values)
    low.write(destination, result, "i32", n)


def _plain(operand: Operand) -> Operand:
    return operand.register if isinstance(operand, Selected) else operand


class _Work:
    """One instruction, for n lanes."""

    def __init__(self, code: Code, operation: Operation, n: int, selectors: Sequence[str]) -> None:
        self._code, self._operation, self._n = code, operation, n
        self._selectors = selectors
        is_set = operation.name.startswith("vset")
        self._a_type, self._b_type = operation.types if is_set else operation.types[1:]
        self._signed = not is_set and operation.types[0] == "s32"
        self._t = vector(_WIDE, n)

    # ----------------------------------------------------------------------------- one at a time

    def scalar(self, values: Sequence[str]) -> str:
        """One byte, half or word of each source, then a second operation or a merge with c."""
        operation = self._operation
        first = self._part(values[0], self._a_type, self._selectors[1])
        second = self._part(values[1], self._b_type, self._selectors[2])
        if operation.name in ("vshl", "vshr"):
            result = self._shift(first, second)
        else:
            result = self._compute(operation.name, first, second)
        target = self._selectors[0]
        # The sum of two unsigned words wraps around in spite of .sat (H200); differences do not.
        words = set(operation.types) == {"u32"} and not any(self._selectors)
        if "sat" in operation and not (operation.name == "vadd" and words):
            result = self._clamp(result, _width(target), self._signed)
        which = operation.get("second")
        if which:
            kind = "s32" if self._signed or operation.name == "vset" else "u32"
            cut, other = self._part(self._low(result), kind, ""), self._part(values[2], kind, "")
            return self._low(self._second(which, cut, other))
        bits = self._low(result)
        if not target or len(values) < 3:
            return bits
        return self._merged(bits, values[2], _width(target), int(target[1]))

    def _second(self, which: str, a: str, b: str) -> str:
        if which == "add":
            return self._let("add", a, b)
        return self._code.intrinsic(f"s{which}", self._t, (self._t, a), (self._t, b))

    def _merged(self, bits: str, old: str, width: int, place: int) -> str:
        c, t = self._code, vector("i32", self._n)
        mask = ((1 << width) - 1) << (width * place)
        moved = c.let(f"shl {t} {bits}, {constant('i32', width * place, self._n)}")
        inside = c.let(f"and {t} {moved}, {constant('i32', mask, self._n)}")
        kept = c.let(f"and {t} {old}, {constant('i32', ~mask, self._n)}")
        return c.let(f"or {t} {kept}, {inside}")

    def _shift(self, value: str, amount: str) -> str:
        """By up to 32 places; the result has 34 bits before it is saturated (H200)."""
        c, t = self._code, self._t
        if self._operation.get("wrapping") == "wrap":
            amount = self._let("and", amount, self._const(31))
        else:
            amount = c.intrinsic("umin", t, (t, amount), (t, self._const(32)))
        if self._operation.name == "vshr":
            return self._let("ashr", value, amount)
        shifted = self._let("shl", self._let("shl", value, amount), self._const(30))
        return self._let("ashr", shifted, self._const(30))

    def multiply_add(self, values: Sequence[str]) -> str:
        """(a * b + c) >> scale, with 128 bits where words are multiplied."""
        c, n, operation = self._code, self._n, self._operation
        signed = "s32" in operation.types[1:]
        wide = "i128" if "" in self._selectors[1:] else _WIDE
        t = vector(wide, n)
        parts = [
            self._part(values[0], operation.types[1], self._selectors[1]),
            self._part(values[1], operation.types[2], self._selectors[2]),
            self._part(values[2], "s32", ""),
        ]
        a, b, addend = (c.resize(x, _WIDE, wide, n, signed=True) for x in parts)
        total = c.let(f"add {t} {c.let(f'mul {t} {a}, {b}')}, {addend}")
        if "po" in operation:
            total = c.let(f"add {t} {total}, {constant(wide, 1, n)}")
        scale = int(operation.get("scale", "shr0")[3:])
        if scale:
            # c is signed also among unsigned operands, but what is shifted in there are zeros (H200).
            if not signed and wide != _WIDE:
                total = c.let(f"and {t} {total}, {constant(wide, (1 << 64) - 1, n)}")
            shift = "ashr" if signed else "lshr"
            total = c.let(f"{shift} {t} {total}, {constant(wide, scale, n)}")
        if "sat" in operation:
            low, high = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
            total = c.intrinsic("smax", t, (t, total), (t, constant(wide, low, n)))
            total = c.intrinsic("smin", t, (t, total), (t, constant(wide, high, n)))
        return c.let(f"trunc {t} {total} to {vector('i32', n)}")

    # ----------------------------------------------------------------------------- several at once

    def packed(self, count: int, values: Sequence[str]) -> str:
        """Two halves or four bytes, whose results stand side by side or are added to c."""
        operation = self._operation
        width, kind = 32 // count, "h" if count == 2 else "b"
        targets = mask_of(self._selectors[0], count)
        a_places, b_places = picks(self._selectors[1], count, 0), picks(self._selectors[2], count, count)
        total = self._part(values[2], "u32", "")
        merged = values[2]
        for lane in range(count):
            if not targets[lane]:
                continue
            first, second = (
                self._part(values[place // count], type, f"{kind}{place % count}")
                for place, type in ((a_places[lane], self._a_type), (b_places[lane], self._b_type))
            )
            result = self._compute(operation.name[:-1], first, second)
            if "sat" in operation:
                result = self._clamp(result, width, self._signed)
            if "add" in operation:
                total = self._let("add", total, result)
            else:
                merged = self._merged(self._low(result), merged, width, lane)
        return self._low(total) if "add" in operation else merged

    # -------------------------------------------------------------------------------------- pieces

    def _compute(self, name: str, a: str, b: str) -> str:
        c, t = self._code, self._t
        if name == "vset":
            relation = _RELATIONS[self._operation.get("compare")]
            return c.let(f"zext {vector('i1', self._n)} {c.let(f'icmp {relation} {t} {a}, {b}')} to {t}")
        if name in ("vmin", "vmax"):
            return c.intrinsic(f"s{name[1:]}", t, (t, a), (t, b))
        if name == "vabsdiff":
            return c.intrinsic("abs", t, (t, self._let("sub", a, b)), ("i1", "false"))
        if name == "vavrg":
            total = self._let("add", a, b)
            # One more where the sum is not negative: what is left of its sign bit, turned around.
            sign = self._let("lshr", total, self._const(63))
            more = self._let("xor", sign, self._const(1))
            return self._let("ashr", self._let("add", total, more), self._const(1))
        return self._let(name[1:], a, b)

    def _part(self, value: str, type: str, selector: str) -> str:
        """Extract a byte, a half or the whole word, extended to 64 bits."""
        c, n = self._code, self._n
        width, t = _width(selector), vector("i32", n)
        place = width * int(selector[1]) if selector else 0
        if place:
            value = c.let(f"lshr {t} {value}, {constant('i32', place, n)}")
        element = f"i{width}"
        value = c.resize(value, "i32", element, n, signed=False)
        return c.resize(value, element, _WIDE, n, signed=type[0] == "s")

    def _clamp(self, value: str, width: int, signed: bool) -> str:
        low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
        c, t = self._code, self._t
        value = c.intrinsic("smax", t, (t, value), (t, self._const(low)))
        return c.intrinsic("smin", t, (t, value), (t, self._const(high)))

    def _low(self, value: str) -> str:
        return self._code.let(f"trunc {self._t} {value} to {vector('i32', self._n)}")

    def _let(self, operation: str, a: str, b: str) -> str:
        return self._code.let(f"{operation} {self._t} {a}, {b}")

    def _const(self, value: int) -> str:
        return constant(_WIDE, value, self._n)


def _width(selector: str) -> int:
    return {"": 32, "b": 8, "h": 16}[selector[:1]]


EFFECTS: dict[str, Callable[[Lowering, Instruction], None]] = {spec.name: _video for spec in VIDEO}
"""Video instructions, by opcode."""
