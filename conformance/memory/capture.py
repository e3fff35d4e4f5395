"""Capturing a stream into a graph: what begins, joins, ends and breaks a capture."""

from __future__ import annotations

from .graph_shape import run_graph, shape, status
from .probe import in_thread, ints, run_chapter

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
MODES = {"global": GLOBAL, "thread_local": THREAD_LOCAL, "relaxed": RELAXED}
LEGACY, PER_THREAD = 1, 2
EXTERNAL = 1


def probe_capture(driver, image, **how):
    """Stream capture, but for what other calls answer meanwhile (capture_calls.py) and for allocation."""
    return run_chapter(
        (
            begin_and_end,
            default_streams,
            states,
            empty,
            replay,
            end_elsewhere,
            other_threads,
            exchange_mode,
            implicit,
            invalidated,
            busy_stream,
            pageable_memory,
            graph_inside,
            into_a_graph,
        ),
        driver,
        image,
        **how,
    )


def begin_and_end(p):
    d = p.d
    for name, mode in MODES.items():
        for kind, flags in (("non_blocking", 1), ("blocking", 0)):
            stream = p.stream(flags)
            p.ask(f"{name}.{kind}.begin", d.cuStreamBeginCapture, stream, d.CUstreamCaptureMode(mode))
            graph = p.ask(f"{name}.{kind}.end", d.cuStreamEndCapture, stream)
            p.note(f"{name}.{kind}.gives_a_graph", graph is not None and int(graph) != 0)
            p.ask(f"{name}.{kind}.end_again", d.cuStreamEndCapture, stream)
    stream = p.stream()
    p.ask("end_without_begin", d.cuStreamEndCapture, stream)
    p.begin_capture(stream)
    p.ask("begin_again", d.cuStreamBeginCapture, stream, d.CUstreamCaptureMode(GLOBAL))
    p.note("begin_again.status", status(p, stream))
    p.ask("begin_again.end", d.cuStreamEndCapture, stream)


