"""Streams run concurrently with the caller and with each other, in the documented order."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
from virtual_fakes import SECONDS, Latch, code, in_thread, read_ints, value

Kernel = Callable[[Any], Any]
Run = Callable[..., str]


class Journal:
    """Kernels that note their names in the order in which they run."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.names: list[str] = []

    def __call__(self, name: str) -> Any:
        return self._kernel(lambda launch: self.names.append(name))


@pytest.fixture
def journal(d: Any, context: Any, kernel: Kernel) -> Journal:
    return Journal(kernel)


def stream(d: Any, *, blocking: bool = False) -> Any:
    return value(d.cuStreamCreate(0 if blocking else 1))


def test_a_kernel_starts_without_anybody_waiting_for_it(
    d: Any, context: Any, kernel: Kernel, launch: Run
) -> None:
    latch = Latch()
    assert launch(kernel(latch)) == "SUCCESS"
    latch.wait_until_entered()
    assert code(d.cuStreamQuery(0)) == "NOT_READY"
    latch.open()
    assert code(d.cuCtxSynchronize()) == "SUCCESS"
    assert code(d.cuStreamQuery(0)) == "SUCCESS"


def test_kernels_of_two_streams_run_at_once(d: Any, context: Any, kernel: Kernel, launch: Run) -> None:
    barrier = threading.Barrier(2)
    function = kernel(lambda launched: barrier.wait(SECONDS))
    launch(function, stream=stream(d))
    launch(function, stream=stream(d))
    assert code(d.cuCtxSynchronize()) == "SUCCESS"


def test_a_hundred_kernels_run_at_once(d: Any, context: Any, kernel: Kernel, launch: Run) -> None:
    barrier = threading.Barrier(100)
    function = kernel(lambda launched: barrier.wait(SECONDS))
    for _ in range(100):
        launch(function, stream=stream(d))
    assert code(d.cuCtxSynchronize()) == "SUCCESS"


def test_kernels_of_two_devices_run_at_once(d: Any, kernel: Kernel, launch: Run) -> None:
    barrier = threading.Barrier(2)
    for device in (0, 1):
        value(d.cuCtxCreate(None, 0, device))
        launch(kernel(lambda launched: barrier.wait(SECONDS)))
    assert code(d.cuCtxSynchronize()) == "SUCCESS"


def test_a_stream_is_first_in_first_out(d: Any, journal: Journal, launch: Run) -> None:
    queue = stream(d)
    for number in range(50):
        launch(journal(str(number)), stream=queue)
    d.cuStreamSynchronize(queue)
    assert journal.names == [str(number) for number in range(50)]


def test_work_behind_a_busy_kernel_waits(d: Any, journal: Journal, kernel: Kernel, launch: Run) -> None:
    latch, queue = Latch(), stream(d)
    launch(kernel(latch), stream=queue)
    launch(journal("after"), stream=queue)
    latch.wait_until_entered()
    launch(journal("elsewhere"), stream=(other := stream(d)))
    d.cuStreamSynchronize(other)
    assert journal.names == ["elsewhere"]
    latch.open()
    d.cuStreamSynchronize(queue)
    assert journal.names == ["elsewhere", "after"]


def test_legacy_stream_waits_for_blocking_streams_and_they_for_it(
    d: Any, journal: Journal, kernel: Kernel, launch: Run
) -> None:
    # The example of the Driver API, "Stream synchronization behavior": k_2 waits for k_1, k_3 for k_2.
    latch, blocking = Latch(), stream(d, blocking=True)
    launch(kernel(latch), stream=blocking)
    launch(journal("k_2"))
    launch(journal("k_3"), stream=stream(d, blocking=True))
    latch.wait_until_entered()
    launch(journal("free"), stream=(non_blocking := stream(d)))
    d.cuStreamSynchronize(non_blocking)
    assert journal.names == ["free"]
    latch.open()
    d.cuCtxSynchronize()
    assert journal.names == ["free", "k_2", "k_3"]


@pytest.mark.parametrize("handle", [0, 1])
def test_synchronizing_the_legacy_stream_waits_for_blocking_streams(
    d: Any, context: Any, kernel: Kernel, launch: Run, handle: int
) -> None:
    latch = Latch()
    launch(kernel(latch), stream=stream(d, blocking=True))
    latch.wait_until_entered()
    assert code(d.cuStreamQuery(handle)) == "NOT_READY"
    latch.open()
    assert code(d.cuStreamSynchronize(handle)) == "SUCCESS"


