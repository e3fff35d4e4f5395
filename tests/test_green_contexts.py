"""Green contexts: a share of a device's multiprocessors as a context, for one thread at a time."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver, get_driver
from gpufleet.multiprocessors import parts_of
from latches import Latch
from leasing import SECONDS, Worker, check, current, poison

PTX = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 .ptr .align 4 target, .param .u32 value) {
    .reg .b32 %r<5>; .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [target];
    ld.param.u32 %r0, [value];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd1, %r1, 4;
    add.u64 %rd2, %rd0, %rd1;
    ld.global.u32 %r2, [%rd2];
    add.u32 %r3, %r2, %r0;
    st.global.u32 [%rd2], %r3;
    ret;
}
.visible .entry count(.param .u64 .ptr .align 4 target) {
    .reg .b32 %r<1>; .reg .b64 %rd<1>;
    ld.param.u64 %rd0, [target];
    mov.u32 %r0, %nsmid;
    st.global.u32 [%rd0], %r0;
    ret;
}
"""


@pytest.fixture
def green(device: Device) -> Iterator[gf.GreenContext]:
    made = device.create_green_context(sm_count=1)
    yield made
    made.close()


@pytest.fixture
def pair(device: Device) -> Iterator[list[gf.GreenContext]]:
    """Return two green contexts of one device, with half of it each."""
    half = parts_of(device).equal_share(2)
    made = [device.create_green_context(sm_count=half) for _ in range(2)]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def add(driver: Driver) -> gf.Kernel:
    return gf.Program.from_image(PTX, driver=driver).kernel("add")


@pytest.fixture
def wide(virtual_as_an_h200: Driver) -> Device:
    """Return a virtual device with as many multiprocessors as an H200."""
    return Device(0, virtual_as_an_h200)


@pytest.fixture
def virtual_as_an_h200() -> Iterator[Driver]:
    from gpufleet.virtual import VirtualDriver

    driver = get_driver(VirtualDriver(devices=1, multiprocessors=132, visible_devices=None))
    yield driver
    driver.reset()


# What it is


def test_green_context_is_a_context_of_its_device(green: gf.GreenContext, device: Device) -> None:
    assert isinstance(green, gf.Context)
    assert (green.kind, green.device) == ("green", device)
    assert not green.is_current
    with green:
        assert gf.current_context(device.driver) is green
    assert current(device.driver) == 0


def test_green_context_tells_how_many_multiprocessors_it_got(device: Device) -> None:
    total = device.multiprocessor_count
    for asked in {1, max(1, total // 3), total}:
        green = device.create_green_context(sm_count=asked)
        assert green.asked_sm_count == asked <= green.sm_count <= total
        assert f"with {green.sm_count} of {total} multiprocessors" in repr(green)
        assert (f"({asked} asked for)" in repr(green)) == (green.sm_count != asked)
        green.close()


@pytest.mark.parametrize(("asked", "got"), [(1, 8), (8, 8), (10, 16), (66, 72), (129, 132), (132, 132)])
def test_multiprocessors_come_in_parts_of_eight_as_on_an_h200(wide: Device, asked: int, got: int) -> None:
    green = wide.create_green_context(sm_count=asked)
    assert green.sm_count == got
    green.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(0, ValueError), (-1, ValueError), (10_000, ValueError), (1.0, TypeError), ("8", TypeError)],
)
def test_number_that_the_device_does_not_have_is_refused(
    device: Device, wrong: Any, error: type[Exception]
) -> None:
    with pytest.raises(
        error, match=rf"^sm_count is {wrong!r}: expected .*1 to {device.multiprocessor_count}"
    ):
        device.create_green_context(sm_count=wrong)
    assert int(device.driver.cuDevicePrimaryCtxGetState(device.handle)[1]) == 0 or not device.is_virtual


def test_kernels_are_told_of_the_multiprocessors_they_have(wide: Device) -> None:
    count = gf.Program.from_image(PTX, driver=wide.driver).kernel("count")
    green = wide.create_green_context(sm_count=24)
    with green, green.alloc(4) as buffer:
        count.launch(1, 1, buffer)
        assert buffer.to_numpy("u4")[0] == 24
    green.close()


