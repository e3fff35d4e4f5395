"""What the tests of pools and executors share: threads, faults, processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import gpufleet as gf
from gpufleet.driver import Driver

SECONDS = 20
"""After which a test that waits for something fails."""

TRAP = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry fault() { trap; }
"""


def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, which another thread brings about."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.0005)


class Worker(threading.Thread):
    """A thread whose result or error `result` returns or raises."""

    def __init__(self, work: Callable[[], Any], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work

    def result(self) -> Any:
        self.join(SECONDS)
        assert not self.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error
        return self._outcome


class Holder:
    """A thread that is inside a lease from its making until `leave`."""

    def __init__(self, pool: gf.ContextPool, **how: Any) -> None:
        self.context: gf.Context | None = None
        self._inside, self._may_leave = threading.Event(), threading.Event()
        self._lease = lambda: pool.lease(**how)
        self.worker = Worker(self._hold)

    def _hold(self) -> None:
        with self._lease() as self.context:
            self._inside.set()
            assert self._may_leave.wait(SECONDS)

    def entered(self) -> Holder:
        assert self._inside.wait(SECONDS), "no lease came"
        return self

    @property
    def is_inside(self) -> bool:
        return self._inside.is_set()

    def leave(self) -> None:
        self._may_leave.set()
        self.worker.result()


def current(driver: Driver) -> int:
    return int(driver.cuCtxGetCurrent())


def poison(driver: Driver) -> None:
    """Let a kernel fault in the current context and find out, so that the driver is lost."""
    program = gf.Program.from_image(TRAP, driver=driver)
    context = gf.current_context(driver)
    assert context is not None
    program.kernel("fault").launch(1, 1, stream=context.main_stream)
    context.synchronize()


IGNORE_FORK = ("-W", "ignore:.*fork:DeprecationWarning")  # which the tests do to see what becomes of it


def run(code: str) -> subprocess.CompletedProcess[str]:
    prelude = "import os, sys, threading\nimport gpufleet as gf\n"
    return subprocess.run(
        [sys.executable, "-W", "error", *IGNORE_FORK, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check(code: str, output: str = "") -> None:
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")