def test_per_thread_default_streams_are_independent_and_blocking(
    d: Any, context: Any, journal: Journal, kernel: Kernel, launch: Run
) -> None:
    latch = Latch()
    launch(kernel(latch), stream=2)
    latch.wait_until_entered()

    def elsewhere() -> str:
        d.cuCtxPushCurrent(context)
        launch(journal("other thread"), stream=2)
        return code(d.cuStreamSynchronize(2))

    assert in_thread(elsewhere) == "SUCCESS"
    launch(journal("legacy"))
    assert journal.names == ["other thread"]
    latch.open()
    d.cuCtxSynchronize()
    assert journal.names == ["other thread", "legacy"]


def test_a_destroyed_stream_finishes_its_work(d: Any, journal: Journal, kernel: Kernel, launch: Run) -> None:
    latch, queue = Latch(), stream(d, blocking=True)
    launch(kernel(latch), stream=queue)
    launch(journal("last"), stream=queue)
    latch.wait_until_entered()
    assert code(d.cuStreamDestroy(queue)) == "SUCCESS"
    assert code(d.cuStreamQuery(queue)) == "INVALID_HANDLE"
    launch(journal("legacy"))  # still ordered behind it
    assert journal.names == []
    latch.open()
    d.cuCtxSynchronize()
    assert journal.names == ["last", "legacy"]


def test_questions_about_streams(d: Any, context: Any) -> None:
    queue = value(d.cuStreamCreateWithPriority(1, -100))
    assert value(d.cuStreamGetFlags(queue)) == 1
    assert value(d.cuStreamGetPriority(queue)) == value(d.cuCtxGetStreamPriorityRange())[1]
    assert int(value(d.cuStreamGetCtx(queue))) == int(context)
    assert int(value(d.cuStreamGetDevice(queue))) == 0
    ids = {value(d.cuStreamGetId(handle)) for handle in (queue, 0, 2, stream(d))}
    assert len(ids) == 4
    assert code(d.cuStreamCreate(8)) == "INVALID_VALUE"
    none = d.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    assert value(d.cuStreamIsCapturing(queue)) == none


def test_a_thousand_streams_leave_nothing(d: Any, context: Any) -> None:
    for _ in range(1000):
        d.cuStreamDestroy(stream(d))
    assert len(d._state.streams) == 0
    assert len(d._state.context(context).streams) == 0


# ---- events


def test_an_event_tells_when_the_work_before_it_is_done(
    d: Any, context: Any, kernel: Kernel, launch: Run
) -> None:
    latch, event = Latch(), value(d.cuEventCreate(0))
    launch(kernel(latch))
    d.cuEventRecord(event, 0)
    assert code(d.cuEventQuery(event)) == "NOT_READY"
    latch.open()
    assert code(d.cuEventSynchronize(event)) == "SUCCESS"
    assert code(d.cuEventQuery(event)) == "SUCCESS"


def test_a_wait_means_the_recording_at_that_time(
    d: Any, journal: Journal, kernel: Kernel, launch: Run
) -> None:
    latch, busy, waiting = Latch(), stream(d), stream(d)
    event = value(d.cuEventCreate(0))
    d.cuEventRecord(event, busy)
    d.cuStreamWaitEvent(waiting, event, 0)  # for a recording that is done
    launch(kernel(latch), stream=busy)
    d.cuEventRecord(event, busy)
    launch(journal("not held"), stream=waiting)
    d.cuStreamSynchronize(waiting)
    d.cuStreamWaitEvent(waiting, event, 0)
    launch(journal("held"), stream=waiting)
    latch.wait_until_entered()
    d.cuEventRecord(event, stream(d))  # does not release who waits already
    assert journal.names == ["not held"]
    latch.open()
    d.cuStreamSynchronize(waiting)
    assert journal.names == ["not held", "held"]


def test_a_stream_waits_for_an_event_of_another_device(d: Any, kernel: Kernel, launch: Run) -> None:
    names: list[str] = []
    value(d.cuCtxCreate(None, 0, 0))
    latch, event = Latch(), value(d.cuEventCreate(0))
    launch(kernel(latch))
    d.cuEventRecord(event, 0)
    value(d.cuCtxCreate(None, 0, 1))
    queue = stream(d)
    assert code(d.cuStreamWaitEvent(queue, event, 0)) == "SUCCESS"
    launch(kernel(lambda launched: names.append("device 1")), stream=queue)
    latch.wait_until_entered()
    assert code(d.cuStreamQuery(queue)) == "NOT_READY"
    assert names == []
    latch.open()
    d.cuStreamSynchronize(queue)
    assert names == ["device 1"]


def test_destroying_an_event_does_not_disturb_who_waits(
    d: Any, journal: Journal, kernel: Kernel, launch: Run
) -> None:
    latch, busy, waiting = Latch(), stream(d), stream(d)
    event = value(d.cuEventCreate(0))
    launch(kernel(latch), stream=busy)
    d.cuEventRecord(event, busy)
    d.cuStreamWaitEvent(waiting, event, 0)
    launch(journal("held"), stream=waiting)
    d.cuEventDestroy(event)
    latch.wait_until_entered()
    assert journal.names == []
    latch.open()
    d.cuCtxSynchronize()
    assert journal.names == ["held"]


