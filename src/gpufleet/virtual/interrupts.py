"""Let a piece of work on the main thread end before Ctrl-C interrupts it."""

from __future__ import annotations

# signal.signal wraps _signal.signal in enum conversions: 16 us for a swap and back, against 1 us.
import _signal  # type: ignore[import-not-found, unused-ignore]
import signal
import threading
from types import FrameType, TracebackType

_MAIN = threading.main_thread().ident


class InterruptsDeferred:
    """Hold SIGINT back while the block runs; its handler is called when the block ends.

    A Python signal handler runs between any two instructions of the main thread, and what it raises
    would leave a kernel that this thread runs, or the driver's lists, half done. A second Ctrl-C is
    not held back, so that nothing can make a program deaf. On other threads, which no signal
    interrupts, the block just runs.
    """

    __slots__ = ("_handler", "_pending")

    def __enter__(self) -> InterruptsDeferred:
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler = None
        if on_main_thread():
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(signal.SIGINT, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None and self._handler is not None:
            self._handler(number, frame)
        self._pending = (number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        _signal.signal(signal.SIGINT, self._handler)
        if self._pending is not None and error is None:
            self._handler(*self._pending)


def on_main_thread() -> bool:
    """Say whether this is the thread that signal handlers run on."""
    return threading.get_ident() == _MAIN