# What works in it


def test_kernels_copies_streams_and_events_work_in_it(green: gf.GreenContext, add: gf.Kernel) -> None:
    numbers = np.arange(32, dtype="u4")
    with green, green.alloc(numbers.nbytes) as buffer, green.stream() as stream:
        buffer.copy_from(numbers)
        add.launch(1, 32, buffer, 1)
        stream.wait(green.main_stream.record())
        before = stream.record(green.event())
        add.launch(1, 32, buffer, 10, stream=stream)
        after = stream.record(green.event())
        after.synchronize()
        assert before.elapsed(after) >= 0
        assert np.array_equal(buffer.to_numpy("u4"), numbers + 11)
        assert green.memory_info() > (0, 0)
        green.synchronize()


def test_memory_of_all_sorts_can_be_had_in_it(green: gf.GreenContext, add: gf.Kernel) -> None:
    with (
        green,
        green.alloc_managed(128) as managed,
        gf.pinned(128, context=green) as pinned,
        green.alloc(128, allocator=gf.PlainAllocator()) as plain,
        green.alloc(128) as pooled,
    ):
        for memory in (managed, pinned):
            memory.array[:] = 0
        for buffer in (plain, pooled):
            buffer.fill(0)
        for target in (managed, pinned, plain, pooled):
            add.launch(1, 32, target, 3)
        green.synchronize()
        for memory in (managed, pinned):
            assert (memory.array.view("u4") == 3).all()
        for buffer in (plain, pooled):
            assert (buffer.to_numpy("u4") == 3).all()
            buffer.copy_from(pinned)
            buffer.copy_to(pinned)
        green.trim_memory()


def test_its_work_is_captured_and_launched_as_a_graph(green: gf.GreenContext, add: gf.Kernel) -> None:
    with green, green.alloc(4) as buffer, green.stream() as stream:
        buffer.fill(0)
        add.load(green)
        with stream.capture() as graph:
            add.launch(1, 1, buffer, 1, stream=stream)
        for _ in range(3):
            graph.launch()
        stream.synchronize()
        assert buffer.to_numpy("u4")[0] == 3
        graph.close()


def test_its_capture_is_not_broken_by_a_wait_for_the_primary_context(
    green: gf.GreenContext, device: Device, add: gf.Kernel
) -> None:
    primary = device.retain_primary_context()
    add.load(green)
    with green.alloc(4) as buffer, green.stream() as stream:
        buffer.fill(0)
        with stream.capture() as graph:
            with pytest.raises(gf.CaptureError):
                primary.synchronize()
            add.launch(1, 1, buffer, 1, stream=stream)
        graph.launch()
        stream.synchronize()
        assert buffer.to_numpy("u4")[0] == 1
        graph.close()
    primary.close()


def test_its_streams_belong_to_it(green: gf.GreenContext) -> None:
    driver = green.driver
    with green, green.stream() as stream, green.stream(priority=-1) as urgent:
        for each in (stream, urgent, green.main_stream):
            assert int(driver.cuStreamGetGreenCtx(each.handle)) == int(green.green_handle)


def test_buffers_serve_the_other_contexts_of_the_device(
    pair: list[gf.GreenContext], context: gf.Context, add: gf.Kernel
) -> None:
    first, second = pair
    with first.alloc(4) as buffer:
        buffer.fill(0)
        for user in (first, second, context):
            add.launch(1, 1, buffer, 1, stream=user.main_stream)
            user.synchronize()
        assert buffer.to_numpy("u4")[0] == 3


def test_streams_of_two_green_contexts_wait_for_each_other(
    pair: list[gf.GreenContext], add: gf.Kernel
) -> None:
    first, second = (each.main_stream for each in pair)
    with pair[0].alloc(4) as buffer:
        buffer.fill(0)
        add.load(pair[1])
        with Latch(first) as latch:
            add.launch(1, 1, buffer, 1, stream=first)
            second.wait(first.record())
            add.launch(1, 1, buffer, 1, stream=second)
            assert not second.query()
            latch.open()
        second.synchronize()
        assert buffer.to_numpy("u4")[0] == 2


