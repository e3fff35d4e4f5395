"""`gpufleet devices`: which GPUs are there, and what can they do?"""

from __future__ import annotations

from typing import Annotated

import typer

from gpufleet.cli.options import DriverOption, JsonOption, chosen
from gpufleet.cli.output import devices_document, print_device, print_json, print_line, print_notice
from gpufleet.device import Device
from gpufleet.device import devices as visible_devices


def devices(
    every: Annotated[bool, typer.Option("--all", help="Print every attribute the driver knows.")] = False,
    as_json: JsonOption = False,
    driver: DriverOption = None,
) -> None:
    """List every GPU, real or virtual, with its properties."""
    found = visible_devices(chosen(driver))
    if as_json:
        _print_json(found, every)
        return
    print_notice(found)
    for device in found:
        print_device(device)
        if every:
            _print_attributes(device)


def _print_json(found: list[Device], every: bool) -> None:
    document = devices_document(found)
    if every:
        for entry, device in zip(document["devices"], found, strict=True):
            entry["attributes"] = device.attributes()
    print_json(document)


def _print_attributes(device: Device) -> None:
    attributes = device.attributes()
    width = max(map(len, attributes))
    print_line("  every attribute")
    for name, value in attributes.items():
        print_line("    ", (name.ljust(width), "dim"), f" {value}")
