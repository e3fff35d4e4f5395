"""`gpufleet migrate`: do contexts migrate between threads, on every device of this machine?"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpufleet.cli.options import DriverOption, JsonOption, chosen
from gpufleet.cli.output import (
    devices_document,
    print_device,
    print_error,
    print_json,
    print_line,
    print_notice,
)
from gpufleet.device import devices as visible_devices

if TYPE_CHECKING:
    from gpufleet.migrate import Migration, ThreadRecord


class Launch(str, Enum):
    """How kernel parameters are passed."""

    pointers = "pointers"
    packed = "packed"
    both = "both"


class Contexts(str, Enum):
    """Which contexts are used."""

    created = "created"
    primary = "primary"


def migrate(
    threads_per_device: Annotated[
        int, typer.Option("--threads-per-device", "-n", min=1, max=15, help="Also -nthreads, -numthreads.")
    ] = 2,
    launch: Annotated[
        Launch,
        typer.Option(help="Pass parameters as an array of addresses, as one buffer, or each way in turn."),
    ] = Launch.both,
    contexts: Annotated[
        Contexts, typer.Option(help="Create a context per device, or use each device's primary one.")
    ] = Contexts.created,
    rounds: Annotated[int, typer.Option(min=1, help="How often each thread enters and leaves.")] = 1,
    image: Annotated[
        Path | None,
        typer.Option(help="A fatbin, cubin or PTX file, in the current folder or beside the program."),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Its kernel (int *out, int n), whose thread i writes n - i.",
            show_default="countdown",
        ),
    ] = None,
    as_json: JsonOption = False,
    driver: DriverOption = None,
    qatest: Annotated[
        bool, typer.Option("--qatest", help="Accepted and ignored: nothing here asks.")
    ] = False,
    noprompt: Annotated[bool, typer.Option("--noprompt", help="Accepted and ignored, as --qatest.")] = False,
) -> None:
    """Show that contexts migrate: many threads, on every device, launch in one context and verify."""
    from gpufleet.migrate import run_migration

    devices = visible_devices(chosen(driver))
    if not as_json:
        print_notice(devices)
        for device in devices:
            print_device(device)
    result = run_migration(
        devices,
        threads_per_device,
        launch.value,
        contexts.value,
        rounds,
        image,
        kernel,
        on_event=None if as_json else _print_event,
    )
    if as_json:
        settings = {"launch": launch.value, "contexts": contexts.value, "rounds": rounds}
        print_json({**devices_document(devices), **settings, **_document(result)})
    else:
        print_line(
            (f"verified {result.verified} of {result.expected}", "bold green" if result.ok else "bold red")
        )
    for failure in result.failures:
        print_error(failure)
    if not result.ok:
        raise typer.Exit(1)


def _print_event(kind: str, record: ThreadRecord) -> None:
    print_line(
        (f"device {record.device.ordinal}", "cyan"),
        (f"  context {record.context:#x}", "dim"),
        f"  thread {record.number:<2}",
        *_outcome(kind, record),
    )


def _outcome(kind: str, record: ThreadRecord) -> list[str | tuple[str, str]]:
    if kind == "starts":
        return [("  starts", "dim")]
    if record.error is not None:
        return ["  ends  ", ("FAILED", "bold red")]
    launches = "1 launch" if len(record.launches) == 1 else f"{len(record.launches)} launches"
    return ["  ends  ", ("verified", "green"), (f"  {launches} in {record.seconds * 1e3:.1f} ms", "dim")]


def _document(result: Migration) -> dict[str, Any]:
    return {
        "expected": result.expected,
        "verified": result.verified,
        "ok": result.ok,
        "failures": list(result.failures),
        "threads": [_thread_document(record) for record in result.threads],
    }


def _thread_document(record: ThreadRecord) -> dict[str, Any]:
    return {
        "device": record.device.ordinal,
        "context": hex(record.context),
        "thread": record.number,
        "seconds": record.seconds,
        "error": None if record.error is None else str(record.error),
        "launches": [vars(launch) for launch in record.launches],
    }
