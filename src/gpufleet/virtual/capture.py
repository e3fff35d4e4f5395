"""Which streams are being captured into which graph, and what may not be called meanwhile?

What is refused, and which captures that breaks, was recorded on driver 580 (conformance/).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.graphs import Graph, Node, Work

if TYPE_CHECKING:
    from gpufleet.virtual.graph_objects import Graphs
    from gpufleet.virtual.operations import Operation
    from gpufleet.virtual.state import State
    from gpufleet.virtual.streams import Event, Stream

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
"""CU_STREAM_CAPTURE_MODE_*."""

UNSAFE = frozenset(
    {
        *("cuEventQuery", "cuEventSynchronize"),
        *("cuMemAlloc", "cuMemAllocPitch", "cuMemFree", "cuMemAllocManaged", "cuMemAdvise"),
        *("cuMemHostAlloc", "cuMemAllocHost", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister"),
        *("cuMemPoolTrimTo", "cuModuleUnload", "cuLibraryUnload", "cuCtxSetLimit"),
        *("cuGraphInstantiate", "cuGraphInstantiateWithParams", "cuGraphExecDestroy"),
    }
)
"""Calls that the capture mode may forbid."""
UNSAFE_IN_OTHER_STREAMS = {
    "cuStreamQuery": 0,
    "cuStreamSynchronize": 0,
    "cuMemAllocAsync": 1,
    "cuMemAllocFromPoolAsync": 2,
    "cuMemFreeAsync": 1,
}
"""Calls that it may forbid unless their stream, the argument of that number, is captured itself."""
REFUSED = {
    "cuStreamQuery": 0,
    "cuStreamSynchronize": 0,
    "cuStreamAddCallback": 0,
    "cuStreamAttachMemAsync": 0,
    "cuStreamGetFlags": 0,
    "cuStreamGetId": 0,
    "cuMemcpyPeerAsync": 5,
    "cuMemPrefetchAsync": 4,
    "cuGraphLaunch": 1,
    "cuGraphUpload": 1,
}
"""Calls that no captured stream takes, and the number of their stream argument."""
WATCHED = UNSAFE | UNSAFE_IN_OTHER_STREAMS.keys() | REFUSED.keys() | {"cuCtxSynchronize"}

_ids = itertools.count(1)


class Capture:
    """The streams that are captured into one graph. All methods are called with the driver's lock held.

    Attributes
    ----------
    graph : Graph
    is_new : bool
        Whether the graph was made for it.
    origin : Stream
        The stream that the capture began with.
    mode : int
    thread : int
        Which thread began it.
    fronts : dict
        For each of its streams, the nodes that the next one comes after.
    is_broken : bool
        Whether something was called that does not go with it.
    is_over : bool
    """

    def __init__(
        self, origin: Stream, mode: int, graph: Graph | None = None, after: Iterable[Node] = ()
    ) -> None:
        self.id = next(_ids)
        self.graph = graph or Graph()
        self.is_new = graph is None
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.fronts: dict[Stream, list[Node]] = {}
        self.is_broken = False
        self.is_over = False
        self.join(origin, after)

    def join(self, stream: Stream, nodes: Iterable[Node]) -> None:
        """Capture a stream too, behind some nodes."""
        stream.capture = self
        self.fronts[stream] = list(nodes)

    def add(self, stream: Stream, work: Work) -> Node:
        """Add a node behind what was captured in a stream."""
        self.check()
        if not work.kind:
            raise self.broken_by("UNSUPPORTED", "this operation cannot be captured")
        node = self.graph.add(work, self.fronts[stream])
        self.fronts[stream] = [node]
        return node

    def add_operation(self, stream: Stream, kind: str, operation: Operation) -> None:
        """Add what would have been work in a stream."""
        self.add(stream, Work(kind, stream.context, operation))

    def check(self) -> None:
        """Refuse if the capture was broken."""
        if self.is_broken:
            raise Refusal("STREAM_CAPTURE_INVALIDATED", "an earlier call broke the capture: end it")

    def broken_by(self, code: str, reason: str) -> Refusal:
        """Break the capture; return the refusal that says why."""
        self.is_broken = True
        return Refusal(f"STREAM_CAPTURE_{code}", reason)

    def is_joined(self) -> bool:
        """Say whether the origin waits for all that was captured in its other streams."""
        ends = self.fronts[self.origin]
        nodes = (node for stream, front in self.fronts.items() if stream is not self.origin for node in front)
        return all(any(end.is_behind(node) for end in ends) for node in nodes)

    def end(self) -> None:
        """Let all streams go."""
        self.is_over = True
        for stream in self.fronts:
            stream.capture = None

    # ---- events

    def record(self, event: Event, stream: Stream) -> None:
        """Let an event mean the nodes that are in a stream now."""
        self.check()
        event.captured = (self, list(self.fronts[stream]))

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream of this capture wait for an event that was not recorded in one."""
        self.check()
        if event.operation is not None:
            raise self.broken_by("ISOLATION", "the event was recorded outside of the capture")

    def wait_for_nodes(self, stream: Stream, nodes: list[Node]) -> None:
        """Let a stream, of this capture or none, wait for nodes of it; it is captured from now on."""
        self.check()
        other = stream.capture
        if other is not None and other is not self:
            other.is_broken = True
            raise self.broken_by("MERGE", "the stream belongs to another capture than the event")
        if stream.is_legacy:
            raise self.broken_by("IMPLICIT", "the legacy default stream cannot be captured")
        front = self.fronts.get(stream, [])
        self.join(stream, dict.fromkeys([*front, *nodes]))


