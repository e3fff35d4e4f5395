"""What a virtual device is: its name, its size, its capabilities."""

from __future__ import annotations

import os
import threading
import uuid
from typing import TYPE_CHECKING, NamedTuple

from gpufleet.virtual.contexts import Context

if TYPE_CHECKING:
    from gpufleet.virtual.arena import Arena
    from gpufleet.virtual.pools import Pool

NAME = "gpufleet virtual GPU"
CLOCK_KILOHERTZ = 1_980_000
"""The boost clock of an H200."""
_CONTEXT_SHARE = 256
_LARGEST_CONTEXT = 524 << 20


class Limits(NamedTuple):
    """What depends on the compute capability (CUDA Programming Guide, technical specifications)."""

    shared_per_block_optin: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int


_LIMITS = {
    (7, 5): Limits(64 << 10, 64 << 10, 1024, 16),
    (8, 0): Limits(163 << 10, 164 << 10, 2048, 32),
    (8, 6): Limits(99 << 10, 100 << 10, 1536, 16),
    (8, 7): Limits(163 << 10, 164 << 10, 1536, 16),
    (8, 9): Limits(99 << 10, 100 << 10, 1536, 24),
    (9, 0): Limits(227 << 10, 228 << 10, 2048, 32),
    (10, 0): Limits(227 << 10, 228 << 10, 2048, 32),
    (10, 3): Limits(227 << 10, 228 << 10, 2048, 32),
    (11, 0): Limits(227 << 10, 228 << 10, 1536, 24),
    (12, 0): Limits(99 << 10, 100 << 10, 1536, 24),
    (12, 1): Limits(99 << 10, 100 << 10, 1536, 24),
}


class Device:
    """One virtual GPU.

    Attributes
    ----------
    ordinal : int
        Its number for the caller.
    index : int
        Its number without CUDA_VISIBLE_DEVICES.
    multiprocessors : int
        One for each CPU core that may be used, if nothing else was asked for.
    primary : Context
        Its primary context, alive while `primary_retained` is above zero.
    primary_lock : RLock
        Held while that begins or ends, so that it is not retained while it ends.
    default_pool, current_pool : Pool
        What cuMemAllocAsync takes from.
    """

    default_pool: Pool
    current_pool: Pool

    def __init__(
        self, ordinal: int, index: int, capability: tuple[int, int], multiprocessors: int | None, arena: Arena
    ) -> None:
        self.ordinal = ordinal
        self.index = index
        self.capability = capability
        self.arena = arena
        self.uuid = device_uuid(index)
        self.limits = _LIMITS.get(capability, _LIMITS[9, 0])
        self.multiprocessors = usable_cores() if multiprocessors is None else multiprocessors
        self.primary_lock = threading.RLock()
        self.primary_retained = 0
        self.primary_flags = 0
        self.primary = Context(self, 0, is_primary=True)

    @property
    def pci_bus_id(self) -> str:
        """The identifier that cuDeviceGetPCIBusId answers."""
        return f"0000:{self.index + 1:02X}:00.0"

    @property
    def context_bytes(self) -> int:
        """What a context takes of the device's memory: counted, not allocated.

        An H200 gives a context 524 MiB of its 141 GB, 1/270 of it; here it is 1/256, and never more.
        """
        return min(self.arena.capacity // _CONTEXT_SHARE, _LARGEST_CONTEXT)


def device_uuid(index: int) -> uuid.UUID:
    """Return the UUID of the device with this number, the same in every process."""
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{index}.gpu.virtual.gpufleet")


def uuid_text(index: int) -> str:
    """Return the UUID as nvidia-smi and CUDA_VISIBLE_DEVICES write it."""
    return f"GPU-{device_uuid(index)}"


def usable_cores() -> int:
    """Return the number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
