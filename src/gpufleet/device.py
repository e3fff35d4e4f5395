"""Which GPUs are there, and what can they do?"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from gpufleet import peers
from gpufleet.context import Context
from gpufleet.driver import Driver, DriverLike, get_driver
from gpufleet.errors import CudaError, NoDriver
from gpufleet.green import GreenContext
from gpufleet.stream import StreamPriorities


class Device:
    """One GPU, real or virtual.

    Two `Device` objects of one driver and ordinal are equal. Immutable, so safe in any thread.

    Attributes
    ----------
    ordinal : int
        Its place among the visible devices, from 0.
    driver : Driver
    handle : CUdevice
    """

    def __init__(self, ordinal: int, driver: DriverLike = None) -> None:
        self.driver: Driver = get_driver(driver)
        self.ordinal = ordinal
        self._attributes: dict[str, int] = {}
        try:
            self.handle: Any = self.driver.cuDeviceGet(ordinal)
        except CudaError as error:
            count = self.driver.cuDeviceGetCount()
            raise NoDriver(f"there is no device {ordinal}: {count} visible, numbered from 0") from error

    @property
    def is_virtual(self) -> bool:
        """Whether this device is carried out by the CPU."""
        return self.driver.is_virtual

    @functools.cached_property
    def name(self) -> str:
        """The name the driver gives it, such as "NVIDIA H200"."""
        name: bytes = self.driver.cuDeviceGetName(256, self.handle)
        return name.split(b"\0", 1)[0].decode(errors="replace")

    @functools.cached_property
    def uuid(self) -> str:
        """Its UUID in the form that ``CUDA_VISIBLE_DEVICES`` takes: "GPU-xxxxxxxx-...."."""
        digits = bytes(self.driver.cuDeviceGetUuid(self.handle).bytes).hex()
        groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32])
        return "GPU-" + "-".join(groups)

    @functools.cached_property
    def pci_bus_id(self) -> str:
        """Its place on the PCI bus, domain:bus:device.function."""
        text: bytes = self.driver.cuDeviceGetPCIBusId(32, self.handle)
        return text.split(b"\0", 1)[0].decode(errors="replace")

    @functools.cached_property
    def total_memory(self) -> int:
        """Bytes of device memory."""
        return int(self.driver.cuDeviceTotalMem(self.handle))

    @functools.cached_property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return (self.attribute("compute_capability_major"), self.attribute("compute_capability_minor"))

    @property
    def max_shared_memory_per_block(self) -> int:
        """Bytes of shared memory that a block may use without asking for more."""
        return self.attribute("max_shared_memory_per_block")

    @property
    def total_constant_memory(self) -> int:
        """Bytes of constant memory for one module."""
        return self.attribute("total_constant_memory")

    @property
    def max_registers_per_block(self) -> int:
        """32-bit registers available to a block."""
        return self.attribute("max_registers_per_block")

    @property
    def clock_rate(self) -> int:
        """Peak clock in kilohertz; `clock64()` counts at most this many thousand a second."""
        return self.attribute("clock_rate")

    @property
    def multiprocessor_count(self) -> int:
        """Number of multiprocessors; of a virtual device, of the CPU cores that it may use by default."""
        return self.attribute("multiprocessor_count")

    @functools.cached_property
    def stream_priorities(self) -> StreamPriorities:
        """(least, greatest) of the priorities that `Context.stream` takes: the smaller is the more urgent.

        The driver tells it in a context only, so that the primary one is retained for a moment, and made
        where it is not there. `Context.stream_priorities` asks in a context of yours.
        """
        with contextlib.closing(self.retain_primary_context()) as context:
            return context.stream_priorities

    def attribute(self, name: str) -> int:
        """Return one attribute by its name in `CUdevice_attribute`, in lower case without the prefix.

        Raises
        ------
        KeyError
            If the driver's bindings have no attribute of that name.
        """
        from cuda.bindings.driver import CUdevice_attribute

        value = self._attributes.get(name)
        if value is None:
            attribute = getattr(CUdevice_attribute, PREFIX + name.upper(), None)
            if attribute is None:
                raise KeyError(f"no device attribute {name!r}: expected one such as 'warp_size'")
            value = self._attributes[name] = int(self.driver.cuDeviceGetAttribute(attribute, self.handle))
        return value

    def attributes(self) -> dict[str, int]:
        """Return every attribute that the driver answers, by name, sorted."""
        found = {}
        for name in _attribute_names():
            try:
                found[name] = self.attribute(name)
            except CudaError:  # of an older or newer driver than the bindings
                continue
        return found

    def can_access(self, other: Device) -> bool:
        """Return whether kernels of this device may use the memory of `other`.

        The first call for an ordered pair tries it with data, since the driver's claim is not enough: behind
        some bridges writes are lost. It does so in the primary contexts of both devices, which are made for
        it where they are not there. `Context.enable_peer_access` opens the access.

        Always true of the device itself, and false of one of another driver.
        """
        known = peers.known_access(self, other)
        if known is not None:
            return known
        with (
            contextlib.closing(self.retain_primary_context()) as user,
            contextlib.closing(other.retain_primary_context()) as owner,
        ):
            return peers.kernels_reach(user, owner)

    def create_context(self) -> Context:
        """Create a context that floats: it is current nowhere, and any thread may enter it.

        On an H200 this takes 135-186 ms and 524 MiB of device memory (driver 580), so one context per
        device, shared by all threads, is the usual way.
        """
        before = self.driver.cuCtxGetCurrent()
        handle = self.driver.cuCtxCreate(None, 0, self.handle)
        try:
            self.driver.cuCtxPopCurrent()
            if int(self.driver.cuCtxGetCurrent()) != int(before):
                self.driver.cuCtxSetCurrent(before)
        except BaseException:
            self.driver.cuCtxDestroy(handle)
            raise
        return Context(self, handle, "created")

    def retain_primary_context(self) -> Context:
        """Retain the primary context, which the CUDA runtime, CuPy and PyTorch use too.

        Each call retains it anew; `Context.close` releases that one retain.
        """
        return Context(self, self.driver.cuDevicePrimaryCtxRetain(self.handle), "primary")

    def create_green_context(self, *, sm_count: int) -> GreenContext:
        """Create a context whose kernels run on a share of the multiprocessors, for one thread at a time.

        Several stand side by side: each gets multiprocessors that no other one of gpufleet's has, as long
        as there are enough. The driver gives them in parts, of 8 on an H200, so that 10 become 16:
        `GreenContext.sm_count` says how many it got.

        On an H200 this takes 0.9-1.7 ms where the primary context is retained already (driver 580), and
        else as long as that takes to make; `retain_primary_context` keeps it.

        Parameters
        ----------
        sm_count : int
            How many multiprocessors it needs, from 1 to `multiprocessor_count`.

        Raises
        ------
        TypeError, ValueError
            If `sm_count` is no such number.
        """
        return GreenContext.create(self, sm_count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (other.ordinal, other.driver) == (self.ordinal, self.driver)

    def __hash__(self) -> int:
        return hash((self.ordinal, id(self.driver)))

    def __repr__(self) -> str:
        return f"<Device {self.ordinal}: {self.name}>"


def devices(driver: DriverLike = None) -> list[Device]:
    """Return all visible devices: real GPUs, or virtual ones where there are none.

    Raises
    ------
    NoDriver
        If `driver` insists on one that is not there, or no device is visible.
    """
    chosen = get_driver(driver)
    return [Device(ordinal, chosen) for ordinal in range(int(chosen.cuDeviceGetCount()))]


PREFIX = "CU_DEVICE_ATTRIBUTE_"


@functools.cache
def _attribute_names() -> tuple[str, ...]:
    from cuda.bindings.driver import CUdevice_attribute

    names = (member.name.removeprefix(PREFIX).lower() for member in CUdevice_attribute)
    return tuple(sorted(name for name in names if name != "max"))
