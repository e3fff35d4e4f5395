"""Which thread runs which task next? The worker threads of a `FleetExecutor`.

Each thread belongs to a device. A task that asks for a device waits for one of its threads, any other for
whatever thread is free first; of the tasks that a thread may run, it takes the one submitted first.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufleet.device import Device
from gpufleet.errors import ContextInUse, GpufleetError, PoolBroken, PoolClosed, StickyError
from gpufleet.worker import Outcome, Task, Worker

if TYPE_CHECKING:
    from gpufleet.pool import ContextPool


class ExecutorBroken(PoolBroken, BrokenExecutor):
    """A kernel's fault, or an initializer that failed, has ended an executor for good.

    Its `__cause__` is that error; `launches` are those that were in flight at a fault.
    """


class ExecutorStatistics(NamedTuple):
    """What `FleetExecutor.statistics` counted, all at one moment.

    Attributes
    ----------
    threads : int
        That were started and have not ended.
    busy : int
        Threads that run a task.
    queued : int
        Tasks that wait for a thread.
    busy_by_device : dict
        Ordinal to busy threads.
    """

    threads: int
    busy: int
    queued: int
    busy_by_device: dict[int, int]


class Desk:
    """The threads of one device, and the tasks that want them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.threads = 0
        self.idle: list[Worker] = []
        self.tasks: deque[Task] = deque()

    @property
    def busy(self) -> int:
        """How many threads run a task, or are about to."""
        return self.threads - len(self.idle)


