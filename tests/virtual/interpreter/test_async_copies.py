"""mbarrier, cp.async, alloca, malloc and small floats, against plain Python."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from machine import Device
from reference import round_fraction
from snippet import kernel_text, run

from gpufleet.virtual.engine import KernelFault

Array = np.ndarray[Any, Any]
START = """
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mad.wide.u32 %rd3, %r1, 16, %rd1; mad.wide.u32 %rd4, %r1, 16, %rd2;
    mov.u32 %r2, room; mad.lo.u32 %r3, %r1, 16, %r2;
"""
ROOM = ".shared .align 16 .b8 room[1024];"
POINTERS = ".param .u64 p0, .param .u64 p1"


def copied(body: str, data: Array, lanes: int = 64, outside: str = "") -> Array:
    """Run a kernel with an input at %rd3 and an output at %rd4 for each lane, 16 bytes both."""
    device = Device.load(kernel_text(START + body, ROOM, POINTERS, outside=outside), 1 << 24)
    source, target = device.memory.upload(data), device.memory.alloc(16 * lanes)
    device.launch("k", (1, 1, 1), (lanes, 1, 1), source, target)
    return device.memory.download(target, np.uint32, 4 * lanes).reshape(lanes, 4)


def words(lanes: int = 64) -> Array:
    return np.random.default_rng(5).integers(0, 1 << 32, (lanes, 4), np.uint32)


OUT = "ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r3]; st.global.v4.u32 [%rd4], {%r5, %r6, %r7, %r8};"


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_copy_of_a_part_leaves_zeros_behind_it(size: int) -> None:
    data = words()
    found = copied(
        f"""st.shared.v4.u32 [%r3], {{1, 2, 3, 4}}; and.b32 %r4, %r1, {size - 1};
        cp.async.{"cg" if size == 16 else "ca"}.shared.global [%r3], [%rd3], {size}, %r4;
        cp.async.wait_all; {OUT}""",
        data,
    )
    expected = np.tile(np.array([1, 2, 3, 4], np.uint32), (64, 1)).view(np.uint8)
    for lane in range(64):
        count = lane % size
        expected[lane, :size] = 0
        expected[lane, :count] = data.view(np.uint8)[lane, :count]
    assert np.array_equal(found.view(np.uint8), expected)


def test_a_copy_of_nothing_may_come_from_anywhere() -> None:
    found = copied(
        f"""st.shared.v4.u32 [%r3], {{1, 2, 3, 4}}; setp.ge.u32 %p1, %r1, 5; selp.b32 %r4, 0, 16, %p1;
        mov.u64 %rd5, 0x10; @%p1 mov.u64 %rd3, %rd5;
        cp.async.cg.shared.global [%r3], [%rd3], 16, %r4;
        cp.async.commit_group; cp.async.wait_group 0; {OUT}""",
        words(),
    )
    assert np.array_equal(found[:5], words()[:5])
    assert not found[5:].any()


@pytest.mark.parametrize(
    "copy",
    [
        "add.u64 %rd3, %rd3, 1024; cp.async.ca.shared.global [%r3], [%rd3], 16;",
        "cp.async.ca.shared.global [%r3+1024], [%rd3], 16;",
    ],
)
def test_copies_outside_of_memory_are_faults(copy: str) -> None:
    with pytest.raises(KernelFault) as caught:
        copied(copy.replace("1024", str(1 << 40)) if "add" in copy else copy, words())
    assert caught.value.code == "ILLEGAL_ADDRESS"


@pytest.mark.parametrize(
    "copy", ["cp.async.ca.shared.global [%r3], [%rd3+4], 8;", "cp.async.ca.shared.global [%r3+2], [%rd3], 4;"]
)
def test_misaligned_copies_are_faults(copy: str) -> None:
    with pytest.raises(KernelFault) as caught:
        copied(copy, words())
    assert caught.value.code == "MISALIGNED_ADDRESS"


def test_warps_hand_data_on_through_mbarriers() -> None:
    """Half of the block produces, the other half consumes: eight rounds through one buffer."""
    body = """
    .shared .align 8 .b64 full; .shared .align 8 .b64 empty;
    setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [full], 32;
    @%p1 mbarrier.init.shared.b64 [empty], 32;
    bar.sync 0; mov.u32 %r10, 0; mov.u32 %r11, 0; and.b32 %r12, %r1, 31; mad.lo.u32 %r13, %r12, 4, %r2;
    setp.ge.u32 %p2, %r1, 32; @%p2 bra consumer;
