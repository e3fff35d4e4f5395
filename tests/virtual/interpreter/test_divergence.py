"""Lanes that go different ways: random programs, each lane compared with plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import Device
from snippet import kernel_text

MASK = 0xFFFFFFFF
VARIABLES = 4


@dataclass(frozen=True)
class Assign:
    """x[target] = x[left] op (x[right] or a constant); or an access to the lane's own scratch memory."""

    operation: str
    target: int
    left: int
    right: int
    constant: int


@dataclass(frozen=True)
class If:
    variable: int
    shift: int
    then: tuple[Any, ...]
    otherwise: tuple[Any, ...]


@dataclass(frozen=True)
class Loop:
    """Up to `limit` times while a bit pattern of the variable holds."""

    variable: int
    mask: int
    limit: int
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """x[target] = f(x[left]), a function that branches."""

    target: int
    left: int


@dataclass(frozen=True)
class Leave:
    """End the thread where the variable's bits are all 0."""

    variable: int
    mask: int


OPERATIONS = {
    "add": lambda a, b: a + b,
    "xor": lambda a, b: a ^ b,
    "mul": lambda a, b: a * b,
    "shr": lambda a, b: a >> (b & 7),
}
indices = st.integers(0, VARIABLES - 1)
assigns = st.builds(
    Assign,
    st.sampled_from([*OPERATIONS, "guarded", "store", "load"]),
    indices,
    indices,
    indices,
    st.integers(1, MASK),
)
simple = st.one_of(
    assigns, st.builds(Call, indices, indices), st.builds(Leave, indices, st.sampled_from([7, 63, 255]))
)


def blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, max_size=4).map(tuple)
    return st.one_of(
        st.builds(If, indices, st.integers(0, 12), body, body),
        st.builds(Loop, indices, st.sampled_from([1, 3, 7, 31]), st.integers(1, 9), body),
    )


programs = st.lists(
    st.recursive(simple, lambda s: st.one_of(s, blocks(s)), max_leaves=12), min_size=1, max_size=6
)


