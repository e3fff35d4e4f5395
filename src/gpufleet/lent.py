"""What keeps another library's memory while work of gpufleet uses it?"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from gpufleet.stream import DISABLE_TIMING, is_ready

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.driver import Driver


class Lent:
    """Stands where an allocator does: memory that its `owner` frees, when gpufleet has let go of it."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def allocate(self, context: Context, nbytes: int, stream: Any) -> int:
        """Refuse: nothing is allocated from another library."""
        raise NotImplementedError("another library's memory is not allocated here")

    def free(self, context: Context, address: int, nbytes: int, stream: Any) -> None:
        """Let go of the owner when the work that is in `stream` now is complete."""
        driver = context.driver
        with context:
            event = driver.cuEventCreate(DISABLE_TIMING)
            driver.cuEventRecord(event, stream)
        _waiting(driver).append((event, self._owner))
        let_go(driver)


def let_go(driver: Driver) -> None:
    """Let go of the owners whose memory no work of gpufleet uses any more."""
    waiting = _waiting(driver)
    for _ in range(len(waiting)):
        try:
            event, owner = waiting.popleft()
        except IndexError:  # another thread was faster
            return
        if is_ready(driver, "cuEventQuery", event):
            driver.cuEventDestroy(event)
        else:
            waiting.append((event, owner))


def _waiting(driver: Driver) -> deque[tuple[Any, Any]]:
    waiting: deque[tuple[Any, Any]] = driver.belongings.setdefault("lent", deque())
    return waiting
