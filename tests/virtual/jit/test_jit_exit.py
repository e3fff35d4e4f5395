"""`exit` in a called function ends the thread: nothing behind the call happens, on either engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import Device

from gpufleet.virtual.interpreter import InterpreterEngine
from gpufleet.virtual.jit import JitEngine

THREADS = 80
"""Two whole warps and a part of one."""

HEAD = """
.version 8.5
.target sm_90
.address_size 64
.func (.param .b32 result) leaf(.param .b32 limit) {
    .reg .b32 %r<6>; .reg .pred %p;
    mov.u32 %r1, %tid.x; ld.param.u32 %r2, [limit];
    setp.lt.u32 %p, %r1, %r2;
    @%p exit;
    add.u32 %r3, %r1, 100; st.param.b32 [result], %r3; ret;
}
.func outer(.param .b32 limit) {
    .reg .b32 %r<6>;
    ld.param.u32 %r1, [limit];
    { .param .b32 a; .param .b32 r; st.param.b32 [a], %r1; call.uni (r), leaf, (a); }
    ret;
}
.func tree(.param .b32 depth) {
    .reg .b32 %r<6>; .reg .pred %p<3>;
    ld.param.u32 %r1, [depth]; mov.u32 %r2, %tid.x;
    and.b32 %r3, %r2, 7;
    setp.eq.u32 %p1, %r3, %r1; @%p1 exit;
    setp.ge.u32 %p2, %r1, 5; @%p2 ret;
    add.u32 %r1, %r1, 1;
    { .param .b32 a; st.param.b32 [a], %r1; call.uni tree, (a); }
    ret;
}
.func all_or_none() {
    .reg .b32 %r<3>; .reg .pred %p;
    mov.u32 %r1, %tid.x; setp.lt.u32 %p, %r1, 32; @%p exit; ret;
}
.func harmless() { ret; }
.func waits(.param .b32 limit) {
    .reg .b32 %r<3>; .reg .pred %p;
    mov.u32 %r1, %tid.x; ld.param.u32 %r2, [limit];
    setp.lt.u32 %p, %r1, %r2; @%p exit;
    bar.sync 0; ret;
}
.visible .entry k(.param .u64 out, .param .u32 limit) {
    .reg .b32 %r<12>; .reg .b64 %rd<8>; .reg .pred %p<4>; .shared .align 4 .b32 count;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [limit];
    mov.u32 %r2, %tid.x; mul.wide.u32 %rd2, %r2, 4; add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], 1;
"""
TAIL = """
    st.global.u32 [%rd3], %r9; ret;
}
"""
CALL_LEAF = "{ .param .b32 a; .param .b32 r; st.param.b32 [a], %r1; call.uni (r), leaf, (a); "

lane = np.arange(THREADS)
CASES: dict[str, tuple[str, Any]] = {
    "a part of a warp, then a result": (
        CALL_LEAF + "ld.param.b32 %r9, [r]; }",
        lambda limit: np.where(lane < limit, 1, lane + 100),
    ),
    "through another function": (
        "{ .param .b32 a; st.param.b32 [a], %r1; call.uni outer, (a); } mov.u32 %r9, 7;",
        lambda limit: np.where(lane < limit, 1, 7),
    ),
    "at different depths of a recursion": (
        "{ .param .b32 a; st.param.b32 [a], %r1; call.uni tree, (a); } mov.u32 %r9, 7;",
        lambda limit: np.where((lane % 8 >= limit) & (lane % 8 <= max(limit, 5)), 1, 7),
    ),
    "whole warps": (
        "call.uni all_or_none, (); mov.u32 %r9, 7;",
        lambda limit: np.where(lane < 32, 1, 7),
    ),
    "under a guard": (
        "and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 1; @%p1 call all_or_none, (); mov.u32 %r9, 7;",
        lambda limit: np.where((lane < 32) & (lane % 2 == 1), 1, 7),
    ),
    "in a loop, in which lanes end one after another": (
        "mov.u32 %r9, 0; mov.u32 %r1, 0; "
        "AGAIN: add.u32 %r9, %r9, 1; st.global.u32 [%rd3], %r9; add.u32 %r1, %r1, 9; "
        + CALL_LEAF
        + "} setp.lt.u32 %p1, %r9, 5; @%p1 bra AGAIN;",
        lambda limit: np.minimum(lane // 9 + 1, 5),
    ),
    "behind a branch that lanes take apart": (
        "mov.u32 %r9, 3; and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 1; @%p1 bra SKIP; "
        + CALL_LEAF
        + "ld.param.b32 %r9, [r]; } SKIP: add.u32 %r9, %r9, 1;",
        lambda limit: np.where(lane % 2 == 1, 4, np.where(lane < limit, 1, lane + 101)),
    ),
    "through a pointer, of which lanes differ": (
        "and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 1; "
        "mov.u64 %rd4, harmless; mov.u64 %rd5, all_or_none; selp.b64 %rd6, %rd5, %rd4, %p1; "
        "{ P: .callprototype _ (); call %rd6, (), P; } mov.u32 %r9, 7;",
        lambda limit: np.where((lane < 32) & (lane % 2 == 1), 1, 7),
    ),
    "before a barrier, which those that ended do not hold up": (
        "mov.u32 %r4, count; setp.eq.u32 %p1, %r2, 79; @%p1 st.shared.u32 [%r4], 5; bar.sync 0; "
        + CALL_LEAF
        + "} bar.sync 0; ld.shared.u32 %r9, [%r4];",
        lambda limit: np.where(lane < limit, 1, 5),
    ),
    "in a function that waits at a barrier": (
        "{ .param .b32 a; st.param.b32 [a], %r1; call.uni waits, (a); } mov.u32 %r9, 7;",
        lambda limit: np.where(lane < limit, 1, 7),
    ),
    "in lanes whose loads would fault": (
        "sub.u32 %r5, %r2, %r1; mul.wide.s32 %rd4, %r5, 4; shl.b64 %rd4, %rd4, 40; add.u64 %rd5, %rd3, 0; "
        "setp.lt.u32 %p1, %r2, %r1; @%p1 mov.u64 %rd5, 1; " + CALL_LEAF + "} ld.global.u32 %r9, [%rd5];",
        lambda limit: np.ones(THREADS),
    ),
}


@pytest.mark.parametrize("limit", [0, 1, 20, 32, 79, 80])
@pytest.mark.parametrize("name", CASES)
def test_threads_end_in_a_called_function(name: str, limit: int) -> None:
    body, expected = CASES[name]
    for engine in (InterpreterEngine(), JitEngine()):
        device = Device.load(HEAD + body + TAIL)
        device.engine = engine
        out = device.memory.upload(np.zeros(THREADS, np.uint32))
        device.launch("k", (1, 1, 1), (THREADS, 1, 1), out, limit)
        found = device.memory.download(out, np.uint32, THREADS)
        np.testing.assert_array_equal(found, expected(limit), err_msg=f"{type(engine).__name__}: {name}")