def default_streams(p):
    d = p.d
    for name, stream in (("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD)):
        p.ask(f"{name}.begin", d.cuStreamBeginCapture, stream, d.CUstreamCaptureMode(GLOBAL))
        p.note(f"{name}.status", status(p, stream))
        p.ask(f"{name}.end", d.cuStreamEndCapture, stream)


def states(p):
    """cuStreamIsCapturing and cuStreamGetCaptureInfo before, during and after."""
    d = p.d
    stream, memory = p.stream(), p.device()

    def say(name):
        p.note(f"{name}.status", status(p, stream))
        info = p.ask(f"{name}.info", d.cuStreamGetCaptureInfo, stream)
        if info is None:
            return None
        state, number, graph, dependencies = info[:4]
        p.note(f"{name}.info.value", [state, int(number) != 0, int(graph) != 0, len(dependencies)])
        return int(number)

    say("before")
    p.begin_capture(stream)
    first = say("begun")
    p.need(p.launch, "fill", memory, 1, stream=stream)
    again = say("after_a_kernel")
    p.note("number_stays", first == again)
    p.note("graph_meanwhile", shape(p, p.need(d.cuStreamGetCaptureInfo, stream)[2]))
    p.end_capture(stream)
    say("after")
    p.begin_capture(stream)
    second = say("begun_again")
    p.note("number_is_new", first != second)
    p.end_capture(stream)


def empty(p):
    d = p.d
    stream = p.stream()
    p.begin_capture(stream)
    graph = p.end_capture(stream)
    p.note("shape", shape(p, graph))
    executable = p.ask("instantiate", d.cuGraphInstantiate, graph, 0)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def replay(p):
    """Nothing runs while it is captured; every launch runs all of it, one after the other."""
    d = p.d
    stream, memory, host = p.stream(), p.device(), p.pinned()
    p.write(memory, 0)
    p.begin_capture(stream)
    p.ask("kernel", p.launch, "add", memory, 1, stream=stream)
    p.ask("memset", d.cuMemsetD32Async, memory + 4, 7, 1, stream)
    p.ask("copy", d.cuMemcpyDtoHAsync, host, memory, 8, stream)
    graph = p.end_capture(stream)
    p.note("shape", shape(p, graph))
    p.note("before", p.read(memory)[0])
    executable = p.ask("instantiate", d.cuGraphInstantiate, graph, 0)
    p.ask("destroy_graph", d.cuGraphDestroy, graph)
    latch = p.latch(stream)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.ask("launch_again", d.cuGraphLaunch, executable, stream)
    p.ask("query", d.cuStreamQuery, stream)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.note("values", list(ints(host, 2)))
    p.ask("destroy_executable", d.cuGraphExecDestroy, executable)


def end_elsewhere(p):
    """Ending a capture on another thread than the one that began it."""
    d = p.d
    for name, mode in MODES.items():
        stream = p.stream()
        p.begin_capture(stream, mode)
        p.ask(f"{name}.end", in_thread, d.cuStreamEndCapture, stream)
        p.note(f"{name}.status", status(p, stream))
        p.ask(f"{name}.end_here", d.cuStreamEndCapture, stream)
    stream = p.stream()
    p.begin_capture(stream)
    p.ask("launch_from_another_thread", in_thread, lambda: _launch_pushed(p, stream))
    p.note("nodes", shape(p, p.end_capture(stream))["nodes"])


def _launch_pushed(p, stream):
    p.need(p.d.cuCtxPushCurrent, p.context)
    try:
        return p.launch("fill", 0, 1, stream=stream)
    finally:
        p.need(p.d.cuCtxPopCurrent)


def other_threads(p):
    """What a thread that captures nothing may do while another one captures."""
    d = p.d

    def allocate(mode=None):
        p.need(d.cuCtxPushCurrent, p.context)
        try:
            if mode is not None:
                p.need(d.cuThreadExchangeStreamCaptureMode, d.CUstreamCaptureMode(mode))
            return d.cuMemAlloc(4096)
        finally:
            p.need(d.cuCtxPopCurrent)

    for name, mode in MODES.items():
        for theirs, exchanged in {"default": None, **MODES}.items():
            stream = p.stream()
            p.begin_capture(stream, mode)
            p.ask(f"{name}.thread_in_{theirs}", in_thread, allocate, exchanged)
            p.note(f"{name}.thread_in_{theirs}.status", status(p, stream))
            p.end_capture(stream)


def exchange_mode(p):
    d = p.d
    modes = d.CUstreamCaptureMode
    for name, mode in (("relaxed", RELAXED), ("thread_local", THREAD_LOCAL), ("global", GLOBAL)):
        before = p.ask(name, d.cuThreadExchangeStreamCaptureMode, modes(mode))
        p.note(f"{name}.before", before)
    stream = p.stream()
    p.begin_capture(stream, GLOBAL)
    p.need(d.cuThreadExchangeStreamCaptureMode, modes(RELAXED))
    p.ask("allocate_while_relaxed", d.cuMemAlloc, 4096)
    p.need(d.cuThreadExchangeStreamCaptureMode, modes(GLOBAL))
    p.note("status", status(p, stream))
    p.ask("allocate_while_global", d.cuMemAlloc, 4096)
    p.note("status_then", status(p, stream))
    p.ask("end", d.cuStreamEndCapture, stream)


def implicit(p):
    """A blocking stream is captured; the null stream would have to wait for it."""
    d = p.d
    memory = p.device()
    calls = {
        "launch": lambda: (p.launch, "fill", memory, 1),
        "query": lambda: (d.cuStreamQuery, 0),
        "synchronize": lambda: (d.cuStreamSynchronize, 0),
        "is_capturing": lambda: (d.cuStreamIsCapturing, 0),
        "info": lambda: (d.cuStreamGetCaptureInfo, 0),
        "memset": lambda: (d.cuMemsetD8, memory, 1, 16),
        "copy": lambda: (d.cuMemcpyDtoD, memory, memory + 64, 16),
        "record": lambda: (d.cuEventRecord, p.event(), 0),
        "allocate": lambda: (d.cuMemAllocAsync, 4096, 0),
        "per_thread": lambda: (d.cuMemsetD8Async, memory, 1, 16, PER_THREAD),
    }
    for name, mode in MODES.items():
        answers = {}
        for call, make in calls.items():
            stream = p.stream(0)
            arguments = make()
            p.begin_capture(stream, mode)
            p.journal(f"{name}.{call}")
            answer = p.code(*arguments)
            answers[call] = [answer, status(p, stream), p.code(d.cuStreamEndCapture, stream)]
            p.need(d.cuStreamDestroy, stream)
        p.keep(name, answers)


def invalidated(p):
    """A capture that was broken stays broken until it is ended."""
    d = p.d
    stream, memory, event = p.stream(), p.device(), p.event()
    p.begin_capture(stream)
    p.ask("breaks", d.cuStreamSynchronize, stream)
    p.note("status", status(p, stream))
    p.ask("launch", p.launch, "fill", memory, 1, stream=stream)
    p.ask("memset", d.cuMemsetD8Async, memory, 1, 16, stream)
    p.ask("record", d.cuEventRecord, event, stream)
    p.ask("query", d.cuStreamQuery, stream)
    p.ask("info", d.cuStreamGetCaptureInfo, stream)
    p.ask("begin", d.cuStreamBeginCapture, stream, d.CUstreamCaptureMode(GLOBAL))
    graph = p.ask("end", d.cuStreamEndCapture, stream)
    p.note("gives_a_graph", graph is not None and int(graph) != 0)
    p.note("status_after", status(p, stream))
    p.ask("launch_after", p.launch, "fill", memory, 1, stream=stream)
    p.ask("synchronize_after", d.cuStreamSynchronize, stream)
    p.begin_capture(stream)
    p.note("captures_again", p.end_capture(stream) is not None)


def busy_stream(p):
    """A capture may begin on a stream with work; the work is no part of it."""
    d = p.d
    stream, memory = p.stream(), p.device()
    latch = p.latch(stream)
    p.ask("begin", d.cuStreamBeginCapture, stream, d.CUstreamCaptureMode(GLOBAL))
    p.need(p.launch, "fill", memory, 1, stream=stream)
    graph = p.ask("end", d.cuStreamEndCapture, stream)
    p.note("shape", shape(p, graph))
    p.ask("query", d.cuStreamQuery, stream)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def pageable_memory(p):
    """When is pageable memory read and written: while it is captured, or by each launch?"""
    d = p.d
    stream, memory = p.stream(), p.device()
    source, target = p.pageable(), p.pageable()
    ints(source)[0] = 1
    p.begin_capture(stream)
    p.ask("in", d.cuMemcpyHtoDAsync, memory, source, 64, stream)
    p.ask("out", d.cuMemcpyDtoHAsync, target, memory, 64, stream)
    graph = p.end_capture(stream)
    p.note("shape", shape(p, graph))
    ints(source)[0] = 2
    run_graph(p, graph, stream)
    p.note("value", ints(target)[0])
    ints(source)[0] = 3
    run_graph(p, graph, stream)
    p.note("value_then", ints(target)[0])


def graph_inside(p):
    """Launching an executable graph into a capture."""
    d = p.d
    stream, memory = p.stream(), p.device()
    p.write(memory, 0)
    p.begin_capture(stream)
    p.need(p.launch, "add", memory, 1, stream=stream)
    executable = p.need(d.cuGraphInstantiate, p.end_capture(stream), 0)
    p.begin_capture(stream)
    p.ask("launch", d.cuGraphLaunch, executable, stream)
    p.ask("launch_again", d.cuGraphLaunch, executable, stream)
    p.note("status", status(p, stream))
    graph = p.end_capture(stream)
    p.note("gives_a_graph", graph is not None)
    if graph is not None:
        p.note("shape", shape(p, graph))
        run_graph(p, graph, stream)
        p.note("value", p.read(memory)[0])


def into_a_graph(p):
    """cuStreamBeginCaptureToGraph adds to a graph that exists."""
    d = p.d
    stream, memory = p.stream(), p.device()
    graph = p.need(d.cuGraphCreate, 0)
    node = p.need(d.cuGraphAddEmptyNode, graph, [], 0)
    mode = d.CUstreamCaptureMode(GLOBAL)
    p.ask("begin", d.cuStreamBeginCaptureToGraph, stream, graph, [node], [d.CUgraphEdgeData()], 1, mode)
    p.need(p.launch, "fill", memory, 1, stream=stream)
    ended = p.ask("end", d.cuStreamEndCapture, stream)
    p.note("same_graph", ended is not None and int(ended) == int(graph))
    p.note("shape", shape(p, graph))
