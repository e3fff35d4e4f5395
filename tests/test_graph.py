"""Capture of streams into graphs, and their launches."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import gpufleet as gf
from gpufleet.device import Device
from latches import Latch

PTX = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 .ptr .align 4 target, .param .u32 value) {
    .reg .b32 %r<3>; .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [target];
    ld.param.u32 %r0, [value];
    ld.global.u32 %r1, [%rd0];
    add.u32 %r2, %r1, %r0;
    st.global.u32 [%rd0], %r2;
    ret;
}
"""


@pytest.fixture
def add(context: gf.Context) -> gf.Kernel:
    kernel = gf.Program.from_image(PTX, driver=context.driver).kernel("add")
    kernel.load(context)
    return kernel


@pytest.fixture
def stream(context: gf.Context) -> Iterator[gf.Stream]:
    with context.stream() as made:
        yield made


@pytest.fixture
def number(context: gf.Context) -> Iterator[gf.DeviceBuffer]:
    with context.alloc(4) as made:
        made.fill(0)
        yield made


def value(buffer: gf.DeviceBuffer) -> int:
    return int(buffer.to_numpy("u4")[0])


def test_nothing_runs_while_it_is_captured_and_all_of_it_at_each_launch(
    stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    with stream.capture() as graph:
        add.launch(1, 1, number, 1, stream=stream)
        add.launch(1, 1, number, 10, stream=stream)
        assert graph.is_capturing
    assert value(number) == 0
    for _ in range(3):
        graph.launch()
    stream.synchronize()
    assert value(number) == 33
    graph.close()


def test_copies_and_fills_are_captured_and_read_host_arrays_at_each_launch(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    source, target = np.full(1, 5, "u4"), np.zeros(1, "u4")
    other = context.alloc(4)
    with stream.capture() as graph:
        number.fill(0, stream=stream)
        number.copy_from(source, stream=stream)
        add.launch(1, 1, number, 1, stream=stream)
        other.copy_from(number, stream=stream)
        other.copy_to(target, stream=stream)
    for given in (5, 7):
        source[0] = given
        graph.replay()
        stream.synchronize()
        assert target[0] == given + 1
    graph.close()
    other.close()


def test_pinned_memory_is_captured(context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer) -> None:
    host = gf.pinned(np.full(1, 3, "u4"), context=context)
    with stream.capture() as graph:
        number.copy_from(host, stream=stream)
    host.array[0] = 4
    graph.launch()
    stream.synchronize()
    assert value(number) == 4
    graph.close()
    host.close()


def test_a_graph_is_launched_on_any_stream_of_its_driver(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    with stream.capture() as graph:
        add.launch(1, 1, number, 1, stream=stream)
    with context.stream() as other:
        graph.launch(other)
        graph.launch(stream)
        other.synchronize()
        stream.synchronize()
    assert value(number) == 2
    graph.close()


def test_a_launch_waits_behind_the_work_of_its_stream(
    stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    with stream.capture() as graph:
        add.launch(1, 1, number, 1, stream=stream)
    with Latch(stream):
        graph.launch()
        event = stream.record()
        assert not event.query()
    assert value(number) == 1
    event.close()
    graph.close()


def test_a_stream_that_waits_for_a_captured_one_is_captured_too(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    with context.stream() as branch, context.alloc(4) as other:
        other.fill(0)
        with stream.capture() as graph:
            add.launch(1, 1, number, 1, stream=stream)
            branch.wait(stream.record())
            assert branch.graph is graph
            add.launch(1, 1, other, 5, stream=branch)
            stream.wait(branch.record())
            add.launch(1, 1, number, 1, stream=stream)
        assert branch.graph is None
        graph.launch()
        stream.synchronize()
        assert [value(number), value(other)] == [2, 5]
        graph.close()


def test_a_capture_that_does_not_wait_for_its_branch_is_refused_with_the_cure(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    with context.stream() as branch:
        with pytest.raises(gf.CaptureError, match=r"stream\.wait\(other\.record\(\)\)"), stream.capture():
            branch.wait(stream.record())
            add.launch(1, 1, number, 1, stream=branch)
        assert stream.graph is branch.graph is None
        add.launch(1, 1, number, 1, stream=branch)
        branch.synchronize()
    assert value(number) == 1


@pytest.mark.parametrize("call", ["synchronize", "query", "close"])
def test_what_waits_for_a_captured_stream_is_refused_and_the_capture_goes_on(
    stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel, call: str
) -> None:
    with stream.capture() as graph:
        with pytest.raises(gf.CaptureError, match="while it is captured"):
            getattr(stream, call)()
        add.launch(1, 1, number, 1, stream=stream)
    graph.launch()
    stream.synchronize()
    assert value(number) == 1
    graph.close()


def test_blocking_copies_and_waits_for_the_context_are_refused_in_a_capture(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer
) -> None:
    with stream.capture() as graph:
        for wait in (number.to_numpy, lambda: number.copy_from(np.zeros(1, "u4")), context.synchronize):
            with pytest.raises(gf.CaptureError, match=r"cannot be part of|while .* is captured"):
                wait()
    graph.launch()
    stream.synchronize()
    graph.close()


def test_events_and_transfers_of_a_capture_cannot_be_waited_for(
    stream: gf.Stream, number: gf.DeviceBuffer
) -> None:
    with stream.capture() as graph:
        event = stream.record()
        transfer = number.copy_to(np.zeros(1, "u4"), stream=stream)
        with pytest.raises(gf.CaptureError, match="while it is captured"):
            event.synchronize()
    assert transfer is not None
    for thing in (event.query, event.synchronize, transfer.query, transfer.result):
        with pytest.raises(gf.CaptureError, match="recorded in a capture, which is over"):
            thing()
    with pytest.raises(gf.CaptureError, match="recorded in a capture, which is over"):
        stream.wait(event)
    stream.record(event)
    event.synchronize()
    event.close()
    graph.close()


def test_an_event_from_outside_is_refused_before_it_breaks_the_capture(
    context: gf.Context, stream: gf.Stream
) -> None:
    with context.stream() as other:
        event = other.record()
        with (
            stream.capture() as graph,
            pytest.raises(gf.CaptureError, match="recorded outside of the capture"),
        ):
            stream.wait(event)
        graph.close()
        event.close()


def test_an_exception_in_the_block_leaves_no_graph(
    stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    with pytest.raises(ZeroDivisionError), stream.capture() as graph:
        add.launch(1, 1, number, 1, stream=stream)
        _ = 1 / 0
    assert graph.is_closed
    add.launch(1, 1, number, 1, stream=stream)
    stream.synchronize()
    assert value(number) == 1


def test_a_graph_cannot_be_launched_while_it_or_its_stream_is_captured(stream: gf.Stream) -> None:
    with stream.capture() as graph:
        for call in (graph.launch, graph.close):
            with pytest.raises(gf.CaptureError, match="before the `with` block"):
                call()
        with pytest.raises(gf.CaptureError, match="captured already"), stream.capture():
            pass
    with stream.capture() as second, pytest.raises(gf.CaptureError, match="which is being captured"):
        graph.launch()
    graph.close()
    second.close()
    with pytest.raises(gf.ContextClosed, match="capture another one"):
        graph.launch()
    graph.close()


def test_a_graph_keeps_what_it_uses_until_it_is_closed(
    context: gf.Context, stream: gf.Stream, add: gf.Kernel
) -> None:
    buffer, result = context.alloc(4), context.alloc(4)
    array, program = np.full(1, 2, "u4"), add.program
    with stream.capture() as graph:
        buffer.copy_from(array, stream=stream)
        add.launch(1, 1, buffer, 40, stream=stream)
        result.copy_from(buffer, stream=stream)
    watched = [weakref.ref(thing) for thing in (buffer, array, program)]
    del buffer, array, program
    gc.collect()
    assert all(reference() is not None for reference in watched)
    graph.launch()
    stream.synchronize()
    assert value(result) == 42
    result.close()
    kept = watched[0]()
    assert kept is not None
    kept.close()
    with pytest.raises(gf.ContextClosed, match="was closed"):
        graph.launch()
    graph.close()


def test_frees_during_a_capture_are_put_off_until_it_ends(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    used, forgotten = context.alloc(4), context.alloc(4)
    for buffer in (used, forgotten):
        buffer.fill(1, stream=stream)
    event, other = stream.record(), context.stream()
    with stream.capture() as graph_before:
        pass
    with stream.capture() as graph:
        add.launch(1, 1, number, 1, stream=stream)
        used.close()
        with pytest.warns(ResourceWarning):
            del forgotten, buffer
            gc.collect()
        event.close()
        with pytest.warns(ResourceWarning):
            del other, graph_before
            gc.collect()
        add.launch(1, 1, number, 1, stream=stream)
    graph.launch()
    stream.synchronize()
    assert value(number) == 2
    graph.close()


def test_no_memory_is_allocated_on_a_captured_stream(context: gf.Context, stream: gf.Stream) -> None:
    with stream.capture() as graph:
        with pytest.raises(gf.CaptureError, match="do it before"):
            context.alloc(4, stream=stream)
        made = context.alloc(4)
        made.fill(1, stream=stream)
    graph.launch()
    stream.synchronize()
    assert list(made.to_numpy()) == [1, 1, 1, 1]
    graph.close()
    made.close()


def test_other_threads_may_do_what_they_like_during_a_capture(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    done = []

    def work() -> None:
        with context.stream() as own, context.alloc(4) as buffer:
            buffer.copy_from(np.full(1, 9, "u4"))
            own.synchronize()
            done.append(value(buffer))
        context.driver.cuCtxGetCurrent()

    with stream.capture() as graph:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        add.launch(1, 1, number, 1, stream=stream)
    assert done == [9]
    graph.launch()
    stream.synchronize()
    assert value(number) == 1
    graph.close()


def test_copies_between_devices_are_refused_in_a_capture(two_devices: list[Device]) -> None:
    contexts = [device.create_context() for device in two_devices]
    here, there = (context.alloc(4) for context in contexts)
    with contexts[0].stream() as stream:
        with stream.capture() as graph, pytest.raises(gf.CaptureError, match="of another device"):
            there.copy_from(here, stream=stream)
        graph.close()
    for thing in (here, there, *contexts):
        thing.close()


def test_a_launch_into_another_librarys_capture_leaves_it_whole(
    context: gf.Context, number: gf.DeviceBuffer, add: gf.Kernel
) -> None:
    class Theirs:
        def __init__(self, address: int) -> None:
            self.address = address

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.address)

    driver = context.driver
    with context:
        handle = driver.cuStreamCreate(1)
        used = context.alloc(4)
        driver.cuStreamBeginCapture(handle, driver.raw.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        add.launch(1, 1, number, 1, stream=Theirs(int(handle)))
        add.launch(1, 1, used, 1, stream=Theirs(int(handle)))
        used.close()
        graph = driver.cuStreamEndCapture(handle)
        driver.cuGraphDestroy(graph)
        driver.cuStreamDestroy(handle)


def test_a_forgotten_graph_warns(stream: gf.Stream) -> None:
    with stream.capture() as graph:
        pass
    with pytest.warns(ResourceWarning, match="a graph of .* was never closed"):
        del graph
        gc.collect()


def test_a_graph_of_a_fault_is_named_among_the_suspects(context: gf.Context, stream: gf.Stream) -> None:
    log = context.driver.launches
    kernel = gf.Program.from_image(PTX, driver=context.driver).kernel("add")
    kernel.load(context)  # loading waits for busy streams (driver 580)
    with context.alloc(4) as buffer, Latch(stream):
        buffer.used_on(stream)
        with context.stream() as other:
            with other.capture() as graph:
                kernel.launch(1, 1, buffer, 1, stream=other)
            graph.launch(stream)
            assert any("a graph of" in suspect and "add" in suspect for suspect in log.suspects())
            graph.close()


def test_pinned_memory_of_a_graph_that_was_closed_is_refused_at_its_launch(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer
) -> None:
    for source in (lambda pinned: pinned, lambda pinned: pinned.array.view("u4")[:1]):
        pinned = gf.pinned(4, context=context)
        with stream.capture() as graph:
            number.copy_from(source(pinned), stream=stream)
        graph.launch()
        stream.synchronize()
        pinned.close()
        with pytest.raises(gf.ContextClosed, match="was closed"):
            graph.launch()
        graph.close()


def test_a_capture_survives_that_there_is_no_memory(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer
) -> None:
    with stream.capture() as graph:
        number.fill(1, stream=stream)
        with pytest.raises(gf.CudaError, match="OUT_OF_MEMORY"):
            context.alloc(1 << 50)
        number.fill(2, stream=stream)
    graph.launch()
    stream.synchronize()
    assert value(number) == 0x02020202
    graph.close()


@pytest.mark.parametrize("what", ["synchronize", "trim_memory", "close"])
def test_what_another_thread_does_to_the_whole_context_is_refused_before_it_breaks_the_capture(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, what: str
) -> None:
    said: list[BaseException] = []

    def work() -> None:
        try:
            getattr(context, what)()
        except gf.CaptureError as error:
            said.append(error)

    with stream.capture() as graph:
        number.fill(3, stream=stream)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "is captured" in str(said[0])
    graph.launch()
    stream.synchronize()
    assert value(number) == 0x03030303
    graph.close()


def test_a_capture_is_known_to_every_object_of_a_primary_context(device: Device) -> None:
    one, other = device.retain_primary_context(), device.retain_primary_context()
    created = device.create_context()
    shared = created.alloc(64)
    shared.share()  # its free waits for all that the primary context has to do
    with one.stream() as stream, one.alloc(4) as buffer:
        with stream.capture() as graph:
            with pytest.raises(gf.CaptureError, match="is captured"):
                other.synchronize()
            shared.close()
            created.alloc(4).close()
            buffer.fill(3, stream=stream)
        graph.launch()
        stream.synchronize()
        assert value(buffer) == 0x03030303
        graph.close()
    created.alloc(4).close()
    assert not created.heap.live
    for context in (created, one, other):
        context.close()


def test_an_interrupt_while_a_capture_begins_or_ends_leaves_none(
    context: gf.Context, stream: gf.Stream, number: gf.DeviceBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(BaseException):
        pass

    driver = context.driver
    for call in ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate"):

        def interrupted(*given: object, real: Callable[..., object] = getattr(driver, call)) -> None:
            real(*given)
            raise Interrupt

        with monkeypatch.context() as patch:
            patch.setattr(driver, call, interrupted)
            with pytest.raises(Interrupt), stream.capture():
                number.fill(1, stream=stream)
        number.fill(0, stream=stream)
        stream.synchronize()  # it is no longer captured
        context.synchronize()
        context.alloc(4).close()
        assert set(context.heap.live) == {number.address}, "frees go on"