producer: setp.eq.u32 %p3, %r10, 0; @%p3 bra ready; sub.u32 %r14, %r10, 1; and.b32 %r14, %r14, 1;
wait_empty: mbarrier.try_wait.parity.shared.b64 %p4, [empty], %r14; @!%p4 bra wait_empty;
ready: mad.lo.u32 %r15, %r10, 100, %r12; st.shared.u32 [%r13], %r15; mbarrier.arrive.shared.b64 %rd9, [full];
    add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 8; @%p5 bra producer; bra done;
consumer: and.b32 %r14, %r10, 1;
wait_full: mbarrier.test_wait.parity.shared.b64 %p4, [full], %r14; @!%p4 bra wait_full;
    xor.b32 %r16, %r12, 31; mad.lo.u32 %r16, %r16, 4, %r2; ld.shared.u32 %r17, [%r16];
    add.u32 %r11, %r11, %r17; mbarrier.arrive.shared.b64 _, [empty];
    add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 8; @%p5 bra consumer;
done: st.global.v4.u32 [%rd4], {%r11, %r10, 0, 0};
    """
    found = copied(body, words())
    lanes = np.arange(32)
    assert np.array_equal(found[32:, 0], sum(100 * k + (31 - lanes) for k in range(8)))
    assert (found[:, 1] == 8).all()


def test_a_phase_waits_for_its_transactions() -> None:
    found = copied(
        """.shared .align 8 .b64 bar; mbarrier.init.shared.b64 [bar], 1;
        mbarrier.arrive.expect_tx.shared.b64 %rd9, [bar], 100; mbarrier.test_wait.shared.b64 %p1, [bar], %rd9;
        selp.u32 %r5, 1, 0, %p1; mbarrier.complete_tx.shared.b64 [bar], 60;
        mbarrier.test_wait.shared.b64 %p1, [bar], %rd9; selp.u32 %r6, 1, 0, %p1;
        mbarrier.complete_tx.shared.b64 [bar], 40; mbarrier.test_wait.shared.b64 %p1, [bar], %rd9;
        selp.u32 %r7, 1, 0, %p1; mbarrier.test_wait.parity.shared.b64 %p1, [bar], 1; selp.u32 %r8, 1, 0, %p1;
        st.global.v4.u32 [%rd4], {%r5, %r6, %r7, %r8};""",
        words(1),
        lanes=1,
    )
    assert found[0].tolist() == [0, 0, 1, 0]


def test_a_misaligned_mbarrier_is_a_fault() -> None:
    with pytest.raises(KernelFault) as caught:
        copied("mbarrier.init.shared.b64 [room+4], 1;", words())
    assert caught.value.code == "MISALIGNED_ADDRESS"


def test_the_stack_of_a_function_that_allocates_is_given_back() -> None:
    outside = """
.func (.param .b32 r) total(.param .b32 n)
{ .reg .b32 %n, %i, %s, %v; .reg .b64 %p, %q, %z; .reg .pred %d; ld.param.b32 %n, [n];
  mul.wide.u32 %z, %n, 4; alloca.u64 %p, %z; mov.u32 %i, 0; mov.u32 %s, 0;
a: mad.wide.u32 %q, %i, 4, %p; st.local.u32 [%q], %i; add.u32 %i, %i, 1; setp.lt.u32 %d, %i, %n; @%d bra a;
b: sub.u32 %i, %i, 1; mad.wide.u32 %q, %i, 4, %p; ld.local.u32 %v, [%q]; add.u32 %s, %s, %v;
  setp.gt.u32 %d, %i, 0; @%d bra b; st.param.b32 [r], %s; ret; }
