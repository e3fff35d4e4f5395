"""Contexts float between threads, and every call leaves the thread as it was."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a new thread and return or raise what it did."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.extend((work(), None))
        except BaseException as error:
            result.extend((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if result[1] is not None:
        raise result[1]
    return result[0]


def current(driver: Driver) -> int:
    return int(driver.cuCtxGetCurrent())


def test_created_context_floats(device: Device) -> None:
    context = device.create_context()
    assert current(device.driver) == 0
    context.close()


def test_creating_leaves_the_current_context_current(device: Device, context: gf.Context) -> None:
    with context:
        other = device.create_context()
        assert current(device.driver) == context.address
    other.close()


def test_any_thread_enters_and_leaves(context: gf.Context) -> None:
    driver = context.driver

    def work() -> tuple[int, int, int]:
        before = current(driver)
        with context:
            inside = current(driver)
        return before, inside, current(driver)

    assert work() == (0, context.address, 0)
    assert in_thread(work) == (0, context.address, 0)


def test_entering_nests_and_recurses(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    with context, other, context, context:
        assert current(device.driver) == context.address
    with context:
        with other:
            assert current(device.driver) == other.address
        assert current(device.driver) == context.address
    assert current(device.driver) == 0
    other.close()


def test_exception_inside_with_restores_and_passes_through(context: gf.Context) -> None:
    with pytest.raises(ZeroDivisionError):
        with context:
            _ = 1 // 0
    assert current(context.driver) == 0


def test_two_threads_with_different_previous_contexts_get_back_their_own(device: Device) -> None:
    shared, first, second = (device.create_context() for _ in range(3))
    inside, left = threading.Barrier(2), threading.Barrier(2)

    def work(previous: gf.Context, leave_first: bool) -> bool:
        with previous:
            with shared:
                inside.wait()
                if not leave_first:
                    left.wait()
            if leave_first:
                left.wait()
            return current(device.driver) == previous.address

    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda p=p, f=f: answers.append(work(p, f)))
        for p, f in ((first, True), (second, False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True, True]
    for context in (shared, first, second):
        context.close()


def test_push_and_pop(device: Device, context: gf.Context) -> None:
    context.push()
    assert context.is_current
    assert gf.current_context(device.driver) is context
    context.pop()
    assert not context.is_current
    assert gf.current_context(device.driver) is None


def test_pop_refuses_what_is_not_on_top(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    context.push()
    other.push()
    with pytest.raises(gf.WrongContext, match="on top"):
        context.pop()
    assert current(device.driver) == other.address
    other.pop()
    context.pop()
    other.close()


def test_pop_without_push_is_refused(context: gf.Context) -> None:
    with pytest.raises(gf.WrongContext, match="has pushed nothing"):
        context.pop()


def test_pop_refuses_what_a_with_block_entered(context: gf.Context) -> None:
    with context:
        with pytest.raises(gf.WrongContext, match="entered by `with`"):
            context.pop()
        assert context.is_current


def test_pop_refuses_while_something_else_is_on_top_of_the_driver_stack(
    device: Device, context: gf.Context
) -> None:
    other = device.create_context()
    context.push()
    device.driver.cuCtxPushCurrent(other.handle)
    with pytest.raises(gf.WrongContext, match="something else has pushed"):
        context.pop()
    device.driver.cuCtxPopCurrent()
    context.pop()
    other.close()


def test_foreign_switch_inside_with_is_put_right(device: Device, context: gf.Context) -> None:
    outer, foreign = device.create_context(), device.create_context()
    with outer:
        with pytest.warns(gf.ContextWarning, match="set again") as caught:
            with context:
                device.driver.cuCtxSetCurrent(foreign.handle)
        assert caught[0].filename == __file__
        assert current(device.driver) == outer.address
    outer.close()
    foreign.close()


def test_foreign_context_current_before_entry_is_current_after_it(
    device: Device, context: gf.Context
) -> None:
    foreign = device.create_context()
    device.driver.cuCtxPushCurrent(foreign.handle)
    with context:
        assert context.is_current
    assert current(device.driver) == foreign.address
    device.driver.cuCtxPopCurrent()
    foreign.close()


def test_leaving_in_another_thread_is_refused(context: gf.Context) -> None:
    with context:
        with pytest.raises(gf.WrongContext, match="was not entered by thread"):
            in_thread(lambda: context.__exit__(None, None, None))
        assert context.is_current


def test_methods_act_in_their_own_context(two_devices: list[Device]) -> None:
    first, second = (device.create_context() for device in two_devices)
    with second:
        buffer = first.alloc(16)
        stream = first.stream()
        assert int(first.driver.cuStreamGetCtx(stream.handle)) == first.address
        assert current(first.driver) == second.address
        buffer.close()
        stream.close()
    first.close()
    second.close()


def test_methods_leave_a_fresh_thread_without_context(context: gf.Context) -> None:
    def work() -> int:
        context.alloc(16).close()
        context.stream().close()
        context.synchronize()
        return current(context.driver)

    assert in_thread(work) == 0


def test_failing_method_leaves_the_current_context(context: gf.Context) -> None:
    with pytest.raises(gf.CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        context.alloc(1 << 45)
    assert current(context.driver) == 0


def test_close_is_idempotent_and_use_after_it_says_so(device: Device) -> None:
    context = device.create_context()
    context.close()
    context.close()
    assert context.is_closed
    for use in (
        context.push,
        context.__enter__,
        context.synchronize,
        context.stream,
        lambda: context.alloc(4),
    ):
        with pytest.raises(gf.ContextClosed, match="was closed"):
            use()
    assert current(device.driver) == 0


def test_two_threads_closing_destroy_once(virtual: Driver) -> None:
    destroyed = []
    raw_destroy = virtual.raw.cuCtxDestroy
    context = Device(0, virtual).create_context()
    virtual.cuCtxDestroy = lambda handle: destroyed.append(int(handle)) or raw_destroy(handle)
    threads = [threading.Thread(target=context.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert destroyed == [context.address]


def test_close_while_a_thread_is_inside_names_it(device: Device) -> None:
    context = device.create_context()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with context:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    inside.wait()
    with pytest.raises(gf.ContextInUse, match="'holder'"):
        context.close()
    assert not context.is_closed
    with context:
        pass
    leave.set()
    context.close(wait=True)
    assert context.is_closed
    thread.join()


def test_close_while_inside_oneself_is_refused_also_when_waiting(device: Device) -> None:
    context = device.create_context()
    with context:
        with pytest.raises(gf.ContextInUse):
            context.close()
        with pytest.raises(gf.ContextInUse, match="itself inside"):
            context.close(wait=True)
    context.close()


def test_close_waits_for_another_thread_of_the_same_name(context: gf.Context) -> None:
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with context:
            is_inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=stay, name=threading.current_thread().name)
    thread.start()
    is_inside.wait(60)
    timer = threading.Timer(0.05, may_leave.set)
    timer.start()
    context.close(wait=True)
    assert context.is_closed
    thread.join()


def test_thread_that_died_inside_does_not_hold_the_context(device: Device) -> None:
    context = device.create_context()
    in_thread(context.push)
    gc.collect()
    context.close()
    assert context.is_closed


def test_forgotten_context_is_destroyed_with_a_warning(device: Device) -> None:
    context = device.create_context()
    handle = context.handle
    with pytest.warns(ResourceWarning, match="was never closed"):
        del context
        gc.collect()
    with pytest.raises(gf.CudaError):
        device.driver.cuCtxDestroy(handle)


def test_forgotten_context_does_not_disturb_the_current_one(device: Device, context: gf.Context) -> None:
    forgotten = [device.create_context()]
    forgotten.append(forgotten)  # type: ignore[arg-type]
    with context, pytest.warns(ResourceWarning, match="was never closed"):
        del forgotten
        gc.collect()
        assert context.is_current


def test_closing_a_context_makes_later_closes_of_its_objects_harmless(device: Device) -> None:
    context = device.create_context()
    buffer, stream, event = context.alloc(16), context.stream(), context.event()
    context.close()
    for thing in (buffer, stream, event):
        thing.close()
    with pytest.raises(gf.ContextClosed):
        buffer.fill()


def test_primary_context_is_shared_and_each_close_releases_one_retain(device: Device) -> None:
    first, second = device.retain_primary_context(), device.retain_primary_context()
    assert first.address == second.address
    first.close()
    with second:
        assert second.is_current
    assert device.driver.cuDevicePrimaryCtxGetState(device.handle)[1] == 1
    second.close()
    assert device.driver.cuDevicePrimaryCtxGetState(device.handle)[1] == 0


def test_closing_a_primary_context_frees_what_is_in_it(device: Device) -> None:
    other = device.retain_primary_context()
    with device.retain_primary_context() as first:
        first.alloc(4 << 20).close()  # the driver keeps something for itself then
    first.close()
    free = other.memory_info()[0]
    context = device.retain_primary_context()
    buffer = context.alloc(4 << 20)
    assert other.memory_info()[0] < free
    context.close()
    assert buffer.is_closed
    assert other.memory_info()[0] == free
    other.close()


def test_current_context_finds_the_entered_object_or_borrows(device: Device, context: gf.Context) -> None:
    foreign = device.create_context()
    with context:
        assert gf.current_context(device.driver) is context
        device.driver.cuCtxPushCurrent(foreign.handle)
        borrowed = gf.current_context(device.driver)
        assert borrowed is not None
        assert (borrowed.kind, borrowed.address) == ("borrowed", foreign.address)
        borrowed.close()
        device.driver.cuCtxPopCurrent()
    with foreign:
        assert foreign.is_current
    foreign.close()


def test_creating_until_out_of_memory_leaves_everything_as_it_was(virtual: Driver) -> None:
    device = Device(0, virtual)
    calls = []
    create = virtual.raw.cuCtxCreate

    def fails_third(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise gf.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "cuCtxCreate")
        return create(*arguments)[1]

    virtual.cuCtxCreate = fails_third
    made = [device.create_context(), device.create_context()]
    with made[0]:
        with pytest.raises(gf.CudaError, match="OUT_OF_MEMORY"):
            device.create_context()
        assert made[0].is_current
    for context in made:
        context.close()


def test_second_failure_while_leaving_is_a_note_on_the_first(context: gf.Context) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with context:
            in_thread_leave = context.__exit__
            in_thread_leave(None, None, None)  # leaves early, so that the block's own leaving fails
            _ = 1 // 0
    assert "leaving" in caught.value.__notes__[0]


def test_forgotten_context_with_a_main_stream_is_destroyed(device: Device) -> None:
    context = device.create_context()
    buffer = context.alloc(16)
    buffer.copy_from(bytes(16), stream=context.main_stream)  # which the buffer keeps, and it the context
    handle = context.handle
    with pytest.warns(ResourceWarning, match="was never closed"):
        with pytest.warns(ResourceWarning, match="were never freed"):
            del context, buffer
            gc.collect()
    with pytest.raises(gf.CudaError):
        device.driver.cuCtxDestroy(handle)


def test_closed_context_is_not_kept_by_what_was_in_it(device: Device) -> None:
    context = device.create_context()
    context.main_stream.record()
    context.alloc(16).close()
    context.close()
    dead = weakref.ref(context)
    del context
    gc.collect()
    assert dead() is None


@pytest.mark.filterwarnings("ignore:16 bytes of .* were never freed:ResourceWarning")
def test_finalizers_of_two_threads_do_not_wait_for_each_other(device: Device) -> None:
    contexts = [device.create_context(), device.create_context()]
    buffers = [[context.alloc(16)] for context in contexts]
    both_hold_their_lock = threading.Barrier(2)

    def forget_the_others_buffer(mine: int) -> None:
        both_hold_their_lock.wait(10)
        buffers[1 - mine].clear()
        both_hold_their_lock.wait(10)

    threads = [
        threading.Thread(
            target=contexts[mine].keep,
            args=("key", functools.partial(forget_the_others_buffer, mine)),
            daemon=True,
        )
        for mine in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for context in contexts:
        context.close()
    assert not both_hold_their_lock.broken


@pytest.mark.parametrize("call", ["_push", "_pop", "_get_current"])
@pytest.mark.parametrize("is_done", [False, True])
def test_interrupted_entering_or_leaving_leaves_nothing_current(
    context: gf.Context, call: str, is_done: bool
) -> None:
    function = getattr(context, call)

    def interrupted(*arguments: Any) -> Any:
        if is_done:
            function(*arguments)
        raise KeyboardInterrupt

    setattr(context, call, interrupted)
    with pytest.raises(KeyboardInterrupt), context:
        pass
    setattr(context, call, function)
    assert current(context.driver) == 0
    assert context.threads_inside() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(virtual: Driver) -> None:
    context = Device(0, virtual).create_context()
    buffer = context.alloc(16)
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        context.keep("key", lambda: (is_held.set(), is_over.wait(60)))

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        with contextlib.suppress(BaseException):
            buffer.close()
            context.close()
            try:
                context.keep("other", int)
            except gf.ForkedProcess:
                code = 0
        os._exit(code)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        is_over.set()
        thread.join()
        context.close()
