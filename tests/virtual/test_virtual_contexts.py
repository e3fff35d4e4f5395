"""Contexts: stacks per thread, primary contexts, what ends with a context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from virtual_fakes import SECONDS, Latch, assert_waits_for, code, in_thread, ptx, value


def current(d: Any) -> int:
    return int(value(d.cuCtxGetCurrent()))


def test_every_thread_has_its_own_stack(d: Any, context: Any) -> None:
    def enter() -> list[int]:
        before = current(d)
        d.cuCtxPushCurrent(context)
        return [before, current(d), int(value(d.cuCtxPopCurrent())), current(d)]

    assert in_thread(enter) == [0, int(context), int(context), 0]
    assert current(d) == int(context)


def test_a_context_is_entered_by_many_threads_at_once(d: Any, context: Any) -> None:
    barrier = threading.Barrier(8)

    def enter() -> bool:
        d.cuCtxPushCurrent(context)
        barrier.wait(SECONDS)
        pointer = value(d.cuMemAlloc(64))
        barrier.wait(SECONDS)
        ok = code(d.cuMemFree(pointer)) == "SUCCESS"
        return ok and int(value(d.cuCtxPopCurrent())) == int(context)

    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(enter())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert results == [True] * 8


def test_handles_may_be_ints_or_handles_of_the_bindings(d: Any, context: Any) -> None:
    assert code(d.cuCtxPushCurrent(int(context))) == "SUCCESS"
    assert code(d.cuCtxPushCurrent(d.CUcontext(int(context)))) == "SUCCESS"
    assert type(value(d.cuCtxGetCurrent())) is d.CUcontext
    assert type(value(d.cuCtxGetDevice())) is d.CUdevice


def test_what_is_no_context_is_refused(d: Any) -> None:
    for call in (d.cuCtxPushCurrent, d.cuCtxSetCurrent, d.cuCtxDestroy):
        assert code(call(0x1234)) == "INVALID_CONTEXT"
        assert "0x1234" in d.last_error_log


@pytest.mark.parametrize(
    ("flags", "answer"), [(0, "SUCCESS"), (4, "SUCCESS"), (3, "INVALID_VALUE"), (256, "INVALID_VALUE")]
)
def test_flags_are_checked(d: Any, flags: int, answer: str) -> None:
    assert code(d.cuCtxCreate(None, flags, 0)) == answer


def test_device_of_a_context(d: Any) -> None:
    value(d.cuCtxCreate(None, 0, 1))
    assert int(value(d.cuCtxGetDevice())) == 1
    assert code(d.cuCtxCreate(None, 0, 2)) == "INVALID_DEVICE"


def test_contexts_take_memory_until_the_device_is_full(d: Any, context: Any) -> None:
    free, total = value(d.cuMemGetInfo())
    handles = []
    while code(answer := d.cuCtxCreate(None, 0, 0)) == "SUCCESS":
        handles.append(value(answer))
        d.cuCtxPopCurrent()
    assert code(answer) == "OUT_OF_MEMORY"
    assert 100 < len(handles) < 300
    assert current(d) == int(context)
    for handle in handles:
        assert code(d.cuCtxDestroy(handle)) == "SUCCESS"
    assert value(d.cuMemGetInfo()) == (free, total)


def test_what_is_in_a_context_ends_with_it(d: Any, context: Any) -> None:
    free = value(d.cuMemGetInfo())
    other = value(d.cuCtxCreate(None, 0, 0))
    pointer = value(d.cuMemAlloc(5000))
    stream = value(d.cuStreamCreate(0))
    event = value(d.cuEventCreate(0))
    module = value(d.cuModuleLoadData(ptx("fill", variables=".global .u32 counter;")))
    function = value(d.cuModuleGetFunction(module, b"fill"))
    d.cuCtxDestroy(other)
    assert value(d.cuMemGetInfo()) == free
    assert code(d.cuMemFree(pointer)) == "INVALID_VALUE"
    assert code(d.cuStreamSynchronize(stream)) == "INVALID_HANDLE"
    assert code(d.cuEventQuery(event)) == "INVALID_HANDLE"
    assert code(d.cuModuleGetFunction(module, b"fill")) == "INVALID_HANDLE"
    assert code(d.cuFuncGetName(function)) == "INVALID_HANDLE"


def test_destroying_waits_for_the_work_of_the_context(
    d: Any, context: Any, kernel: Callable[[Any], Any], launch: Callable[..., str]
) -> None:
    latch = Latch()
    launch(kernel(latch))
    latch.wait_until_entered()
    assert_waits_for(latch, lambda: d.cuCtxDestroy(context))
    assert not latch.was_cancelled


def test_primary_context_lives_while_it_is_retained(d: Any) -> None:
    handle = value(d.cuDevicePrimaryCtxRetain(0))
    d.cuCtxPushCurrent(handle)
    pointer = value(d.cuMemAlloc(64))
    assert value(d.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    d.cuDevicePrimaryCtxRelease(0)
    assert value(d.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    assert code(d.cuMemAlloc(64)) == "CONTEXT_IS_DESTROYED"
    again = value(d.cuDevicePrimaryCtxRetain(0))
    assert int(again) == int(handle)
    assert code(d.cuMemFree(pointer)) == "INVALID_VALUE"
    assert code(d.cuMemAlloc(64)) == "SUCCESS"


def test_primary_context_flags(d: Any) -> None:
    assert code(d.cuDevicePrimaryCtxSetFlags(1, 4)) == "SUCCESS"
    assert code(d.cuDevicePrimaryCtxSetFlags(1, 1 << 12)) == "INVALID_VALUE"
    d.cuCtxPushCurrent(value(d.cuDevicePrimaryCtxRetain(1)))
    assert value(d.cuCtxGetFlags()) == 4
    assert value(d.cuDevicePrimaryCtxGetState(1)) == (4, 1)


def test_resetting_a_primary_context_empties_it_and_keeps_its_retains(d: Any) -> None:
    d.cuCtxPushCurrent(value(d.cuDevicePrimaryCtxRetain(0)))
    first_life = value(d.cuCtxGetId(0))
    pointer = value(d.cuMemAlloc(64))
    assert code(d.cuDevicePrimaryCtxReset(0)) == "SUCCESS"
    assert code(d.cuMemFree(pointer)) == "INVALID_VALUE"
    value(d.cuDevicePrimaryCtxRetain(0))
    assert value(d.cuCtxGetId(0)) != first_life
    assert code(d.cuDevicePrimaryCtxRelease(0)) == "SUCCESS"
    assert code(d.cuDevicePrimaryCtxRelease(0)) == "SUCCESS"
    assert code(d.cuDevicePrimaryCtxRelease(0)) == "INVALID_CONTEXT"


def test_limits_are_remembered(d: Any, context: Any) -> None:
    stack = d.CUlimit.CU_LIMIT_STACK_SIZE
    assert value(d.cuCtxGetLimit(stack)) == 1024
    d.cuCtxSetLimit(stack, 4096)
    assert value(d.cuCtxGetLimit(stack)) == 4096


def test_refused_calls_answer_as_many_nones_as_values(d: Any) -> None:
    assert len(d.cuMemAlloc(16)) == 2
    assert len(d.cuMemGetInfo()) == 3
    assert len(d.cuCtxSynchronize()) == 1


def test_two_drivers_share_nothing(make_driver: Callable[..., Any]) -> None:
    first, second = make_driver(), make_driver()
    handle = value(first.cuCtxCreate(None, 0, 0))
    assert current(second) == 0
    assert code(second.cuCtxPushCurrent(handle)) == "INVALID_CONTEXT"


def test_functions_that_are_not_there_say_so(d: Any) -> None:
    with pytest.raises(AttributeError, match="the virtual driver has no cuArrayCreate"):
        _ = d.cuArrayCreate
    with pytest.raises(AttributeError, match="neither VirtualDriver nor"):
        _ = d.cuNoSuchFunction
    assert d.CUdevice_attribute is not None
    assert not hasattr(d, "_private")