class Crew:
    """Worker threads over the devices of a pool, started as they are needed.

    The threads hold the crew and not the executor, so that a forgotten executor is found.

    Parameters
    ----------
    pool : ContextPool
    threads_per_device : int
    name : str
        What the threads' names begin with.
    owns_pool : bool
        Whether the last thread closes the pool.
    begin : callable or None
        Called by each thread inside a lease, before its first task.
    """

    def __init__(
        self,
        pool: ContextPool,
        threads_per_device: int,
        name: str,
        owns_pool: bool,
        begin: Callable[[], object] | None,
    ) -> None:
        self.pool = pool
        self.owns_pool = owns_pool
        self.threads: list[threading.Thread] = []
        self.desks: list[Desk] = []
        self.tasks: deque[Task] = deque()  # that any thread may run
        self.is_over = False
        self.ended = threading.Event()
        self._reason: tuple[str, BaseException] | None = None
        self._is_forgotten = False
        self._threads_per_device = threads_per_device
        self._name = name
        self._begin = begin
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        _crews.add(self)

    def submit(
        self,
        device: Device | int | None,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Future[Any]:
        """Let a thread call `function`, on `device` if that is given."""
        if not self.desks:
            self._prepare()
        wanted = None if device is None else self._desk_of(device)
        future: Future[Any] = Future()
        with self._lock:
            failure = self.failure()
            if failure is not None:
                raise failure
            if self.is_over:
                raise RuntimeError("cannot schedule new futures after shutdown")  # as ThreadPoolExecutor says
            task = Task(next(self._numbers), future, function, arguments, keywords)
            then = self._assign(task, wanted)
        if then is not None:
            then()
        return future

    def _assign(self, task: Task, wanted: Desk | None) -> Callable[[], object] | None:
        """Decide who runs the task; return what is to be called to let it."""
        limit = self._threads_per_device
        best = None
        for desk in self.desks if wanted is None else (wanted,):
            if (desk.idle or desk.threads < limit) and (best is None or desk.busy < best.busy):
                best = desk
        if best is None:
            (self.tasks if wanted is None else wanted.tasks).append(task)
            return None
        if best.idle:
            worker = best.idle.pop()
            worker.task = task
            return worker.wake
        best.threads += 1
        return lambda: self._start(Worker(best, task))

    def _start(self, worker: Worker) -> None:
        desk = worker.desk
        name = f"{self._name}-device{desk.device.ordinal}-{next(self._numbers)}"
        thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=not _ends_at_exit)
        self.threads.append(thread)
        try:
            thread.start()
        except BaseException as error:  # no thread can be had
            self.threads.remove(thread)
            self._thread_ends(worker)
            self._fail_stranded(error)
            raise

    def _fail_stranded(self, error: BaseException) -> None:
        """Fail the tasks that wait for a thread, if there is none and the one to come did not start."""
        with self._lock:
            stranded = [] if any(desk.threads for desk in self.desks) else self._drop_tasks()
        for task in stranded:
            if task is not None and task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)

    # What each thread does

    def _work(self, worker: Worker) -> None:
        task = worker.take()
        try:
            if self._begin is not None and not self._has_begun(worker, self._begin):
                self._fail([task])
                return
            while task is not None:
                task = self._run(worker, task)  # the one that was run is not kept while this thread waits
                if task is None:
                    task = worker.wait()
        finally:
            self._thread_ends(worker)

    def _run(self, worker: Worker, task: Task) -> Task | None:
        """Run a task and tell how it went; return the next one, or None to wait for one.

        The future is told last, so that who waits for it finds the thread idle and the lease given back.
        """
        future, pool = task.future, self.pool
        is_called = future.set_running_or_notify_cancel()
        outcome: Outcome = None, None
        if is_called:
            outcome = worker.call(pool, task.function, *task.arguments, **task.keywords)
            if worker.desk.device.driver.is_lost:
                self._break_if_poisoned(worker.desk.device)
        del task
        following = self._next(worker)
        if following is None or pool.has_waiters or worker.is_displaced:
            outcome = worker.leave(outcome)
        if is_called:
            _tell(future, outcome)
        return following

    def _next(self, worker: Worker) -> Task | None:
        """Return the task submitted first that this thread may run, or None: it is to wait then."""
        desk = worker.desk
        if self.tasks and not desk.tasks:  # a deque needs no lock, and who waits for one gives the GIL away
            try:
                return self.tasks.popleft()
            except IndexError:  # another thread was faster
                pass
        with self._lock:
            queue = _first(self.tasks, desk.tasks)
            if queue:
                return queue.popleft()
            if self.is_over:
                worker.wake()  # at once, to its end
            else:
                desk.idle.append(worker)
        if self._is_forgotten:
            self._close_if_forgotten()
        return None

    def _thread_ends(self, worker: Worker) -> None:
        with self._lock:
            worker.desk.threads -= 1
            has_ended = self._has_ended()
        if has_ended:
            self._end()

    def _has_begun(self, worker: Worker, begin: Callable[[], object]) -> bool:
        _, error = worker.leave(worker.call(self.pool, begin))
        if error is None:
            return True
        self._break(f"the initializer of its threads failed: {error!r}", error)
        return False

    # The end

    def close(self, *, cancel: bool = False) -> None:
        """Take no more tasks; let the threads end after those that wait, or (`cancel`) without them."""
        with self._lock:
            dropped = self._drop_tasks() if cancel else []
            idle = self._stop()
            has_ended = self._has_ended()
        for task in dropped:
            if task is not None:
                task.future.cancel()
        for worker in idle:
            worker.wake()
        if has_ended:
            self._end()

    def forget(self) -> None:
        """Close, for a finalizer: it may run while its thread has the lock, which then closes afterwards."""
        self._is_forgotten = True
        self._close_if_forgotten()

    def join(self) -> None:
        """Wait until the threads have ended.

        Raises
        ------
        RuntimeError
            In one of them.
        """
        if threading.current_thread() in self.threads:
            raise RuntimeError(
                "a task of the executor cannot wait for the end of its own thread: call "
                "shutdown(wait=False), or shut down from outside"
            )
        self.ended.wait()
        for thread in list(self.threads):
            thread.join()

    def _close_if_forgotten(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            idle = self._stop()
            has_ended = self._has_ended()
        finally:
            self._lock.release()
        for worker in idle:
            worker.wake()
        if has_ended:
            self._end()

    def _break_if_poisoned(self, device: Device) -> None:
        try:
            device.driver.cuCtxSynchronize()
        except StickyError as error:
            self._break(str(error), error)
        except GpufleetError:  # of a forked process, which has no such thread
            return

    def _break(self, reason: str, cause: BaseException) -> None:
        with self._lock:
            self._reason = self._reason or (reason, cause)
            dropped = self._drop_tasks()
            idle = self._stop()
        self._fail(dropped)
        for worker in idle:
            worker.wake()

    def failure(self) -> ExecutorBroken | None:
        """Return the error that says why no task is run any more, a new one each time."""
        if self._reason is None:
            return None
        reason, cause = self._reason
        error = ExecutorBroken(
            f"the executor runs no task any more: {reason}", getattr(cause, "launches", ())
        )
        error.__cause__ = cause
        return error

    def _fail(self, tasks: list[Task | None]) -> None:
        for task in tasks:
            if task is not None and task.future.set_running_or_notify_cancel():
                task.future.set_exception(self.failure())

    def _stop(self) -> list[Worker]:
        self.is_over = True
        idle = [worker for desk in self.desks for worker in desk.idle]
        for desk in self.desks:
            desk.idle.clear()
        return idle

    def _drop_tasks(self) -> list[Task | None]:
        dropped: list[Task | None] = []
        for queue in (self.tasks, *(desk.tasks for desk in self.desks)):
            with contextlib.suppress(IndexError):
                while True:  # one at a time: threads take some meanwhile
                    dropped.append(queue.popleft())
        return dropped

    def _has_ended(self) -> bool:
        return self.is_over and not any(desk.threads for desk in self.desks)

    def _end(self) -> None:
        if self.owns_pool:
            with contextlib.suppress(ContextInUse):  # `shutdown` says it to who can do something
                self.pool.close()
        self.ended.set()

    # First use, and what it is

    def _prepare(self) -> None:
        devices = self.pool.devices
        if not devices:
            raise PoolClosed(f"{self.pool!r} lends no context any more")
        with self._lock:
            if not self.desks:
                self.desks = [Desk(device) for device in devices]

    def _desk_of(self, device: Device | int) -> Desk:
        for desk in self.desks:
            if desk.device.ordinal == device or desk.device == device:
                return desk
        has = ", ".join(str(desk.device.ordinal) for desk in self.desks)
        raise ValueError(f"the executor has no device {device!r}: expected one of {has}")

    def count(self) -> ExecutorStatistics:
        """Count threads and tasks."""
        with self._lock:
            queued = len(self.tasks) + sum(len(desk.tasks) for desk in self.desks)
            return ExecutorStatistics(
                threads=sum(desk.threads for desk in self.desks),
                busy=sum(desk.busy for desk in self.desks),
                queued=queued,
                busy_by_device={desk.device.ordinal: desk.busy for desk in self.desks},
            )


def _tell(future: Future[Any], outcome: Outcome) -> None:
    """Tell how a task went. What a callback raises (`SystemExit`, say) must not end the thread."""
    result, error = outcome
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except BaseException as raised:
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(raised), raised, raised.__traceback__, thread)))


def _first(one: deque[Task], other: deque[Task]) -> deque[Task]:
    """Return the queue whose first task was submitted first; an empty one if both are."""
    if one and other:
        return one if one[0].number < other[0].number else other
    return one or other


def _end_all() -> None:
    """Run what was submitted to the end before the interpreter exits, as `ThreadPoolExecutor` does."""
    crews = list(_crews)
    for crew in crews:
        crew.close()
    for crew in crews:
        crew.join()


def forget_inherited(crew: Crew) -> None:
    """Leave a crew alone in a forked child, whose threads it has not."""
    _crews.discard(crew)


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_register = getattr(threading, "_register_atexit", None)  # what concurrent.futures uses; not documented
_ends_at_exit = _register is not None
if _register is not None:
    _register(_end_all)
