"""Streams and events in their plain form."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver
from latches import Latch


def test_event_tells_when_the_work_before_it_is_complete(context: gf.Context) -> None:
    stream = context.stream()
    event = stream.record()
    event.synchronize()
    assert event.query()
    assert stream.query()
    stream.close()
    event.close()


def test_elapsed_is_milliseconds_between_timed_events(context: gf.Context) -> None:
    stream = context.stream()
    start, end = context.event(), context.event()
    stream.record(start)
    stream.record(end)
    end.synchronize()
    assert 0 <= start.elapsed(end) < 1000
    for thing in (start, end, stream):
        thing.close()


def test_elapsed_without_timing_is_refused_up_front(context: gf.Context) -> None:
    start, end = context.event(timing=False), context.event()
    with pytest.raises(ValueError, match="without timing"):
        start.elapsed(end)
    start.close()
    end.close()


def test_elapsed_between_devices_is_refused_up_front(two_devices: list[Device]) -> None:
    contexts = [device.create_context() for device in two_devices]
    start, end = (context.event() for context in contexts)
    with pytest.raises(ValueError, match="device 0 and device 1"):
        start.elapsed(end)
    for thing in (start, end, *contexts):
        thing.close()


def test_event_of_another_context_is_refused_naming_both(device: Device, context: gf.Context) -> None:
    other = device.create_context()
    stream, event = context.stream(), other.event()
    with pytest.raises(gf.WrongContext) as caught:
        stream.record(event)
    assert f"{context.address:#x}" in str(caught.value)
    assert f"{other.address:#x}" in str(caught.value)
    for thing in (stream, event, other):
        thing.close()


def test_waiting_for_an_event_crosses_contexts_and_devices(two_devices: list[Device]) -> None:
    contexts = [device.create_context() for device in two_devices]
    first, second = (context.stream() for context in contexts)
    event = first.record()
    second.wait(event)
    second.synchronize()
    assert event.query()
    for thing in (event, first, second, *contexts):
        thing.close()


def test_closed_stream_and_event_say_so(context: gf.Context) -> None:
    stream, event = context.stream(), context.event()
    stream.close()
    stream.close()
    event.close()
    event.close()
    for use in (stream.record, stream.synchronize, stream.query, lambda: stream.wait(event), event.query):
        with pytest.raises(gf.ContextClosed, match="was closed"):
            use()


def test_forgotten_stream_is_destroyed_with_a_warning(context: gf.Context) -> None:
    stream = context.stream()
    with pytest.warns(ResourceWarning, match="a stream of"):
        del stream
        gc.collect()


def test_main_stream_is_made_once(context: gf.Context) -> None:
    assert context.main_stream is context.main_stream


def test_priorities_are_a_range_whose_smaller_number_is_the_more_urgent(
    device: Device, context: gf.Context
) -> None:
    least, greatest = device.stream_priorities
    assert context.stream_priorities == device.stream_priorities
    assert greatest <= 0 <= least
    for priority in range(greatest, least + 1):
        with context.stream(priority=priority) as stream:
            assert stream.priority == priority
    with context.stream() as stream:
        assert stream.priority == 0


@pytest.mark.parametrize("beyond", [-1, 1])
def test_priority_out_of_range_is_refused_naming_the_range(context: gf.Context, beyond: int) -> None:
    least, greatest = context.stream_priorities
    wrong = least + 1 if beyond > 0 else greatest - 1
    with pytest.raises(ValueError, match=f"cannot have priority {wrong}: .* from {least} .* to {greatest} "):
        context.stream(priority=wrong)


def test_events_of_recordings_are_used_again_and_mean_the_new_recording(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with context.stream() as busy, context.stream() as idle, context.stream() as other:
        busy.record().close()
        monkeypatch.setattr(gf.Event, "create", None)  # what creates one would fail
        for _ in range(3):
            with Latch(busy) as latch:
                early = busy.record()
                other.wait(early)
                early.close()
                late = idle.record()
                late.synchronize()
                assert late.query()
                assert not other.query(), "it waits for what the event meant then"
                late.close()
                latch.open()
            other.synchronize()


def test_closed_primary_context_leaves_no_events(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = device.driver
    alive = 0

    def counted(name: str, step: int) -> None:
        original = getattr(driver, name)

        def call(*arguments: object) -> object:
            nonlocal alive
            alive += step
            return original(*arguments)

        monkeypatch.setattr(driver, name, call)

    counted("cuEventCreate", 1)
    counted("cuEventDestroy", -1)
    context = device.retain_primary_context()
    with context.stream() as stream:
        events = [stream.record() for _ in range(300)]
        assert alive == 300
        for event in events:
            event.close()
        stream.record(stream.record())
        assert 0 < alive < 300
    context.close()
    assert alive == 0


def test_held_objects_live_until_the_work_is_done(context: gf.Context) -> None:
    stream, buffer = context.stream(), context.alloc(4096)
    array = np.arange(1024, dtype="i4")
    event = buffer.copy_from(array, stream=stream)
    del array
    gc.collect()
    assert event is not None
    event.synchronize()
    assert (buffer.to_numpy("i4") == np.arange(1024)).all()
    stream.synchronize()
    for thing in (buffer, stream):
        thing.close()


def test_closed_transfer_does_not_let_go_of_what_its_stream_holds(context: gf.Context) -> None:
    with (
        context.stream() as stream,
        context.alloc(4096) as buffer,
        gf.pinned(4096, context=context) as pinned,
    ):
        first = buffer.copy_from(pinned, stream=stream)
        assert first is not None
        first.close()
        with Latch(stream) as latch:
            array = np.full(1024, 7, "i4")
            references = sys.getrefcount(array)
            second = buffer.copy_from(array, stream=stream)
            assert second is not None
            second.event.close()
            del second
            buffer.copy_from(pinned, stream=stream)
            gc.collect()
            assert sys.getrefcount(array) > references
            latch.open()
        stream.synchronize()
        assert sys.getrefcount(array) == references


def test_stream_speaks_the_cuda_stream_protocol(context: gf.Context) -> None:
    with context.stream() as stream:
        assert stream.__cuda_stream__() == (0, int(stream.handle))


def test_interrupted_close_leaves_the_stream_open(
    context: gf.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = context.stream()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gpufleet.stream.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert not stream.is_closed
    stream.close()
    assert stream.is_closed


def test_closed_stream_leaves_no_suspects(context: gf.Context) -> None:
    launches = context.driver.launches
    with context.stream() as stream:
        launches.add(context.address, stream.address, "a launch")
    assert launches.suspects() == ()
    assert launches.is_idle(context.address)
    assert (context.address, stream.address) not in launches._streams


def test_what_is_no_event_is_refused(context: gf.Context) -> None:
    with context.stream() as stream, context.stream() as other:
        for wrong in (None, other, 3):
            with pytest.raises(TypeError, match="expected an event"):
                stream.wait(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected an event"):
            stream.record(other)  # type: ignore[arg-type]


def test_events_of_another_driver_are_refused_naming_both(context: gf.Context, virtual: Driver) -> None:
    other = Device(0, virtual).create_context()
    with context.stream() as stream, other.stream() as theirs:
        with pytest.raises(gf.WrongContext, match="of different drivers"):
            stream.wait(theirs.record())
        with pytest.raises(gf.WrongContext, match="of different drivers"):
            context.event().elapsed(other.event())
    other.close()


@pytest.mark.parametrize("wrong", [None, -0.5, "high"])
def test_priority_is_an_integer(context: gf.Context, wrong: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        context.stream(priority=wrong)
