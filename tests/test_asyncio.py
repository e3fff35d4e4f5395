"""Tasks of an event loop wait for streams, events and copies, and the loop goes on."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.awaiting import SPIN_SECONDS
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch
from leasing import check, poison

WAYS: dict[str, Callable[[gf.Stream], Awaitable[object]]] = {
    "stream": lambda stream: stream.synchronize_async(),
    "event": lambda stream: stream.record(),
    "timed event": lambda stream: stream.record(stream.context.event()),
    "copy out": lambda stream: stream.context.alloc(16).to_numpy("u1", stream=stream),
}


async def of(awaitable: Awaitable[object]) -> object:
    return await awaitable


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def awaited(request: pytest.FixtureRequest) -> Callable[[gf.Stream], Awaitable[object]]:
    way: Callable[[gf.Stream], Awaitable[object]] = request.param
    return way


@pytest.mark.filterwarnings("ignore:.*never:ResourceWarning")
def test_loop_beats_until_the_work_is_done(
    context: gf.Context, awaited: Callable[[gf.Stream], Awaitable[object]]
) -> None:
    async def main() -> None:
        with context.stream() as stream, Latch(stream) as latch:
            waiting = asyncio.create_task(of(awaited(stream)))
            for _ in range(10):
                await asyncio.sleep(SPIN_SECONDS)
                assert not waiting.done()
            latch.open()
            await asyncio.wait_for(waiting, 20)
            assert stream.query()
            assert not latch.has_timed_out

    asyncio.run(main())


def test_awaiting_a_copy_out_brings_its_target(context: gf.Context) -> None:
    async def main() -> np.ndarray:
        with context.alloc(128) as buffer, context.stream() as stream:
            await buffer.copy_from(np.arange(32, dtype="i4"), stream=stream)
            return await buffer.to_numpy("i4", stream=stream)

    assert asyncio.run(main()).tolist() == list(range(32))


def test_complete_work_is_not_waited_for(context: gf.Context) -> None:
    with context.stream() as stream:
        event = stream.record()
        event.synchronize()
        with pytest.raises(StopIteration):
            next(event.__await__())


def test_tasks_wake_in_the_order_in_which_their_work_ends(two_devices: list[Device]) -> None:
    order: list[int] = []

    async def wait(number: int, stream: gf.Stream) -> None:
        await stream.synchronize_async()
        order.append(number)

    async def main(streams: list[gf.Stream]) -> None:
        latches = [Latch(stream) for stream in streams]
        tasks = [asyncio.create_task(wait(number, stream)) for number, stream in enumerate(streams)]
        await asyncio.sleep(2 * SPIN_SECONDS)
        for number in (1, 0):
            latches[number].open()
            await tasks[number]

    contexts = [device.create_context() for device in two_devices]
    asyncio.run(main([context.stream() for context in contexts]))
    assert order == [1, 0]
    for context in contexts:
        context.close()


@pytest.mark.filterwarnings("ignore:.*never:ResourceWarning")
def test_cancelled_task_waits_no_more_and_the_work_goes_on(
    context: gf.Context, awaited: Callable[[gf.Stream], Awaitable[object]]
) -> None:
    async def main() -> None:
        with context.stream() as stream, Latch(stream) as latch:
            waiting = asyncio.create_task(of(awaited(stream)))
            await asyncio.sleep(2 * SPIN_SECONDS)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not stream.query()
            latch.open()
            await stream.synchronize_async()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*never:ResourceWarning")
def test_fault_wakes_every_task_that_waits(virtual: Driver) -> None:
    context = gf.Device(0, virtual).create_context()

    async def main() -> list[object]:
        first, second = context.stream(), context.stream()
        Latch(first)
        waiting = [of(first.record()), first.synchronize_async(), second.synchronize_async()]
        gathered = asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)
        with context, pytest.raises(gf.StickyError):
            poison(virtual)
        return await gathered

    errors = asyncio.run(main())
    assert [type(error) for error in errors] == [gf.StickyError, gf.StickyError, type(None)]
    context.close()


def test_task_that_waits_in_a_context_that_is_closed_is_told_so(context: gf.Context) -> None:
    async def main() -> None:
        stream = context.stream()
        latch = Latch(stream)
        waiting = asyncio.create_task(of(stream.record()))
        await asyncio.sleep(2 * SPIN_SECONDS)
        latch.open()
        context.close()
        with pytest.raises(gf.ContextClosed):
            await waiting

    asyncio.run(main())


def test_captured_stream_cannot_be_awaited(context: gf.Context) -> None:
    async def main(stream: gf.Stream) -> None:
        with stream.capture() as graph:
            with pytest.raises(gf.CaptureError, match="cannot be waited for while it is captured"):
                await stream.synchronize_async()
            event = stream.record()
            with pytest.raises(gf.CaptureError, match="cannot be asked whether it is reached"):
                await event
        graph.close()

    with context.stream() as stream:
        asyncio.run(main(stream))


def test_many_tasks_of_two_loops_wait_for_one_event(context: gf.Context) -> None:
    async def main() -> None:
        await asyncio.gather(*(of(event) for _ in range(500)))

    with context.stream() as stream, Latch(stream) as latch:
        event = stream.record()
        loops = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
        for loop in loops:
            loop.start()
        latch.open()
        for loop in loops:
            loop.join(20)
            assert not loop.is_alive()


def test_loop_that_is_over_is_forgotten(context: gf.Context) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        with context.stream() as stream, Latch(stream) as latch:
            asyncio.get_running_loop().call_later(2 * SPIN_SECONDS, latch.open)
            await stream.synchronize_async()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_loop_that_was_closed_under_a_waiting_task_is_forgotten(context: gf.Context) -> None:
    async def begin(stream: gf.Stream) -> None:
        task = asyncio.create_task(stream.synchronize_async())
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    with context.stream() as stream, Latch(stream) as latch:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin(stream))
        loop.close()
        forgotten = weakref.ref(loop)
        del loop
        gc.collect()
        assert forgotten() is None
        latch.open()


def test_context_may_be_closed_by_another_task_as_soon_as_the_work_is_done(device: Device) -> None:
    async def main() -> None:
        context = device.create_context()
        stream, event = context.stream(), context.event()
        array, buffer = np.arange(4), context.alloc(32)

        async def close() -> None:
            await event
            context.close()

        async def wait() -> None:
            await stream.synchronize_async()

        with Latch(stream) as latch:
            stream.hold(array, buffer)
            stream.record(event)
            tasks = [asyncio.create_task(close()), asyncio.create_task(wait())]
            await asyncio.sleep(0)
            latch.open()
            event.synchronize()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_waiting_outside_of_a_loop_says_so(context: gf.Context) -> None:
    with context.stream() as stream, Latch(stream) as latch:
        with pytest.raises(RuntimeError, match="no running event loop"):
            next(stream.record().__await__())
        latch.open()


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="needs signals")
def test_ctrl_c_ends_a_wait_and_the_loop_can_be_run_again() -> None:
    check(
        """
        import asyncio, signal

        WAIT = '''
        .version 7.0
        .target sm_75
        .address_size 64
        .visible .entry wait(.param .u64 state) {
            .reg .pred %p0; .reg .b32 %r0; .reg .b64 %rd0;
            ld.param.u64 %rd0, [state];
        again:
            ld.volatile.global.u32 %r0, [%rd0];
            setp.eq.s32 %p0, %r0, 0;
            @%p0 bra again;
            ret;
        }
        '''
        driver = gf.get_driver("virtual")
        context = gf.Device(0, driver).create_context()
        stream = context.stream()
        state = gf.pinned(4, context=context)
        state.array[:] = 0
        gf.Program.from_image(WAIT, driver=driver).kernel("wait").launch(1, 1, state, stream=stream)
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(stream.synchronize_async())
        loop.call_later(0.05, signal.raise_signal, signal.SIGINT)
        try:
            loop.run_until_complete(waiting)
        except KeyboardInterrupt:
            print("interrupted", waiting.done())
        state.array[:] = 1
        loop.run_until_complete(waiting)
        print("done", stream.query())
        loop.close()
        state.close()
        context.close()
        """,
        "interrupted False\ndone True\n",
    )
