"""Devices: what they say of themselves, and which of them CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from virtual_fakes import code, value

from gpufleet.virtual import VirtualDriver
from gpufleet.virtual.visible_devices import visible_devices

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-0000-0000-0000-000000000001",
    "GPU-77000000-0000-0000-0000-000000000002",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),  # NVIDIA's own example
        ("0, 1 ,2", [0, 1, 2]),
        ("0,3,1", [0]),
        ("none", []),
        ("1,none,0", [1]),
        ("1gpu2,2ampere", [1, 2]),
        ("0,1,2,1", []),  # a repeated device leaves none
        ("GPU-77", [2]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", [0]),
        ("gpu-8932F,GPU-77", [0, 2]),
        ("GPU-8932", []),  # ambiguous
        ("GPU-77,GPU-nope,0", [2]),
        ("GPU-77,GPU-7700", []),
        ("GPU-77,0", [2, 0]),
        (",0", []),
    ],
)
def test_visible_devices(text: str | None, expected: list[int]) -> None:
    assert visible_devices(text, UUIDS) == expected


def test_the_environment_is_read_at_cu_init(monkeypatch: pytest.MonkeyPatch) -> None:
    d = VirtualDriver(devices=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert code(d.cuInit(0)) == "SUCCESS"
    assert value(d.cuDeviceGetCount()) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    every = VirtualDriver(devices=3, visible_devices=None)
    every.cuInit(0)
    assert value(every.cuDeviceGetCount()) == 3
    uuids = [bytes(value(every.cuDeviceGetUuid(index)).bytes) for index in range(3)]
    assert [bytes(value(d.cuDeviceGetUuid(index)).bytes) for index in range(2)] == [uuids[2], uuids[0]]
    d.reset()
    d.cuInit(0)
    assert bytes(value(d.cuDeviceGetUuid(0)).bytes) == uuids[1]
    d.reset()
    every.reset()


def test_no_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    d = VirtualDriver()
    assert code(d.cuInit(0)) == "NO_DEVICE"
    assert d.last_error_log == "CUDA_VISIBLE_DEVICES='' leaves no virtual device"
    assert code(d.cuDeviceGetCount()) == "NOT_INITIALIZED"


def test_uuids_select_devices(d: Any) -> None:
    import uuid

    text = f"GPU-{uuid.UUID(bytes=bytes(value(d.cuDeviceGetUuid(1)).bytes))}"
    chosen = VirtualDriver(visible_devices=text)
    assert code(chosen.cuInit(0)) == "SUCCESS"
    assert value(chosen.cuDeviceGetUuid(0)).bytes == value(d.cuDeviceGetUuid(1)).bytes
    chosen.reset()


def test_every_attribute_has_a_value(d: Any) -> None:
    for attribute in d.CUdevice_attribute:
        answer = d.cuDeviceGetAttribute(attribute, 0)
        if attribute.name == "CU_DEVICE_ATTRIBUTE_MAX":
            assert code(answer) == "INVALID_VALUE"
        else:
            assert type(value(answer)) is int
    assert code(d.cuDeviceGetAttribute(10_000, 0)) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MAX_THREADS_PER_BLOCK", 1024),
        ("MAX_SHARED_MEMORY_PER_BLOCK", 49_152),
        ("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 232_448),
        ("TOTAL_CONSTANT_MEMORY", 65_536),
        ("MAX_REGISTERS_PER_BLOCK", 65_536),
        ("WARP_SIZE", 32),
        ("CLOCK_RATE", 1_980_000),
        ("COMPUTE_CAPABILITY_MAJOR", 9),
        ("UNIFIED_ADDRESSING", 1),
        ("CONCURRENT_MANAGED_ACCESS", 1),
        ("PAGEABLE_MEMORY_ACCESS", 0),
    ],
)
def test_attributes(d: Any, name: str, expected: int) -> None:
    attribute = getattr(d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    assert value(d.cuDeviceGetAttribute(attribute, 0)) == expected


def test_texts_are_cut_and_ended_by_nul(d: Any) -> None:
    assert value(d.cuDeviceGetName(64, 0)).rstrip(b"\0") == b"gpufleet virtual GPU"
    assert value(d.cuDeviceGetName(9, 0)) == b"gpufleet\0"
    assert code(d.cuDeviceGetName(0, 0)) == "INVALID_VALUE"
    bus = value(d.cuDeviceGetPCIBusId(32, 1)).rstrip(b"\0")
    assert int(value(d.cuDeviceGetByPCIBusId(bus))) == 1
    assert code(d.cuDeviceGetByPCIBusId(b"0000:FF:00.0")) == "INVALID_VALUE"


def test_capability_and_peers(make_driver: Callable[..., Any]) -> None:
    d = make_driver(devices=3, compute_capability=(12, 0))
    assert value(d.cuDeviceComputeCapability(2)) == (12, 0)
    assert value(d.cuDeviceCanAccessPeer(0, 0)) == 0
    assert value(d.cuDeviceCanAccessPeer(0, 2)) == 1
    supported = d.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
    assert value(d.cuDeviceGetP2PAttribute(supported, 0, 1)) == 1
    assert code(d.cuDeviceGetP2PAttribute(supported, 1, 1)) == "INVALID_DEVICE"


def test_versions_and_error_texts(d: Any) -> None:
    fresh = VirtualDriver()
    assert value(fresh.cuDriverGetVersion()) == 13_000
    assert value(fresh.cuGetErrorName(d.CUresult.CUDA_ERROR_NOT_READY)) == b"CUDA_ERROR_NOT_READY"
    assert value(fresh.cuGetErrorString(700)) == b"an illegal memory access was encountered"
    assert code(fresh.cuGetErrorName(123_456)) == "INVALID_VALUE"
    for result in d.CUresult:
        assert value(d.cuGetErrorString(result))


@pytest.mark.parametrize("arguments", [{"devices": 0}, {"memory": 0}])
def test_impossible_drivers(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        VirtualDriver(**arguments)


def test_default_memory_is_a_quarter_of_the_machine_for_all_devices() -> None:
    from gpufleet.virtual.memory import physical_memory

    d = VirtualDriver(devices=4, visible_devices=None)
    d.cuInit(0)
    assert value(d.cuDeviceTotalMem(3)) == physical_memory() // 4 // 4
    d.reset()
