"""Captures of several streams: events that fork, join, and do what a capture forbids."""

from __future__ import annotations

from .graph_shape import run_graph, shape, status
from .probe import run_chapter

GLOBAL, RELAXED = 0, 2
EXTERNAL = 1


def probe_capture_streams(driver, image, **how):
    """Streams that join a capture, and events inside and outside of it."""
    return run_chapter(
        (
            fork_and_join,
            waiting_joins_a_capture,
            unjoined,
            merge,
            isolation,
            captured_event_outside,
            external_events,
            dependencies,
            other_context,
            other_device,
            destroy_a_capturing_stream,
        ),
        driver,
        image,
        **how,
    )


def fork_and_join(p):
    """Two branches by events: a second stream is captured too, and comes back."""
    d = p.d
    stream, branch, memory, event, back = p.stream(), p.stream(), p.device(), p.event(2), p.event(2)
    p.write(memory, 0, 0)
    p.begin_capture(stream)
    p.need(p.launch, "add", memory, 1, stream=stream)
    p.ask("record", d.cuEventRecord, event, stream)
    p.note("branch.before", status(p, branch))
    p.ask("wait", d.cuStreamWaitEvent, branch, event, 0)
    p.note("branch.after", status(p, branch))
    p.need(p.launch, "add", memory + 4, 10, stream=branch)
    p.need(p.launch, "add", memory, 1, stream=stream)
    p.ask("record_back", d.cuEventRecord, back, branch)
    p.ask("wait_back", d.cuStreamWaitEvent, stream, back, 0)
    p.need(p.launch, "add", memory, 100, block=2, stream=stream)
    p.note(
        "ids_are_equal",
        int(p.need(d.cuStreamGetCaptureInfo, stream)[1]) == int(p.need(d.cuStreamGetCaptureInfo, branch)[1]),
    )
    graph = p.end_capture(stream)
    p.note("branch.at_last", status(p, branch))
    p.note("shape", shape(p, graph))
    run_graph(p, graph, stream)
    p.note("value", p.read(memory, 2))
    p.ask("event.query_after", d.cuEventQuery, event)
    p.ask("event.synchronize_after", d.cuEventSynchronize, event)


def waiting_joins_a_capture(p):
    """Records and waits alone, without work between them."""
    d = p.d
    stream, branch, event, back = p.stream(), p.stream(), p.event(2), p.event(2)
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, stream)
    p.need(d.cuStreamWaitEvent, branch, event, 0)
    p.note("branch", status(p, branch))
    graph = p.ask("end_with_an_idle_branch", d.cuStreamEndCapture, stream)
    p.note("idle_branch.gives_a_graph", graph is not None and int(graph) != 0)
    p.note("branch.after", status(p, branch))
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, stream)
    p.need(d.cuStreamWaitEvent, branch, event, 0)
    p.need(d.cuEventRecord, back, branch)
    p.need(d.cuStreamWaitEvent, stream, back, 0)
    p.ask("end_on_the_branch", d.cuStreamEndCapture, branch)
    p.note("end_on_the_branch.status", status(p, stream))
    p.ask("end", d.cuStreamEndCapture, stream)


def unjoined(p):
    d = p.d
    stream, branch, event = p.stream(), p.stream(), p.event(2)
    memory = p.device()
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, stream)
    p.need(d.cuStreamWaitEvent, branch, event, 0)
    p.need(p.launch, "fill", memory, 1, stream=branch)
    graph = p.ask("end", d.cuStreamEndCapture, stream)
    p.note("gives_a_graph", graph is not None and int(graph) != 0)
    p.note("status", [status(p, stream), status(p, branch)])
    p.ask("launch_after", p.launch, "fill", memory, 2, stream=branch)
    p.ask("synchronize", d.cuCtxSynchronize)
    p.note("value", p.read(memory)[0])


