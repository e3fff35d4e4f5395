"""Generic addresses, vectors, guards, and the ways that addresses are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import Device
from snippet import kernel_text

from gpufleet.virtual.ptx import PtxError

GLOBAL = ".global .u32 g[64];"
LANE = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;"


def launch(
    body: str, declarations: str = "", lanes: int = 64, block: int = 32, outside: str = "", words: int = 1
) -> Any:
    """Run a body that leaves its result in %r9 (and %r10, ... for more words)."""
    registers = [f"%r{9 + i}" for i in range(words)]
    stores = "".join(f"st.global.u32 [%rd19+{4 * i}], {r};" for i, r in enumerate(registers))
    text = kernel_text(
        f"{LANE} ld.param.u64 %rd19, [p0]; mad.wide.u32 %rd19, %r4, {4 * words}, %rd19; {body} {stores}",
        declarations,
        outside=outside,
    )
    device = Device.load(text)
    out = device.memory.alloc(4 * lanes * words)
    device.launch("k", (lanes // block, 1, 1), (block, 1, 1), out)
    return device.memory.download(out, np.uint32, lanes * words).reshape(lanes, words)


def test_generic_addresses_of_all_spaces() -> None:
    body = """
    mov.u64 %rd1, s; cvta.shared.u64 %rd1, %rd1; mad.wide.u32 %rd1, %r1, 4, %rd1; st.u32 [%rd1], %r4;
    mov.u64 %rd2, l; cvta.local.u64 %rd2, %rd2; st.u32 [%rd2+4], %r4;
    mov.u64 %rd3, g; cvta.global.u64 %rd3, %rd3; mad.wide.u32 %rd3, %r4, 4, %rd3; st.u32 [%rd3], %r4;
    isspacep.shared %p1, %rd1; isspacep.local %p2, %rd2; isspacep.global %p3, %rd3; isspacep.global %p4, %rd1;
    selp.u32 %r9, 1, 0, %p1; selp.u32 %r10, 1, 0, %p2; selp.u32 %r11, 1, 0, %p3; selp.u32 %r12, 1, 0, %p4;
    cvta.to.shared.u64 %rd4, %rd1; ld.shared.u32 %r13, [%rd4];
    cvta.to.local.u64 %rd4, %rd2; ld.local.u32 %r14, [%rd4+4];
    cvta.to.global.u64 %rd4, %rd3; ld.global.u32 %r15, [%rd4];
    ld.u32 %r16, [%rd1]; ld.u32 %r17, [%rd2+4]; ld.u32 %r18, [%rd3];
    """
    declarations = ".shared .align 4 .b8 s[128]; .local .align 4 .b8 l[8];"
    found = launch(body, declarations, outside=".global .u32 g[64];", words=10)
    assert (found[:, :4] == [1, 1, 1, 0]).all()
    assert (found[:, 4:] == np.arange(64)[:, None]).all()


def test_lanes_of_one_access_in_different_spaces() -> None:
    body = """
    mov.u64 %rd1, s; cvta.shared.u64 %rd1, %rd1; mad.wide.u32 %rd1, %r1, 4, %rd1;
    mov.u64 %rd2, l; cvta.local.u64 %rd2, %rd2; mov.u64 %rd3, g; mad.wide.u32 %rd3, %r4, 4, %rd3;
    rem.u32 %r5, %r1, 3; setp.eq.u32 %p1, %r5, 0; setp.eq.u32 %p2, %r5, 1;
    selp.b64 %rd4, %rd1, %rd2, %p1; selp.b64 %rd4, %rd3, %rd4, %p2;
    st.u32 [%rd4], %r4; atom.add.u32 %r10, [%rd4], 5; ld.u32 %r9, [%rd4];
    """.replace(
        "atom.add.u32 %r10, [%rd4], 5;", "ld.u32 %r10, [%rd4]; add.u32 %r10, %r10, 5; st.u32 [%rd4], %r10;"
    )
    declarations = ".shared .align 4 .b8 s[128]; .local .align 4 .b8 l[8];"
    found = launch(body, declarations, outside=".global .u32 g[64];")
    assert np.array_equal(found[:, 0], np.arange(64) + 5)


def test_generic_atomics() -> None:
    body = """
    mov.u64 %rd1, s; cvta.shared.u64 %rd1, %rd1; mov.u64 %rd2, g; and.b32 %r5, %r1, 1;
        setp.eq.u32 %p1, %r5, 0;
    selp.b64 %rd3, %rd1, %rd2, %p1; atom.add.u32 %r9, [%rd3], 1; bar.sync 0; ld.shared.u32 %r10, [s];
    """
    found = launch(body, ".shared .u32 s;", lanes=64, block=32, outside=".global .u32 g;", words=2)
    assert np.array_equal(found[::2, 0], list(range(16)) * 2), "one counter per block"
    assert sorted(found[1::2, 0]) == list(range(32)), "one counter for all"
    assert (found[:, 1] == 16).all()


def test_each_block_and_each_lane_has_its_own_memory() -> None:
    body = """
    mov.u64 %rd1, s; mad.wide.u32 %rd1, %r1, 4, %rd1; st.shared.u32 [%rd1], %r4; st.local.u32 [l], %r4;
        bar.sync 0;
    xor.b32 %r5, %r1, 31; mov.u64 %rd1, s; mad.wide.u32 %rd1, %r5, 4, %rd1; ld.shared.u32 %r9, [%rd1];
    ld.local.u32 %r10, [l];
    """
    found = launch(body, ".shared .align 4 .b8 s[128]; .local .u32 l;", lanes=4096, words=2)
    lanes = np.arange(4096)
    assert np.array_equal(found[:, 0], lanes ^ 31)
    assert np.array_equal(found[:, 1], lanes)


def test_shared_memory_at_one_address_is_one_place_per_block() -> None:
    found = launch("st.shared.u32 [s], %r2; bar.sync 0; ld.shared.u32 %r9, [s];", ".shared .u32 s;", lanes=96)
    assert np.array_equal(found[:, 0], np.arange(96) // 32)


def test_guarded_instructions_leave_other_lanes_alone() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 10; mov.u32 %r9, 7; @%p1 mov.u32 %r9, %r1; @!%p1 add.u32 %r9, %r9, 100;
    mov.u32 %r10, 5; mov.u64 %rd1, g; @%p1 mad.wide.u32 %rd1, %r1, 4, %rd1; @%p1 ld.global.u32 %r10, [%rd1];
    mov.u64 %rd2, 8; @%p1 mov.u64 %rd2, %rd1; @%p1 st.global.u32 [%rd2], %r9;
    """
    found = launch(
        body, outside=".global .u32 g[10] = {50, 51, 52, 53, 54, 55, 56, 57, 58, 59};", lanes=32, words=2
    )
    assert found[:, 0].tolist() == [*range(10), *[107] * 22]
    assert found[:, 1].tolist() == [*range(50, 60), *[5] * 22]


