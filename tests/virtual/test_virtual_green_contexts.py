"""Green contexts of the virtual driver, beyond what was recorded of a real one (conformance/)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from virtual_fakes import FakeEngine, Latch, assert_waits_for, code, ptx, value


def multiprocessors(d: Any, device: int = 0) -> Any:
    return value(d.cuDeviceGetDevResource(device, d.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))


def green_context(d: Any, count: int = 1) -> Any:
    parts = value(d.cuDevSmResourceSplitByCount(1, multiprocessors(d), 0, count))[0]
    return value(d.cuGreenCtxCreate(value(d.cuDevResourceGenerateDesc(parts, 1)), 0, 1))


@pytest.mark.parametrize(
    ("capability", "count", "least", "step"),
    [
        ((9, 0), 132, 8, 8),
        ((8, 6), 132, 4, 2),
        ((7, 5), 132, 2, 2),
        ((9, 0), 8, 4, 4),
        ((9, 0), 2, 1, 1),
        ((9, 0), 1, 1, 1),
    ],
)
def test_parts_are_as_large_as_on_real_devices_if_there_are_two(
    make_driver: Callable[..., Any], capability: tuple[int, int], count: int, least: int, step: int
) -> None:
    d = make_driver(compute_capability=capability, multiprocessors=count)
    found = multiprocessors(d).sm
    assert (found.smCount, found.minSmPartitionSize, found.smCoscheduledAlignment) == (count, least, step)


def test_number_of_multiprocessors_is_an_option(make_driver: Callable[..., Any]) -> None:
    d = make_driver(multiprocessors=7)
    attribute = d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert value(d.cuDeviceGetAttribute(attribute, 0)) == 7
    with pytest.raises(ValueError, match="0 multiprocessors"):
        type(d)(multiprocessors=0)


def test_split_without_groups_says_how_many_there_could_be(make_driver: Callable[..., Any]) -> None:
    d = make_driver(multiprocessors=40)
    parts, number, rest = value(d.cuDevSmResourceSplitByCount(0, multiprocessors(d), 0, 16))
    assert (parts, number, rest.sm.smCount) == ([], 2, 8)


def test_parts_of_two_devices_cannot_be_described_together(d: Any) -> None:
    both = [multiprocessors(d, 0), multiprocessors(d, 1)]
    assert code(d.cuDevResourceGenerateDesc(both, 2)) == "INVALID_RESOURCE_CONFIGURATION"


def test_primary_context_waits_for_its_green_ones_and_they_not_for_each_other(
    d: Any, engine: FakeEngine
) -> None:
    primary = value(d.cuDevicePrimaryCtxRetain(0))
    d.cuCtxPushCurrent(primary)
    latch = engine.bodies["latch"] = Latch()
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("latch"))), b"latch"))
    first, second = green_context(d), green_context(d)
    stream, other = (value(d.cuGreenCtxStreamCreate(green, 1, 0)) for green in (first, second))
    event = value(d.cuEventCreate(2))
    assert code(d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, _two_zeros(), 0)) == "SUCCESS"
    latch.wait_until_entered()

    assert code(d.cuStreamSynchronize(other)) == "SUCCESS"
    d.cuCtxPushCurrent(value(d.cuCtxFromGreenCtx(second)))
    assert code(d.cuCtxSynchronize()) == "SUCCESS"
    d.cuCtxPopCurrent()
    assert code(d.cuGreenCtxRecordEvent(second, event)) == "SUCCESS"
    assert code(d.cuEventQuery(event)) == "SUCCESS"

    for record in (lambda: d.cuGreenCtxRecordEvent(first, event), lambda: d.cuCtxRecordEvent(primary, event)):
        assert code(record()) == "SUCCESS"
        assert code(d.cuEventQuery(event)) == "NOT_READY"
    assert code(d.cuGreenCtxWaitEvent(second, event)) == "SUCCESS"
    assert code(d.cuStreamQuery(other)) == "NOT_READY"
    assert_waits_for(latch, lambda: d.cuCtxSynchronize_v2(primary))
    assert code(d.cuStreamQuery(other)) == "SUCCESS"
    for green in (first, second):
        d.cuGreenCtxDestroy(green)
    d.cuCtxPopCurrent()
    d.cuDevicePrimaryCtxRelease(0)


def _two_zeros() -> Any:
    return ((0, 0), (ctypes.c_void_p, ctypes.c_int))


def test_cooperative_grid_must_fit_on_the_share(make_driver: Callable[..., Any]) -> None:
    d = make_driver(multiprocessors=4)
    value(d.cuDevicePrimaryCtxRetain(0))
    green = green_context(d, 2)
    d.cuCtxPushCurrent(value(d.cuCtxFromGreenCtx(green)))
    function = value(d.cuModuleGetFunction(value(d.cuModuleLoadData(ptx("fit"))), b"fit"))
    per_multiprocessor = value(d.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 1024, 0))
    for blocks, answer in (
        (2 * per_multiprocessor, "SUCCESS"),
        (2 * per_multiprocessor + 1, "COOPERATIVE_LAUNCH_TOO_LARGE"),
    ):
        launch = d.cuLaunchCooperativeKernel(function, blocks, 1, 1, 1024, 1, 1, 0, 0, _two_zeros())
        assert code(launch) == answer
    d.cuCtxSynchronize()
    d.cuCtxPopCurrent()
    d.cuGreenCtxDestroy(green)
    d.cuDevicePrimaryCtxRelease(0)


def test_reset_of_the_primary_context_ends_its_green_ones(d: Any) -> None:
    green = green_context(d)
    context = value(d.cuCtxFromGreenCtx(green))
    assert code(d.cuDevicePrimaryCtxReset(0)) == "SUCCESS"
    d.cuCtxPushCurrent(context)
    assert code(d.cuCtxSynchronize()) == "CONTEXT_IS_DESTROYED"
    d.cuCtxPopCurrent()
    assert code(d.cuGreenCtxDestroy(green)) == "CONTEXT_IS_DESTROYED"
