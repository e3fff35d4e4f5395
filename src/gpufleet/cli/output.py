"""How do results look on a terminal, in a pipe, and as JSON?"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from gpufleet.device import Device
    from gpufleet.driver import Driver


def print_line(*parts: str | tuple[str, str]) -> None:
    """Print one line of texts, plain or with a rich style: never wrapped, coloured on a terminal only."""
    from rich.text import Text

    _console().print(Text.assemble(*parts), soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    """Print `document` on stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_error(error: BaseException | str) -> None:
    """Say on stderr what went wrong, with what the error's notes add."""
    sys.stderr.write(f"gpufleet: {error}\n")
    for note in getattr(error, "__notes__", ()):
        sys.stderr.write(f"gpufleet: {note}\n")


def print_notice(devices: Sequence[Device]) -> None:
    """Say that the devices are virtual, and why, if they are."""
    if devices[0].is_virtual:
        print_line((virtual_notice(devices[0].driver, len(devices)), "yellow"))


def print_device(device: Device) -> None:
    """Print one device with its properties."""
    print_line((f"device {device.ordinal}", "bold cyan"), "  ", (device.name, "bold"))
    for label, value in _properties(device).items():
        print_line("  ", (f"{label:<24}", "dim"), value)


def virtual_notice(driver: Driver, count: int) -> str:
    """Say that virtual devices are used, and why."""
    devices = "one virtual device" if count == 1 else f"{count} virtual devices"
    return f"using {devices}: {driver.reason or 'the virtual driver was asked for'}"


def devices_document(devices: Sequence[Device]) -> dict[str, Any]:
    """Describe devices and their driver for `--json`."""
    driver = devices[0].driver
    return {
        "driver": driver.name,
        "reason": driver.reason or None,
        "devices": [device_document(device) for device in devices],
    }


def device_document(device: Device) -> dict[str, Any]:
    """Describe one device for `--json`: sizes in bytes, the clock rate in kilohertz."""
    return {
        "ordinal": device.ordinal,
        "name": device.name,
        "uuid": device.uuid,
        "pci_bus_id": device.pci_bus_id,
        "is_virtual": device.is_virtual,
        "compute_capability": list(device.compute_capability),
        "total_memory": device.total_memory,
        "max_shared_memory_per_block": device.max_shared_memory_per_block,
        "total_constant_memory": device.total_constant_memory,
        "max_registers_per_block": device.max_registers_per_block,
        "clock_rate": device.clock_rate,
        "multiprocessor_count": device.multiprocessor_count,
    }


def _properties(device: Device) -> dict[str, str]:
    return {
        "UUID": device.uuid,
        "PCI id": device.pci_bus_id,
        "virtual": "yes, carried out by the CPU" if device.is_virtual else "no",
        "compute capability": "{}.{}".format(*device.compute_capability),
        "memory": _bytes(device.total_memory),
        "shared memory per block": _bytes(device.max_shared_memory_per_block),
        "constant memory": _bytes(device.total_constant_memory),
        "registers per block": str(device.max_registers_per_block),
        "clock rate": f"{device.clock_rate / 1e6:.2f} GHz",
        "multiprocessors": str(device.multiprocessor_count),
    }


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


@functools.cache
def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
