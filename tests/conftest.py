"""Fixtures: every driver, and a check after each test that nothing was left behind.

A test that takes `driver` (or what is made from it) runs on virtual devices and, marked `gpu`, on real
ones: `pytest -m gpu`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import gpufleet as gf
from gpufleet.device import Device
from gpufleet.driver import Driver, get_driver
from gpufleet.entries import thread_entries

BOTH = ["virtual", pytest.param("nvidia", marks=pytest.mark.gpu)]


@pytest.fixture(params=BOTH)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Return a driver with at least one device; two where it is virtual."""
    yield from _checked(_fresh_virtual() if request.param == "virtual" else get_driver("nvidia"))


@pytest.fixture
def virtual() -> Iterator[Driver]:
    """Return a fresh virtual driver with two devices, for what cannot be asked of a real one."""
    yield from _checked(_fresh_virtual())


@pytest.fixture
def device(driver: Driver) -> Device:
    return Device(0, driver)


@pytest.fixture
def two_devices(driver: Driver) -> list[Device]:
    found = gf.devices(driver)
    if len(found) < 2:
        pytest.skip("needs two devices")
    return found[:2]


@pytest.fixture
def context(device: Device) -> Iterator[gf.Context]:
    made = device.create_context()
    yield made
    made.close()


@pytest.fixture
def both(two_devices: list[Device]) -> Iterator[list[gf.Context]]:
    """Return a context of each of two devices."""
    contexts = [device.create_context() for device in two_devices]
    yield contexts
    for context in contexts:
        context.close()


def _fresh_virtual() -> Driver:
    from gpufleet.virtual import VirtualDriver

    return get_driver(VirtualDriver(devices=2, visible_devices=None))


def _checked(driver: Driver) -> Iterator[Driver]:
    before = _free_memory(driver) if driver.is_virtual else None
    yield driver
    assert thread_entries() == [], "a test left a context pushed"
    if driver.poison is None:
        assert int(driver.cuCtxGetCurrent()) == 0, "a test left a context current"
    gc.collect()
    if before is not None:
        if driver.poison is None:
            assert _free_memory(driver) == before, "a test left device memory allocated"
        driver.reset()


def _free_memory(driver: Driver) -> list[Any]:
    free = []
    for device in gf.devices(driver):
        with device.retain_primary_context() as context:
            free.append(context.memory_info())
        context.close()
    return free
