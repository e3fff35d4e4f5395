"""Whatever a kernel does, nothing outside its allocations is touched, and only KernelFault is raised."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Device
from snippet import kernel_text

from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.interpreter.memory import WINDOWS

CANARY = 0xA5
ACCESSES = {
    "ld.{space}u8 %rs1, [%rd1{offset}];": (1, False),
    "ld.{space}u32 %r5, [%rd1{offset}];": (4, False),
    "ld.{space}v4.f32 {{%f1, %f2, %f3, %f4}}, [%rd1{offset}];": (16, False),
    "st.{space}u16 [%rd1{offset}], %rs1;": (2, True),
    "st.{space}u64 [%rd1{offset}], %rd2;": (8, True),
    "st.{space}v2.u32 [%rd1{offset}], {{%r5, %r6}};": (8, True),
    "atom.{space}add.u32 %r5, [%rd1{offset}], 1; st.shared.u32 [s], %r5;": (4, True),
    "red.{space}max.u32 [%rd1{offset}], %r5;": (4, True),
    "atom.{space}cas.b64 %rd2, [%rd1{offset}], 0, 1; st.shared.u64 [s], %rd2;": (8, True),
}


@st.composite
def addresses(draw: st.DrawFn) -> list[tuple[str, int]]:
    """A place to be near to, and a distance from it, for each lane."""
    places = st.sampled_from(["first", "last", "low", "high", *WINDOWS, "zero", "top"])
    distance = st.one_of(
        st.integers(-40, 40), st.integers(-(2**40), 2**40), st.sampled_from([0, 16, 60, 64, 4096])
    )
    same = draw(st.booleans())
    place = draw(places)
    lanes = draw(st.integers(1, 40))
    return [(place if same else draw(places), draw(distance)) for _ in range(lanes)]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ACCESSES)), st.sampled_from(["", "global."]), addresses(), st.integers(-70, 70))
def test_wild_accesses(access: str, space: str, lanes: list[tuple[str, int]], offset: int) -> None:
    size, writes = ACCESSES[access]
    text = kernel_text(
        "mov.u32 %r1, %tid.x; ld.param.u64 %rd3, [p0]; mad.wide.u32 %rd3, %r1, 8, %rd3;"
        "ld.global.u64 %rd1, [%rd3];"
        "mov.u16 %rs1, 3; mov.u32 %r5, 4; mov.u32 %r6, 5; mov.u64 %rd2, 6;"
        + access.format(space=space, offset=f"+{offset}" if offset else ""),
        ".shared .align 16 .b8 s[64]; .local .align 16 .b8 l[64];",
    )
    device = Device.load(text, 1 << 16)
    memory = device.memory
    region = memory.view(np.uint8)
    region[:] = CANARY
    pointers = memory.alloc(8 * len(lanes))
    first, last = memory.alloc(64), memory.alloc(100)
    near = {"first": first, "last": last, "low": memory.base, "high": memory.base + len(region), "zero": 0}
    near |= {**WINDOWS, "top": 1 << 64}
    wanted = [(near[place] + distance) % 2**64 for place, distance in lanes]
    memory.write(pointers, np.array(wanted, np.uint64).tobytes())
    before = region.copy()
    code = outcome(device, len(lanes), pointers)
    assert code in ("", "ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS")
    exact = [(a + offset) % 2**64 for a in wanted]
    if space:
        assert (code == "") == all(allowed(memory, a, size) for a in exact)
    changed = np.flatnonzero(region != before) + memory.base
    reachable = {a + i for a in exact if allowed(memory, a, size) for i in range(size)} if writes else set()
    assert set(changed.tolist()) <= reachable


def outcome(device: Device, lanes: int, pointers: int) -> str:
    try:
        device.launch("k", (1, 1, 1), (lanes, 1, 1), pointers)
    except KernelFault as fault:
        return fault.code
    return ""


def allowed(memory: Any, address: int, size: int) -> bool:
    starts, ends = memory.spans()
    inside = any(
        start <= address and address + size <= end
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )
    return inside and address % size == 0
