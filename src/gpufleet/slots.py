"""Which contexts has a pool, how many leases are on each, and which one is next?

Plain bookkeeping, under the lock of a `Ledger`; only `Plan.groups` and `Slot.open` call the driver, and
they are called without it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpufleet.device import Device, devices
from gpufleet.driver import DriverLike, get_driver
from gpufleet.multiprocessors import parts_of

if TYPE_CHECKING:
    from gpufleet.context import Context

UNLIMITED = sys.maxsize

Make = Callable[[Device], "Context"]
MAKE: dict[str, Make] = {"primary": Device.retain_primary_context, "created": Device.create_context}


class Slot:
    """The place of one context. It outlives its context, and that the leases on it.

    Attributes
    ----------
    context : Context or None
        None until the first lease makes one.
    leased : int
        How many leases are on it now.
    """

    __slots__ = ("_make", "_making", "context", "group", "leased")

    def __init__(self, group: Group, make: Make) -> None:
        self.group = group
        self.context: Context | None = None
        self.leased = 0
        self._make = make
        self._making = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether `open` has nothing to do."""
        context = self.context
        return context is not None and not context.is_closed and not context.driver.is_lost

    def open(self) -> Context:
        """Return the context, made now if there is none or somebody has closed it.

        For who has a lease on it. Making one takes 150 ms (H200, driver 580), so others than those that
        need this one must not wait for it.
        """
        driver = self.group.device.driver
        if driver.is_lost:
            driver.cuCtxSynchronize()  # raises, saying how it was lost
        with self._making:
            context = self.context
            if context is None or context.is_closed:
                context = self.context = self._make(self.group.device)
            return context


class Group:
    """The slots of one device, the one given back last first."""

    __slots__ = ("device", "leased", "served", "slots")

    def __init__(self, device: Device, per_device: int, make: Make) -> None:
        self.device = device
        self.leased = 0
        self.served = 0
        self.slots = [Slot(self, make) for _ in range(per_device)]

    def give_back(self, slot: Slot) -> None:
        """Count one lease less, and let the slot be the next of those with equally few."""
        slot.leased -= 1
        self.leased -= 1
        slots = self.slots
        if slots[0] is not slot:
            slots.remove(slot)
            slots.insert(0, slot)


def take_slot(groups: Iterable[Group], capacity: int) -> Slot | None:
    """Count a lease on the slot that is next; return None if each group has `capacity` leases.

    On the device with the fewest leases (the first of several) it is the slot with the fewest, and of
    several the one given back last.
    """
    chosen, fewest = None, capacity
    for group in groups:
        leased = group.leased
        if not leased:
            slot = group.slots[0]
            group.leased = slot.leased = 1
            group.served += 1
            return slot
        if leased < fewest:
            chosen, fewest = group, leased
    if chosen is None:
        return None
    slots = chosen.slots
    slot = slots[0] if len(slots) == 1 else min(slots, key=_leased)
    slot.leased += 1
    chosen.leased = fewest + 1
    chosen.served += 1
    return slot


def _leased(slot: Slot) -> int:
    return slot.leased


class Plan(NamedTuple):
    """What a pool was asked for, before any driver is called."""

    devices: tuple[Device | int, ...] | None
    per_device: int
    kind: str
    max_threads_per_context: int | None
    driver: DriverLike
    sm_count: int | None = None

    @property
    def capacity_per_device(self) -> int:
        """How many leases a device can have at once."""
        limit = 1 if self.kind == "green" else self.max_threads_per_context
        return UNLIMITED if limit is None else limit * self.per_device

    def groups(self) -> tuple[Group, ...]:
        """Look up the devices."""
        make = self._make_green if self.kind == "green" else MAKE[self.kind]
        return tuple(Group(device, self.per_device, make) for device in self._found())

    def _make_green(self, device: Device) -> Context:
        count = self.sm_count
        if count is None:
            count = parts_of(device).equal_share(self.per_device)
        return device.create_green_context(sm_count=count)

    def _found(self) -> list[Device]:
        if self.devices is None:
            return devices(self.driver)
        given = [device for device in self.devices if isinstance(device, Device)]
        driver = given[0].driver if given and self.driver is None else get_driver(self.driver)
        for device in given:
            if device.driver is not driver:
                raise ValueError(f"{device!r} is of {device.driver!r}: expected one of {driver!r}")
        return [d if isinstance(d, Device) else Device(d, driver) for d in self.devices]

    def check(self) -> None:
        """Raise `ValueError` for what no pool can be."""
        per_device, kind, limit = self.per_device, self.kind, self.max_threads_per_context
        if kind != "green" and kind not in MAKE:
            raise ValueError(f"kind is {kind!r}: expected 'primary', 'created' or 'green'")
        if per_device < 1:
            raise ValueError(f"per_device is {per_device}: expected 1 or more")
        if kind == "primary" and per_device > 1:
            raise ValueError(
                f"per_device is {per_device}, but a device has one primary context: take kind='created' "
                "or 'green'"
            )
        if limit is not None and limit < 1:
            raise ValueError(
                f"max_threads_per_context is {limit}: expected 1 or more, or None for any number"
            )
        self._check_green()
        if self.devices is not None:
            self._check_devices(self.devices)

    def _check_green(self) -> None:
        limit, count = self.max_threads_per_context, self.sm_count
        if self.kind == "green" and limit not in (None, 1):
            raise ValueError(
                f"max_threads_per_context is {limit}, but a green context is for one thread at a time: leave "
                "it out, and take a larger per_device"
            )
        if self.kind != "green" and count is not None:
            raise ValueError(f"sm_count is {count}, but contexts of kind {self.kind!r} have the whole device")
        if count is not None and count < 1:
            raise ValueError(f"sm_count is {count}: expected 1 or more, or None for an equal part")

    @staticmethod
    def _check_devices(given: tuple[Device | int, ...]) -> None:
        if not given:
            raise ValueError("devices is empty: name at least one, or leave it out for all")
        ordinals = [device.ordinal if isinstance(device, Device) else device for device in given]
        if len(set(ordinals)) < len(ordinals):
            raise ValueError(f"devices names one twice: {ordinals}")
