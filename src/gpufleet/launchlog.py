"""Which launches are not yet known to be complete: the suspects after a sticky fault."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

SUSPECTS_PER_STREAM = 64
"""Older launches of a stream are forgotten: a fault is found out long before so many more are queued."""


class LaunchLog:
    """Launches in flight, by stream.

    A launch enters when the driver has accepted it and leaves when a wait on its stream, on an event
    recorded behind it, or on its whole context has succeeded. Safe to use from many threads: each
    operation is one atomic step of a dict or deque.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self._streams: dict[tuple[int, int], deque[tuple[int, Any]]] = {}

    def add(self, context: int, stream: int, launch: Any) -> None:
        """Note a launch; `launch` is anything whose `str()` names it."""
        self.of_stream(context, stream).append((next(self.numbers), launch))

    def of_stream(self, context: int, stream: int) -> deque[tuple[int, Any]]:
        """Return the launches of a stream, numbered by `numbers`, to which `add` appends."""
        key = (context, stream)
        launches = self._streams.get(key)
        if launches is None:
            launches = self._streams.setdefault(key, deque(maxlen=SUSPECTS_PER_STREAM))
        return launches

    def mark(self) -> int:
        """Return a number that separates launches before now from later ones."""
        return next(self.numbers)

    def finished(self, context: int, stream: int | None = None, before: int | None = None) -> None:
        """Forget launches that are known to be complete.

        Without `stream`: those of the whole context. With `before` (a `mark`): only the older ones.
        """
        for key in [(context, stream)] if stream is not None else list(self._streams):
            launches = self._streams.get(key) if key[0] == context else None
            while launches and (before is None or launches[0][0] < before):
                try:
                    launches.popleft()
                except IndexError:  # another thread was faster
                    break

    def forget(self, context: int, stream: int | None = None) -> None:
        """Forget a stream that was closed (without `stream`: a context), and all its launches."""
        for key in [(context, stream)] if stream is not None else list(self._streams):
            if key[0] == context:
                self._streams.pop(key, None)

    def is_idle(self, context: int) -> bool:
        """Whether all launches in a context are known to be complete."""
        return not any(launches for key, launches in list(self._streams.items()) if key[0] == context)

    def suspects(self) -> tuple[str, ...]:
        """Name what is in flight, oldest first."""
        found = [entry for launches in list(self._streams.values()) for entry in list(launches)]
        return tuple(str(launch) for _, launch in sorted(found, key=lambda entry: entry[0]))
