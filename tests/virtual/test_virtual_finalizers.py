"""Python may run a finalizer in the middle of a driver call, or of a kernel that the thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from virtual_fakes import SECONDS, Latch, code, value

Run = Callable[..., str]


def test_memory_freed_while_the_lock_is_held_goes_with_the_next_call(d: Any, context: Any) -> None:
    free = value(d.cuMemGetInfo())
    pointer = value(d.cuMemAlloc(5000))
    with d._state.lock:
        assert code(d.cuMemFree(pointer)) == "SUCCESS"
        assert d._state.memory.find(int(pointer)) is not None
        assert code(d.cuCtxGetCurrent()) == "SUCCESS"  # this one is still inside
    d.cuCtxGetCurrent()
    assert value(d.cuMemGetInfo()) == free


def test_the_next_call_does_not_wait_for_kernels(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    free, latch = value(d.cuMemGetInfo()), Latch()
    pointer = value(d.cuMemAlloc(5000))
    launch(kernel(latch))
    latch.wait_until_entered()
    with d._state.lock:
        d.cuMemFree(pointer)
    assert code(d.cuCtxGetCurrent()) == "SUCCESS"
    assert value(d.cuMemGetInfo()) != free
    latch.open()
    d._state.deferred.join(SECONDS)
    assert value(d.cuMemGetInfo()) == free


def test_a_kernel_whose_thread_runs_a_finalizer(d: Any, context: Any, kernel: Any, launch: Run) -> None:
    free = value(d.cuMemGetInfo())
    pointers = [value(d.cuMemAlloc(5000)) for _ in range(2)]
    stream, event = value(d.cuStreamCreate(1)), value(d.cuEventCreate(0))
    answers: list[str] = []

    def finalize(launched: Any) -> None:
        d.cuCtxPushCurrent(context)
        answers.append(code(d.cuMemFree(pointers.pop())))
        answers.append(code(d.cuStreamDestroy(stream)) if pointers else code(d.cuEventDestroy(event)))
        d.cuCtxPopCurrent()

    function = kernel(finalize)
    for _ in range(2):  # on a worker, then, as it is known to be brief, on this thread
        launch(function)
        assert code(d.cuCtxSynchronize()) == "SUCCESS"
    d._state.deferred.join(SECONDS)
    d.cuCtxGetCurrent()
    assert answers == ["SUCCESS"] * 4
    assert value(d.cuMemGetInfo()) == free
    assert code(d.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert code(d.cuEventQuery(event)) == "INVALID_HANDLE"


def test_waiting_from_inside_is_refused_instead_of_hanging(
    d: Any, context: Any, kernel: Any, launch: Run
) -> None:
    answers: list[str] = []

    def wait(launched: Any) -> None:
        d.cuCtxPushCurrent(context)
        answers.append(code(d.cuCtxSynchronize()))
        answers.append(code(d.cuMemcpy(0x1234, 0x1234, 1)))
        d.cuCtxPopCurrent()

    launch(kernel(wait))
    assert code(d.cuCtxSynchronize()) == "SUCCESS"
    assert answers == ["NOT_PERMITTED"] * 2


def test_finalizers_of_many_threads(d: Any, kernel: Any) -> None:
    """Objects in cycles, which Python frees at any moment, on any thread."""
    import ctypes
    import gc

    context = value(d.cuCtxCreate(None, 0, 0))
    free = value(d.cuMemGetInfo())
    from virtual_fakes import fill

    function = kernel(fill)
    failures: list[Any] = []

    class Buffer:
        def __init__(self) -> None:
            self.pointer = value(d.cuMemAlloc(256))
            self.cycle = self

        def __del__(self) -> None:
            answer = code(d.cuMemFree(self.pointer))
            if answer != "SUCCESS":
                failures.append(answer)

    def work() -> None:
        d.cuCtxPushCurrent(context)
        stream = value(d.cuStreamCreate(1))
        for number in range(40):
            buffer = Buffer()
            arguments = ((int(buffer.pointer), number), (ctypes.c_void_p, ctypes.c_int))
            if code(d.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0)) != "SUCCESS":
                failures.append(d.last_error_log)
            d.cuStreamSynchronize(stream)
            del buffer
        d.cuStreamDestroy(stream)

    thresholds = gc.get_threshold()
    gc.set_threshold(40, 2, 2)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SECONDS)
    finally:
        gc.set_threshold(*thresholds)
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    d.cuCtxSynchronize()
    d._state.deferred.join(SECONDS)
    d.cuCtxGetCurrent()
    assert failures == []
    assert value(d.cuMemGetInfo()) == free
