"""Does every thread on every device launch and verify? The proof that contexts migrate.

The main thread makes one context per device, loads the kernel in each and leaves them, so that they
float. Then several threads per device enter their device's context, all at once, launch, and check
what comes back. Nothing is printed here: `gpufleet migrate` does that.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from gpufleet.allocators import PlainAllocator
from gpufleet.context import Context
from gpufleet.current import context_of
from gpufleet.device import Device
from gpufleet.driver import Driver
from gpufleet.errors import GpufleetError, ImageError, NoDriver, add_note
from gpufleet.program import Kernel, Program

LAUNCH_STYLES = {"pointers": ("pointers",), "packed": ("packed",), "both": ("pointers", "packed")}
CONTEXT_MAKERS = {"created": Device.create_context, "primary": Device.retain_primary_context}
MOST_THREADS = 15

SHIPPED_IMAGE = Path(__file__).with_name("kernels") / "migrate.fatbin"
SHIPPED_KERNEL = "countdown"
COUNT = 32
"""Threads of the one block, and ints of the buffer."""

Event = tuple[Literal["starts", "ends"], "ThreadRecord"]
OnEvent = Callable[[Literal["starts", "ends"], "ThreadRecord"], None]


@dataclass(frozen=True)
class LaunchRecord:
    """One launch, and where the driver says that it was."""

    round: int
    style: str
    device: int
    """Of the context that was current when the kernel was launched."""
    buffer_device: int
    """Of the memory that the kernel wrote."""


@dataclass
class ThreadRecord:
    """What one thread did. Complete once the thread has ended."""

    device: Device
    context: int
    """The handle of the context that this thread enters."""
    number: int
    """From 1 to the number of threads of the device."""
    launches: list[LaunchRecord] = field(default_factory=list)
    """Those whose result was as it must be."""
    seconds: float = 0.0
    error: Exception | None = None

    def __str__(self) -> str:
        return f"thread {self.number} of device {self.device.ordinal}"


@dataclass(frozen=True)
class Migration:
    """What a run of the proof found."""

    expected: int
    """Threads times devices."""
    verified: int
    """Threads all of whose launches gave the right result on the right device."""
    threads: tuple[ThreadRecord, ...]
    failures: tuple[str, ...]
    """A sentence for each thread that failed, each context that could not be closed, and a fault."""

    @property
    def ok(self) -> bool:
        """Whether every thread was verified and everything was cleaned up."""
        return self.verified == self.expected and not self.failures


def run_migration(
    devices: Sequence[Device],
    threads_per_device: int = 2,
    launch: str = "both",
    contexts: str = "created",
    rounds: int = 1,
    image: str | os.PathLike[str] | None = None,
    kernel: str | None = None,
    on_event: OnEvent | None = None,
) -> Migration:
    """Show that contexts migrate between threads, on all `devices` at once.

    Each thread pushes its device's context, and for each style allocates 32 ints, launches one block of
    32 threads, copies back, verifies and frees; then it pops. Whatever happens, also Ctrl-C, no context
    is left current anywhere, and all contexts are closed.

    Parameters
    ----------
    devices : sequence of Device
        Of one driver.
    threads_per_device : int
        1 to 15.
    launch : str
        How parameters are passed: "pointers", "packed", or "both" (each thread does both).
    contexts : str
        "created" (one new context per device) or "primary".
    rounds : int
        How often each thread enters the context and does all that.
    image : path, optional
        A fatbin, cubin or PTX file instead of the shipped one; see `find_image`.
    kernel : str, optional
        The kernel's name, "countdown" if None. Its parameters are ``(int *out, int n)``, and with one
        block of n threads it must set ``out[i] = n - i``.
    on_event : callable, optional
        Called as ``on_event("starts" | "ends", record)``, on the calling thread, one call at a time. An
        exception from it ends the run and is raised when everything is cleaned up.

    Raises
    ------
    NoDriver
        If `devices` is empty.
    ImageError
        If there is no such image, or no such kernel in it.
    GpufleetError
        If a context cannot be made or the kernel not be loaded. What a thread meets is not raised: it
        is in the result.
    """
    _check(devices, threads_per_device, launch, contexts, rounds)
    path = SHIPPED_IMAGE if image is None else find_image(image)
    program = Program.from_file(path, driver=devices[0].driver)
    function = program.kernel(kernel or SHIPPED_KERNEL)
    floating: list[Context] = []
    try:
        for device in devices:
            floating.append(CONTEXT_MAKERS[contexts](device))
            function.load(floating[-1])
        proof = _Proof(function, LAUNCH_STYLES[launch], rounds)
        proof.run(floating, threads_per_device, on_event)
    except BaseException as error:
        for failure in _close(floating):
            add_note(error, failure)
        raise
    failures = [f"{record} failed: {_in_words(record.error)}" for record in proof.records if record.error]
    failures += _close(floating) + _faults(devices[0].driver)
    expected = threads_per_device * len(devices)
    return Migration(expected, proof.verified, tuple(proof.records), tuple(failures))


class _Proof:
    """The threads of one run, and what they share."""

    def __init__(self, kernel: Kernel, styles: tuple[str, ...], rounds: int) -> None:
        self.kernel = kernel
        self.styles = styles
        self.rounds = rounds
        self.records: list[ThreadRecord] = []
        self.verified = 0
        self.lock = threading.Lock()
        self.go = threading.Event()
        self.is_stopped = False
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def run(self, contexts: Sequence[Context], threads_per_device: int, on_event: OnEvent | None) -> None:
        """Run all threads to their end; call `on_event` meanwhile."""
        threads = [
            self._thread(context, number)
            for number in range(1, threads_per_device + 1)
            for context in contexts
        ]
        try:
            _start(threads)
            self.go.set()  # only now, so that the threads of a device are inside its context together
            for _ in range(2 * len(threads)):
                event = self._next_event()
                if on_event is not None:
                    on_event(*event)
        finally:
            self.is_stopped = True
            self.go.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _next_event(self) -> Event:
        while True:
            try:
                return self.events.get(timeout=0.1)
            except queue.Empty:  # Ctrl-C just before the wait does not end it: it is looked for here
                continue

    def _thread(self, context: Context, number: int) -> threading.Thread:
        record = ThreadRecord(context.device, context.address, number)
        self.records.append(record)
        # A daemon, so that a second Ctrl-C ends the process even if a kernel never does.
        return threading.Thread(target=self._work, args=(context, record), name=str(record), daemon=True)

    def _work(self, context: Context, record: ThreadRecord) -> None:
        self.go.wait()
        began = time.perf_counter()
        self.events.put(("starts", record))
        try:
            for round_number in range(1, self.rounds + 1):
                self._one_round(context, record, round_number)
            _check_nothing_current(context)
        except Exception as error:
            record.error = error
        else:
            with self.lock:
                self.verified += 1
        finally:
            record.seconds = time.perf_counter() - began
            self.events.put(("ends", record))

    def _one_round(self, context: Context, record: ThreadRecord, round_number: int) -> None:
        with context:
            for style in self.styles:
                if self.is_stopped:
                    raise GpufleetError("the run was stopped")
                device, buffer_device = self._launch(context, style)
                record.launches.append(LaunchRecord(round_number, style, device, buffer_device))

    def _launch(self, context: Context, style: str) -> tuple[int, int]:
        """Launch once and verify; return the ordinals of the context's and the buffer's device."""
        values = np.empty(COUNT, np.int32)
        # Plain memory: the driver names its context, while memory of a pool has none.
        with context.alloc(values.nbytes, allocator=PlainAllocator()) as buffer:
            buffer.fill(0xFF)  # what an earlier launch left in recycled memory must not pass for a result
            self.kernel.launch(1, COUNT, buffer, COUNT, style=style)
            places = _current_device(context), _device_of_memory(context, buffer.address)
            buffer.copy_to(values)
        _verify(values, places, context.device, style)
        return places


def find_image(image: str | os.PathLike[str]) -> Path:
    """Find an image file in the current folder, beside the program, or among gpufleet's own.

    "Beside the program" is the folder of `sys.argv[0]`, links followed.

    Raises
    ------
    ImageError
        If it is nowhere, with the places looked at.
    """
    folders = (Path.cwd(), Path(sys.argv[0]).resolve().parent, SHIPPED_IMAGE.parent)
    places = list(dict.fromkeys(folder / image for folder in folders))  # an absolute path is one place
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise ImageError(f"there is no image file {os.fspath(image)!r}: looked for {looked}")


def _check(
    devices: Sequence[Device], threads_per_device: int, launch: str, contexts: str, rounds: int
) -> None:
    if not devices:
        raise NoDriver("there is no device to run on")
    if not 1 <= threads_per_device <= MOST_THREADS:
        raise ValueError(f"threads_per_device is {threads_per_device}: expected 1 to {MOST_THREADS}")
    if launch not in LAUNCH_STYLES:
        raise ValueError(f"launch is {launch!r}: expected one of {', '.join(LAUNCH_STYLES)}")
    if contexts not in CONTEXT_MAKERS:
        raise ValueError(f"contexts is {contexts!r}: expected one of {', '.join(CONTEXT_MAKERS)}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: expected 1 or more")


def _start(threads: Sequence[threading.Thread]) -> None:
    for started, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:  # the system's limit
            raise GpufleetError(
                f"only {started} of {len(threads)} threads could be started: {error}"
            ) from error


def _verify(
    values: np.ndarray[tuple[int], np.dtype[np.int32]], places: tuple[int, int], device: Device, style: str
) -> None:
    expected = np.arange(COUNT, 0, -1, dtype=np.int32)
    wrong = np.flatnonzero(values != expected)
    if wrong.size:
        first = int(wrong[0])
        raise GpufleetError(
            f"launched with {style}, {wrong.size} of {COUNT} values are wrong: out[{first}] is "
            f"{values[first]}, expected {expected[first]}"
        )
    if places != (device.ordinal, device.ordinal):
        raise GpufleetError(
            f"launched with {style}, the driver says that the context is of device {places[0]} and the "
            f"buffer of device {places[1]}, expected {device.ordinal}"
        )


def _current_device(context: Context) -> int:
    return int(context.driver.cuCtxGetDevice())


def _device_of_memory(context: Context, address: int) -> int:
    from cuda.bindings.driver import CUpointer_attribute

    # The bindings (13.3.1) return 0 for CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of memory of device 1, where
    # the driver itself answers 1 (580.159, two H200s). The owning context comes back right.
    attribute = CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    owner = context.driver.cuPointerGetAttribute(attribute, address)
    return context_of(context.driver, owner).device.ordinal


def _check_nothing_current(context: Context) -> None:
    current = int(context.driver.cuCtxGetCurrent())
    if current:
        raise GpufleetError(f"context {current:#x} is still current on a thread that has left it")


def _close(contexts: Sequence[Context]) -> list[str]:
    """Close every context; return a sentence for each that could not be."""
    failures = []
    for context in contexts:
        try:
            context.close()
        except GpufleetError as error:
            failures.append(f"{context!r} could not be closed: {error}")
    return failures


def _faults(driver: Driver) -> list[str]:
    """Say that the driver is lost, if it is: of a fault found while freeing, nothing else has told."""
    return [f"a kernel has faulted: {driver.poison}"] if driver.poison is not None else []


def _in_words(error: Exception) -> str:
    notes: Sequence[str] = getattr(error, "__notes__", ())
    text = str(error) if isinstance(error, GpufleetError) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *notes])
