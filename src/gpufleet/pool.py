"""Which context may this thread have for a while? Leases on the contexts of many devices."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from gpufleet.device import Device
from gpufleet.driver import DriverLike
from gpufleet.entries import thread_entries
from gpufleet.errors import ContextInUse
from gpufleet.forks import watch_forks
from gpufleet.lease import Lease
from gpufleet.ledger import Ledger, PoolStatistics
from gpufleet.slots import Plan


class ContextPool:
    """Contexts of one or more devices that any number of threads and asyncio tasks share.

    ``with pool.lease() as context:`` is all that most programs need. A lease goes to the device with the
    fewest leases, there to the context with the fewest, and of several to the one given back last. Where
    all are taken, who has waited longest is served first.

    Making a pool calls no driver: devices are looked up and contexts made when they are first leased. A
    pool that a process has made and not used works in each of its forked children on its own.

    All methods may be called from any thread, and leave its current context as it was.

    Parameters
    ----------
    devices : iterable of Device or int, optional
        None: all that are visible.
    per_device : int
        Contexts on each device; more than 1 only where `kind` is "created" or "green".
    kind : str
        "primary": the context that CuPy and PyTorch use too; "created": contexts of the pool's own; "green":
        `GreenContext`s of the pool's own, side by side on the multiprocessors of a device.
    max_threads_per_context : int, optional
        Leases on one context at once; None: any number (of a green context, 1). One context that all
        threads share overlaps their work better than several created ones do (four kernels of 20 ms took
        20 ms against 28, H200).
    sm_count : int, optional
        How many multiprocessors each green context needs; None: an equal part of its device.
    driver : optional
        As `get_driver` takes it. Without it, that of the devices.

    Raises
    ------
    ValueError
        If no pool can be so.
    """

    def __init__(
        self,
        devices: Iterable[Device | int] | None = None,
        *,
        per_device: int = 1,
        kind: str = "primary",
        max_threads_per_context: int | None = None,
        sm_count: int | None = None,
        driver: DriverLike = None,
    ) -> None:
        chosen = None if devices is None else tuple(devices)
        self._plan = Plan(chosen, per_device, kind, max_threads_per_context, driver, sm_count)
        self._plan.check()
        self._ledger = Ledger(self._plan)
        watch_forks(self)

    def lease(self, device: Device | int | None = None, timeout: float | None = None) -> Lease:
        """Return a lease, to be entered by ``with`` or ``async with``; see `Lease`.

        Parameters
        ----------
        device : Device or int, optional
            One of the pool's, or its ordinal; None: the one with the fewest leases.
        timeout : float, optional
            Seconds to wait where all contexts are taken; None: as long as it takes, 0: not at all. The
            making of a context, at its first lease, does not count.

        Raises
        ------
        PoolTimeout
            When entered: no context became free in time.
        PoolClosed
            When entered: the pool was closed, also while this lease waited.
        PoolBroken
            When entered: a kernel's fault has ended the driver.
        ValueError
            When entered: the pool has no such device.
        """
        return Lease(self._ledger, device, timeout)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, looked up now if the pool was not used before."""
        self._ledger.prepare()
        return tuple(group.device for group in self._ledger.groups)

    def statistics(self) -> PoolStatistics:
        """Count contexts, leases and waiters, now and so far."""
        return self._ledger.count()

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._ledger.is_closed

    @property
    def is_broken(self) -> bool:
        """Whether a kernel's fault has ended the driver."""
        return self._ledger.fault is not None or self._ledger.poison is not None

    @property
    def has_waiters(self) -> bool:
        """Whether a thread or task waits for a lease."""
        return self._ledger.has_waiters

    def close(self, *, wait: bool = False) -> None:
        """Lend no context any more, and close each as soon as no lease is on it.

        Who waits for a lease gets `PoolClosed`. Leases that are out stay good; a context they are on is
        closed when the last of them is given back. Closing twice is no error. ``with pool:`` ends by it.

        Parameters
        ----------
        wait : bool
            Return when all leases are back and all contexts closed.

        Raises
        ------
        ContextInUse
            If a thread is inside a context without a lease; or, when waiting, this thread is inside one.
        """
        ledger = self._ledger
        ledger.close()
        if wait:
            self._check_outside()
            ledger.wait_for_leases()
            ledger.close()

    def _check_outside(self) -> None:
        mine = [slot.context for group in self._ledger.groups for slot in group.slots]
        for context, _, _ in thread_entries():
            if any(context is of_pool for of_pool in mine):
                raise ContextInUse(f"{self!r} cannot wait for its leases: this thread is inside {context!r}")

    def after_fork(self) -> None:
        """Begin anew in a forked child: leases, waiters and contexts are the parent's."""
        # The old ones are kept until the driver knows of the fork too: finalizers would call it before.
        self._inherited = self._ledger
        self._inherited.after_fork()
        self._ledger = Ledger(self._plan)

    def __enter__(self) -> ContextPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._ledger)