# Side by side


def test_two_halves_of_a_device_share_no_multiprocessor(pair: list[gf.GreenContext], device: Device) -> None:
    if device.multiprocessor_count < 2:
        pytest.skip("the device cannot be halved")
    assert [green.shared_sm_count for green in pair] == [0, 0]
    assert sum(green.sm_count for green in pair) <= device.multiprocessor_count


def test_virtual_shares_are_disjoint_until_none_are_left(wide: Device) -> None:
    greens = [wide.create_green_context(sm_count=count) for count in (40, 10, 32, 30)]
    assert [green.shared_sm_count for green in greens] == [0, 0, 0, 0]
    had = [_multiprocessors(green) for green in greens]
    assert len(set().union(*had)) == sum(map(len, had)) == 40 + 16 + 32 + 32
    more = wide.create_green_context(sm_count=20)
    assert (more.sm_count, more.shared_sm_count) == (20, 8)  # 12 were left, in parts of 8 and 4
    for green in (*greens, more):
        green.close()


def test_multiprocessors_of_a_closed_or_forgotten_context_are_given_again(wide: Device) -> None:
    wide.create_green_context(sm_count=132).close()
    forgotten = wide.create_green_context(sm_count=132)
    assert forgotten.shared_sm_count == 0
    with pytest.warns(ResourceWarning, match="was never closed"):
        del forgotten
        gc.collect()
    again = wide.create_green_context(sm_count=132)
    assert again.shared_sm_count == 0
    again.close()


def test_work_of_one_does_not_hold_up_the_other(pair: list[gf.GreenContext], add: gf.Kernel) -> None:
    with pair[1].alloc(4) as buffer:
        buffer.fill(0)
        add.load(pair[1])
        with Latch(pair[0].main_stream) as latch:
            with pair[1]:
                add.launch(1, 1, buffer, 7)
            assert buffer.to_numpy("u4")[0] == 7
            latch.open()


# One thread at a time


class Inside:
    """A thread that is inside a context until the block ends."""

    def __init__(self, context: gf.Context, name: str = "holder") -> None:
        self._context = context
        self._inside, self._may_leave = threading.Event(), threading.Event()
        self._thread = Worker(self._hold, name)

    def _hold(self) -> None:
        with self._context:
            self._inside.set()
            assert self._may_leave.wait(SECONDS)

    def __enter__(self) -> None:
        assert self._inside.wait(SECONDS)

    def __exit__(self, *_: object) -> None:
        self._may_leave.set()
        self._thread.result()


@pytest.mark.parametrize(
    "use",
    [
        lambda green: green.__enter__(),
        lambda green: green.push(),
        lambda green: green.alloc(4),
        lambda green: green.stream(),
        lambda green: green.event(),
        lambda green: green.synchronize(),
    ],
    ids=["enter", "push", "alloc", "stream", "event", "synchronize"],
)
def test_second_thread_is_refused_while_one_is_inside(
    green: gf.GreenContext, use: Callable[[gf.GreenContext], object]
) -> None:
    with Inside(green), pytest.raises(gf.ContextInUse, match=r"'holder'.* one thread at a time"):
        use(green)
    assert current(green.driver) == 0
    with green:
        assert green.is_current


def test_thread_that_is_inside_enters_again(green: gf.GreenContext, context: gf.Context) -> None:
    with green, context, green:
        green.push()
        green.pop()
        assert green.is_current
    with Inside(green):
        pass


def test_threads_take_turns(green: gf.GreenContext) -> None:
    inside: list[str] = []
    refused = 0

    def work(name: str) -> None:
        nonlocal refused
        done = 0
        while done < 50:
            try:
                with green:
                    inside.append(name)
                    assert inside == [name]
                    inside.remove(name)
            except gf.ContextInUse:
                refused += 1
                continue
            done += 1

    for thread in [Worker(lambda name=str(number): work(name)) for number in range(4)]:  # type: ignore[misc]
        thread.result()
    assert green.threads_inside() == []


