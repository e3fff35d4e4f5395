"""Who carries out which operation when?

An operation knows how many others must end before it: the one before it in its stream, events it waits
for. When none is left it is ready and goes to its device's queue, from which one of the device's workers
takes it. A thread that waits for an operation runs ready ones that lead to it itself: handing over to a
worker and back costs 20-90 us, more than many kernels.
"""

from __future__ import annotations

import threading
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.engine import KernelFault
from gpufleet.virtual.interrupts import InterruptsDeferred
from gpufleet.virtual.operations import BLOCKED, DONE, READY, RUNNING, Operation, unfinished_ancestors
from gpufleet.virtual.queues import Queue

WORKERS = 128
"""Operations of one device that run at once: an H200 runs 128 grids (CUDA Programming Guide, technical
specifications per compute capability)."""
IDLE_SECONDS = 1.0
"""After so long without work a worker ends."""
WAIT_SLICE = 0.25
"""A wait looks for signals this often where the system does not interrupt it (Windows)."""


def _do_nothing() -> None:
    pass


class _Here(threading.local):
    """What the scheduler knows of one thread."""

    is_running = False
    """Whether it is carrying out an operation."""


class Scheduler:
    """Carries operations out in an order that their predecessors allow.

    Parameters
    ----------
    lock : RLock
        Guards everything here. It is reentrant because a finalizer, which Python may run at almost any
        point of a thread, may call the driver.
    devices : int
    on_fault : callable
        Takes the `KernelFault` of an operation that failed.
    after_work : callable
        Called on the thread that carried out an operation, after that.
    """

    def __init__(
        self,
        lock: Any,
        devices: int,
        on_fault: Callable[[KernelFault], None],
        after_work: Callable[[], None] = _do_nothing,
    ) -> None:
        self.lock = lock
        self._on_fault = on_fault
        self._after_work = after_work
        self._here = _Here()
        self._queues = [Queue(ordinal) for ordinal in range(devices)]
        self._hiring: list[Queue] = []
        self._running: dict[Operation, int] = {}
        """What runs, oldest first, and its number."""
        self._started = 0
        self._retired: deque[tuple[int, Callable[[], None]]] = deque()
        self._dropping = False
        self._closing = False

    # ---- entering work

    def submit(self, operation: Operation, predecessors: Iterable[Operation], *, claim: bool = False) -> bool:
        """Enter an operation behind its predecessors; the lock is held, and `settle` follows its release.

        With `claim`, an operation that is ready at once is not offered to a worker: True is returned, and
        the caller must `run` it.
        """
        for predecessor in predecessors:
            if predecessor.state != DONE:
                predecessor.followers.append(operation)
                operation.predecessors.append(predecessor)
        operation.blockers = len(operation.predecessors)
        for allocation in operation.uses:
            allocation.note(operation)
        if operation.blockers:
            return False
        if operation.action is None or self._dropping:
            self._end(operation)
        elif claim and operation.may_run_here():
            self._start(operation)
            return True
        else:
            self._offer(operation)
        return False

    def settle(self) -> None:
        """Do what is not done with the lock held: start missing workers, call what was retired."""
        while self._hiring:
            self._hire()
        if self._retired:
            with self.lock:
                actions = self._take_retired()
            for action in actions:
                action()

    # ---- waiting and running

    def wait(self, operation: Operation) -> None:
        """Return when the operation has ended, running on this thread what leads to it.

        Refuses to wait `is_inside`: the operation, or its thread, may be waiting for this one.
        """
        if operation.state != DONE and self.is_inside():
            raise Refusal("NOT_PERMITTED", "a finalizer in the middle of another call would wait for work")
        if operation.state != DONE:
            self._help(operation)
        if operation.state != DONE:
            self._park(operation)

    def run(
        self, operation: Operation, comes_back_for: Callable[[Operation], bool] | None = None
    ) -> Operation | None:
        """Carry out an operation that this thread has claimed.

        Of the operations that are ready then, no worker is called for the first that `comes_back_for`
        accepts. It is returned, and the caller takes it from the queue next.
        """
        self._here.is_running = True
        try:
            self._carry_out(operation)
        except BaseException:
            self._here.is_running = False
            self._finish(operation, None)
            raise
        self._here.is_running = False
        return self._finish(operation, comes_back_for)

    def is_inside(self) -> bool:
        """Say whether this thread holds the lock or carries out an operation.

        Whoever calls the driver then is a finalizer, or a kernel's own code.
        """
        return bool(self.lock._is_owned()) or self._here.is_running

    def revoke(self, operation: Operation) -> None:
        """Let an operation do nothing if it has not begun; otherwise wait until it has ended.

        For who cannot wait any longer, but owns what the operation uses.
        """
        with self.lock:
            if operation.state in (BLOCKED, READY):
                operation.action = _do_nothing
                return
        self._park(operation)

    def retire(self, action: Callable[[], None]) -> None:
        """Let `settle` call `action` once every operation that is running now has ended."""
        with self.lock:
            self._retired.append((self._started, action))

    # ---- ending

    def drop(self) -> None:
        """Let all that has not begun, and all that comes, end without being carried out."""
        with self.lock:
            self._dropping = True
            for queue in self._queues:
                while (operation := queue.take()) is not None:
                    self._end(operation)

    def close(self, timeout: float) -> bool:
        """Drop all work, end the workers, and wait for what runs; False if that took too long."""
        self.drop()
        with self.lock:
            self._closing = True
            workers = [worker for queue in self._queues for worker in queue.workers]
            running = list(self._running)
            for queue in self._queues:
                while queue.wake():
                    pass
        deadline = time.monotonic() + timeout
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(max(deadline - time.monotonic(), 0))
        is_quiet = all(self._park(operation, max(deadline - time.monotonic(), 0)) for operation in running)
        return is_quiet and not self.worker_count

    @property
    def worker_count(self) -> int:
        """How many worker threads there are."""
        return sum(len(queue.workers) for queue in self._queues)

    # ---- a waiting thread

    def _help(self, target: Operation) -> None:
        """Run what leads to `target`, until nothing of it is ready or it has ended."""
        with self.lock:
            wanted = unfinished_ancestors(target)
        ready = deque(operation for operation in wanted if operation.state == READY)

        def may_take(operation: Operation) -> bool:
            return operation in wanted and operation.may_run_here()

        try:
            while target.state != DONE and ready:
                with InterruptsDeferred():
                    operation = self._claim(ready)
                    following = None if operation is None else self.run(operation, may_take)
                    if following is not None:
                        ready.appendleft(following)
        except BaseException:
            self._call_workers()
            raise

    def _claim(self, ready: deque[Operation]) -> Operation | None:
        with self.lock:
            while ready:
                operation = ready.popleft()
                if operation.state == READY and operation.may_run_here():
                    self._queues[operation.device].waiting -= 1
                    return self._start(operation)
        return None

    def _park(self, operation: Operation, timeout: float | None = None) -> bool:
        """Sleep until the operation has ended; False if it has not in time."""
        ended = allocate_lock()
        ended.acquire()
        with self.lock:
            if operation.state == DONE:
                return True
            operation.waiters.append(ended)
        if timeout is not None:
            return ended.acquire(timeout=timeout)
        while not ended.acquire(timeout=WAIT_SLICE):
            pass
        return True

    # ---- a worker

    def _work(self, queue: Queue) -> None:
        parked = allocate_lock()
        parked.acquire()
        is_at_work = True
        try:
            while is_at_work:
                with self.lock:
                    queue.coming -= 1
                self._serve(queue)
                is_at_work = self._rest(queue, parked)
        finally:
            with self.lock:
                queue.workers.discard(threading.current_thread())

    def _serve(self, queue: Queue) -> None:
        """Run operations until none is ready."""
        while True:
            with self.lock:
                operation = queue.take()
                if operation is None:
                    return
                self._start(operation)
            self.run(operation, queue.is_takeable)

    def _rest(self, queue: Queue, parked: LockType) -> bool:
        """Sleep until there is work; False to leave instead."""
        with self.lock:
            if queue.waiting:
                queue.coming += 1
                return True
            if self._closing:
                return False
            queue.parked.append(parked)
        if parked.acquire(timeout=IDLE_SECONDS):
            return True
        with self.lock:
            if parked in queue.parked:
                queue.parked.remove(parked)
                return False
        return parked.acquire()  # it was woken at the last moment

    # ---- with the lock held

    def _start(self, operation: Operation) -> Operation:
        operation.state = RUNNING
        self._running[operation] = self._started
        self._started += 1
        return operation

    def _offer(self, operation: Operation, *, quietly: bool = False) -> None:
        """Put a ready operation into its queue; unless `quietly`, see to it that a worker comes."""
        queue = self._queues[operation.device]
        operation.state = READY
        queue.ready.append(operation)
        queue.waiting += 1
        if not quietly and queue.coming < queue.waiting:
            self._call_worker(queue)

    def _call_worker(self, queue: Queue) -> None:
        if not queue.wake() and len(queue.workers) < WORKERS:
            queue.coming += 1
            self._hiring.append(queue)

    def _end(self, operation: Operation) -> list[Operation]:
        """Mark an operation done, and the markers behind it; return what is ready now."""
        ready: list[Operation] = []
        ended = [operation]
        while ended:
            operation = ended.pop()
            if operation.mark is not None:
                operation.mark()
            operation.state = DONE
            operation.action = operation.mark = None
            operation.predecessors = []
            for waiter in operation.waiters:
                waiter.release()
            for follower in operation.followers:
                follower.blockers -= 1
                if not follower.blockers:
                    is_over = follower.action is None or self._dropping
                    (ended if is_over else ready).append(follower)
            operation.followers = []
            operation.waiters = []
        return ready

    # ---- carrying out

    def _carry_out(self, operation: Operation) -> None:
        action = operation.action
        if action is None or self._dropping:
            return
        try:
            action()
        except KernelFault as fault:
            self._on_fault(fault)
        except Exception as error:
            failure = KernelFault("LAUNCH_FAILED", f"gpufleet itself failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._on_fault(failure)
        except BaseException as error:
            self._on_fault(KernelFault("LAUNCH_FAILED", f"interrupted by {type(error).__name__}"))
            raise

    def _finish(
        self, operation: Operation, comes_back_for: Callable[[Operation], bool] | None
    ) -> Operation | None:
        following = None
        with self.lock:
            del self._running[operation]
            for ready in self._end(operation):
                is_next = following is None and comes_back_for is not None and comes_back_for(ready)
                self._offer(ready, quietly=is_next)
                if is_next:
                    following = ready
        self.settle()
        self._after_work()
        return following

    def _call_workers(self) -> None:
        """Call workers for what no worker was called for."""
        with self.lock:
            for queue in self._queues:
                if queue.coming < queue.waiting:
                    self._call_worker(queue)
        self.settle()

    def _hire(self) -> None:
        try:
            queue = self._hiring.pop()
        except IndexError:  # another thread was faster
            return
        name = f"gpufleet virtual GPU {queue.ordinal}"
        worker = threading.Thread(target=self._work, args=(queue,), name=name, daemon=True)
        with self.lock:
            queue.workers.add(worker)
        try:
            worker.start()
        except RuntimeError:  # the interpreter is ending: whoever waits runs the work itself
            with self.lock:
                queue.workers.discard(worker)
                queue.coming -= 1

    def _take_retired(self) -> list[Callable[[], None]]:
        """Take out what was retired before the oldest running operation started."""
        oldest = next(iter(self._running.values()), self._started)
        actions = []
        while self._retired and self._retired[0][0] <= oldest:
            actions.append(self._retired.popleft()[1])
        return actions
