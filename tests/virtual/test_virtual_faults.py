"""A kernel that faults poisons the whole driver, until it is reset."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
from virtual_fakes import SECONDS, Latch, code, fill, in_thread, ptx, value, workers

from gpufleet.virtual.engine import KernelFault

Run = Callable[..., str]


def fault(launch: Any) -> None:
    raise KernelFault("ILLEGAL_ADDRESS", "kernel k, line 7: store to 0x10")


@pytest.fixture
def poisoned(d: Any, context: Any, kernel: Any, launch: Run) -> Any:
    assert launch(kernel(fault)) == "SUCCESS"
    assert code(d.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    return d


def test_the_fault_says_what_happened(poisoned: Any) -> None:
    assert str(poisoned.fault) == "kernel k, line 7: store to 0x10"
    assert poisoned.fault.code == "ILLEGAL_ADDRESS"
    assert poisoned.last_error_log == "kernel k, line 7: store to 0x10"


def test_every_later_call_answers_the_fault_on_every_thread_and_device(poisoned: Any) -> None:
    d = poisoned
    for call in (
        lambda: d.cuMemAlloc(16),
        lambda: d.cuMemFree(0x1234),
        lambda: d.cuStreamCreate(1),
        lambda: d.cuStreamQuery(0),
        lambda: d.cuEventCreate(0),
        lambda: d.cuModuleLoadData(ptx("k")),
        lambda: d.cuCtxCreate(None, 0, 1),
        lambda: d.cuDevicePrimaryCtxRetain(1),
        lambda: d.cuMemHostAlloc(16, 0),
    ):
        assert code(call()) == "ILLEGAL_ADDRESS"
    assert code(in_thread(lambda: d.cuDevicePrimaryCtxRetain(0))) == "ILLEGAL_ADDRESS"


def test_another_driver_is_not_poisoned(poisoned: Any, make_driver: Callable[..., Any]) -> None:
    other = make_driver()
    assert code(other.cuCtxCreate(None, 0, 0)) == "SUCCESS"
    assert other.fault is None


def test_reset_begins_anew(poisoned: Any, engine: Any) -> None:
    d = poisoned
    d.reset()
    assert d.fault is None
    assert code(d.cuCtxGetCurrent()) == "NOT_INITIALIZED"
    assert code(d.cuInit(0)) == "SUCCESS"
    assert int(value(d.cuCtxGetCurrent())) == 0
    value(d.cuCtxCreate(None, 0, 0))
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("fill"))), b"fill"))
    pointer = value(d.cuMemAlloc(128))
    arguments = ((int(pointer), 5), (ctypes.c_void_p, ctypes.c_int))
    assert code(d.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, arguments, 0)) == "SUCCESS"
    assert code(d.cuCtxSynchronize()) == "SUCCESS"


def test_old_handles_mean_nothing_after_a_reset(d: Any, context: Any) -> None:
    pointer, stream = value(d.cuMemAlloc(64)), value(d.cuStreamCreate(1))
    d.reset()
    d.cuInit(0)
    value(d.cuCtxCreate(None, 0, 0))
    assert code(d.cuCtxPushCurrent(context)) == "INVALID_CONTEXT"
    assert code(d.cuStreamSynchronize(stream)) == "INVALID_HANDLE"
    assert code(d.cuMemFree(int(pointer) + (1 << 40))) == "INVALID_VALUE"


def test_the_first_fault_counts(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    def trap(launched: Any) -> None:
        raise KernelFault("LAUNCH_FAILED", "trap")

    first, second = kernel(trap), kernel(fault)
    gate = Latch()
    launch(kernel(gate))
    launch(first)
    launch(second)
    gate.open()
    assert code(d.cuCtxSynchronize()) == "LAUNCH_FAILED"
    assert str(d.fault) == "trap"


def test_what_waits_behind_a_fault_does_not_run(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    ran: list[str] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def callback(data: int) -> None:
        ran.append("host function")

    latch = Latch()

    def late_fault(launched: Any) -> None:
        latch(launched)
        fault(launched)

    launch(kernel(late_fault))
    launch(kernel(lambda launched: ran.append("kernel")))
    d.cuLaunchHostFunc(0, ctypes.cast(callback, ctypes.c_void_p).value, 0)
    latch.open()
    assert code(d.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    assert ran == []


def test_a_fault_ends_every_wait_and_stops_other_kernels(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    stuck, gate = Latch(), Latch()
    other = value(d.cuCtxCreate(None, 0, 1))
    launch(kernel(stuck))
    stuck.wait_until_entered()
    answers: list[str] = []

    def wait() -> None:
        d.cuCtxPushCurrent(other)
        answers.append(code(d.cuCtxSynchronize()))

    thread = threading.Thread(target=wait)
    thread.start()
    d.cuCtxSetCurrent(context)

    def late_fault(launched: Any) -> None:
        gate(launched)
        fault(launched)

    launch(kernel(late_fault))
    gate.open()
    thread.join(SECONDS)
    assert answers == ["ILLEGAL_ADDRESS"]
    assert stuck.was_cancelled


def test_an_error_of_the_engine_itself_is_a_fault(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    def broken(launched: Any) -> None:
        raise ZeroDivisionError("oops")

    launch(kernel(broken))
    assert code(d.cuCtxSynchronize()) == "LAUNCH_FAILED"
    assert str(d.fault) == "gpufleet itself failed: ZeroDivisionError: oops"
    assert isinstance(d.fault.__cause__, ZeroDivisionError)


def test_destroying_a_context_after_a_fault_gives_its_memory_back(poisoned: Any, context: Any) -> None:
    state = poisoned._state
    assert code(poisoned.cuCtxDestroy(context)) == "SUCCESS"
    assert [arena.used for arena in state.memory.arenas] == [0, 0]


def test_reset_stops_running_kernels_and_workers(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    latches = [Latch() for _ in range(5)]
    for latch in latches:
        launch(kernel(latch), stream=value(d.cuStreamCreate(1)))
        latch.wait_until_entered()
    launch(kernel(fill), 0, threads=32)  # never gets its turn
    assert len(workers()) >= 5
    d.reset()
    assert all(latch.was_cancelled for latch in latches)
    assert workers() == []


def test_a_driver_that_is_forgotten_stops_its_kernels(engine: Any) -> None:
    from gpufleet.virtual import VirtualDriver

    latch = Latch()
    engine.bodies["k"] = latch
    d = VirtualDriver(engine=engine, visible_devices=None)
    d.cuInit(0)
    value(d.cuCtxCreate(None, 0, 0))
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("k"))), b"k"))
    d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((0, 0), (ctypes.c_void_p, ctypes.c_int)), 0)
    latch.wait_until_entered()
    del d
    assert latch.thread is not None
    latch.thread.join(SECONDS)
    assert latch.was_cancelled