def test_vectors_and_narrow_types() -> None:
    body = """
    mov.u64 %rd1, g;
    ld.global.v4.u8 {%r9, %r10, %r11, %r12}, [%rd1];
    ld.global.s8 %r13, [%rd1+3]; ld.global.s16 %rd2, [%rd1+4]; cvt.u32.u64 %r14, %rd2;
        ld.global.u16 %rd3, [%rd1+4];
    cvt.u32.u64 %r15, %rd3; ld.global.v2.u16 {%rs1, %rs2}, [%rd1+4]; cvt.s32.s16 %r16, %rs2;
    """
    data = ".global .align 8 .b8 g[8] = {1, 2, 3, 0xFE, 0xFF, 0x80, 5, 0x90};"
    found = launch(body, outside=data, lanes=32, words=8)
    expected = [1, 2, 3, 0xFE, 0xFFFFFFFE, 0xFFFF80FF, 0x80FF, 0xFFFF9005]
    assert (found == expected).all()


def test_packing_and_unpacking() -> None:
    body = """
    mov.b64 %rd1, {%r1, %r4}; mov.b64 {%r9, %r10}, %rd1; mov.b32 {%rs1, %rs2}, 0x12345678;
        mov.b32 %r11, {%rs2, %rs1};
    mov.b64 {_, %r12}, %rd1;
    """
    found = launch(body, lanes=64, words=4)
    lanes = np.arange(64)
    assert np.array_equal(found[:, 0], lanes % 32)
    assert np.array_equal(found[:, 1], lanes)
    assert (found[:, 2] == 0x56781234).all()
    assert np.array_equal(found[:, 3], lanes)