def test_thread_that_ended_inside_lets_the_next_one_in(green: gf.GreenContext) -> None:
    Worker(green.push).result()
    gc.collect()
    with green:
        assert green.is_current


def test_pinned_memory_used_in_it_is_given_to_others_only_when_it_can_be_asked(
    green: gf.GreenContext, context: gf.Context
) -> None:
    with gf.pinned(4096, context=context) as pinned, green.alloc(4096) as buffer:
        pinned.array[:] = 5
        with green.stream() as stream:
            buffer.copy_from(pinned, stream=stream)
            with Inside(green):
                pinned.close()  # which cannot enter, and does not need to
                gf.pinned(4096, context=context).close()
            stream.synchronize()
        assert (buffer.to_numpy() == 5).all()


def test_buffer_that_two_of_them_use_is_freed_while_others_are_inside(
    pair: list[gf.GreenContext], context: gf.Context
) -> None:
    buffer = context.alloc(4096)
    streams = [green.stream() for green in pair]
    for stream in streams:
        buffer.fill(0, stream=stream)
    with Inside(pair[0], "first"), Inside(pair[1], "second"):
        buffer.close()
    for stream in streams:
        stream.close()


def test_green_context_that_something_displaced_is_put_right(green: gf.GreenContext) -> None:
    with pytest.warns(gf.ContextWarning) as warned:
        with green:
            green.driver.cuCtxPopCurrent()
    assert warned[0].filename == __file__
    assert current(green.driver) == 0
    with Inside(green):
        pass


def test_leaving_a_green_context_restores_what_was_current(
    green: gf.GreenContext, context: gf.Context
) -> None:
    with context:
        with pytest.raises(ZeroDivisionError), green:
            _ = 1 // 0
        assert context.is_current
        with pytest.raises(gf.WrongContext):
            green.pop()
        green.stream().close()
        assert context.is_current


# Other devices


def test_buffers_are_copied_between_green_contexts_of_two_devices(two_devices: list[Device]) -> None:
    greens = [device.create_green_context(sm_count=1) for device in two_devices]
    with greens[0].alloc(4096) as source, greens[1].alloc(4096) as target:
        source.fill(3)
        target.copy_from(source)
        assert (target.to_numpy() == 3).all()
    for green in greens:
        green.close()


def test_devices_are_split_each_for_itself(two_devices: list[Device]) -> None:
    greens = [device.create_green_context(sm_count=device.multiprocessor_count) for device in two_devices]
    for green in greens:
        assert green.shared_sm_count == 0
        green.close()


# The end


def test_close_destroys_it_by_its_own_call(virtual: Driver) -> None:
    calls: list[str] = []
    driver = _watched(virtual, calls.append)
    green = Device(0, driver).create_green_context(sm_count=1)
    with green:
        green.alloc(16).close()
    green.close()
    green.close()
    assert calls.count("cuGreenCtxCreate") == calls.count("cuGreenCtxDestroy") == 1
    assert "cuCtxDestroy" not in calls


def test_closed_one_says_so_and_closes_what_lives_in_it(green: gf.GreenContext) -> None:
    buffer, stream, event = green.alloc(16), green.stream(), green.event()
    green.close()
    assert "closed" in repr(green)
    for use in (green.__enter__, lambda: green.alloc(4), stream.record, event.query, buffer.fill):
        with pytest.raises(gf.ContextClosed):
            use()


def test_it_is_not_closed_while_a_thread_is_inside(green: gf.GreenContext) -> None:
    with Inside(green), pytest.raises(gf.ContextInUse, match="'holder'"):
        green.close()
    with green, pytest.raises(gf.ContextInUse):
        green.close()
    green.close()


def test_it_retains_the_primary_context_until_it_is_closed(virtual: Driver) -> None:
    def is_alive() -> bool:
        return bool(int(virtual.cuDevicePrimaryCtxGetState(0)[1]))

    greens = [Device(0, virtual).create_green_context(sm_count=1) for _ in range(2)]
    greens[0].close()
    assert is_alive()
    greens[1].close()
    assert not is_alive()