"""
    body = """
    mov.u32 %r10, 0; mov.u32 %r11, 0; and.b32 %r12, %r1, 15; add.u32 %r12, %r12, 500;
again: { .param .b32 r; .param .b32 n; st.param.b32 [n], %r12; call.uni (r), total, (n);
    ld.param.b32 %r13, [r]; }
    add.u32 %r10, %r10, %r13; add.u32 %r11, %r11, 1; setp.lt.u32 %p1, %r11, 20; @%p1 bra again;
    st.global.v4.u32 [%rd4], {%r10, 0, 0, 0};
    """
    found = copied(body, words(), outside=outside)
    counts = 500 + np.arange(64) % 16
    assert np.array_equal(found[:, 0], 20 * counts * (counts - 1) // 2)


def test_an_allocation_beyond_the_stack_is_a_fault() -> None:
    with pytest.raises(KernelFault) as caught:
        copied("alloca.u64 %rd9, 20000; st.local.u32 [%rd9], 1;", words())
    assert caught.value.code == "LAUNCH_FAILED"


HEAP = ".extern .func (.param .b64 r) malloc (.param .b64 n);\n.extern .func free (.param .b64 p);"
MALLOC = (
    "{{ .param .b64 r; .param .b64 n; st.param.b64 [n], {size}; call.uni (r), malloc, (n); "
    "ld.param.b64 {to}, [r]; }}"
)
FREE = "{{ .param .b64 p; st.param.b64 [p], {0}; call.uni free, (p); }}"


def test_the_heap_gives_memory_that_nobody_else_has_and_takes_it_back() -> None:
    body = f"""
    mov.u32 %r10, 0; mov.u32 %r11, 0; mul.wide.u32 %rd8, %r1, 16; add.u64 %rd8, %rd8, 8192;
again: {MALLOC.format(size="%rd8", to="%rd9")}
    setp.eq.u64 %p2, %rd9, 0; @%p2 add.u32 %r11, %r11, 1; @!%p2 st.u32 [%rd9], %r1; @!%p2 ld.u32 %r12, [%rd9];
    @!%p2 setp.ne.u32 %p3, %r12, %r1; @!%p2 selp.u32 %r13, 1, 0, %p3; @!%p2 add.u32 %r11, %r11, %r13;
    {FREE.format("%rd9")}
    add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 20; @%p1 bra again;
    st.global.v4.u32 [%rd4], {{%r11, 0, 0, 0}};
    """
    # 64 threads take about 9 KiB each, 20 times: more than the heap has, unless it is given back.
    assert not copied(body, words(), outside=HEAP)[:, 0].any()


def test_a_full_heap_gives_null() -> None:
    body = f"""mov.u32 %r10, 0;
again: {MALLOC.format(size="0x100000", to="%rd9")} setp.eq.u64 %p2, %rd9, 0; @%p2 bra full;
    add.u32 %r10, %r10, 1; bra again;