class Writer:
    """The program as PTX."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.labels = 0

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def write(self, statements: Any) -> None:
        for statement in statements:
            getattr(self, "write_" + type(statement).__name__.lower())(statement)

    def write_assign(self, s: Assign) -> None:
        x = f"%x{s.target}"
        if s.operation == "store":
            self.lines.append(f"st.global.u32 [%scratch+{4 * (s.right % 2)}], %x{s.left};")
        elif s.operation == "load":
            self.lines.append(f"ld.global.u32 {x}, [%scratch+{4 * (s.right % 2)}];")
        elif s.operation == "guarded":
            self.lines.append(f"setp.gt.u32 %q, %x{s.left}, {s.constant}; @%q add.u32 {x}, {x}, %x{s.right};")
        elif s.operation == "shr":
            self.lines.append(f"and.b32 %t, %x{s.right}, 7; shr.u32 {x}, %x{s.left}, %t;")
        else:
            other = f"%x{s.right}" if s.constant % 2 else str(s.constant)
            name = {"add": "add.u32", "xor": "xor.b32", "mul": "mul.lo.u32"}[s.operation]
            self.lines.append(f"{name} {x}, %x{s.left}, {other};")

    def write_if(self, s: If) -> None:
        otherwise, end = self.label(), self.label()
        self.lines.append(f"shr.u32 %t, %x{s.variable}, {s.shift}; and.b32 %t, %t, 1; setp.eq.u32 %q, %t, 0;")
        self.lines.append(f"@%q bra {otherwise};")
        self.write(s.then)
        self.lines.append(f"bra {end}; {otherwise}:")
        self.write(s.otherwise)
        self.lines.append(f"{end}:")

    def write_loop(self, s: Loop) -> None:
        top, end = self.label(), self.label()
        counter = f"%n{self.labels}"
        self.lines.append(
            f".reg .u32 {counter}; mov.u32 {counter}, 0; {top}: setp.ge.u32 %q, {counter}, {s.limit};"
        )
        self.lines.append(
            f"@%q bra {end}; and.b32 %t, %x{s.variable}, {s.mask}; setp.eq.u32 %q, %t, 0; @%q bra {end};"
        )
        self.lines.append(f"add.u32 {counter}, {counter}, 1;")
        self.write(s.body)
        self.lines.append(f"bra {top}; {end}:")

    def write_call(self, s: Call) -> None:
        self.lines.append(f"{{ .param .b32 a; .param .b32 r; st.param.b32 [a], %x{s.left};")
        self.lines.append(f"call (r), f, (a); ld.param.b32 %x{s.target}, [r]; }}")

    def write_leave(self, s: Leave) -> None:
        self.lines.append(f"and.b32 %t, %x{s.variable}, {s.mask}; setp.eq.u32 %q, %t, 0; @%q exit;")


FUNCTION = """
.func (.param .b32 r) f(.param .b32 a) {
    .reg .u32 %v; .reg .pred %q; .local .u32 l;
    ld.param.u32 %v, [a];
    st.local.u32 [l], %v;
    and.b32 %v, %v, 1;
    setp.ne.u32 %q, %v, 0;
    ld.local.u32 %v, [l];
    @%q bra ODD;
    shr.u32 %v, %v, 1;
    bra DONE;
ODD: mad.lo.u32 %v, %v, 3, 1;
DONE: st.param.b32 [r], %v;
    ret;
}
"""


class Left(Exception):
    """The thread has ended."""


def run_lane(statements: Any, x: list[int], scratch: list[int]) -> None:
    for s in statements:
        if isinstance(s, Assign):
            a, b = x[s.left], x[s.right]
            if s.operation == "store":
                scratch[s.right % 2] = a
            elif s.operation == "load":
                x[s.target] = scratch[s.right % 2]
            elif s.operation == "guarded":
                x[s.target] = (x[s.target] + b) & MASK if a > s.constant else x[s.target]
            else:
                other = b if s.constant % 2 or s.operation == "shr" else s.constant
                x[s.target] = OPERATIONS[s.operation](a, other) & MASK
        elif isinstance(s, If):
            run_lane(s.then if x[s.variable] >> s.shift & 1 else s.otherwise, x, scratch)
        elif isinstance(s, Loop):
            for _ in range(s.limit):
                if x[s.variable] & s.mask == 0:
                    break
                run_lane(s.body, x, scratch)
        elif isinstance(s, Call):
            v = x[s.left]
            x[s.target] = (3 * v + 1) & MASK if v & 1 else v >> 1
        elif x[s.variable] & s.mask == 0:
            raise Left


def text_of(statements: Any) -> str:
    writer = Writer()
    writer.write(statements)
    registers = ".reg .u32 %x<4>; .reg .u32 %t; .reg .pred %q; .reg .u64 %scratch;"
    before = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
    ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r1, 16, %rd1; ld.param.u64 %scratch, [p1];
    mad.wide.u32 %scratch, %r1, 8, %scratch;
    ld.global.v4.u32 {%x0, %x1, %x2, %x3}, [%rd1];
    """
    after = "st.global.v4.u32 [%rd1], {%x0, %x1, %x2, %x3};"
    body = "\n".join([before, *writer.lines, after])
    return kernel_text(body, registers, ".param .u64 p0, .param .u64 p1", outside=FUNCTION)


def check(statements: Any, lanes: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 32, (lanes, 4), dtype=np.uint32) >> rng.integers(
        0, 31, (lanes, 1), dtype=np.uint32
    )
    device = Device.load(text_of(statements), 1 << 21)
    address, scratch = device.memory.upload(x), device.memory.upload(np.zeros(2 * lanes, np.uint32))
    device.launch("k", (lanes // block, 1, 1), (block, 1, 1), address, scratch)
    found = device.memory.download(address, np.uint32, 4 * lanes).reshape(lanes, 4).tolist()
    found_scratch = device.memory.download(scratch, np.uint32, 2 * lanes).reshape(lanes, 2).tolist()
    for lane, start in enumerate(x.tolist()):
        values, own = list(start), [0, 0]
        try:
            run_lane(statements, values, own)
        except Left:
            values = start
        assert (found[lane], found_scratch[lane]) == (values, own), f"lane {lane} from {start}"


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(programs, st.integers(0, 1000))
def test_small_launches(statements: Any, seed: int) -> None:
    check(statements, 96, 48, seed)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(programs, st.integers(0, 1000))
def test_launches_large_enough_to_leave_idle_lanes_behind(statements: Any, seed: int) -> None:
    check(statements, 4096, 128, seed)


@pytest.mark.parametrize("lanes", [64, 8192])
def test_a_loop_that_lanes_leave_one_by_one(lanes: int) -> None:
    count = Assign("add", 0, 0, 0, 2)
    check(
        [Loop(1, 31, 9, (Assign("shr", 1, 1, 2, 1), count, If(3, 2, (count,), (Leave(0, 3),)))), count],
        lanes,
        32,
        3,
    )
