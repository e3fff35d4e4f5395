"""Devices and what they say of themselves."""

from __future__ import annotations

import re

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver


def test_devices_are_numbered_and_equal_by_ordinal(driver: Driver) -> None:
    found = gf.devices(driver)
    assert [device.ordinal for device in found] == list(range(len(found)))
    assert found == gf.devices(driver)
    assert len({*found, *gf.devices(driver)}) == len(found)


def test_properties_are_plausible(device: Device) -> None:
    assert device.name
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", device.uuid)
    assert device.compute_capability >= (7, 5)
    assert device.total_memory > 1 << 28
    assert device.max_shared_memory_per_block >= 48 << 10
    assert device.total_constant_memory == 64 << 10
    assert device.max_registers_per_block >= 1 << 15
    assert device.clock_rate > 100_000
    assert device.multiprocessor_count >= 1
    assert device.attribute("warp_size") == 32
    assert device.is_virtual == device.driver.is_virtual
    assert re.fullmatch(r"[0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+\.\d", device.pci_bus_id)


def test_attributes_has_all_by_name(device: Device) -> None:
    attributes = device.attributes()
    assert attributes["warp_size"] == 32
    assert len(attributes) > 100
    assert list(attributes) == sorted(attributes)


def test_unknown_attribute_is_a_key_error(device: Device) -> None:
    with pytest.raises(KeyError, match="no device attribute 'wrap_size'"):
        device.attribute("wrap_size")


def test_uuids_differ(virtual: Driver) -> None:
    first, second = gf.devices(virtual)
    assert first.uuid != second.uuid


@pytest.mark.parametrize("ordinal", [99, -1])
def test_missing_device_says_how_many_there_are(driver: Driver, ordinal: int) -> None:
    with pytest.raises(gf.NoDriver, match=f"there is no device {ordinal}: {len(gf.devices(driver))} visible"):
        Device(ordinal, driver)
