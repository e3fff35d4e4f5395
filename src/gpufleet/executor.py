"""Run functions on many devices, each inside of a context, as `concurrent.futures` does on threads."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from gpufleet.crew import Crew, ExecutorStatistics, forget_inherited
from gpufleet.device import Device
from gpufleet.driver import DriverLike
from gpufleet.forks import watch_forks
from gpufleet.pool import ContextPool

T = TypeVar("T")


class FleetExecutor(Executor):
    """A `concurrent.futures.Executor` whose tasks run inside a context of one of several devices.

    ``with FleetExecutor() as executor: future = executor.submit(work, argument)``. In `work` the context is
    current: `gpufleet.current_context()`, and launches without ``stream=`` go to its main stream. What a
    task has queued there need not be complete when the task ends; synchronize in it to return results.

    Each thread belongs to a device, and is started when a task needs it. A task goes to the device with
    the fewest busy threads; where all are busy, the next free one takes what was submitted first. Each task
    leases a context from the pool anew, so others may lease from it too.

    After a kernel's fault all later and waiting tasks fail with `ExecutorBroken`, which is a
    `concurrent.futures.BrokenExecutor` and names the launches that were in flight.

    Making an executor starts no thread and calls no driver. One that a process has made and not used works
    in each of its forked children on its own.

    Parameters
    ----------
    pool : ContextPool, optional
        It stays open. None: one over all devices, closed by `shutdown`.
    threads_per_device : int
        Two let one task prepare on the host what comes after that of the other.
    initializer, initargs : callable, tuple
        Called by each thread before its first task, inside a context.
    thread_name_prefix : str
        Of the threads' names.
    driver : optional
        As `get_driver` takes it, where no pool is given.
    """

    def __init__(
        self,
        pool: ContextPool | None = None,
        threads_per_device: int = 2,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        thread_name_prefix: str = "",
        driver: DriverLike = None,
    ) -> None:
        if threads_per_device < 1:
            raise ValueError(f"threads_per_device is {threads_per_device}: expected 1 or more")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer is {initializer!r}: expected something that can be called")
        if pool is not None and driver is not None:
            raise ValueError("pool and driver are both given: a pool has its driver already")
        self._pool = ContextPool(driver=driver) if pool is None else pool
        self._new_crew = functools.partial(
            Crew,
            self._pool,
            threads_per_device,
            thread_name_prefix or f"FleetExecutor-{next(_numbers)}",
            pool is None,
            None if initializer is None else functools.partial(initializer, *initargs),
        )
        self._start()
        watch_forks(self)

    def _start(self) -> None:
        self._crew = self._new_crew()
        self._finalizer = weakref.finalize(self, _forgotten, self._crew)
        self._finalizer.atexit = False

    def submit(  # type: ignore[override]  # a ParamSpec has no place for `device`
        self, fn: Callable[..., T], /, *args: Any, device: Device | int | None = None, **kwargs: Any
    ) -> Future[T]:
        """Call ``fn(*args, **kwargs)`` in a thread, inside a context; return its future.

        Parameters
        ----------
        device : Device or int, optional
            Where; None: on the device with the fewest busy threads. (A keyword `device` for `fn` itself is
            to be bound by `functools.partial`.)

        Raises
        ------
        ExecutorBroken
            If a kernel's fault or an initializer has ended the executor.
        RuntimeError
            After `shutdown`.
        ValueError
            If the pool has no such device.
        """
        return self._crew.submit(device, fn, args, kwargs)

    async def run(
        self, fn: Callable[..., T], /, *args: Any, device: Device | int | None = None, **kwargs: Any
    ) -> T:
        """Do as `submit`, and await the result. If it is cancelled, a task that has begun runs to its end."""
        import asyncio  # 30 ms, for those who use it

        return await asyncio.wrap_future(self.submit(fn, *args, device=device, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and end the threads when those that were submitted are done.

        Parameters
        ----------
        wait : bool
            Return when they have ended, and the executor's own pool is closed.
        cancel_futures : bool
            Cancel the tasks that no thread has begun.

        Raises
        ------
        ContextInUse
            If a thread is inside a context of the executor's own pool still.
        RuntimeError
            If a task of the executor is to wait: it would wait for itself. No more tasks are taken all the
            same.
        """
        self._finalizer.detach()
        crew = self._crew
        crew.close(cancel=cancel_futures)
        if wait:
            crew.join()
            if crew.owns_pool:
                self._pool.close()

    @property
    def pool(self) -> ContextPool:
        """Where the tasks' contexts come from."""
        return self._pool

    @property
    def is_broken(self) -> bool:
        """Whether it runs no task any more, by a kernel's fault or an initializer that failed."""
        return self._crew.failure() is not None

    def statistics(self) -> ExecutorStatistics:
        """Count threads and tasks."""
        return self._crew.count()

    def after_fork(self) -> None:
        """Begin anew in a forked child: threads and tasks are the parent's."""
        self._finalizer.detach()
        forget_inherited(self._crew)
        self._inherited = self._crew
        self._start()

    def __repr__(self) -> str:
        crew = self._crew
        count = crew.count()
        state = "broken, " if self.is_broken else "shut down, " if crew.is_over else ""
        return (
            f"<FleetExecutor {state}{count.threads} threads: {count.busy} busy, {count.queued} tasks queued>"
        )


def _forgotten(crew: Crew) -> None:
    if sys.is_finalizing():
        return
    is_used = bool(crew.threads) and not crew.is_over
    crew.forget()
    if is_used:
        warnings.warn("a FleetExecutor was never shut down", ResourceWarning, stacklevel=2)


_numbers = itertools.count()