full: st.global.v4.u32 [%rd4], {{%r10, 0, 0, 0}};"""
    assert copied(body, words(1), lanes=1, outside=HEAP)[0, 0] == 7


@pytest.mark.parametrize(
    ("format", "mantissa", "smallest", "largest"), [("e4m3", 4, -9, 448.0), ("e5m2", 3, -16, 57344.0)]
)
def test_floats_of_eight_bits(format: str, mantissa: int, smallest: int, largest: float) -> None:
    rng = np.random.default_rng(8)
    values = np.concatenate(
        (
            np.ldexp(rng.uniform(-2, 2, 400), rng.integers(-20, 18, 400)),
            [0.0, -0.0, 1.0, -1.0, largest, 1.1 * largest, -1e30, 2.0**smallest, 2.0 ** (smallest - 1)],
            [1.0625, 1.1875, 1.125, 1.375, np.inf, -np.inf, np.nan, 2.0 ** (smallest - 1) * 1.01],
        )
    ).astype(np.float32)
    bits = values.view(np.uint32)
    packed = run(
        f"cvt.rn.satfinite.{format}x2.f32 %d, %a, %b;", "b16", ("b32", bits), ("b32", bits[::-1].copy())
    )
    assert np.array_equal(packed >> 8, (packed & 0xFF)[::-1])
    back = run(f"cvt.rn.f16x2.{format}x2 %d, %a;", "b32", ("b16", packed))
    found = (back >> 16).astype(np.uint16).view(np.float16).astype(float)
    for value, result in zip(values.tolist(), found.tolist(), strict=True):
        if np.isnan(value):
            assert np.isnan(result)
        elif np.isinf(value) or abs(value) >= largest:
            assert result == np.copysign(largest, value)
        else:
            exact = round_fraction(Fraction(value), "rn", mantissa, smallest, 128)
            assert result == np.copysign(min(abs(exact), largest), value)
            assert np.signbit(result) == np.signbit(value)


@pytest.mark.parametrize("base", ["f16", "bf16"])
def test_atomic_sums_of_halves_at_one_address(base: str) -> None:
    one = 0x3C00 if base == "f16" else 0x3F80
    for space, place in (("global", "%rd2"), ("shared", "%r2")):
        body = f"""st.{space}.u32 [{place}], 0; bar.sync 0; mov.b32 %r5, {one | one << 16:#x};
        red.{space}.add.noftz.{base}x2 [{place}], %r5; setp.lt.u32 %p1, %r1, 9; mov.b16 %rs1, {one};
        @%p1 atom.{space}.add.noftz.{base} %rs2, [{place}], %rs1; bar.sync 0;
        ld.{space}.u32 %r6, [{place}]; bar.sync 0; st.global.v4.u32 [%rd4], {{%r6, 0, 0, 0}};"""
        found = copied(body, words())[:, 0]
        halves = found.astype(np.uint32).view(np.uint16).reshape(-1, 2)
        if base == "f16":
            numbers = halves.view(np.float16).astype(float)
        else:
            numbers = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(float)
        assert (numbers == [73, 64]).all()


def test_indirect_calls_of_functions_with_barriers() -> None:
    outside = """
.func (.param .b32 r) first(.param .b32 v)
{ .reg .b32 %v, %t; .reg .pred %p; .shared .align 4 .b32 s; ld.param.b32 %v, [v]; mov.u32 %t, %tid.x;
  setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [s], 0; bar.sync 0;
  red.shared.max.u32 [s], %v; bar.sync 0; ld.shared.u32 %v, [s]; bar.sync 0; st.param.b32 [r], %v; ret; }
.func (.param .b32 r) second(.param .b32 v)
{ .reg .b32 %v; ld.param.b32 %v, [v]; add.u32 %v, %v, 7; st.param.b32 [r], %v; ret; }
.global .align 8 .u64 table[2] = {first, second};
"""
    body = """
    mov.u32 %r10, 0;
each: mov.u64 %rd8, table; mad.wide.u32 %rd8, %r10, 8, %rd8; ld.global.u64 %rd9, [%rd8];
shape: .callprototype (.param .b32 _) _ (.param .b32 _);
    { .param .b32 r; .param .b32 v; st.param.b32 [v], %r1; call (r), %rd9, (v), shape;
    ld.param.b32 %r11, [r]; }
    mad.wide.u32 %rd10, %r10, 4, %rd4; st.global.u32 [%rd10], %r11; add.u32 %r10, %r10, 1;
    setp.lt.u32 %p1, %r10, 2; @%p1 bra each;
    """
    found = copied(body, words(), outside=outside)
    assert (found[:, 0] == 63).all()
    assert np.array_equal(found[:, 1], np.arange(64) + 7)
