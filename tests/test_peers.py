"""Two devices: memory of one in kernels of the other, copies, and waiting from one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet import peers
from gpufleet.compiler import compile_source
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch

SOURCE = r"""
extern "C" __global__ void increment(int *numbers) { numbers[threadIdx.x] += 1; }
"""
POOL, PLAIN = gf.PoolAllocator(), gf.PlainAllocator()


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_source(SOURCE, arch=75, target="ptx").code


@pytest.fixture
def increment(image: bytes, driver: Driver) -> gf.Kernel:
    return gf.Program.from_image(image, driver=driver).kernel("increment")


@pytest.fixture
def untried(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what earlier tests have found out about the devices."""
    monkeypatch.setitem(driver.belongings, "peers", {})


def need_access(user: Device, owner: Device) -> None:
    if not user.can_access(owner):
        pytest.skip("these devices have no access to each other's memory")


def in_threads(*calls: Callable[[], object]) -> None:
    """Call all at the same time; what one raises is raised here."""
    errors: list[BaseException] = []
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        ready.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


# Whether there is access


def test_device_has_access_to_itself_and_to_none_of_another_driver(device: Device, virtual: Driver) -> None:
    assert device.can_access(device)
    assert not device.can_access(Device(1, virtual))
    assert not Device(1, virtual).can_access(device)


