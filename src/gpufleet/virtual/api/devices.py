"""Devices: which there are, what they can do, and which reach which."""

from __future__ import annotations

import ctypes
from typing import Any

from gpufleet.virtual.attributes import device_attribute
from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import Refusal, call
from gpufleet.virtual.devices import NAME
from gpufleet.virtual.state import State

_PREFIX = "CU_DEVICE_ATTRIBUTE_"


@call(outputs=1, after_fault=True)
def cuDeviceGetCount(state: State) -> int:
    """Return the number of visible devices."""
    return len(state.devices)


@call(outputs=1, after_fault=True)
def cuDeviceGet(state: State, ordinal: int) -> Any:
    """Return the device with a number."""
    return bindings().CUdevice(state.device(ordinal).ordinal)


@call(outputs=1, after_fault=True)
def cuDeviceGetName(state: State, length: int, dev: Any) -> bytes:
    """Return the name, cut to `length` bytes with the NUL that ends it, and filled up with NULs."""
    state.device(dev)
    return _text(NAME, length)


@call(outputs=1, after_fault=True)
def cuDeviceGetUuid(state: State, dev: Any) -> Any:
    """Return the UUID, the same in every process."""
    answer = bindings().CUuuid()
    ctypes.memmove(answer.getPtr(), state.device(dev).uuid.bytes, 16)
    return answer


@call(outputs=1, after_fault=True)
def cuDeviceTotalMem(state: State, dev: Any) -> int:
    """Return the bytes of memory of the device."""
    return state.device(dev).arena.capacity


@call(outputs=1, after_fault=True)
def cuDeviceGetAttribute(state: State, attrib: Any, dev: Any) -> int:
    """Return one attribute."""
    device = state.device(dev)
    try:
        name = bindings().CUdevice_attribute(int(attrib)).name
    except ValueError:
        name = "MAX"
    if name.removeprefix(_PREFIX) == "MAX":
        raise Refusal("INVALID_VALUE", f"{int(attrib)} is no CUdevice_attribute")
    return device_attribute(device, name.removeprefix(_PREFIX))


@call(outputs=2, after_fault=True)
def cuDeviceComputeCapability(state: State, dev: Any) -> tuple[int, int]:
    """Return major and minor number of the compute capability."""
    return state.device(dev).capability


@call(outputs=1, after_fault=True)
def cuDeviceGetPCIBusId(state: State, length: int, dev: Any) -> bytes:
    """Return the PCI bus identifier as text."""
    return _text(state.device(dev).pci_bus_id, length)


@call(outputs=1, after_fault=True)
def cuDeviceGetByPCIBusId(state: State, pciBusId: bytes) -> Any:
    """Return the device with a PCI bus identifier."""
    wanted = pciBusId.partition(b"\0")[0].decode(errors="replace").upper()
    for device in state.devices:
        if wanted in (device.pci_bus_id, device.pci_bus_id.removeprefix("0000:")):
            return bindings().CUdevice(device.ordinal)
    raise Refusal("INVALID_VALUE", f"no device has the PCI bus identifier {wanted!r}")


@call(outputs=1)
def cuDeviceCanAccessPeer(state: State, dev: Any, peerDev: Any) -> int:
    """Return 1 for two different devices: every virtual device reaches every other."""
    return int(state.device(dev) is not state.device(peerDev))


@call(outputs=1)
def cuDeviceGetP2PAttribute(state: State, attrib: Any, srcDevice: Any, dstDevice: Any) -> int:
    """Return what the link between two devices can do."""
    if state.device(srcDevice) is state.device(dstDevice):
        raise Refusal("INVALID_DEVICE", "the two devices are the same one")
    kinds = bindings().CUdevice_P2PAttribute
    try:
        kind = kinds(int(attrib))
    except ValueError:
        raise Refusal("INVALID_VALUE", f"{int(attrib)} is no CUdevice_P2PAttribute") from None
    return int(kind == kinds.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)


def _text(text: str, length: int) -> bytes:
    if length < 1:
        raise Refusal("INVALID_VALUE", f"a text of {length} bytes: expected at least 1")
    return text.encode()[: length - 1].ljust(length, b"\0")
