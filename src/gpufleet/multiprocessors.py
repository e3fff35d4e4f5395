"""Which of a device's multiprocessors does each green context have?

The driver splits the same device in the same way each time it is asked, so that two green contexts, each
of a split of its own, would share their multiprocessors. Here a device is split once, into the smallest
parts that the driver gives, and each green context takes those that the fewest others have.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpufleet.device import Device
    from gpufleet.driver import Driver


class Share(NamedTuple):
    """What a green context has of a device.

    Attributes
    ----------
    parts : tuple of int
        Which of the device's parts.
    shared : int
        How many of its multiprocessors other green contexts had already.
    """

    parts: tuple[int, ...]
    shared: int


class Parts:
    """The multiprocessors of one device, in the smallest parts there are.

    Attributes
    ----------
    total : int
        How many multiprocessors the device has.
    size : int
        How many are in a part. What no whole part is left of is one more part.
    """

    def __init__(self, device: Device) -> None:
        from cuda.bindings.driver import CUdevResourceType

        driver = device.driver
        whole = driver.cuDeviceGetDevResource(device.handle, CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        self.total = int(whole.sm.smCount)
        self.size = int(whole.sm.minSmPartitionSize)
        most = self.total // self.size
        parts, count, rest = driver.cuDevSmResourceSplitByCount(most, whole, 0, self.size)
        self._resources = [*parts[: int(count)], rest]
        self._counts = [int(part.sm.smCount) for part in self._resources]
        if not self._counts[-1]:
            del self._resources[-1], self._counts[-1]
        self._users = [0] * len(self._counts)
        self._descriptions: dict[tuple[int, ...], Any] = {}
        self._lock = threading.Lock()

    def take(self, sm_count: int) -> Share:
        """Take parts with at least `sm_count` multiprocessors, until `give_back`: the least taken."""
        with self._lock:
            free_first = sorted(range(len(self._users)), key=self._users.__getitem__)
            parts: list[int] = []
            for part in free_first:
                if sum(self._counts[each] for each in parts) >= sm_count:
                    break
                parts.append(part)
            shared = sum(self._counts[part] for part in parts if self._users[part])
            for part in parts:
                self._users[part] += 1
        return Share(tuple(sorted(parts)), shared)

    def give_back(self, share: Share) -> None:
        """Let others have the parts of a share."""
        with self._lock:
            for part in share.parts:
                self._users[part] -= 1

    def describe(self, driver: Driver, share: Share) -> Any:
        """Return the description (CUdevResourceDesc) of a share. The driver keeps it for ever: made once."""
        description = self._descriptions.get(share.parts)
        if description is None:
            resources = [self._resources[part] for part in share.parts]
            description = driver.cuDevResourceGenerateDesc(resources, len(resources))
            self._descriptions[share.parts] = description
        return description

    def equal_share(self, contexts: int) -> int:
        """Return how many multiprocessors each of so many contexts asks for, so that they share none."""
        return max(1, self.total // contexts // self.size * self.size)


def parts_of(device: Device) -> Parts:
    """Return the parts of a device, split now if they were not before."""
    known: dict[int, Parts] = device.driver.belongings.setdefault("multiprocessors", {})
    parts = known.get(device.ordinal)
    if parts is None:
        with _splitting:
            parts = known.get(device.ordinal)
            if parts is None:
                parts = known[device.ordinal] = Parts(device)
    return parts


def checked_count(device: Device, sm_count: int, total: int) -> int:
    """Return `sm_count` if it is a number of multiprocessors that the device has."""
    try:
        number = operator.index(sm_count)
    except TypeError:
        raise TypeError(f"sm_count is {sm_count!r}: expected a whole number from 1 to {total}") from None
    if not 1 <= number <= total:
        raise ValueError(
            f"sm_count is {number}: expected 1 to {total}, the multiprocessors of device {device.ordinal}"
        )
    return number


_splitting = threading.Lock()
