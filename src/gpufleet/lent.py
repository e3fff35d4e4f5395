"""What keeps another library's memory while work of gpufleet uses it?"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from gpufleet.stream import DISABLE_TIMING, is_ready

if TYPE_CHECKING:
    from gpufleet.context import Context


class Lent:
    """Stands where an allocator does: memory that its `owner` frees, when gpufleet has let go of it."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def allocate(self, context: Context, nbytes: int, stream: Any) -> int:
        """Refuse: nothing is allocated from another library."""
        raise NotImplementedError("another library's memory is not allocated here")

    def free(self, context: Context, address: int, nbytes: int, stream: Any) -> None:
        """Let go of the owner when the work that is in `stream` now is complete; at once without a stream."""
        if stream is None:
            self._owner = None
            return
        driver = context.driver
        with context:
            event = driver.cuEventCreate(DISABLE_TIMING)
            driver.cuEventRecord(event, stream)
        last_use = LastUse(context, event, self._owner)
        driver.unfinished.append(last_use)
        last_use.advance()


class LastUse:
    """An owner that is kept until work is complete. The next wait of gpufleet lets go of it (`settle`)."""

    def __init__(self, context: Context, event: Any, owner: Any) -> None:
        self._life = context.life
        self._event = event
        self._owner = owner
        self._lock = threading.RLock()  # the owner's end may run finalizers

    def advance(self) -> bool:
        """Let go of the owner if its time has come; return whether it has."""
        driver = self._life.driver
        with self._lock:
            if self._event is None:
                return True
            if not self._life.is_gone:  # all work of a context that was closed is complete
                if not is_ready(driver, "cuEventQuery", self._event):
                    return False
                driver.cuEventDestroy(self._event)
            self._event = self._owner = None
        with contextlib.suppress(ValueError):  # a reset has emptied it
            driver.unfinished.remove(self)
        return True
