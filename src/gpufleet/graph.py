"""What is recorded of a stream instead of being carried out, and how is it run again? Capture and graphs.

Streams are captured in the driver's relaxed mode, in which no call of another thread can break a capture;
what would break it from this thread is refused here, before the driver hears of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpufleet.errors import CaptureError, ContextClosed, CudaError, WrongContext

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.driver import Driver
    from gpufleet.lifetime import Lifetime
    from gpufleet.stream import Event, Stream


class Graph:
    """Work that was captured from streams, to be launched as often as you like. Made by `Stream.capture`.

    It keeps alive what its work uses: buffers, host arrays, programs. Its launches run one after the other,
    whatever streams they are on. Safe to use from many threads.

    Attributes
    ----------
    context : Context
        That of the captured stream.
    origin : Stream
        The captured stream.
    """

    def __init__(self, origin: Stream) -> None:
        self.context = origin.context
        self.origin = origin
        self._streams: list[Stream] = []
        self._kept: dict[int, Any] = {}
        self._arrays: list[Any] = []
        self._kernels: dict[str, int] = {}
        self._frees = contextlib.ExitStack()
        self._executable: Any = None
        self._is_capturing = False
        self._finalizer: Any = None

    def launch(self, stream: Stream | None = None) -> None:
        """Put all of the graph's work into a stream, and return without waiting for it.

        Parameters
        ----------
        stream : Stream
            None: the stream that was captured.

        Raises
        ------
        ContextClosed
            If the graph, the stream, or a buffer that the graph uses was closed.
        CaptureError
            If the stream is being captured.
        """
        queue = self.origin if stream is None else stream
        self.check_open()
        queue.check_open()
        driver = self.context.driver
        if queue.context.driver is not driver:
            raise WrongContext(f"{self!r} cannot be launched on {queue!r}, of another driver")
        if queue.graph is not None:
            raise CaptureError(f"{self!r} cannot be launched on {queue!r}, which is being captured")
        if queue.must_enter:
            with queue.context:
                self.launch(queue)
            return
        for each in list(self._kept.values()):
            _note_use(each, queue)
        driver.cuGraphLaunch(self._executable, queue.handle)
        driver.launches.add(queue.context.address, queue.address, self)
        if self._arrays:
            queue.hold(*self._arrays)

    def replay(self) -> None:
        """Launch the graph on the stream that was captured."""
        self.launch()

    @property
    def is_capturing(self) -> bool:
        """Whether its `with` block is still going on."""
        return self._is_capturing

    @property
    def is_closed(self) -> bool:
        """Whether the graph, or the context of its stream, was closed."""
        return (self._executable is None and not self._is_capturing) or self.context.is_closed

    def check_open(self) -> None:
        """Raise if the graph cannot be launched: it was closed, or its capture is not over."""
        self.context.check_open()
        if self._is_capturing:
            raise CaptureError(f"{self!r} cannot be launched before the `with` block of its capture ends")
        if self._executable is None:
            raise ContextClosed(f"{self!r} was closed; capture another one")

    def close(self) -> None:
        """Destroy the graph; launches that are under way are not disturbed. Closing twice is no error."""
        if self._is_capturing:
            raise CaptureError(f"{self!r} cannot be closed before the `with` block of its capture ends")
        if self._finalizer is None or self._finalizer.detach() is None:
            return
        executable, self._executable = self._executable, None
        self._forget()
        self.context.free("cuGraphExecDestroy", executable)

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return f"a graph of {', '.join(self._kernels) or 'no kernels'}"

    def __repr__(self) -> str:
        state = "being captured" if self._is_capturing else "closed" if self.is_closed else "ready"
        return f"<Graph of {sum(self._kernels.values())} launches, {state}, of {self.context!r}>"

    # While it is captured

    def keep(self, *objects: Any) -> None:
        """Keep what captured work uses as long as the graph; memory is freed behind its launches."""
        self._kept.update((id(each), each) for each in objects if not isinstance(each, (int, float)))

    def keep_arrays(self, *arrays: Any) -> None:
        """Keep host arrays that captured work uses, until the last launch is complete."""
        self._arrays.extend(array for array in arrays if array is not None)

    def note_launch(self, launch: Any) -> None:
        """Note the launch of a kernel."""
        name = str(launch)
        self._kernels[name] = self._kernels.get(name, 0) + 1

    def join(self, stream: Stream) -> None:
        """Note that a stream is captured too."""
        # A free in the order of a captured stream would be refused, or become part of the graph.
        self._frees.enter_context(stream.context.heap.frees_held())
        self._streams.append(stream)
        stream.graph = self

    # How a capture begins and ends

    def _begin(self) -> None:
        from cuda.bindings.driver import CUstreamCaptureMode

        self.join(self.origin)
        try:
            mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            with self.context, capturing:
                _captures.append(self)
                self.context.driver.cuStreamBeginCapture(self.origin.handle, mode)
        except CudaError:
            self._let_go()
            raise
        self._is_capturing = True
        _here.graphs.append(self)

    def _end(self) -> None:
        driver = self.context.driver
        try:
            graph = driver.cuStreamEndCapture(self.origin.handle)
        except CudaError as error:
            joined = [stream for stream in self._streams if stream is not self.origin]
            raise _why_not(error, self.origin, joined) from error
        self._let_go()
        try:
            with self.context:
                self._executable = driver.cuGraphInstantiate(graph, 0)
        finally:
            driver.cuGraphDestroy(graph)
        self._finalizer = weakref.finalize(self, _forgotten, self.context.life, self._executable)
        self._finalizer.atexit = False
        self.context.adopt(self)

    def _abandon(self) -> None:
        driver = self.context.driver
        try:
            if self in _captures and not driver.is_lost:
                error, graph = driver.raw.cuStreamEndCapture(self.origin.handle)
                if not error:
                    driver.cuGraphDestroy(graph)
        finally:
            self._let_go()
            self._forget()

    def _let_go(self) -> None:
        """Let the streams take work again, and do what was put off."""
        for stream in self._streams:
            stream.graph = None
        self._streams.clear()
        self._is_capturing = False
        with contextlib.suppress(ValueError):  # another thread ends the capture than began it
            _here.graphs.remove(self)
        with contextlib.suppress(ValueError):  # it has not begun
            _captures.remove(self)
        self._frees.close()

    def _forget(self) -> None:
        self._kept = {}
        self._arrays = []


@contextlib.contextmanager
def capture(stream: Stream) -> Iterator[Graph]:
    """Record what is put into `stream`; see `Stream.capture`."""
    stream.check_open()
    if stream.graph is not None:
        raise CaptureError(f"{stream!r} is being captured already")
    graph = Graph(stream)
    try:
        graph._begin()
        yield graph
        graph._end()
    except BaseException:  # Ctrl-C too, wherever it comes
        graph._abandon()
        raise


class _Here(threading.local):
    """The captures that a thread has begun."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []


