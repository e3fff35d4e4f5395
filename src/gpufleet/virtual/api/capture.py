"""Capture of streams into graphs."""

from __future__ import annotations

import threading
from typing import Any

from gpufleet.virtual.bindings import bindings, number
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.capture import RELAXED, Capture
from gpufleet.virtual.graphs import Graph, Node
from gpufleet.virtual.state import State
from gpufleet.virtual.streams import Stream


@call()
def cuStreamBeginCapture(state: State, hStream: Any, mode: Any) -> None:
    """Let what enters a stream become nodes of a new graph instead."""
    _begin(state, hStream, mode, None, [])


@call()
def cuStreamBeginCaptureToGraph(
    state: State,
    hStream: Any,
    hGraph: Any,
    dependencies: Any,
    dependencyData: Any,
    numDependencies: int,
    mode: Any,
) -> None:
    """Let what enters a stream become nodes of a graph that there is, behind some of its nodes."""
    graph = state.graphs.graph(hGraph)
    _begin(state, hStream, mode, graph, state.graphs.nodes(graph, dependencies, numDependencies))


@call(outputs=1)
def cuStreamEndCapture(state: State, hStream: Any) -> Any:
    """End a capture and return the graph, unless the capture was broken."""
    with state.lock:
        stream = state.stream(hStream)
        capture = stream.capture
        if capture is None:
            raise Refusal("ILLEGAL_STATE", "the stream is not captured")
        if capture.origin is not stream:
            raise capture.broken_by("UNMATCHED", "the capture did not begin with this stream")
        is_elsewhere = capture.mode != RELAXED and capture.thread != threading.get_ident()
        is_broken, is_joined = capture.is_broken, capture.is_joined()
        if is_elsewhere or is_broken or not is_joined:
            state.captures.abandon(capture)
            state.scheduler.settle()
        if is_elsewhere:
            raise Refusal("STREAM_CAPTURE_WRONG_THREAD", "another thread began the capture")
        if is_broken:
            raise Refusal("STREAM_CAPTURE_INVALIDATED", "an earlier call broke the capture")
        if not is_joined:
            raise Refusal("STREAM_CAPTURE_UNJOINED", "it does not wait for a stream that joined the capture")
        state.captures.end(capture)
        return bindings().CUgraph(capture.graph.handle)


@call(outputs=1)
def cuStreamIsCapturing(state: State, hStream: Any) -> Any:
    """Return whether a stream is captured, and whether the capture was broken."""
    return _status(_asked(state, hStream).capture)


@call(outputs=6)
def cuStreamGetCaptureInfo(state: State, hStream: Any) -> tuple[Any, ...]:
    """Return the status, number and graph of a capture, and what the stream's next node comes after."""
    types = bindings()
    with state.lock:
        stream = _asked(state, hStream)
        capture = stream.capture
        if capture is None or capture.is_broken:
            return _status(capture), types.cuuint64_t(0), types.CUgraph(0), [], [], 0
        nodes = [types.CUgraphNode(node.handle) for node in capture.fronts[stream]]
        data = [types.CUgraphEdgeData() for _ in nodes]
        graph = types.CUgraph(capture.graph.handle)
        return _status(capture), types.cuuint64_t(capture.id), graph, nodes, data, len(nodes)


@call()
def cuStreamUpdateCaptureDependencies(
    state: State, hStream: Any, dependencies: Any, dependencyData: Any, numDependencies: int, flags: int
) -> None:
    """Change what the next node of a captured stream comes after: add to it (0) or replace it (1)."""
    with state.lock:
        stream = state.stream(hStream)
        capture = stream.capture
        if capture is None:
            raise Refusal("ILLEGAL_STATE", "the stream is not captured")
        if flags not in (0, 1):
            raise Refusal("INVALID_VALUE", f"the flags are {flags}: expected 0 (add) or 1 (set)")
        nodes = state.graphs.nodes(capture.graph, dependencies, numDependencies)
        kept: list[Node] = [] if flags else capture.fronts[stream]
        capture.fronts[stream] = list(dict.fromkeys([*kept, *nodes]))


@call(outputs=1)
def cuThreadExchangeStreamCaptureMode(state: State, mode: Any) -> Any:
    """Set which calls captures forbid this thread; return what was set before."""
    before = state.thread.capture_mode
    state.thread.capture_mode = mode
    return bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL if before is None else before


def _begin(state: State, handle: Any, mode: Any, graph: Graph | None, after: list[Node]) -> None:
    with state.lock:
        stream = state.stream(handle)
        if stream.is_legacy:
            raise Refusal("STREAM_CAPTURE_UNSUPPORTED", "the legacy default stream cannot be captured")
        if stream.capture is not None:
            raise Refusal("ILLEGAL_STATE", "the stream is captured already")
        state.captures.begin(Capture(stream, number(mode), graph, after))


def _asked(state: State, handle: Any) -> Stream:
    """The stream of a question; the legacy stream has no answer while it would wait for a captured one."""
    stream = state.stream(handle)
    if stream.is_legacy and any(each.capture is not None for each in stream.context.blocking_streams()):
        raise Refusal("STREAM_CAPTURE_IMPLICIT", "a stream that it would wait for is captured")
    return stream


def _status(capture: Capture | None) -> Any:
    kinds = bindings().CUstreamCaptureStatus
    if capture is None:
        return kinds.CU_STREAM_CAPTURE_STATUS_NONE
    if capture.is_broken:
        return kinds.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    return kinds.CU_STREAM_CAPTURE_STATUS_ACTIVE
