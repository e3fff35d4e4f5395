"""What programs with many threads do: workers, requests, hand-overs, waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch
from leasing import SECONDS, Worker, current

ADD = 'extern "C" __global__ void add(int *numbers, int n) { numbers[threadIdx.x] += n; }'


@pytest.fixture
def add(driver: Driver) -> gf.Kernel:
    return gf.Program.from_source(ADD, driver=driver).kernel("add")


def sum_after_adding(add: gf.Kernel, context: gf.Context, number: int) -> int:
    """Allocate, copy in, launch, copy back: what a worker does."""
    with context.alloc(128) as buffer, context.stream() as stream:
        buffer.copy_from(np.zeros(32, "i4"), stream=stream)
        add.launch(1, 32, buffer, number, stream=stream)
        return int(buffer.to_numpy("i4", stream=stream).result().sum())


def test_workers_of_a_thread_pool_use_what_the_main_thread_made(
    context: gf.Context, add: gf.Kernel, driver: Driver
) -> None:
    with ThreadPoolExecutor(4) as workers:
        sums = list(workers.map(lambda n: sum_after_adding(add, context, n), range(12)))
        assert sums == [32 * n for n in range(12)]
        assert set(workers.map(current, [driver] * 8)) == {0}


def test_stream_of_one_context_is_refused_with_a_buffer_of_another_devices(
    two_devices: list[Device], add: gf.Kernel
) -> None:
    first, second = (device.create_context() for device in two_devices)
    with first.alloc(128) as buffer, second.stream() as stream:
        with ThreadPoolExecutor(1) as workers:
            with pytest.raises(gf.WrongContext) as caught:
                workers.submit(add.launch, 1, 32, buffer, 1, stream=stream).result(SECONDS)
        assert "device 0" in str(caught.value)
        assert "device 1" in str(caught.value)
    first.close()
    second.close()


def test_each_request_in_a_fresh_thread_leaves_nothing_behind(driver: Driver, add: gf.Kernel) -> None:
    with gf.ContextPool([0], driver=driver) as pool:

        def request(number: int) -> int:
            with pool.lease() as context:
                answer = sum_after_adding(add, context, number)
            assert current(driver) == 0
            return answer

        request(1)
        with pool.lease() as context:
            free = context.memory_info()[0]
            workers = [Worker(lambda n=n: request(n)) for n in range(20)]
            assert [worker.result() for worker in workers] == [32 * n for n in range(20)]
            assert context.heap.live == {}
            if driver.is_virtual:  # a real driver's pool is as large as the requests at once have made it
                assert context.memory_info()[0] == free
        assert pool.statistics().leased == 0


def test_block_freed_by_one_thread_is_used_at_once_by_a_fresh_one(
    context: gf.Context, add: gf.Kernel
) -> None:
    with context.alloc(128) as buffer:
        buffer.fill(1)
    assert Worker(lambda: sum_after_adding(add, context, 5)).result() == 160


def test_buffer_made_in_the_main_thread_is_read_in_another(context: gf.Context) -> None:
    with context.alloc(128) as buffer:
        buffer.copy_from(np.arange(32, dtype="i4"))
        assert Worker(lambda: buffer.to_numpy("i4").tolist()).result() == list(range(32))


def test_eight_threads_are_inside_one_context_at_once(driver: Driver, add: gf.Kernel) -> None:
    all_inside = threading.Barrier(8)

    def request(number: int) -> int:
        with pool.lease() as context:
            all_inside.wait(SECONDS)
            assert context.is_current
            return sum_after_adding(add, context, number)

    with gf.ContextPool([0], driver=driver) as pool, ThreadPoolExecutor(8) as workers:
        assert list(workers.map(request, range(8))) == [32 * n for n in range(8)]
        assert pool.statistics().contexts == 1


def test_two_threads_may_use_one_stream_at_once(context: gf.Context, add: gf.Kernel) -> None:
    with context.stream() as stream, context.alloc(128) as buffer:
        buffer.fill(0, stream=stream)

        def launch_many() -> None:
            for _ in range(50):
                add.launch(1, 32, buffer, 1, stream=stream)

        for worker in [Worker(launch_many) for _ in range(2)]:
            worker.result()
        assert (buffer.to_numpy("i4", stream=stream).result() == 100).all()


@pytest.mark.filterwarnings("ignore:16 bytes of .* were never freed:ResourceWarning")
def test_buffer_that_dies_in_a_thread_that_knows_no_cuda_is_freed_on_its_own_device(
    two_devices: list[Device],
) -> None:
    first, second = two_devices
    with gf.ContextPool([second]) as pool:
        with pool.lease() as context:
            buffers = [context.alloc(16)]
        Worker(lambda: (buffers.clear(), gc.collect())).result()
        assert first.driver.cuDevicePrimaryCtxGetState(first.handle)[1] == 0


def test_waiting_for_one_device_does_not_hold_up_threads_of_another(
    two_devices: list[Device], add: gf.Kernel
) -> None:
    with gf.ContextPool(two_devices) as pool:
        with pool.lease(device=0) as context, context.stream() as stream, Latch(stream) as latch:
            waiting = Worker(stream.synchronize)

            def work() -> int:
                with pool.lease(device=1) as other:
                    return sum_after_adding(add, other, 2)

            assert Worker(work).result() == 64
            assert waiting.is_alive()
            latch.open()
            waiting.result()


def test_python_goes_on_in_other_threads_and_in_the_loop_while_a_kernel_is_awaited(driver: Driver) -> None:
    async def main(executor: gf.FleetExecutor) -> int:
        beats = 0
        with context.stream() as stream, Latch(stream) as latch:
            waiting = asyncio.create_task(executor.run(stream.synchronize))
            while beats < 20:
                beats += 1
                await asyncio.sleep(0.001)
            assert not waiting.done()
            latch.open()
            await waiting
        return beats

    with gf.ContextPool([0], driver=driver) as pool, gf.FleetExecutor(pool) as executor:
        with pool.lease() as context:
            pass
        assert asyncio.run(main(executor)) == 20


def test_awaiting_and_as_completed_tell_which_work_is_done(driver: Driver, add: gf.Kernel) -> None:
    def work(number: int) -> int:
        context = gf.current_context(driver)
        assert context is not None
        return sum_after_adding(add, context, number)

    async def main(executor: gf.FleetExecutor) -> list[int]:
        return [await done for done in asyncio.as_completed([executor.run(work, n) for n in range(6)])]

    with gf.FleetExecutor(driver=driver) as executor:
        futures = {executor.submit(work, n): n for n in range(6)}
        for future in concurrent.futures.as_completed(futures, SECONDS):
            assert future.result() == 32 * futures[future]
        assert sorted(asyncio.run(main(executor))) == [32 * n for n in range(6)]


def test_threads_record_and_ask_one_event_at_once(context: gf.Context) -> None:
    with context.stream() as first, context.stream() as second:
        event = context.event()

        def work(stream: gf.Stream) -> None:
            for _ in range(50):
                stream.record(event)
                second.wait(event)
                event.query()
                event.synchronize()

        for worker in [Worker(lambda stream=stream: work(stream)) for stream in (first, second, first)]:
            worker.result()
        with Latch(first) as latch:
            first.record(event)
            assert not event.query()
            latch.open()
            event.synchronize()
        event.close()


def test_threads_launch_one_graph_at_once(context: gf.Context, add: gf.Kernel) -> None:
    with context.alloc(128) as buffer, context.stream() as stream, context.stream() as other:
        buffer.fill(0)
        with stream.capture() as graph:
            add.launch(1, 32, buffer, 1, stream=stream)

        def launch_many(on: gf.Stream) -> None:
            for _ in range(25):
                graph.launch(on)

        for worker in [Worker(lambda on=on: launch_many(on)) for on in (stream, other)]:
            worker.result()
        context.synchronize()
        assert (buffer.to_numpy("i4") == 50).all()
        graph.close()


@pytest.mark.parametrize(
    ("make", "destroy"),
    [
        (lambda context: context.stream(), "cuStreamDestroy"),
        (lambda context: context.event(), "cuEventDestroy"),
        (lambda context: context.alloc(16), "cuMemFreeAsync"),
    ],
    ids=["stream", "event", "buffer"],
)
def test_threads_closing_one_object_destroy_it_once(
    virtual: Driver, make: Callable[[gf.Context], Any], destroy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = getattr(virtual, destroy)
    monkeypatch.setattr(virtual, destroy, lambda *arguments: (calls.append(1), original(*arguments))[1])
    context = gf.Device(0, virtual).create_context()

    def close(made: Any, start: threading.Barrier) -> None:
        start.wait(SECONDS)
        made.close()

    for _ in range(20):
        made, start = make(context), threading.Barrier(4)
        calls.clear()
        workers = [Worker(functools.partial(close, made, start)) for _ in range(4)]
        for worker in workers:
            worker.result()
        assert calls == [1]
        assert made.is_closed
    context.close()
