"""Tasks run inside a context of some device, as futures of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver
from leasing import SECONDS, Worker, check, current, poison, until


@pytest.fixture
def executor(driver: Driver) -> Iterator[gf.FleetExecutor]:
    with gf.FleetExecutor(driver=driver) as made:
        yield made


def here(driver: Driver) -> gf.Context:
    context = gf.current_context(driver)
    assert context is not None
    return context


class Gate:
    """A task that runs until `open`."""

    def __init__(self, executor: gf.FleetExecutor, **how: Any) -> None:
        self._entered, self._may_go = threading.Event(), threading.Event()
        self.future = executor.submit(self._run, **how)

    def _run(self) -> str:
        self._entered.set()
        assert self._may_go.wait(SECONDS)
        return threading.current_thread().name

    def entered(self) -> Gate:
        assert self._entered.wait(SECONDS), "the task does not begin"
        return self

    def open(self) -> str:
        self._may_go.set()
        return self.future.result(SECONDS)


def test_task_runs_inside_a_context(executor: gf.FleetExecutor, driver: Driver) -> None:
    context = executor.submit(here, driver).result(SECONDS)
    assert context.device.driver is driver
    assert executor.submit(int, "z", base=36).result(SECONDS) == 35
    assert current(driver) == 0


def test_it_is_an_executor(executor: gf.FleetExecutor) -> None:
    assert isinstance(executor, concurrent.futures.Executor)
    assert list(executor.map(pow, range(20), [2] * 20)) == [n * n for n in range(20)]
    futures = [executor.submit(str, n) for n in range(5)]
    assert {f.result() for f in concurrent.futures.as_completed(futures, SECONDS)} == set("01234")


def test_tasks_allocate_launch_and_copy_back(executor: gf.FleetExecutor, driver: Driver) -> None:
    double = gf.Program.from_source(
        'extern "C" __global__ void twice(int *x) { x[threadIdx.x] *= 2; }', driver=driver
    ).kernel("twice")

    def work(number: int) -> int:
        context = here(driver)
        with context.alloc(128) as buffer:
            buffer.copy_from(np.full(32, number, "i4"))
            double.launch(1, 32, buffer)
            return int(buffer.to_numpy("i4").sum())

    assert list(executor.map(work, range(12))) == [64 * number for number in range(12)]


def test_device_is_chosen_or_the_least_busy(virtual: Driver) -> None:
    with gf.FleetExecutor(driver=virtual, threads_per_device=2) as executor:
        for ordinal in (1, 0):
            for device in (ordinal, Device(ordinal, virtual)):
                assert executor.submit(here, virtual, device=device).result().device.ordinal == ordinal
        gates = [Gate(executor).entered() for _ in range(4)]
        assert executor.statistics()._asdict() == {
            "threads": 4,
            "busy": 4,
            "queued": 0,
            "busy_by_device": {0: 2, 1: 2},
        }
        for gate in gates:
            gate.open()


def test_tasks_begin_in_the_order_of_their_submission(virtual: Driver) -> None:
    begun: list[int] = []
    with gf.FleetExecutor(driver=virtual, threads_per_device=1) as executor:
        gates = [Gate(executor, device=device).entered() for device in (0, 1)]
        for number, device in enumerate((None, 0, None, 0, None)):
            executor.submit(begun.append, number, device=device)
        on_the_other = executor.submit(begun.append, -1, device=1)
        gates[0].open()
        until(lambda: len(begun) == 5)
        assert begun == [0, 1, 2, 3, 4]
        assert not on_the_other.done()
        gates[1].open()


def test_a_busy_device_does_not_hold_up_another(virtual: Driver) -> None:
    with gf.FleetExecutor(driver=virtual, threads_per_device=1) as executor:
        gate = Gate(executor, device=0).entered()
        waiting = executor.submit(here, virtual, device=0)
        assert executor.submit(here, virtual).result(SECONDS).device.ordinal == 1
        assert executor.submit(here, virtual, device=1).result(SECONDS).device.ordinal == 1
        assert not waiting.done()
        gate.open()
        assert waiting.result(SECONDS).device.ordinal == 0


def test_device_that_the_pool_does_not_have_is_refused(executor: gf.FleetExecutor) -> None:
    with pytest.raises(ValueError, match="no device 99: expected one of 0"):
        executor.submit(int, device=99)


def test_exception_of_a_task_is_its_futures(executor: gf.FleetExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 // 0).result(SECONDS)
    with pytest.raises(SystemExit):
        executor.submit(lambda: exec("raise SystemExit")).result(SECONDS)
    assert executor.submit(int).result(SECONDS) == 0


def test_task_that_leaves_a_context_pushed_does_not_change_the_next(virtual: Driver) -> None:
    with gf.FleetExecutor(driver=virtual, threads_per_device=1) as executor:

        def pushes() -> None:
            virtual.cuCtxSetCurrent(other.handle)

        other = Device(1, virtual).create_context()
        with pytest.raises(gf.ContextWarning):  # a warning is an error in the tests
            executor.submit(pushes, device=0).result(SECONDS)
        assert executor.submit(here, virtual, device=0).result(SECONDS) is not other
        other.close()


def test_initializer_runs_once_in_each_thread_inside_a_context(virtual: Driver) -> None:
    seen: list[tuple[str, int]] = []

    def initialize(*arguments: int) -> None:
        assert arguments == (1, 2)
        seen.append((threading.current_thread().name, here(virtual).device.ordinal))

    with gf.FleetExecutor(
        driver=virtual, initializer=initialize, initargs=(1, 2), thread_name_prefix="mine"
    ) as executor:
        gates = [Gate(executor) for _ in range(4)]
        names = {gate.entered() and gate.open() for gate in gates}
        list(executor.map(int, range(20)))
    assert {name for name, _ in seen} == names
    assert sorted(ordinal for _, ordinal in seen) == [0, 0, 1, 1]
    assert all(name.startswith("mine-device") for name in names)


def test_initializer_that_fails_breaks_the_executor(driver: Driver) -> None:
    with gf.FleetExecutor(driver=driver, initializer=lambda: 1 // 0) as executor:
        future = executor.submit(int)
        with pytest.raises(gf.ExecutorBroken, match=r"initializer.*ZeroDivisionError"):
            future.result(SECONDS)
        until(lambda: executor.is_broken)
        with pytest.raises(concurrent.futures.BrokenExecutor) as caught:
            executor.submit(int)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_fault_breaks_the_executor_and_names_the_launches(virtual: Driver) -> None:
    with gf.FleetExecutor(driver=virtual, threads_per_device=1) as executor:
        all_wait = threading.Event()
        faulty = executor.submit(lambda: all_wait.wait(SECONDS) and poison(virtual), device=0)
        gate = Gate(executor, device=1).entered()
        waiting = [executor.submit(int, device=device) for device in (0, 1, None)]
        all_wait.set()
        with pytest.raises(gf.StickyError):
            faulty.result(SECONDS)
        for future in waiting:
            with pytest.raises(gf.ExecutorBroken, match=r"runs no task any more.*fault") as caught:
                future.result(SECONDS)
            assert any("fault" in launch for launch in caught.value.launches)
        gate.open()
        with pytest.raises(gf.PoolBroken):
            executor.submit(int)
        assert executor.is_broken
        assert "broken" in repr(executor)


def test_fault_that_a_task_swallows_breaks_the_executor_too(virtual: Driver) -> None:
    def swallow() -> str:
        try:
            poison(virtual)
        except gf.StickyError:
            return "swallowed"
        return "no fault"

    with gf.FleetExecutor(driver=virtual) as executor:
        assert executor.submit(swallow).result(SECONDS) == "swallowed"
        until(lambda: executor.is_broken)


def test_cancelled_task_does_not_run(virtual: Driver) -> None:
    with gf.FleetExecutor(driver=virtual, threads_per_device=1) as executor:
        gate = Gate(executor, device=0).entered()
        ran: list[int] = []
        future = executor.submit(ran.append, 1, device=0)
        assert future.cancel()
        gate.open()
    assert ran == []


def test_shutdown_ends_what_was_submitted(driver: Driver) -> None:
    executor = gf.FleetExecutor(driver=driver, threads_per_device=1)
    futures = [executor.submit(pow, n, 2) for n in range(10)]
    executor.shutdown()
    executor.shutdown()
    assert [future.result(0) for future in futures] == [n * n for n in range(10)]
    assert executor.statistics().threads == 0
    assert executor.pool.statistics().contexts == 0
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)


def test_shutdown_before_the_first_task(driver: Driver) -> None:
    gf.FleetExecutor(driver=driver).shutdown()
    executor = gf.FleetExecutor(driver=driver)
    executor.shutdown()
    with pytest.raises((RuntimeError, gf.PoolClosed)):
        executor.submit(int)


def test_shutdown_can_cancel_what_has_not_begun(virtual: Driver) -> None:
    executor = gf.FleetExecutor(driver=virtual, threads_per_device=1)
    gate = Gate(executor, device=0).entered()
    waiting = [executor.submit(int, device=0) for _ in range(3)]
    closing = Worker(lambda: executor.shutdown(cancel_futures=True))
    until(lambda: all(future.cancelled() for future in waiting))
    assert closing.is_alive()
    gate.open()
    closing.result()


def test_shutdown_without_waiting_closes_the_pool_behind_the_last_task(driver: Driver) -> None:
    executor = gf.FleetExecutor(driver=driver)
    gate = Gate(executor).entered()
    executor.shutdown(wait=False)
    assert not executor.pool.is_closed
    gate.open()
    until(lambda: executor.pool.is_closed and executor.pool.statistics().contexts == 0)
    executor.shutdown()


def test_task_that_shuts_its_executor_down_cannot_wait_for_itself(driver: Driver) -> None:
    executor = gf.FleetExecutor(driver=driver)
    with pytest.raises(RuntimeError, match="wait=False"):
        executor.submit(executor.shutdown).result(SECONDS)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)
    executor.shutdown()
    assert executor.pool.is_closed


def test_task_may_shut_its_executor_down_without_waiting(driver: Driver) -> None:
    executor = gf.FleetExecutor(driver=driver)
    executor.submit(executor.shutdown, wait=False).result(SECONDS)
    until(lambda: executor.pool.is_closed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("queued", [0, 3])
def test_callback_that_exits_costs_no_thread_and_no_task(virtual: Driver, queued: int) -> None:
    def leave(_: object) -> None:
        raise SystemExit

    pool = gf.ContextPool([0], driver=virtual)
    with pool, gf.FleetExecutor(pool, threads_per_device=1) as executor:
        gate = Gate(executor)
        gate.future.add_done_callback(leave)
        waiting = [executor.submit(int, number) for number in range(queued)]
        gate.open()
        assert [future.result(SECONDS) for future in waiting] == list(range(queued))
        assert executor.submit(int, 7).result(SECONDS) == 7


def test_thread_that_cannot_be_started_keeps_nobody_waiting(
    virtual: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        queued.append(executor.submit(int))  # by another thread, as it were
        Worker(lambda: executor.shutdown(wait=False)).result()
        raise RuntimeError("can't start new thread")

    def start(thread: threading.Thread) -> None:
        (refuse if "FleetExecutor" in thread.name else original)(thread)

    queued: list[concurrent.futures.Future[int]] = []
    original = threading.Thread.start
    executor = gf.FleetExecutor(gf.ContextPool([0], driver=virtual), threads_per_device=1)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        executor.submit(int)
    with pytest.raises(RuntimeError, match="new thread"):
        queued[0].result(SECONDS)
    Worker(executor.shutdown).result()


def test_shutdown_leaves_a_pool_that_was_given_open(driver: Driver) -> None:
    with gf.ContextPool(driver=driver) as pool:
        with gf.FleetExecutor(pool) as executor:
            assert executor.pool is pool
            executor.submit(int).result(SECONDS)
        assert not pool.is_closed
        assert pool.statistics().contexts == 1


def test_tasks_share_a_narrow_pool_with_others(driver: Driver) -> None:
    with gf.ContextPool([0], max_threads_per_context=1, driver=driver) as pool:
        with gf.FleetExecutor(pool, threads_per_device=3) as executor:
            with pool.lease():
                futures = [executor.submit(int) for _ in range(6)]
                until(lambda: pool.statistics().waiting == 3)
            concurrent.futures.wait(futures, SECONDS)
            assert [future.result(0) for future in futures] == [0] * 6


def test_pool_that_was_closed_is_said_to_be(driver: Driver) -> None:
    pool = gf.ContextPool(driver=driver)
    with gf.FleetExecutor(pool) as executor:
        executor.submit(int).result(SECONDS)
        pool.close()
        with pytest.raises(gf.PoolClosed):
            executor.submit(int).result(SECONDS)
    with gf.FleetExecutor(pool) as late, pytest.raises(gf.PoolClosed):
        late.submit(int).result(SECONDS)


def test_threads_are_started_as_they_are_needed(virtual: Driver) -> None:
    with gf.FleetExecutor(driver=virtual, threads_per_device=8) as executor:
        assert executor.statistics().threads == 0
        for _ in range(5):
            executor.submit(int).result(SECONDS)
            until(lambda: executor.statistics().busy == 0)
        assert executor.statistics().threads == 1


def test_forgotten_executor_ends_its_threads(virtual: Driver) -> None:
    executor = gf.FleetExecutor(driver=virtual)
    executor.submit(int).result(SECONDS)
    pool, threads = executor.pool, list(executor._crew.threads)
    with pytest.warns(ResourceWarning, match="never shut down"):
        del executor
        gc.collect()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert pool.statistics().contexts == 0


def test_a_thread_that_waits_holds_no_argument_or_result(executor: gf.FleetExecutor) -> None:
    class Large:
        pass

    large = Large()
    reference = weakref.ref(large)
    executor.submit(id, large).result(SECONDS)
    del large
    until(lambda: executor.statistics().busy == 0)
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"threads_per_device": 0}, ValueError, "expected 1 or more"),
        ({"initializer": 3}, TypeError, "can be called"),
        ({"pool": gf.ContextPool(), "driver": "virtual"}, ValueError, "both given"),
    ],
)
def test_executor_that_cannot_be_is_refused(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        gf.FleetExecutor(**arguments)


# asyncio


def test_awaiting_run_gives_the_result_while_the_loop_goes_on(executor: gf.FleetExecutor) -> None:
    async def main() -> tuple[list[int], int]:
        beats = 0
        gate = Gate(executor)
        results = asyncio.gather(*(executor.run(pow, n, 2) for n in range(20)))
        while not gate.future.done():
            beats += 1
            await asyncio.sleep(0)
            if beats == 10:
                gate.open()
        return await results, beats

    squares, beats = asyncio.run(main())
    assert squares == [n * n for n in range(20)]
    assert beats >= 10


def test_awaiting_run_raises_what_the_task_raised(executor: gf.FleetExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(executor.run(lambda: 1 // 0))


def test_cancelled_run_leaves_the_executor_usable(virtual: Driver) -> None:
    async def main() -> int:
        waiting = asyncio.create_task(executor.run(ran.append, 1, device=0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        return await executor.run(int, "7", device=0)

    ran: list[int] = []
    with gf.FleetExecutor(driver=virtual, threads_per_device=1) as executor:
        gate = Gate(executor, device=0).entered()
        assert asyncio.run(main()) == 7
    assert ran == []


# The process


def test_tasks_are_done_before_the_interpreter_exits() -> None:
    check(
        """
        executor = gf.FleetExecutor(driver="virtual", threads_per_device=1)
        import time
        for n in range(5):
            executor.submit(lambda n=n: (time.sleep(0.01), print(n)), device=0)
        """,
        "0\n1\n2\n3\n4\n",
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no fork on this system")
def test_executor_made_before_a_fork_works_in_each_child() -> None:
    check(
        """
        executor = gf.FleetExecutor(driver="virtual")
        for _ in range(2):
            child = os.fork()
            if not child:
                assert executor.submit(pow, 2, 3).result(20) == 8
                executor.shutdown()
                sys.exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        "0\n0\n",
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no fork on this system")
def test_executor_used_before_a_fork_says_so_in_the_child_which_ends() -> None:
    check(
        """
        executor = gf.FleetExecutor(driver="virtual")
        executor.submit(int).result()
        child = os.fork()
        if not child:
            try:
                executor.submit(int).result(20)
            except gf.ForkedProcess:
                sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(executor.submit(pow, 2, 3).result())
        executor.shutdown()
        """,
        "7\n8\n",
    )


def test_tasks_run_in_green_contexts_of_a_pool(device: Device) -> None:
    with (
        gf.ContextPool([device], kind="green", per_device=2) as pool,
        gf.FleetExecutor(pool, threads_per_device=3) as executor,
    ):
        contexts = {each.address for each in executor.map(_current_green, range(20))}
        assert 1 <= len(contexts) <= 2


def _current_green(_: int) -> gf.Context:
    context = gf.current_context()
    assert isinstance(context, gf.GreenContext)
    assert len(context.threads_inside()) == 1
    return context
