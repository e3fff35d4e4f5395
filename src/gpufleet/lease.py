"""Who may be inside a context of a pool now?"""

from __future__ import annotations

import sys
import threading
import warnings
from types import TracebackType
from typing import TYPE_CHECKING

from gpufleet.errors import ContextClosed, LeaseEnded

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.device import Device
    from gpufleet.ledger import Ledger
    from gpufleet.slots import Slot


class Lease:
    """The right to be inside a context of a `ContextPool` for a while. Made by `ContextPool.lease`.

    Three ways, each once:

    * ``with pool.lease() as context:`` waits for a context, enters it, leaves it and gives it back.
    * ``async with pool.lease() as lease:`` does not enter, since two tasks of one thread would leave in
      the wrong order: enter between two awaits, by ``with lease.context:``.
    * ``lease = pool.lease().acquire()`` does not enter either; give it back by `release`, from any thread.

    A lease that is forgotten comes back to the pool, with a `ResourceWarning`.
    """

    # `slot` and `is_used` are the ledger's, written under its lock. A slot that is not None is counted
    # there and given back once, whatever happens to the thread.
    __slots__ = ("__weakref__", "_context", "_ledger", "is_used", "slot", "timeout", "wanted")

    def __init__(self, ledger: Ledger, wanted: Device | int | None, timeout: float | None) -> None:
        self.slot: Slot | None = None
        self.is_used = False
        self._ledger = ledger
        self.wanted = wanted
        self.timeout = timeout

    # In a thread

    def __enter__(self) -> Context:
        ledger = self._ledger
        try:
            slot = ledger.take(self) or self._wait()
            context = slot.context or slot.open()
            try:
                context.__enter__()
            except ContextClosed:  # by somebody who had it before
                context = slot.open()
                context.__enter__()
        except BaseException as error:
            raise ledger.failed(self, error)  # noqa: B904 (the same error, or one that has it as cause)
        self._context = context
        return context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._context.__exit__(kind, error, trace)
        finally:
            self._ledger.give_back(self)

    def acquire(self) -> Lease:
        """Wait for a context, without entering it. Raises what ``with`` does."""
        ledger = self._ledger
        try:
            (ledger.take(self) or self._wait()).open()
        except BaseException as error:
            raise ledger.failed(self, error)  # noqa: B904
        return self

    def release(self) -> None:
        """Give the lease back; a second time, nothing happens."""
        self._ledger.give_back(self)

    def _wait(self) -> Slot:
        event = threading.Event()
        slot = self._ledger.take_or_queue(self, event.set)
        return slot or self._served(event.wait(self.timeout))

    def _served(self, was_woken: bool) -> Slot:
        if not was_woken:
            self._ledger.stop_waiting(self)
        if self.slot is None:
            raise self._ledger.refusal()
        return self.slot

    # In an asyncio task

    async def __aenter__(self) -> Lease:
        ledger = self._ledger
        try:
            slot = ledger.take(self) or await self._wait_async()
            if not slot.is_open:
                await self._open_async(slot)
        except BaseException as error:
            raise ledger.failed(self, error)  # noqa: B904
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger.give_back(self)

    async def _wait_async(self) -> Slot:
        import asyncio  # 30 ms, for those who use it

        loop = asyncio.get_running_loop()
        over: asyncio.Future[bool] = loop.create_future()

        def end(was_woken: bool) -> None:
            if not over.done():
                over.set_result(was_woken)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(end, True)
            except RuntimeError:  # the loop was closed under its tasks: nobody is there to use it
                self._ledger.return_later(self)

        slot = self._ledger.take_or_queue(self, wake)
        if slot is not None:
            return slot
        # asyncio.wait_for of Python 3.10 and 3.11 loses a cancellation that comes as the wait ends.
        timer = None if self.timeout is None else loop.call_later(self.timeout, end, False)
        try:
            return self._served(await over)
        finally:
            if timer is not None:
                timer.cancel()

    async def _open_async(self, slot: Slot) -> None:
        """Make the context on another thread. If the task is cancelled, the lease lasts until it is made."""
        import asyncio

        opening = asyncio.get_running_loop().run_in_executor(None, slot.open)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            other = Lease(self._ledger, self.wanted, self.timeout)
            self._ledger.move(self, other)
            opening.add_done_callback(lambda _: other.release())
            raise

    # What it is

    @property
    def context(self) -> Context:
        """The context that is leased.

        Raises
        ------
        LeaseEnded
            If the lease was given back (somebody else may have the context now), or not yet taken.
        """
        slot = self.slot
        if slot is None:
            raise self.ended()
        return slot.context or slot.open()

    @property
    def device(self) -> Device:
        """The device of `context`."""
        slot = self.slot
        if slot is None:
            raise self.ended()
        return slot.group.device

    @property
    def is_held(self) -> bool:
        """Whether it was taken and not yet given back."""
        return self.slot is not None

    def ended(self) -> LeaseEnded:
        """Return the error that says why this lease cannot be used."""
        if self.slot is not None:
            return LeaseEnded(f"{self!r} is in use: ask the pool for another one")
        if self.is_used:
            return LeaseEnded(f"{self!r} was given back to the pool, or never came: ask it for another one")
        return LeaseEnded(f"{self!r} holds nothing yet: enter it by `with`, or call its acquire()")

    def __repr__(self) -> str:
        slot = self.slot
        if slot is None:
            return "<Lease, over>" if self.is_used else "<Lease, not taken yet>"
        return f"<Lease of {slot.context or slot.group.device!r}>"

    def __del__(self) -> None:
        slot = self.slot
        if slot is None or sys.is_finalizing():
            return
        self._ledger.forget(slot)
        warnings.warn(
            f"a lease of {slot.context!r} was never given back: use `with`, or call its release()",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )
