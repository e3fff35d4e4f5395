"""Leases in asyncio tasks: nothing is entered for them, and no wait blocks the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver
from leasing import SECONDS, Holder, current, poison, until


@pytest.fixture
def narrow(driver: Driver) -> Iterator[gf.ContextPool]:
    """Return a pool of one context that one lease takes."""
    with gf.ContextPool([0], max_threads_per_context=1, driver=driver) as made:
        yield made


async def until_waiting(pool: gf.ContextPool, count: int) -> None:
    for _ in range(10_000):
        if pool.statistics().waiting == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never {count} waiting: {pool!r}")


def test_lease_of_a_task_enters_nothing_until_it_is_told_to(narrow: gf.ContextPool, driver: Driver) -> None:
    async def main() -> None:
        async with narrow.lease() as lease:
            assert current(driver) == 0
            with lease.context as context:
                assert context.is_current
            await asyncio.sleep(0)
            assert current(driver) == 0
            assert narrow.statistics().leased == 1
        assert narrow.statistics().leased == 0
        with pytest.raises(gf.LeaseEnded, match="given back to the pool"):
            _ = lease.context

    asyncio.run(main())


def test_tasks_have_a_green_context_each_and_enter_it_between_awaits(device: Device) -> None:
    async def work(pool: gf.ContextPool) -> int:
        async with pool.lease() as lease:
            for _ in range(3):
                with lease.context as context:
                    context.alloc(16).close()
                await asyncio.sleep(0)
            return lease.context.address

    async def main() -> None:
        with gf.ContextPool([device], kind="green", per_device=2) as pool:
            used = await asyncio.gather(*(work(pool) for _ in range(6)))
            assert len(set(used)) == 2

    asyncio.run(main())


def test_tasks_of_one_thread_leave_in_any_order(two_devices: list[Device]) -> None:
    driver = two_devices[0].driver

    async def work(pool: gf.ContextPool, ordinal: int, turns: int) -> None:
        async with pool.lease(device=ordinal) as lease:
            for _ in range(turns):
                with lease.context as context:
                    assert context.device.ordinal == ordinal
                await asyncio.sleep(0)
                assert current(driver) == 0

    async def main(pool: gf.ContextPool) -> None:
        await asyncio.gather(work(pool, 0, 5), work(pool, 1, 2), work(pool, 0, 1), work(pool, 1, 7))

    with gf.ContextPool(two_devices) as pool:
        asyncio.run(main(pool))


def test_tasks_and_threads_are_served_in_turn(narrow: gf.ContextPool) -> None:
    order: list[str] = []

    async def task() -> None:
        async with narrow.lease():
            order.append("task")

    async def main() -> None:
        async with narrow.lease():
            first = asyncio.create_task(task())
            await until_waiting(narrow, 1)
            thread = Holder(narrow)
            await until_waiting(narrow, 2)
            second = asyncio.create_task(task())
            await until_waiting(narrow, 3)
        await first
        while not thread.is_inside:
            await asyncio.sleep(0)
        order.append("thread")
        assert not second.done()
        thread.leave()
        await second

    asyncio.run(main())
    assert order == ["task", "thread", "task"]


def test_loop_goes_on_while_a_task_waits_and_the_timeout_ends_it(narrow: gf.ContextPool) -> None:
    async def main() -> int:
        beats = 0
        waiting = asyncio.create_task(narrow.lease(timeout=0.02).__aenter__())
        while not waiting.done():
            beats += 1
            await asyncio.sleep(0)
        with pytest.raises(gf.PoolTimeout, match=r"within 0\.02 s: .*1 of 1 leased"):
            await waiting
        return beats

    with narrow.lease():
        assert asyncio.run(main()) > 10
    assert narrow.statistics().waiting == 0


def test_cancelled_task_leaves_the_queue(narrow: gf.ContextPool) -> None:
    async def main() -> None:
        waiting = asyncio.create_task(narrow.lease().__aenter__())
        await until_waiting(narrow, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert narrow.statistics().waiting == 0

    with narrow.lease():
        asyncio.run(main())
    assert narrow.statistics().leased == 0


def test_task_cancelled_after_it_was_served_gives_the_lease_back(narrow: gf.ContextPool) -> None:
    async def main() -> None:
        held = narrow.lease().acquire()
        waiting = asyncio.create_task(narrow.lease().__aenter__())
        await until_waiting(narrow, 1)
        held.release()  # serves the task, which has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert narrow.statistics().leased == 0

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(6))
def test_cancellation_is_not_lost_whenever_it_comes(narrow: gf.ContextPool, turns: int) -> None:
    async def work() -> None:
        async with narrow.lease(timeout=SECONDS):
            await asyncio.sleep(SECONDS)

    async def main() -> None:
        held = narrow.lease().acquire()
        task = asyncio.create_task(work())
        await until_waiting(narrow, 1)
        held.release()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done, "the task was cancelled, and goes on"
        assert task.cancelled()
        assert narrow.statistics().leased == 0

    asyncio.run(main())


def test_context_is_made_while_the_loop_goes_on_and_a_cancelled_task_loses_none(virtual: Driver) -> None:
    create, is_making, may_go_on = virtual.cuCtxCreate, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        is_making.set()
        assert may_go_on.wait(SECONDS)
        return create(*arguments)

    async def main() -> None:
        opening = asyncio.create_task(pool.lease().__aenter__())
        while not is_making.is_set():
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert pool.statistics().leased == 1  # until the context is there
        may_go_on.set()
        while pool.statistics().leased:
            await asyncio.sleep(0)
        assert pool.statistics().contexts == 1

    virtual.cuCtxCreate = slow
    with gf.ContextPool([0], kind="created", driver=virtual) as pool:
        asyncio.run(main())


def test_closing_wakes_tasks(narrow: gf.ContextPool) -> None:
    async def main() -> None:
        async with narrow.lease():
            waiting = [asyncio.create_task(narrow.lease().__aenter__()) for _ in range(3)]
            await until_waiting(narrow, 3)
            narrow.close()
            for task in waiting:
                with pytest.raises(gf.PoolClosed):
                    await task

    asyncio.run(main())
    assert narrow.statistics().contexts == 0


def test_fault_is_told_to_tasks_that_wait_and_that_come(virtual: Driver) -> None:
    async def main() -> None:
        async with pool.lease() as lease:
            waiting = asyncio.create_task(pool.lease().__aenter__())
            await until_waiting(pool, 1)
            with pytest.raises(gf.StickyError), lease.context:
                poison(virtual)
        for coming in (waiting, pool.lease().__aenter__()):
            with pytest.raises(gf.PoolBroken, match="fault"):
                await coming

    pool = gf.ContextPool([0], max_threads_per_context=1, driver=virtual)
    asyncio.run(main())
    assert pool.statistics().leased == 0
    pool.close()


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_lease_of_a_loop_that_was_closed_comes_back(narrow: gf.ContextPool) -> None:
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(narrow.lease().__aenter__())
    held = narrow.lease().acquire()
    while narrow.statistics().waiting == 0:
        loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    held.release()
    del waiting, loop
    gc.collect()
    until(lambda: narrow.statistics().leased == 0)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_many_tasks_of_a_loop_that_was_closed_leave_the_queue(narrow: gf.ContextPool) -> None:
    loop = asyncio.new_event_loop()
    held = narrow.lease().acquire()
    tasks = [loop.create_task(narrow.lease().__aenter__()) for _ in range(2000)]
    loop.run_until_complete(until_waiting(narrow, len(tasks)))
    loop.close()
    waiting = Holder(narrow)  # behind all of them
    until(lambda: narrow.statistics().waiting == len(tasks) + 1)
    held.release()
    waiting.entered().leave()
    statistics = narrow.statistics()
    assert (statistics.leased, statistics.waiting) == (0, 0)
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