def test_offsets_that_only_together_are_aligned() -> None:
    found = launch(
        "mov.u64 %rd1, g; add.u64 %rd1, %rd1, 3; mad.wide.u32 %rd1, %r1, 4, %rd1; "
        "ld.global.u32 %r9, [%rd1+1];",
        outside=".global .align 4 .u32 g[40] = {0, 1, 2, 3, 4};",
        lanes=32,
    )
    assert found[:4, 0].tolist() == [1, 2, 3, 4]


def test_pointers_in_initialisers_and_function_addresses() -> None:
    outside = """
    .func (.param .b32 r) twice(.param .b32 a) { .reg .u32 %x; ld.param.u32 %x, [a];
        add.u32 %x, %x, %x; st.param.u32 [r], %x; ret; }
    .func (.param .b32 r) next(.param .b32 a) { .reg .u32 %x; ld.param.u32 %x, [a]; add.u32 %x, %x, 1;
        st.param.u32 [r], %x; ret; }
    .global .u32 values[4] = {10, 20, 30, 40};
    .global .u64 pointer = generic(values)+8;
    .global .u64 functions[2] = {twice, next};
    """
    body = """
    ld.global.u64 %rd1, [pointer]; ld.u32 %r10, [%rd1];
    and.b32 %r5, %r1, 1; mov.u64 %rd2, functions; mad.wide.u32 %rd2, %r5, 8, %rd2; ld.global.u64 %rd3, [%rd2];
    { .param .b32 a; .param .b32 r; st.param.b32 [a], %r1;
        p: .callprototype (.param .b32 _) _ (.param .b32 _);
      call (r), %rd3, (a), p; ld.param.b32 %r9, [r]; }
    """
    found = launch(body, outside=outside, lanes=64, words=2)
    lanes = np.arange(64) % 32
    assert np.array_equal(found[:, 0], np.where(lanes & 1, lanes + 1, 2 * lanes))
    assert (found[:, 1] == 30).all()


def test_addresses_in_32_bits_wrap_around() -> None:
    """As sm_120 code reads a shared array backwards: the register is negative, the offset makes up for it."""
    body = """.shared .align 4 .b8 room[128]; shl.b32 %r5, %r1, 2; mov.u32 %r6, room; add.u32 %r7, %r6, %r5;
    st.shared.u32 [%r7], %r1; bar.sync 0; sub.s32 %r8, %r6, %r5; ld.shared.u32 %r9, [%r8+124];"""
    assert np.array_equal(launch(body, lanes=32)[:, 0], 31 - np.arange(32))


def test_functions_with_registers_as_parameters() -> None:
    outside = ".func (.reg .u32 r) f(.reg .u32 a, .reg .u32 b) { mad.lo.u32 r, a, b, 1; ret; }"
    found = launch("call (%r9), f, (%r1, 3);", outside=outside, lanes=32)
    assert np.array_equal(found[:, 0], np.arange(32) * 3 + 1)


def test_indirect_branches() -> None:
    body = """
    rem.u32 %r5, %r1, 3; t: .branchtargets A, B, C; brx.idx %r5, t;
    A: mov.u32 %r9, 100; bra D; B: mov.u32 %r9, 200; bra D; C: mov.u32 %r9, 300; D: add.u32 %r9, %r9, %r1;
    """
    found = launch(body, lanes=4096)
    lanes = np.arange(4096) % 32
    assert np.array_equal(found[:, 0], 100 * (lanes % 3 + 1) + lanes)