def merge(p):
    """A stream of one capture waits for an event of another."""
    d = p.d
    first, second, event = p.stream(), p.stream(), p.event(2)
    p.begin_capture(first)
    p.begin_capture(second)
    p.need(d.cuEventRecord, event, first)
    p.ask("wait", d.cuStreamWaitEvent, second, event, 0)
    p.note("status", [status(p, first), status(p, second)])
    p.ask("end_first", d.cuStreamEndCapture, first)
    p.ask("end_second", d.cuStreamEndCapture, second)


def isolation(p):
    """A captured stream waits for an event that was recorded outside the capture, or never."""
    d = p.d
    for name, recorded in (("recorded_before", True), ("unrecorded", False)):
        stream, event = p.stream(), p.event(2)
        if recorded:
            p.need(d.cuEventRecord, event, p.stream())
        p.begin_capture(stream)
        p.ask(f"{name}.wait", d.cuStreamWaitEvent, stream, event, 0)
        p.note(f"{name}.status", status(p, stream))
        p.ask(f"{name}.end", d.cuStreamEndCapture, stream)
    stream, other, event = p.stream(), p.stream(), p.event(2)
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, other)
    p.ask("recorded_meanwhile_on_another_stream.wait", d.cuStreamWaitEvent, stream, event, 0)
    p.note("recorded_meanwhile_on_another_stream.status", status(p, stream))
    p.ask("recorded_meanwhile_on_another_stream.end", d.cuStreamEndCapture, stream)


def captured_event_outside(p):
    """An event recorded in a capture stands for a node, not for a moment."""
    d = p.d
    for name in ("query", "synchronize", "elapsed", "record_elsewhere"):
        stream, other, event, timed = p.stream(), p.stream(), p.event(), p.event()
        p.need(d.cuEventRecord, timed, stream)
        p.need(d.cuStreamSynchronize, stream)
        p.begin_capture(stream, RELAXED)
        p.need(d.cuEventRecord, event, stream)
        if name == "query":
            p.ask(name, d.cuEventQuery, event)
        elif name == "synchronize":
            p.ask(name, d.cuEventSynchronize, event)
        elif name == "elapsed":
            p.ask(name, d.cuEventElapsedTime, timed, event)
        else:
            p.ask(name, d.cuEventRecord, event, other)
        p.note(f"{name}.status", status(p, stream))
        p.ask(f"{name}.end", d.cuStreamEndCapture, stream)
        p.ask(f"{name}.query_after", d.cuEventQuery, event)
    stream, event = p.stream(), p.event()
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, stream)
    p.ask("destroy", d.cuEventDestroy, event)
    p.ask("destroy.end", d.cuStreamEndCapture, stream)
    stream, event = p.stream(), p.event()
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, stream)
    p.end_capture(stream)
    p.ask("wait_after_the_end", d.cuStreamWaitEvent, p.stream(), event, 0)
    p.ask("record_after_the_end", d.cuEventRecord, event, stream)
    p.ask("record_after_the_end.synchronize", d.cuEventSynchronize, event)


def external_events(p):
    """Event nodes: recorded and waited for by the graph, not by the capture."""
    d = p.d
    stream, memory, event = p.stream(), p.device(), p.event()
    p.begin_capture(stream)
    p.ask("record", d.cuEventRecordWithFlags, event, stream, EXTERNAL)
    p.need(p.launch, "fill", memory, 1, stream=stream)
    p.ask("wait", d.cuStreamWaitEvent, stream, event, EXTERNAL)
    graph = p.end_capture(stream)
    p.note("shape", shape(p, graph))
    p.ask("query_before", d.cuEventQuery, event)
    run_graph(p, graph, stream)
    p.ask("query_after", d.cuEventQuery, event)