_here = _Here()
_captures: list[Graph] = []
"""Those of all threads."""


def refuse_to_wait(owner: Any, what: str) -> None:
    """Raise if `owner`, a stream or event, has to do with a capture, so that it says nothing of real work."""
    graph = owner.graph
    if graph is None:
        return
    if graph.is_capturing:
        raise CaptureError(
            f"{owner!r} cannot {what} while it is captured: the work is only recorded, and runs when the "
            "graph is launched"
        )
    raise CaptureError(
        f"{owner!r} cannot {what}: it was recorded in a capture, which is over; record it again behind a "
        "launch of the graph"
    )


def refuse_blocking(context: Context, what: str) -> None:
    """Raise if this thread captures a stream of `context`: what waits is no part of a graph."""
    for graph in _here.graphs:
        if any(stream.context is context for stream in graph._streams):
            raise CaptureError(
                f"{what} waits for its work, so it cannot be part of {graph!r}: give it stream=, or do it "
                "before or after the capture"
            )


def capture_in(driver: Driver, context: Any) -> Graph | None:
    """Return a graph for which some thread captures a stream of a CUcontext now, if any."""
    address = int(context)
    for graph in tuple(_captures):
        if graph.context.driver is driver and any(
            address in stream.context.covered_by for stream in tuple(graph._streams)
        ):
            return graph
    return None


capturing = threading.RLock()
"""Held while a capture begins, and from a look at `capture_in` to a short call that would break one."""


def refuse_in_captures(context: Context, what: str) -> None:
    """Raise if any thread captures a stream of `context`, for what has to do with all of its streams.

    The driver would break the capture.
    """
    graph = capture_in(context.driver, context.handle)
    if graph is not None:
        raise CaptureError(
            f"{context!r} cannot {what} while {graph.origin!r} is captured: do it before or after, or wait "
            "for its other streams one by one"
        )


def check_meeting(stream: Stream, event: Event) -> None:
    """Raise if a wait of `stream` for `event` would break a capture."""
    mine, its = stream.graph, event.graph
    if its is not None and not its.is_capturing:
        refuse_to_wait(event, "be waited for")
    if mine is not None and its is None and event.mark is not None:
        raise CaptureError(
            f"{stream!r} cannot wait for {event!r} while it is captured: the event was recorded outside of "
            "the capture; wait for it before, or record it in a stream that is captured too"
        )
    if mine is not None and its is not None and mine is not its:
        raise CaptureError(f"{stream!r} cannot wait for {event!r}: they are of different captures")


def _note_use(kept: Any, queue: Stream) -> None:
    """Let memory be freed behind the work that is put into `queue` next; refuse what was closed."""
    if hasattr(kept, "used_on"):
        kept.used_on(queue)
    elif hasattr(kept, "address_for"):
        kept.address_for(queue)


def _why_not(error: CudaError, origin: Stream, joined: list[Stream]) -> CaptureError:
    if error.name == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED":
        names = ", ".join(repr(stream) for stream in joined)
        return CaptureError(
            f"{origin!r} does not wait for all that was captured in the streams that joined it ({names}): "
            "end the block with `stream.wait(other.record())` for each"
        )
    if error.name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED":
        return CaptureError(
            f"the capture of {origin!r} was broken by a call that does not go with it, such as another "
            "library's wait for the stream or the whole context"
        )
    return CaptureError(f"the capture of {origin!r} failed: {error}")


def _forgotten(life: Lifetime, executable: Any) -> None:
    if sys.is_finalizing() or life.is_gone or life.driver.is_forked:
        return
    warnings.warn(f"a graph of {life!r} was never closed", ResourceWarning, stacklevel=2)
    life.free_later(lambda: life.driver.cuGraphExecDestroy(executable))