@pytest.mark.parametrize(
    "body",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};",
        "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [t, {%r1}];",
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%r1}, [%rd1];",
        "wgmma.fence.sync.aligned;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%rd1];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%rd1], [%rd2], 16, [%rd3];",
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%rd1], [%rd2, {%r1}], [%rd3];",
        "multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%rd1];",
        "sured.b.add.1d.u32.trap [t, {%r1}], %r2;",
        "suld.b.1d.b32.trap %r1, [t, {%r2}];",
        "setmaxnreg.inc.sync.aligned.u32 64;",
        "mov.u32 %r1, %pm0;",
    ],
)
def test_ptx_that_is_not_carried_out_is_refused_when_the_kernel_is_loaded(body: str) -> None:
    text = kernel_text(body)
    device = Device.load(text + ".visible .entry other() { ret; }")
    with pytest.raises(PtxError) as caught:
        device.engine.load(device.module, "k", device.symbols)
    assert caught.value.code == "NOT_SUPPORTED"
    assert "unsupported PTX: " in str(caught.value)
    assert caught.value.line > 0
    device.launch("other", (1, 1, 1), (1, 1, 1))


def test_a_guarded_vector_leaves_every_element_of_other_lanes_alone() -> None:
    text = kernel_text(
        f"""{LANE} mov.u32 %r9, 1; mov.u32 %r10, 2; setp.lt.u32 %p1, %r1, 3;
        @%p1 ld.param.v2.u32 {{%r9, %r10}}, [p1];
        ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r1, 8, %rd1; st.global.v2.u32 [%rd1], {{%r9, %r10}};""",
        parameters=".param .u64 p0, .param .align 8 .b8 p1[8]",
    )
    device = Device.load(text)
    out = device.memory.alloc(64)
    device.launch("k", (1, 1, 1), (8, 1, 1), out, bytes([5, 0, 0, 0, 6, 0, 0, 0]))
    assert device.memory.download(out, np.uint32, 16).tolist() == [5, 6] * 3 + [1, 2] * 5


def test_a_call_block_named_like_a_parameter_is_another_one() -> None:
    outside = """
    .func (.param .b32 r) g(.param .b32 a) { .reg .u32 %x; ld.param.u32 %x, [a]; add.u32 %x, %x, 1;
      st.param.u32 [r], %x; ret; }
    .func (.param .b32 r) f(.param .b32 a) { .reg .u32 %x; .reg .u32 %y;
      ld.param.u32 %x, [a]; mul.lo.u32 %y, %x, 10;
      { .param .b32 a; .param .b32 r; st.param.b32 [a], %y; call (r), g, (a); ld.param.b32 %y, [r]; }
      ld.param.u32 %x, [a]; add.u32 %x, %x, %y; st.param.u32 [r], %x; ret; }
    """
    body = "{ .param .b32 a; .param .b32 r; st.param.b32 [a], %r1; call (r), f, (a); ld.param.b32 %r9, [r]; }"
    found = launch(body, outside=outside, lanes=32)
    assert np.array_equal(found[:, 0], 11 * np.arange(32) + 1)


def test_special_registers_as_operands() -> None:
    body = """
    mov.v4.u32 {%r9, %r10, %r11, _}, %tid; mov.b64 %rd1, {%tid.x, %ctaid.x}; mov.b64 {%r12, %r13}, %rd1;
    cvt.u64.u32 %rd2, %tid.x; cvt.u32.u64 %r14, %rd2; mov.u16 %rs1, %ctaid.x; cvt.u32.u16 %r15, %rs1;
    """
    found = launch(body, lanes=64, words=7)
    lanes = np.arange(64)
    assert np.array_equal(found[:, [0, 3, 5]], np.stack([lanes % 32] * 3, axis=1))
    assert np.array_equal(found[:, [4, 6]], np.stack([lanes // 32] * 2, axis=1))
    assert (found[:, 1:3] == 0).all()