class Captures:
    """The captures that have not ended.

    Attributes
    ----------
    active : list of Capture
        Looked at before each call, so it must be cheap.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.active: list[Capture] = []
        self._graphs = graphs

    def begin(self, capture: Capture) -> None:
        """Enter a capture and its graph."""
        self._graphs.add(capture.graph)
        self.active.append(capture)

    def end(self, capture: Capture) -> None:
        """End a capture; its graph stays."""
        capture.end()
        self.active.remove(capture)

    def abandon(self, capture: Capture) -> None:
        """End a capture and forget the graph that was made for it."""
        self.end(capture)
        if capture.is_new:
            self._graphs.remove(capture.graph)

    def leave(self, stream: Stream) -> None:
        """Take a stream that is about to be destroyed out of its capture, which ends with its origin."""
        capture = stream.capture
        if capture is not None:
            del capture.fronts[stream]
            stream.capture = None
            if stream is capture.origin:
                self.abandon(capture)

    def check(self, state: State, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse a call that does not go with the captures there are, and break these."""
        if name not in WATCHED:
            return
        with state.lock:
            if name == "cuCtxSynchronize":
                self._check_context(state)
                return
            stream = _stream_argument(state, name, arguments, keywords)
            if stream is not None and stream.capture is not None:
                if name in REFUSED:
                    raise stream.capture.broken_by("UNSUPPORTED", f"{name} does not take a captured stream")
                return
            if name in REFUSED and name not in UNSAFE_IN_OTHER_STREAMS:
                return
            if stream is not None and stream.is_legacy:
                stream.pending()  # refuses if it would wait for a captured stream
            self._check_mode(state, name)

    def _check_mode(self, state: State, name: str) -> None:
        mode = int(state.thread.capture_mode or GLOBAL)
        if mode == RELAXED:
            return
        here = threading.get_ident()
        forbidding = [
            capture
            for capture in self.active
            if (capture.mode != RELAXED if capture.thread == here else GLOBAL == capture.mode == mode)
        ]
        for capture in forbidding:
            capture.is_broken = True
        if forbidding:
            raise Refusal("STREAM_CAPTURE_UNSUPPORTED", f"{name} while a stream is captured")

    def _check_context(self, state: State) -> None:
        current = state.current()
        for capture in self.active:
            if any(current in (stream.context, stream.context.home) for stream in capture.fronts):
                raise capture.broken_by("UNSUPPORTED", "the context has a captured stream")


def check_not_captured(event: Event, *, breaks: bool) -> None:
    """Refuse an event that stands for a node of a graph instead of a moment."""
    if event.captured is None:
        return
    capture = event.captured[0]
    if capture.is_over:
        raise Refusal("INVALID_VALUE", "the event was recorded in a capture, which is over")
    capture.is_broken = capture.is_broken or breaks
    raise Refusal("CAPTURED_EVENT", "the event was recorded in a capture")


def wait_in_capture(stream: Stream, event: Event) -> bool:
    """Let a stream wait for an event if either has to do with a capture; False if not."""
    if event.captured is not None:
        capture, nodes = event.captured
        if capture.is_over:
            raise Refusal("INVALID_VALUE", "the event was recorded in a capture, which is over")
        capture.wait_for_nodes(stream, nodes)
        return True
    if stream.capture is not None:
        stream.capture.wait(stream, event)
        return True
    return False


def _stream_argument(
    state: State, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Stream | None:
    index = REFUSED.get(name, UNSAFE_IN_OTHER_STREAMS.get(name))
    if index is None:
        return None
    return state.stream(arguments[index] if index < len(arguments) else keywords.get("hStream", 0))