@pytest.mark.usefixtures("untried")
def test_pair_that_claims_access_is_tried_with_data_once_for_each_direction(
    two_devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_devices
    tried: list[tuple[int, int]] = []
    original = peers._try_kernel

    def counted(user: gf.Context, owner: gf.Context) -> bool:
        tried.append((user.device.ordinal, owner.device.ordinal))
        return original(user, owner)

    monkeypatch.setattr(peers, "_try_kernel", counted)
    need_access(first, second)
    in_threads(*[lambda: first.can_access(second)] * 3)
    assert second.can_access(first)
    assert tried == [(0, 1), (1, 0)]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("lost", ["writes", "reads"])
def test_claim_of_access_is_not_believed_where_data_does_not_arrive(
    both: list[gf.Context],
    two_devices: list[Device],
    monkeypatch: pytest.MonkeyPatch,
    increment: gf.Kernel,
    lost: str,
) -> None:
    need_access(*two_devices)
    here, there = both
    here.driver.belongings["peers"].clear()

    def behind_a_bad_bridge(user: gf.Context, memory: gf.DeviceBuffer) -> None:
        if lost == "reads":  # the kernel has seen zeros, and its writes arrive
            memory.copy_from(np.full(peers.WORDS, peers.CHANGE, "u4"), offset=4 * peers.WORDS)

    monkeypatch.setattr(peers, "_run_probe", behind_a_bad_bridge)
    assert not two_devices[0].can_access(two_devices[1])
    with pytest.raises(gf.WrongContext, match=r"device 0 has no access .* of device 1 \(tried, the data did"):
        here.enable_peer_access(there)
    with there.alloc(128) as theirs, here.alloc(128) as mine:
        theirs.fill(3)
        mine.copy_from(theirs)  # through the host: access stays closed
        assert (mine.to_numpy() == 3).all()
        with pytest.raises(gf.WrongContext, match=r"buffer\.copy_from"):
            increment.launch(1, 32, theirs, stream=here.main_stream)


@pytest.mark.usefixtures("untried")
def test_no_claim_of_access_means_no_trial(
    both: list[gf.Context], two_devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = both
    monkeypatch.setattr(here.driver, "cuDeviceCanAccessPeer", lambda *_: 0)
    monkeypatch.setattr(peers, "_try_kernel", None)  # what tries would fail
    assert not two_devices[0].can_access(two_devices[1])
    with pytest.raises(gf.WrongContext, match=r"the driver offers none.* with buffer\.copy_from"):
        here.enable_peer_access(there)


# Opening it


@pytest.mark.parametrize("allocator", [POOL, PLAIN])
def test_buffer_of_another_device_is_refused_before_the_launch_until_access_is_opened(
    both: list[gf.Context], increment: gf.Kernel, allocator: Any
) -> None:
    here, there = both
    increment.load(here)
    with there.alloc(128, allocator=allocator) as before:
        before.fill(0)
        with pytest.raises(gf.WrongContext) as caught:
            increment.launch(1, 32, before, stream=here.main_stream)
        message = str(caught.value)
        assert "memory of device 1 that device 0 has no access to" in message
        assert "buffer.copy_from" in message
        assert "context.enable_peer_access(" in message
        assert (before.to_numpy("i4") == 0).all(), "nothing was launched"

        need_access(here.device, there.device)
        here.enable_peer_access(there)
        with there.alloc(128, allocator=allocator) as after:
            after.fill(0)
            for buffer in (before, after):
                increment.launch(1, 32, buffer, stream=here.main_stream)
            here.synchronize()
            assert (before.to_numpy("i4") == 1).all()
            assert (after.to_numpy("i4") == 1).all()


def test_opened_access_is_of_one_direction(both: list[gf.Context], increment: gf.Kernel) -> None:
    here, there = both
    need_access(here.device, there.device)
    here.enable_peer_access(there)
    with here.alloc(128) as mine, pytest.raises(gf.WrongContext, match="device 1 has no access to"):
        increment.launch(1, 32, mine, stream=there.main_stream)


@pytest.mark.usefixtures("untried")
def test_peer_access_enabled_twice_and_by_threads_at_once_is_fine(
    both: list[gf.Context], increment: gf.Kernel
) -> None:
    here, there = both
    need_access(here.device, there.device)
    with here:  # by another library, which does not tell
        here.driver.cuCtxEnablePeerAccess(there.handle, 0)
    in_threads(*[lambda: here.enable_peer_access(there), lambda: there.enable_peer_access(here)] * 4)
    here.enable_peer_access(there)
    with there.alloc(128) as theirs, here.alloc(128) as mine:
        for buffer, context in ((theirs, here), (mine, there)):
            buffer.fill(0)
            increment.launch(1, 32, buffer, stream=context.main_stream)
            context.synchronize()
            assert (buffer.to_numpy("i4") == 1).all()


def test_access_is_opened_anew_for_a_context_that_came_later(
    both: list[gf.Context], increment: gf.Kernel
) -> None:
    here, there = both
    need_access(here.device, there.device)
    for _ in range(2):  # the driver may give the second the address of the first
        later = there.device.create_context()
        here.enable_peer_access(later)
        with later.alloc(128, allocator=PLAIN) as buffer:
            buffer.fill(0)
            increment.launch(1, 32, buffer, stream=here.main_stream)
            here.synchronize()
            assert (buffer.to_numpy("i4") == 1).all()
        later.close()


def test_nothing_is_opened_between_contexts_of_one_device(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    context.enable_peer_access(other)
    context.enable_peer_access(context)
    other.close()
    with pytest.raises(gf.ContextClosed):
        context.enable_peer_access(other)


def test_access_to_a_context_of_another_driver_is_refused(context: gf.Context, virtual: Driver) -> None:
    foreign = Device(1, virtual).create_context()
    with pytest.raises(gf.WrongContext, match=r"the virtual driver; .* with buffer\.copy_from"):
        context.enable_peer_access(foreign)
    foreign.close()


@pytest.mark.usefixtures("untried")
def test_asking_and_opening_leave_the_current_context_alone(
    both: list[gf.Context], two_devices: list[Device]
) -> None:
    here, there = both
    driver = here.driver
    for current in (None, here, there):
        driver.belongings["peers"].clear()
        if current is not None:
            current.push()
        before = int(driver.cuCtxGetCurrent())
        if two_devices[0].can_access(two_devices[1]):
            here.enable_peer_access(there)
        assert int(driver.cuCtxGetCurrent()) == before
        if current is not None:
            current.pop()


# Copies


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("allocator", [POOL, PLAIN])
def test_copy_opens_what_makes_it_direct(both: list[gf.Context], allocator: Any) -> None:
    here, there = both
    data = np.random.default_rng(5).integers(0, 255, 1 << 16, "u1")
    with (
        here.alloc(data.nbytes, allocator=allocator) as source,
        there.alloc(data.nbytes, allocator=allocator) as target,
    ):
        source.copy_from(data)
        target.copy_from(source)
        assert (target.to_numpy() == data).all()
    if here.device.can_access(there.device):
        with here, pytest.raises(gf.CudaError, match="CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"):
            here.driver.cuCtxEnablePeerAccess(there.handle, 0)


# Waiting


def test_waiting_for_one_device_does_not_hold_up_threads_that_use_another(
    both: list[gf.Context], increment: gf.Kernel
) -> None:
    busy, free = both
    waiting = threading.Event()
    with busy.stream() as held, free.alloc(128) as buffer:

        def work(count: int) -> None:
            """Allocate, copy, launch, and wait, in every way."""
            buffer.copy_from(np.full(32, count, "i4"))
            increment.launch(1, 32, buffer, stream=free.main_stream)
            with free.alloc(128) as copy, free.stream() as stream:
                stream.wait(free.main_stream.record())
                copy.copy_from(buffer, stream=stream)
                assert (copy.to_numpy("i4", stream=stream).result() == count + 1).all()
            free.synchronize()

        def wait() -> None:
            waiting.set()
            held.synchronize()

        work(0)  # what is made once is there before the latch
        thread = threading.Thread(target=wait)
        with Latch(held) as latch:
            thread.start()
            waiting.wait()
            for count in range(1, 4):
                work(count)
            assert not held.query(), "the other device has been busy all the time"
            assert thread.is_alive()
            latch.open()
            thread.join()


def test_event_of_another_device_is_waited_for_on_the_device(
    both: list[gf.Context], increment: gf.Kernel
) -> None:
    here, there = both
    increment.load(there)
    with here.stream() as first, there.stream() as second, there.alloc(128) as buffer:
        buffer.fill(0)
        with Latch(first) as latch:
            second.wait(first.record())
            increment.launch(1, 32, buffer, stream=second)  # returns, the host waits for nothing
            assert not second.query()
            assert (buffer.to_numpy("i4") == 0).all(), "the kernel has not run"
            latch.open()
            second.synchronize()
        assert (buffer.to_numpy("i4") == 1).all()


@pytest.mark.parametrize("held", range(3))
def test_event_recorded_on_several_streams_in_turn_joins_them_all(context: gf.Context, held: int) -> None:
    event = context.event(timing=False)
    streams = [context.stream() for _ in range(3)]
    with context.stream() as joined:
        with Latch(streams[held]) as latch:
            for stream in streams:
                stream.record(event)
                joined.wait(event)
            for stream in streams:
                if stream is not streams[held]:
                    stream.synchronize()
            assert not joined.query(), "one of the streams is not done"
            latch.open()
            joined.synchronize()
            assert streams[held].query()
    for thing in (event, *streams):
        thing.close()


def test_elapsed_time_between_events_of_two_devices_is_refused_up_front(both: list[gf.Context]) -> None:
    events = [context.event() for context in both]
    for event in events:
        event.context.main_stream.record(event)
    with pytest.raises(ValueError, match="events of device 0 and device 1: their clocks are not the same"):
        events[0].elapsed(events[1])
    for event in events:
        event.close()
