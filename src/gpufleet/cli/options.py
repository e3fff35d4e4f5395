"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class DriverChoice(str, Enum):
    """What `--driver` takes."""

    auto = "auto"
    nvidia = "nvidia"
    virtual = "virtual"


DriverOption = Annotated[
    DriverChoice | None,
    typer.Option(
        "--driver",
        help="Real GPUs, virtual ones, or (auto) virtual ones where there are no real ones.",
        show_default="GPUFLEET_DRIVER, else auto",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def chosen(driver: DriverChoice | None) -> str | None:
    """Return what `gpufleet.get_driver` takes for this choice."""
    return None if driver is None else driver.value
