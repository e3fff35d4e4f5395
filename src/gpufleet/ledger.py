"""Who has which context of a pool, and who is served next?

Everything is decided under one lock, in a few steps; drivers, contexts and waiters are called without it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpufleet.device import Device
from gpufleet.errors import (
    CudaError,
    GpufleetError,
    LeaseEnded,
    PoolBroken,
    PoolClosed,
    PoolTimeout,
    StickyError,
)
from gpufleet.slots import UNLIMITED, Group, Plan, Slot, take_slot

if TYPE_CHECKING:
    from gpufleet.lease import Lease


class PoolStatistics(NamedTuple):
    """What `ContextPool.statistics` counted, all at one moment.

    Attributes
    ----------
    contexts : int
        That exist.
    leased : int
        Leases that are out.
    waiting : int
        Threads and tasks that wait for one.
    capacity : int or None
        Leases that can be out at once; None: any number.
    served, timeouts, forgotten : int
        Leases given so far, those that did not come in time, and those that nobody gave back.
    leased_by_device : dict
        Ordinal to leases that are out.
    """

    contexts: int
    leased: int
    waiting: int
    capacity: int | None
    served: int
    timeouts: int
    forgotten: int
    leased_by_device: dict[int, int]


class Waiter(NamedTuple):
    """A lease in the queue: what can serve it, and what tells its thread or task."""

    lease: Lease
    groups: tuple[Group, ...]
    wake: Callable[[], object]


class Ledger:
    """The leases of one pool in one process. A pool in a forked child begins a new one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups: tuple[Group, ...] = ()
        self.fault: StickyError | None = None
        self.is_closed = False
        self._capacity = plan.capacity_per_device
        self._lending: tuple[Group, ...] = ()  # `groups`, from the first use to the end
        self._waiters: deque[Waiter] = deque()
        self._closers: list[threading.Event] = []
        self._returned: deque[tuple[Slot, bool]] = deque()  # and whether its lease was forgotten
        self._forgotten_count = self._timeouts = 0
        # One that a finalizer can ask whether its own thread holds it, as `threading.Condition` does.
        self._lock = threading.RLock()
        self._preparing = threading.Lock()

    # Taking

    def take(self, lease: Lease) -> Slot | None:
        """Give `lease` a slot, if one is free."""
        groups = self._lending if lease.wanted is None else self._groups_of(lease.wanted)
        with self._lock:
            if lease.is_used:
                raise lease.ended()
            slot = take_slot(groups, self._capacity)
            if slot is not None:
                lease.slot = slot
                lease.is_used = True
        if self._returned:
            self._take_back()
        return slot

    def take_or_queue(self, lease: Lease, wake: Callable[[], object]) -> Slot | None:
        """Give `lease` a slot, or let it wait for one behind those that wait already.

        A newcomer overtakes nobody: where a slot is free, none of those who wait can use it.
        """
        self.prepare()
        groups = self._lending if lease.wanted is None else self._groups_of(lease.wanted)
        with self._deciding():
            if lease.is_used:
                raise lease.ended()
            lease.is_used = True
            if not self._lending:
                raise self._refusal()
            slot = lease.slot = take_slot(groups, self._capacity)
            if slot is None:
                self._waiters.append(Waiter(lease, groups, wake))
        return slot

    def stop_waiting(self, lease: Lease) -> None:
        """Raise `PoolTimeout`, unless the lease was served at the last moment or the pool has ended."""
        with self._deciding():
            if not self._leave_queue(lease):
                return
            self._timeouts += 1
            error = self._timeout(lease)
        raise error

    def failed(self, lease: Lease, error: BaseException) -> BaseException:
        """Undo what was done for a lease that could not be entered; return what is to be raised."""
        if isinstance(error, LeaseEnded):  # what it holds is of who entered it first
            return error
        with self._deciding():
            self._leave_queue(lease)
        self.give_back(lease)
        if isinstance(error, StickyError):
            self.break_by(error)
            return self.refusal()
        return error

    def _leave_queue(self, lease: Lease) -> bool:
        for waiter in self._waiters:
            if waiter.lease is lease:
                self._waiters.remove(waiter)
                return True
        return False

    # Giving back

    def give_back(self, lease: Lease) -> None:
        """Take back what `lease` holds, if anything.

        The garbage collector may call it while its thread decides: it closes generators and coroutines that
        were inside a lease.
        """
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            self.return_later(lease)
            return
        with lock:
            slot = lease.slot
            if slot is None:
                return
            lease.slot = None
            if self._lending and not self._waiters:  # nearly always
                slot.group.give_back(slot)
                then = None
            else:
                then = self._decide(slot)
        if then is not None:
            then()
        if self._returned:
            self._take_back()

    def _decide(self, slot: Slot) -> Callable[[], object] | None:
        """Say what becomes of a slot that a lease leaves, and return what is to be called for it."""
        for waiter in self._waiters:
            if slot.group in waiter.groups:
                self._waiters.remove(waiter)
                waiter.lease.slot = slot
                slot.group.served += 1
                return waiter.wake
        slot.group.give_back(slot)
        if slot.leased or not self.is_closed:
            return None
        return lambda: self.retire(slot)

    def forget(self, slot: Slot) -> None:
        """Take back what a forgotten lease held. A finalizer may call it while its thread has the lock."""
        self._returned.append((slot, True))
        self._take_back()

    def return_later(self, lease: Lease) -> None:
        """Let whoever decides next take back what `lease` holds: this thread is in the middle of it."""
        slot, lease.slot = lease.slot, None
        if slot is not None:
            self._returned.append((slot, False))

    def _take_back(self) -> None:
        """Take back what was returned where it could not be; if another thread has the lock, it does so."""
        lock = self._lock
        while self._returned and not lock._is_owned() and lock.acquire(blocking=False):  # type: ignore[attr-defined]
            then = None
            try:
                if self._returned:
                    slot, is_forgotten = self._returned.popleft()
                    self._forgotten_count += is_forgotten
                    then = self._decide(slot)
            finally:
                lock.release()
            if then is not None:
                then()

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Hold the lock, and do afterwards what finalizers could not do meanwhile."""
        try:
            with self._lock:
                yield
        finally:
            if self._returned:
                self._take_back()

    def move(self, lease: Lease, other: Lease) -> None:
        """Let `other` hold what `lease` holds."""
        with self._deciding():
            other.is_used = True
            other.slot, lease.slot = lease.slot, None

    # First use

    def prepare(self) -> None:
        """Look up the devices, once."""
        if self.groups or self.is_closed:
            return
        with self._preparing:
            if self.groups:
                return
            groups = self.plan.groups()
            with self._deciding():
                self.groups = groups
                self._lending = () if self.is_closed else groups

    def _groups_of(self, device: Device | int) -> tuple[Group, ...]:
        self.prepare()
        for group in self.groups:
            if group.device.ordinal == device or group.device == device:
                return (group,) if self._lending else ()
        if self.is_closed:
            return ()
        has = ", ".join(str(group.device.ordinal) for group in self.groups)
        raise ValueError(f"the pool has no device {device!r}: expected one of {has}")

    # The end

    def break_by(self, fault: StickyError) -> None:
        """Lend nothing any more, since the driver carries out nothing any more."""
        with self._deciding():
            self.fault = self.fault or fault
            waiters = self._stop_lending()
        for waiter in waiters:
            waiter.wake()

    def close(self) -> None:
        """Lend nothing any more; close the contexts that no lease is on, and the others later."""
        with self._deciding():
            self.is_closed = True
            waiters = self._stop_lending()
            idle = [slot for group in self.groups for slot in group.slots if not slot.leased]
        for waiter in waiters:
            waiter.wake()
        with contextlib.ExitStack() as steps:  # when one raises, the others follow still
            for slot in idle:
                steps.callback(self.retire, slot)

    def retire(self, slot: Slot) -> None:
        """Close the context of a slot that no lease is on."""
        context = slot.context
        try:
            if context is not None:
                with contextlib.suppress(StickyError):  # which its leases have told
                    context.close()
                slot.context = None
        finally:
            with self._deciding():
                closers: list[threading.Event] = []
                if not self._leased():
                    closers, self._closers = self._closers, closers
            for event in closers:
                event.set()

    def after_fork(self) -> None:
        """Let the leases that a forked child inherited end without the thread that may have had the lock."""
        self._lock = threading.RLock()

    def wait_for_leases(self) -> None:
        """Return when all leases are back."""
        event = threading.Event()
        with self._deciding():
            if not self._leased():
                return
            self._closers.append(event)
        event.wait()

    def _stop_lending(self) -> list[Waiter]:
        self._lending = ()
        waiters = list(self._waiters)
        self._waiters.clear()
        return waiters

    def _leased(self) -> int:
        return sum(group.leased for group in self.groups)

    def refusal(self) -> GpufleetError:
        """Return the error that says why nothing is lent any more."""
        with self._deciding():
            return self._refusal()

    def _refusal(self) -> GpufleetError:
        fault = self.fault
        if fault is None:
            return PoolClosed(f"{self._describe()} lends no context any more")
        error = PoolBroken(f"the context pool lends no context any more: {fault}", fault.launches)
        error.__cause__ = fault
        return error

    # What it is

    @property
    def has_waiters(self) -> bool:
        """Whether any lease is in the queue."""
        return bool(self._waiters)

    @property
    def poison(self) -> CudaError | None:
        """The fault that has ended the driver, as it saw it."""
        return self.groups[0].device.driver.poison if self.groups else None

    def count(self) -> PoolStatistics:
        """Count what is there."""
        with self._deciding():
            return self._count()

    def _count(self) -> PoolStatistics:
        slots = [slot for group in self.groups for slot in group.slots]
        capacity = None if self._capacity == UNLIMITED else self._capacity * len(self.groups)
        return PoolStatistics(
            contexts=sum(slot.context is not None and not slot.context.is_closed for slot in slots),
            leased=self._leased(),
            waiting=len(self._waiters),
            capacity=capacity,
            served=sum(group.served for group in self.groups),
            timeouts=self._timeouts,
            forgotten=self._forgotten_count,
            leased_by_device={group.device.ordinal: group.leased for group in self.groups},
        )

    def __repr__(self) -> str:
        with self._deciding():
            return self._describe()

    def _describe(self) -> str:
        is_broken = self.fault is not None or self.poison is not None
        state = "broken, " if is_broken else "closed, " if self.is_closed else ""
        if not self.groups:
            return f"<ContextPool {self.plan.kind}, {state}not used yet>"
        count = self._count()
        capacity = "" if count.capacity is None else f" of {count.capacity}"
        return (
            f"<ContextPool {self.plan.kind}, {state}{_plural(len(self.groups), 'device')}: "
            f"{_plural(count.contexts, 'context')}, {count.leased}{capacity} leased, {count.waiting} waiting>"
        )

    def _timeout(self, lease: Lease) -> PoolTimeout:
        wanted = lease.wanted
        ordinal = wanted.ordinal if isinstance(wanted, Device) else wanted
        where = "" if ordinal is None else f" on device {ordinal}"
        return PoolTimeout(
            f"no context{where} became free within {lease.timeout:g} s: {self._describe()}. Give leases back "
            "sooner, wait longer (timeout=), or let more be out (per_device=, max_threads_per_context=)"
        )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