def test_what_lives_in_it_is_freed_also_where_the_primary_context_lives_on(device: Device) -> None:
    with device.retain_primary_context() as primary:
        before = primary.memory_info()
        green = device.create_green_context(sm_count=1)
        kept = [green.alloc(1 << 20), green.alloc(1 << 20, allocator=gf.PlainAllocator()), green.stream()]
        green.close()
        if device.is_virtual:  # a real one has other users
            assert primary.memory_info() == before
        del kept
    primary.close()


def test_fault_in_one_ends_the_driver_and_closing_says_so(virtual: Driver) -> None:
    device = Device(0, virtual)
    with device.create_green_context(sm_count=1) as green, pytest.raises(gf.StickyError):
        poison(virtual)
    with pytest.raises(gf.StickyError):
        device.create_green_context(sm_count=1)
    with pytest.raises(gf.StickyError):
        green.close()
    assert green.is_closed


def test_forgotten_one_is_destroyed_with_a_warning(virtual: Driver) -> None:
    green = Device(0, virtual).create_green_context(sm_count=1)
    with green:
        green.alloc(16).close()
    with pytest.warns(ResourceWarning, match="was never closed"):
        del green
        gc.collect()
    assert int(virtual.cuDevicePrimaryCtxGetState(0)[1]) == 0


@pytest.mark.parametrize(
    "failing",
    ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuCtxFromGreenCtx", "cuGreenCtxStreamCreate"],
)
def test_creation_that_fails_leaves_nothing(virtual: Driver, failing: str) -> None:
    is_failing = True

    def fail(name: str) -> None:
        if is_failing and name == failing:
            raise KeyboardInterrupt

    driver = _watched(virtual, fail)
    with pytest.raises(KeyboardInterrupt):
        Device(0, driver).create_green_context(sm_count=1)
    assert int(virtual.cuDevicePrimaryCtxGetState(0)[1]) == 0
    is_failing = False
    green = Device(0, driver).create_green_context(sm_count=Device(0, driver).multiprocessor_count)
    assert green.shared_sm_count == 0
    green.close()


def test_open_one_is_no_trouble_when_the_interpreter_exits() -> None:
    check("""
    green = gf.devices("virtual")[0].create_green_context(sm_count=1)
    with green:
        buffer = green.alloc(16)
    inside = threading.Event()
    def hold():
        with green:
            inside.set()
            threading.Event().wait()
    threading.Thread(target=hold, daemon=True).start()
    inside.wait()
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_is_told_so_whoever_was_inside() -> None:
    check(
        """
        device = gf.devices("virtual")[0]
        green = device.create_green_context(sm_count=1)
        with green:
            green.push()
            held = threading.Event()
            def hold():
                with green._turn:  # as a thread that is about to enter
                    held.set()
                    threading.Event().wait()
            threading.Thread(target=hold, daemon=True).start()
            held.wait()
            child = os.fork()
            if child:
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
                os._exit(0)
            create = lambda: device.create_green_context(sm_count=1)
            for use in (green.push, green.pop, lambda: green.alloc(4), create):
                try:
                    use()
                except gf.ForkedProcess as error:
                    print("spawn" in str(error), flush=True)
        green.close()
        """,
        "True\nTrue\nTrue\nTrue\n0\n",
    )


def _multiprocessors(green: gf.GreenContext) -> set[int]:
    """Which multiprocessors a virtual green context has."""
    return set(green.driver.raw._state.green_contexts[int(green.green_handle)].share.multiprocessors)


def _watched(driver: Driver, see: Callable[[str], None]) -> Driver:
    """Return another `Driver` of the same virtual driver; `see` is told of each call before it."""

    class Watched:
        is_virtual = True

        def __getattr__(self, name: str) -> Any:
            function = getattr(driver.raw, name)
            if not name.startswith("cu"):
                return function

            def call(*arguments: Any) -> Any:
                see(name)
                return function(*arguments)

            return call

    return get_driver(Watched())
