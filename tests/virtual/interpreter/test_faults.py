"""What a kernel must not do, and what is said about it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from machine import Device
from snippet import kernel_text

from gpufleet.virtual.engine import KernelFault


def faulting(
    device: Device, kernel: str, *args: Any, block: int = 32, grid: int = 1, **options: Any
) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        device.launch(kernel, (grid, 1, 1), (block, 1, 1), *args, **options)
    return caught.value


@pytest.mark.parametrize("target", [75, 90, 120])
@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ("oob", "ILLEGAL_ADDRESS"),
        ("nullw", "ILLEGAL_ADDRESS"),
        ("misaligned", "MISALIGNED_ADDRESS"),
        ("trap", "LAUNCH_FAILED"),
    ],
)
def test_the_faults_that_were_recorded_on_a_gpu(target: int, kernel: str, code: str) -> None:
    device = Device.corpus("probes", target)
    fault = faulting(device, kernel, device.memory.alloc(4096))
    assert fault.code == code
    assert f"kernel {kernel}, PTX line " in str(fault)
    assert "block (0, 0, 0), thread (0, 0, 0)" in str(fault)


def test_the_probes_other_kernels_run() -> None:
    device = Device.corpus("probes", 75)
    p = device.memory.alloc(128)
    device.launch("fill", (1, 1, 1), (32, 1, 1), p, -7)
    assert device.memory.download(p, np.int32, 32).tolist() == [-7] * 32
    device.launch("three", (1, 1, 1), (1, 1, 1), 4, 5.9, p)
    assert device.memory.download(p, np.int32, 3).tolist() == [4, 5, -7]


def test_one_lane_past_the_end_is_found() -> None:
    device = Device.corpus("vectoradd", 90)
    address = device.memory.alloc(4 * 1000)
    fault = faulting(device, "vectoradd", address, address, address, 1001, block=128, grid=8)
    assert fault.code == "ILLEGAL_ADDRESS"
    assert "block (7, 0, 0), thread (104, 0, 0)" in str(fault)
    assert f"{address + 4000:#x}" in str(fault)
    assert "nearest allocation" in str(fault)


def test_a_use_after_free_is_found() -> None:
    device = Device.corpus("vectoradd", 90)
    a, b = device.memory.alloc(400), device.memory.alloc(400)
    device.launch("vectoradd", (1, 1, 1), (100, 1, 1), a, a, b, 100)
    device.memory.free(a)
    assert faulting(device, "vectoradd", a, a, b, 100, block=100).code == "ILLEGAL_ADDRESS"


def test_lanes_may_reach_different_allocations_but_not_between_them() -> None:
    text = kernel_text(
        "mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r1, 8, %rd1; "
        "ld.global.u64 %rd2, [%rd1]; ld.global.u32 %r2, [%rd2]; "
        "add.u32 %r2, %r2, 1; st.global.u32 [%rd2], %r2;"
    )
    device = Device.load(text)
    places = [device.memory.upload(np.array([i], np.int32)) for i in range(5)]
    pointers = device.memory.upload(np.array(places, np.uint64))
    device.launch("k", (1, 1, 1), (5, 1, 1), pointers)
    assert [int(device.memory.download(p, np.int32, 1)[0]) for p in places] == [1, 2, 3, 4, 5]
    places[3] += 4
    device.memory.write(pointers, np.array(places, np.uint64).tobytes())
    fault = faulting(device, "k", pointers, block=5)
    assert fault.code == "ILLEGAL_ADDRESS"
    assert "thread (3, 0, 0)" in str(fault)


def test_source_lines_are_named_where_the_text_has_them() -> None:
    text = kernel_text(
        ".loc 1 42 7\n ld.param.u64 %rd1, [p0];\n .loc 1 43 1\n st.global.u32 [%rd1+2], 1;",
        outside='.file 1 "/src/a.cu"',
    )
    device = Device.load(text)
    fault = faulting(device, "k", device.memory.alloc(64), block=1)
    assert fault.code == "MISALIGNED_ADDRESS"
    assert "(/src/a.cu:43)" in str(fault)
    assert "st.global.u32" in str(fault)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("st.shared.u32 [%rd1], 1;", "shared store of 4 bytes out of bounds"),
        ("ld.shared.u32 %r2, [%rd1];", "the block has 64 bytes of shared memory"),
        ("ld.shared.v4.u32 {%r2,%r3,%r4,%r5}, [s+56];", "not a multiple of 16"),
        ("st.shared.u8 [%rd1], 1;", "shared store of 1 byte out of bounds"),
        ("st.local.u32 [%rd1], 1;", "local store of 4 bytes out of bounds"),
        ("st.u32 [%rd1], 1;", "global store of 4 bytes out of bounds"),
        ("ld.param.u32 %r2, [%rd1];", "param load of 4 bytes out of bounds"),
        ("atom.shared.add.u32 %r2, [%rd1], 1; st.shared.u32 [s], %r2;", "shared atomic operation"),
    ],
)
def test_every_space_is_checked(body: str, what: str) -> None:
    text = kernel_text(
        f"ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %rd1; {body}",
        ".shared .align 16 .b8 s[64]; .local .align 16 .b8 l[64];",
    )
    device = Device.load(text)
    for address in (64, 1 << 20, (1 << 64) - 1024, 1 << 63):
        fault = faulting(device, "k", address)
        assert fault.code in ("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS")
        assert what in str(fault)
    assert faulting(device, "k", (1 << 64) - 8, block=1).code in ("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS")


def test_kernel_parameters_are_read_only() -> None:
    text = kernel_text("mov.b64 %rd1, p0; cvta.param.u64 %rd1, %rd1; ld.u64 %rd2, [%rd1]; st.u64 [%rd1], 1;")
    fault = faulting(Device.load(text), "k", 5)
    assert fault.code == "ILLEGAL_ADDRESS"
    assert "read-only" in str(fault)


def test_a_barrier_that_can_never_open_is_a_deadlock() -> None:
    text = kernel_text(
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1; bra B; A: bar.sync 2; B:"
    )
    fault = faulting(Device.load(text), "k", 0, block=64)
    assert fault.code == "LAUNCH_FAILED"
    assert "deadlock" in str(fault)
    assert "32 threads of the block wait at barrier" in str(fault)
    assert "kernel k, PTX line 11" in str(fault)


def test_a_warp_that_never_completes_is_a_deadlock() -> None:
    text = kernel_text(
        "mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.sync 0; bra B; "
        "A: shfl.sync.idx.b32 %r2, %r1, 20, 31, -1; B:"
    )
    assert "deadlock" in str(faulting(Device.load(text), "k", 0))


def test_threads_that_have_ended_are_not_waited_for() -> None:
    text = kernel_text(
        "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 40; @%p1 exit; bar.sync 0; "
        "shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; ld.param.u64 %rd1, [p0]; "
        "mad.wide.u32 %rd1, %r1, 4, %rd1; st.global.u32 [%rd1], %r2;"
    )
    device = Device.load(text)
    out = device.memory.alloc(160)
    device.launch("k", (1, 1, 1), (64, 1, 1), out)
    assert device.memory.download(out, np.int32, 40).tolist() == [0] * 32 + [32] * 8


def test_a_wild_indirect_branch_and_call_fault() -> None:
    branch = kernel_text("ld.param.u32 %r1, [p0]; t: .branchtargets A, B; brx.idx %r1, t; A: B:")
    assert faulting(Device.load(branch), "k", 2).code == "ILLEGAL_INSTRUCTION"
    call = kernel_text("ld.param.u64 %rd1, [p0]; p: .callprototype _ (); call %rd1, p;")
    assert faulting(Device.load(call), "k", 1234).code == "ILLEGAL_INSTRUCTION"


def test_endless_recursion_is_a_stack_overflow() -> None:
    text = kernel_text("call f;", outside=".func f() { .local .b8 l[1024]; call f; ret; }")
    fault = faulting(Device.load(text), "k", 0, block=1)
    assert fault.code == "LAUNCH_FAILED"
    assert "stack overflow" in str(fault)
    assert "function f" in str(fault)


def test_a_launch_can_be_cancelled() -> None:
    device = Device.load(kernel_text("A: bra A;"))
    cancelled = threading.Event()
    outcome: list[KernelFault] = []
    executable, launch = device.prepare("k", (1, 1, 1), (32, 1, 1), 0, cancelled=cancelled)

    def run() -> None:
        try:
            executable.run(launch)
        except KernelFault as fault:
            outcome.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    cancelled.set()
    thread.join(20)
    assert not thread.is_alive()
    assert "cancelled" in str(outcome[0])
