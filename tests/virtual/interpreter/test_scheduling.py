"""Threads that wait for each other, and launches that run at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from machine import Device
from snippet import kernel_text

LANE = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;"


def read(device: Device, address: int, count: int) -> list[int]:
    return [int(v) for v in device.memory.download(address, np.uint32, count)]


@pytest.mark.parametrize(("grid", "block"), [(1, 32), (3, 64)])
def test_a_spin_lock_between_all_threads(grid: int, block: int) -> None:
    """Losers spin at a lower place than the winner that must go on to unlock."""
    text = kernel_text(
        """
        ld.param.u64 %rd1, [p0];
        AGAIN: atom.global.cas.b32 %r5, [%rd1], 0, 1;
        setp.ne.u32 %p1, %r5, 0;
        @%p1 bra AGAIN;
        ld.volatile.global.u32 %r6, [%rd1+4];
        add.u32 %r6, %r6, 1;
        st.volatile.global.u32 [%rd1+4], %r6;
        membar.gl;
        atom.global.exch.b32 %r5, [%rd1], 0;
        """
    )
    device = Device.load(text)
    lock = device.memory.upload(np.zeros(2, np.uint32))
    device.launch("k", (grid, 1, 1), (block, 1, 1), lock)
    assert read(device, lock, 2) == [0, grid * block]


def test_blocks_that_wait_for_earlier_blocks() -> None:
    """Each block waits for a flag that the one before it sets: a chain through one batch."""
    text = kernel_text(
        """
        ld.param.u64 %rd1, [p0]; mov.u32 %r2, %ctaid.x; mad.wide.u32 %rd2, %r2, 4, %rd1;
        WAIT: ld.volatile.global.u32 %r5, [%rd2];
        setp.eq.u32 %p1, %r5, 0;
        @%p1 bra WAIT;
        bar.sync 0;
        mov.u32 %r1, %tid.x; setp.ne.u32 %p2, %r1, 0; @%p2 bra DONE;
        add.u32 %r5, %r5, 1; st.volatile.global.u32 [%rd2+4], %r5;
        DONE:
        """
    )
    device = Device.load(text)
    flags = device.memory.upload(np.array([1] + [0] * 40, np.uint32))
    device.launch("k", (40, 1, 1), (33, 1, 1), flags)
    assert read(device, flags, 41) == list(range(1, 42))


def test_a_grid_barrier_of_a_cooperative_launch() -> None:
    text = kernel_text(
        """
        ld.param.u64 %rd1, [p0]; mov.u32 %r2, %ctaid.x; mov.u32 %r1, %tid.x; mov.u32 %r7, %nctaid.x;
        setp.ne.u32 %p1, %r1, 0; @%p1 bra JOIN;
        atom.global.add.u32 %r5, [%rd1], 1;
        WAIT: ld.acquire.gpu.global.u32 %r5, [%rd1]; setp.lt.u32 %p2, %r5, %r7; @%p2 bra WAIT;
        JOIN: bar.sync 0;
        ld.global.u32 %r6, [%rd1]; mad.wide.u32 %rd2, %r2, 4, %rd1; st.global.u32 [%rd2+4], %r6;
        """
    )
    device = Device.load(text)
    blocks = 70
    counter = device.memory.upload(np.zeros(blocks + 1, np.uint32))
    device.launch("k", (blocks, 1, 1), (1024, 1, 1), counter, cooperative=True)
    assert read(device, counter, blocks + 1) == [blocks] * (blocks + 1)


def test_named_barriers_between_producers_and_consumers() -> None:
    """Warp 0 stores and arrives, warp 1 waits and loads; the other way round for the next round."""
    text = kernel_text(
        f"""
        {LANE} ld.param.u64 %rd1, [p0]; mov.u32 %r9, 0; mov.u32 %r10, 0; setp.ge.u32 %p1, %r1, 32;
            @%p1 bra CONSUME;
        PRODUCE: mad.wide.u32 %rd2, %r1, 4, s; add.u32 %r5, %r9, %r1; st.shared.u32 [%rd2], %r5;
        bar.arrive 1, 64; bar.sync 2, 64;
        add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 5; @%p2 bra PRODUCE; bra DONE;
        CONSUME: bar.sync 1, 64; sub.u32 %r6, 63, %r1; mad.wide.u32 %rd2, %r6, 4, s;
            ld.shared.u32 %r5, [%rd2];
        add.u32 %r10, %r10, %r5; bar.arrive 2, 64;
        add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 5; @%p2 bra CONSUME;
        mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r10;
        DONE:
        """.replace("4, s;", "4, %rd5;"),
        ".shared .align 4 .b8 s[128];",
    ).replace("ld.param.u64 %rd1, [p0];", "ld.param.u64 %rd1, [p0]; mov.u64 %rd5, s;")
    device = Device.load(text)
    out = device.memory.alloc(4 * 64)
    device.launch("k", (2, 1, 1), (64, 1, 1), out)
    assert read(device, out + 128, 32) == [5 * (63 - t) + 10 for t in range(32, 64)]


def test_the_same_barrier_in_both_sides_of_a_branch() -> None:
    text = kernel_text(
        f"""
        {LANE} ld.param.u64 %rd1, [p0]; mov.u64 %rd5, s; mad.wide.u32 %rd2, %r1, 4, %rd5;
            st.shared.u32 [%rd2], %r1;
        and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra EVEN;
        bar.sync 0; bra DONE;
        EVEN: bar.sync 0;
        DONE: xor.b32 %r6, %r1, 1; mad.wide.u32 %rd2, %r6, 4, %rd5; ld.shared.u32 %r7, [%rd2];
        mad.wide.u32 %rd2, %r4, 4, %rd1; st.global.u32 [%rd2], %r7;
        """,
        ".shared .align 4 .b8 s[256];",
    )
    device = Device.load(text)
    out = device.memory.alloc(4 * 192)
    device.launch("k", (3, 1, 1), (64, 1, 1), out)
    assert read(device, out, 192) == [t ^ 1 for t in range(64)] * 3


@pytest.mark.parametrize("mask", [-1, 0xF0F0F0F0])
def test_lanes_of_a_warp_arrive_one_after_the_other(mask: int) -> None:
    """A shuffle waits for the lanes that its mask names, whichever way they come."""
    text = kernel_text(
        f"""
        {LANE} ld.param.u64 %rd1, [p0]; mov.u32 %r9, 0;
        LOOP: setp.ge.u32 %p1, %r9, %r1; @%p1 bra GO; add.u32 %r9, %r9, 1; bra LOOP;
        GO: shr.u32 %r5, {mask & 0xFFFFFFFF}, %r1; and.b32 %r5, %r5, 1; setp.eq.u32 %p2, %r5, 0;
            @%p2 bra DONE;
        shfl.sync.bfly.b32 %r6, %r1, 1, 31, {mask};
        mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r6;
        DONE:
        """
    )
    device = Device.load(text)
    out = device.memory.upload(np.full(32, 99, np.uint32))
    device.launch("k", (1, 1, 1), (32, 1, 1), out)
    assert read(device, out, 32) == [t ^ 1 if mask >> t & 1 else 99 for t in range(32)]


def test_a_block_that_is_no_multiple_of_a_warp() -> None:
    text = kernel_text(
        f"""
        {LANE} ld.param.u64 %rd1, [p0]; setp.lt.u32 %p1, %r1, 1000; vote.sync.ballot.b32 %r5, %p1, -1;
        shfl.sync.down.b32 %r6|%p2, %r1, 1, 31, -1; @!%p2 mov.u32 %r6, 77;
        mad.wide.u32 %rd2, %r4, 8, %rd1; st.global.v2.u32 [%rd2], {{%r5, %r6}};
        """
    )
    device = Device.load(text)
    out = device.memory.alloc(8 * 120)
    device.launch("k", (3, 1, 1), (40, 1, 1), out)
    found = np.array(read(device, out, 240)).reshape(3, 40, 2)
    assert (found[:, :32, 0] == 0xFFFFFFFF).all()
    assert (found[:, 32:, 0] == 0xFF).all()
    assert (found[:, 31, 1] == 77).all()
    assert (found[:, :31, 1] == np.arange(1, 32)).all()


@pytest.mark.parametrize(
    ("grid", "block"), [((2, 3, 4), (3, 2, 5)), ((5, 1, 2), (1, 1, 7)), ((1, 9, 1), (33, 3, 1))]
)
def test_coordinates(grid: Any, block: Any) -> None:
    names = [f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"]
    body = """
        mov.u32 %r1, %tid.z; mov.u32 %r2, %ntid.y; mov.u32 %r3, %tid.y; mad.lo.u32 %r1, %r1, %r2, %r3;
        mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
        mov.u32 %r4, %ctaid.z; mov.u32 %r5, %nctaid.y; mov.u32 %r6, %ctaid.y; mad.lo.u32 %r4, %r4, %r5, %r6;
        mov.u32 %r5, %nctaid.x; mov.u32 %r6, %ctaid.x; mad.lo.u32 %r4, %r4, %r5, %r6;
        ld.param.u32 %r7, [p1]; mad.lo.u32 %r1, %r4, %r7, %r1;
        ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r1, 48, %rd1;
    """
    body += "".join(
        f"mov.u32 %r8, {name}; st.global.u32 [%rd1+{4 * i}], %r8;" for i, name in enumerate(names)
    )
    device = Device.load(kernel_text(body, parameters=".param .u64 p0, .param .u32 p1"))
    threads, blocks = int(np.prod(block)), int(np.prod(grid))
    out = device.memory.alloc(48 * threads * blocks)
    device.launch("k", grid, block, out, threads)
    expected = [
        (x, y, z, bx, by, bz, *block, *grid)
        for bz in range(grid[2])
        for by in range(grid[1])
        for bx in range(grid[0])
        for z in range(block[2])
        for y in range(block[1])
        for x in range(block[0])
    ]
    assert np.array(read(device, out, 12 * threads * blocks)).reshape(-1, 12).tolist() == [
        list(e) for e in expected
    ]


def test_the_clock_follows_wall_time() -> None:
    device = Device.corpus("probes", 75)
    ticks = 1_980_000 * 50  # 50 ms at the test device's clock rate
    before = time.perf_counter()
    device.launch("spin", (1, 1, 1), (1, 1, 1), ticks)
    elapsed = time.perf_counter() - before
    assert elapsed >= 0.05


def test_a_waiting_kernel_lets_other_python_threads_run() -> None:
    """One launch polls memory that only this thread will change."""
    text = kernel_text(
        "ld.param.u64 %rd1, [p0]; W: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra W;"
    )
    device = Device.load(text)
    flag = device.memory.upload(np.zeros(1, np.uint32))
    thread = threading.Thread(target=device.launch, args=("k", (1, 1, 1), (32, 1, 1), flag))
    thread.start()
    device.memory.write(flag, b"\1\0\0\0")
    thread.join(20)
    assert not thread.is_alive()


def test_launches_from_several_threads_share_counters_and_nothing_else() -> None:
    device = Device.corpus("histogram", 90)
    data = np.arange(20000, dtype=np.uint32).astype(np.uint8)
    x = device.memory.upload(data)
    out = device.memory.upload(np.zeros(256, np.uint32))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                device.launch("histogram", (7, 1, 1), (128, 1, 1), x, out, len(data))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert np.array_equal(read(device, out, 256), 20 * np.bincount(data, minlength=256))
