"""A pool of device memory that is allocated and freed in the order of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.virtual.handles import new_handle

if TYPE_CHECKING:
    from gpufleet.virtual.devices import Device


class Pool:
    """What cuMemAllocAsync takes memory from.

    Freed memory goes back to the device at once: nothing is kept for reuse, so the release threshold is
    remembered but has no effect.

    Attributes
    ----------
    limit : int
        The most bytes that may be in use; 0 for no limit but the device's.
    used, used_high : int
        Bytes in use, and the most there were. A free counts at once, also where it waits in a stream.
    accessible_from : set of int
        Ordinals of the devices whose kernels may use its memory (cuMemPoolSetAccess).
    """

    def __init__(self, device: Device, limit: int = 0) -> None:
        self.handle = new_handle()
        self.device = device
        self.limit = limit
        self.used = 0
        self.used_high = 0
        self.settings: dict[int, int] = {}
        self.accessible_from = {device.ordinal}

    def count(self, size: int) -> None:
        """Count an allocation, or with a negative size a free."""
        self.used += size
        self.used_high = max(self.used_high, self.used)