def test_elapsed_time_is_the_time_between_the_events(
    d: Any, context: Any, kernel: Kernel, launch: Run
) -> None:
    start, end, latch = value(d.cuEventCreate(0)), value(d.cuEventCreate(0)), Latch()
    d.cuEventRecord(start, 0)
    launch(kernel(latch))
    d.cuEventRecord(end, 0)
    assert code(d.cuEventElapsedTime(start, end)) == "NOT_READY"
    latch.open()
    d.cuEventSynchronize(end)
    assert 0 < value(d.cuEventElapsedTime(start, end)) < 1e3 * SECONDS
    assert value(d.cuEventElapsedTime(end, start)) < 0


def test_elapsed_time_needs_one_context(d: Any, context: Any) -> None:
    start = value(d.cuEventCreate(0))
    d.cuEventRecord(start, 0)
    value(d.cuCtxCreate(None, 0, 1))
    end = value(d.cuEventCreate(0))
    d.cuEventRecord(end, 0)
    assert code(d.cuEventElapsedTime(start, end)) == "INVALID_HANDLE"


# ---- who runs the work


def test_waiting_runs_brief_work_on_the_calling_thread(
    d: Any, context: Any, kernel: Kernel, launch: Run
) -> None:
    threads: list[threading.Thread] = []
    function = kernel(lambda launched: threads.append(threading.current_thread()))
    launch(function)
    d.cuCtxSynchronize()  # how long it takes is not known yet, so a worker runs it
    gate = Latch()
    launch(kernel(gate))
    launch(function)
    gate.wait_until_entered()
    gate.open()
    d.cuCtxSynchronize()
    assert len(threads) == 2


def test_a_thread_that_waits_runs_what_leads_to_it(d: Any, context: Any, kernel: Kernel, launch: Run) -> None:
    d._state.scheduler._call_worker = lambda queue: None  # no worker ever comes
    names: list[int] = []
    for number in range(20):
        launch(kernel(lambda launched, number=number: names.append(number)), stream=0)

    def synchronize() -> str:
        d.cuCtxPushCurrent(context)
        return code(d.cuCtxSynchronize())

    assert in_thread(synchronize) == "SUCCESS"
    assert names == list(range(20))


def test_host_functions_run_in_order_on_a_thread_of_the_driver(
    d: Any, journal: Journal, kernel: Kernel, launch: Run
) -> None:
    called: list[tuple[threading.Thread, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(data: int) -> None:
        called.append((threading.current_thread(), data))
        journal.names.append("host function")

    latch, queue = Latch(), stream(d)
    launch(kernel(latch), stream=queue)
    address = ctypes.cast(note, ctypes.c_void_p).value
    assert code(d.cuLaunchHostFunc(queue, d.CUhostFn(address), 77)) == "SUCCESS"
    launch(journal("after"), stream=queue)
    latch.open()
    d.cuStreamSynchronize(queue)
    assert journal.names == ["host function", "after"]
    assert called[0][0] is not threading.current_thread()
    assert called[0][1] == 77


def test_host_functions_may_not_call_the_driver(d: Any, context: Any) -> None:
    answers: list[str] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def misbehave(data: int) -> None:
        answers.append(code(d.cuCtxSynchronize()))

    d.cuLaunchHostFunc(0, ctypes.cast(misbehave, ctypes.c_void_p).value, 0)
    d.cuCtxSynchronize()
    assert answers == ["NOT_PERMITTED"]


def test_workers_end_when_there_is_no_work(
    d: Any, context: Any, kernel: Kernel, launch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.virtual.work.IDLE_SECONDS", 0.01)
    latch = Latch()
    launch(kernel(latch))
    latch.wait_until_entered()
    assert d._state.scheduler.worker_count == 1
    latch.open()
    assert latch.thread is not None
    latch.thread.join(SECONDS)
    assert d._state.scheduler.worker_count == 0
    assert launch(kernel(Latch())) == "SUCCESS"


def test_many_threads_submit_and_wait(d: Any, context: Any, kernel: Kernel, launch: Run) -> None:
    from virtual_fakes import fill

    function = kernel(fill)
    failures: list[Any] = []

    def work(number: int) -> None:
        d.cuCtxPushCurrent(context)
        queue, pointer = stream(d), value(d.cuMemAlloc(128))
        for step in range(30):
            launch(function, pointer, 1000 * number + step, queue, threads=32)
            d.cuStreamSynchronize(queue)
            found = read_ints(d, pointer, 32)
            if found != [1000 * number + step] * 32:
                failures.append((number, step, found))
        d.cuMemFree(pointer)
        d.cuStreamDestroy(queue)
        d.cuCtxPopCurrent()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
