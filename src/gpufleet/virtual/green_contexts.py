"""What is a share of a device's multiprocessors, and what is a context that has only that?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.handles import new_handle

if TYPE_CHECKING:
    from gpufleet.virtual.devices import Device
    from gpufleet.virtual.engine import DeviceMemory
    from gpufleet.virtual.memory import Memory
    from gpufleet.virtual.streams import Stream

IGNORE_COSCHEDULING = 1
"""CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING: parts may be smaller."""
LARGE_CLUSTERS = 2
"""CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE: changes nothing here, nor on an H200."""
MAP_HOST = 8
"""CU_CTX_MAP_HOST, the flags that cuCtxGetFlags answers for a green context."""


class Share(NamedTuple):
    """Some multiprocessors of a device: what a resource, or a descriptor of resources, stands for.

    Attributes
    ----------
    device : Device
    multiprocessors : range or tuple of int
    split : int
        Which split it came from; 0 for what may be split itself.
    """

    device: Device
    multiprocessors: range | tuple[int, ...]
    split: int = 0


class GreenContext(Context):
    """A context whose kernels run on a share of the device; all but its streams is the primary context's."""

    def __init__(self, device: Device, share: Share) -> None:
        super().__init__(device, MAP_HOST)
        self.share = share
        self.green_handle = new_handle()
        self.home = device.primary
        self.multiprocessors = len(share.multiprocessors)

    def memory(self, memory: Memory) -> DeviceMemory:
        """Return what a kernel may touch: what one of the primary context may."""
        return self.home.memory(memory)

    def per_thread_stream(self) -> Stream:
        """Refuse: a green context has none (driver 580)."""
        raise Refusal("INVALID_HANDLE", "a green context has no default stream per thread")


def part_size(device: Device, flags: int = 0) -> tuple[int, int]:
    """Return the least multiprocessors of a part, and of what its number is a multiple.

    As the Driver API says (cuDevSmResourceSplitByCount), but so that a device of few, which a small
    machine has, can be halved.
    """
    major = device.capability[0]
    least, step = (8, 8) if major >= 9 else (4, 2) if major == 8 else (2, 2)
    if flags & IGNORE_COSCHEDULING:
        least = step = 2
    half = max(1, device.multiprocessors // 2)
    return min(least, half), min(step, half)


def split(share: Share, groups: int, least: int, flags: int) -> tuple[list[Share], Share]:
    """Return at most `groups` parts of at least `least` multiprocessors each, and the rest."""
    if flags & IGNORE_COSCHEDULING and flags & LARGE_CLUSTERS:
        raise Refusal("INVALID_VALUE", f"flags {flags} of a split exclude each other")
    total = len(share.multiprocessors)
    if share.split:
        raise Refusal("INVALID_RESOURCE_CONFIGURATION", "a part is not split before a green context has it")
    if not 0 <= least <= total:
        raise Refusal("INVALID_RESOURCE_CONFIGURATION", f"{least} multiprocessors: there are {total}")
    smallest, step = part_size(share.device, flags)
    size = min(-(-max(least, smallest) // step) * step, total)
    number, origin = min(groups, total // size), new_handle()
    ranges = [share.multiprocessors[each * size : (each + 1) * size] for each in range(number)]
    rest = share.multiprocessors[number * size :]
    return [Share(share.device, each, origin) for each in ranges], Share(share.device, rest, origin)
