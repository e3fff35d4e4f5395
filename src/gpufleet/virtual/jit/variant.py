"""Compiled code of a kernel for one class of block shapes, and when better code replaces it.

A kernel is compiled twice. The first time quickly: that takes a third of the time, and the code runs
one to four times as long as it could (benchmarks/compile.py has the figures). When its launches have
run for `PATIENCE` seconds, it is compiled again, optimised, on a thread of its own (optimiser.py).
Launches that are running then go on with the better code at their next range of blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpufleet.virtual.jit.abi import Job
from gpufleet.virtual.jit.kernel import Generated
from gpufleet.virtual.jit.llvm import Effort

PATIENCE = 0.05
"""Seconds of running after which a kernel is worth optimising, which takes 0.1 to 1.5 s of one core."""


class Later:
    """A function that is compiled when it is first needed."""

    def __init__(self, make: Callable[[], tuple[int, Any]]) -> None:
        """`make` returns the function's address, and what keeps it in memory."""
        self.address = 0
        """0 as long as it does not exist."""
        self._make = make
        self._lock = threading.Lock()
        self._tracker: Any = None

    def get(self) -> int:
        """The function's address."""
        with self._lock:
            if not self.address:
                self.address, self._tracker = self._make()
        return self.address


@dataclass(frozen=True)
class Code:
    """Machine code in memory."""

    generated: Generated
    """Without its source."""
    effort: Effort
    entry: int
    """Address of the function that runs blocks."""
    diverged: Later
    """The function that runs a warp whose lanes have parted."""
    symbols: Any
    """Addresses of the variables that the code refers to, as a C array."""
    tracker: Any
    """Keeps the code in memory."""

    def can_take_over_from(self, other: Code) -> bool:
        """Whether a launch that began with other code may go on with this."""
        return self.generated == other.generated


class Variant:
    """The code that a class of block shapes runs now; safe to use from several threads."""

    def __init__(self, code: Code, improve: Callable[[Variant], None] | None) -> None:
        """Begin with some code; `improve`, if any, is called once, when the code has run for long."""
        self.code = code
        self._improve = improve
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Job, Code]] = {}
        self._seconds = 0.0
        self._replaced: list[Code] = []
        """Code that a launch may still be in."""

    @contextmanager
    def running(self, job: Job, code: Code) -> Iterator[Callable[[], None]]:
        """Count a launch's time; what it yields is to be called from time to time while it runs."""
        if self._improve is None:
            yield _nothing
            return
        start = time.perf_counter()
        with self._lock:
            self._running[id(job)] = job, code
        try:
            yield lambda: self._consider(time.perf_counter() - start)
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                del self._running[id(job)]
            self._consider(seconds)
            self._seconds += seconds

    def _consider(self, more: float) -> None:
        """Ask for better code if launches have run for long enough."""
        if self._seconds + more < PATIENCE:
            return
        with self._lock:
            improve, self._improve = self._improve, None
        if improve is not None:
            improve(self)

    def replace(self, code: Code) -> None:
        """Run better code from now on."""
        with self._lock:
            self._replaced.append(self.code)
            self.code = code
            for job, before in self._running.values():
                if code.can_take_over_from(before):
                    job.diverged = code.diverged.get()
                    job.entry = code.entry


def _nothing() -> None:
    pass