def dependencies(p):
    """cuStreamUpdateCaptureDependencies: 0 adds to what the next node depends on, 1 replaces it."""
    d = p.d
    stream, memory = p.stream(), p.device()
    p.begin_capture(stream)
    p.need(p.launch, "fill", memory, 1, stream=stream)
    nodes = p.need(d.cuStreamGetCaptureInfo, stream)[3]
    p.need(p.launch, "fill", memory, 2, stream=stream)
    p.ask("add", d.cuStreamUpdateCaptureDependencies, stream, nodes, None, len(nodes), 0)
    p.note("add.count", len(p.need(d.cuStreamGetCaptureInfo, stream)[3]))
    p.ask("set", d.cuStreamUpdateCaptureDependencies, stream, nodes, None, len(nodes), 1)
    p.note("set.count", len(p.need(d.cuStreamGetCaptureInfo, stream)[3]))
    p.ask("unknown_flag", d.cuStreamUpdateCaptureDependencies, stream, nodes, None, len(nodes), 2)
    p.ask("end", d.cuStreamEndCapture, stream)
    p.ask("not_capturing", d.cuStreamUpdateCaptureDependencies, stream, [], None, 0, 1)


def other_context(p):
    """A capture that reaches into another context of the device."""
    d = p.d
    stream, memory, event = p.stream(), p.device(), p.event(2)
    p.write(memory, 0)
    other = p.new_context()
    theirs, their_event = p.stream(), p.event(2)
    p.kernel("add")
    p.need(d.cuCtxPopCurrent)
    p.begin_capture(stream)
    p.need(p.launch, "add", memory, 1, stream=stream)
    p.need(d.cuEventRecord, event, stream)
    p.need(d.cuCtxPushCurrent, other)
    p.ask("wait", d.cuStreamWaitEvent, theirs, event, 0)
    p.note("status", status(p, theirs))
    p.ask("launch", p.launch, "add", memory, 10, stream=theirs)
    p.ask("record", d.cuEventRecord, their_event, theirs)
    p.need(d.cuCtxPopCurrent)
    p.ask("wait_back", d.cuStreamWaitEvent, stream, their_event, 0)
    graph = p.end_capture(stream)
    p.note("gives_a_graph", graph is not None)
    if graph is not None:
        p.note("shape", shape(p, graph))
        run_graph(p, graph, stream)
        p.note("value", p.read(memory)[0])


def other_device(p):
    """A capture that spans two devices."""
    if p.device_count < 2:
        return
    d = p.d
    stream, memory, event = p.stream(), p.device(), p.event(2)
    p.write(memory, 0)
    other = p.new_context(1)
    theirs, their_event, their_memory = p.stream(), p.event(2), p.device()
    p.write(their_memory, 0)
    p.kernel("add")
    p.need(d.cuCtxPopCurrent)
    p.begin_capture(stream)
    p.need(p.launch, "add", memory, 1, stream=stream)
    p.need(d.cuEventRecord, event, stream)
    p.need(d.cuCtxPushCurrent, other)
    p.ask("wait", d.cuStreamWaitEvent, theirs, event, 0)
    p.ask("launch", p.launch, "add", their_memory, 10, stream=theirs)
    p.ask("record", d.cuEventRecord, their_event, theirs)
    p.need(d.cuCtxPopCurrent)
    p.ask("wait_back", d.cuStreamWaitEvent, stream, their_event, 0)
    graph = p.end_capture(stream)
    p.note("gives_a_graph", graph is not None)
    if graph is not None:
        p.note("shape", shape(p, graph))
        run_graph(p, graph, stream)
        p.note("value", [p.read(memory)[0], p.read(their_memory)[0]])


def destroy_a_capturing_stream(p):
    d = p.d
    stream, branch, event = p.stream(), p.stream(), p.event(2)
    p.begin_capture(stream)
    p.need(d.cuEventRecord, event, stream)
    p.need(d.cuStreamWaitEvent, branch, event, 0)
    p.ask("branch", d.cuStreamDestroy, branch)
    p.note("branch.status", status(p, stream))
    p.ask("branch.end", d.cuStreamEndCapture, stream)
    last = p.stream()
    p.need(d.cuStreamBeginCapture, last, d.CUstreamCaptureMode(GLOBAL))
    p.ask("origin", d.cuStreamDestroy, last)
    p.ask("allocate_after", d.cuMemAlloc, 4096)
