"""What the interpreter's tests say about faults, asked of compiled kernels."""

from __future__ import annotations

from test_faults import *  # noqa: F403

# Only the interpreter knows where allocations end, or that a shuffle waits for lanes at a barrier.
del test_one_lane_past_the_end_is_found  # noqa: F821
del test_a_use_after_free_is_found  # noqa: F821
del test_lanes_may_reach_different_allocations_but_not_between_them  # noqa: F821
del test_a_warp_that_never_completes_is_a_deadlock  # noqa: F821
del test_a_barrier_that_can_never_open_is_a_deadlock  # noqa: F821 - counts the threads
del test_kernel_parameters_are_read_only  # noqa: F821 - words it otherwise


def test_two_warps_at_different_barriers_are_a_deadlock() -> None:
    text = kernel_text(  # noqa: F405
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1; bra B; A: bar.sync 2; B:"
    )
    fault = faulting(Device.load(text), "k", 0, block=64)  # noqa: F405
    assert fault.code == "LAUNCH_FAILED"
    assert "deadlock" in str(fault)
    assert "kernel k, PTX line 11" in str(fault)


def test_parameters_cannot_be_stored_to() -> None:
    text = kernel_text(  # noqa: F405
        "mov.b64 %rd1, p0; cvta.param.u64 %rd1, %rd1; ld.u64 %rd2, [%rd1]; st.u64 [%rd1], 1;"
    )
    assert faulting(Device.load(text), "k", 5).code == "ILLEGAL_ADDRESS"  # noqa: F405
