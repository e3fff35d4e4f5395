"""An engine whose kernels are Python functions, so that the driver is tested by itself.

Kernels that wait hold a latch: a test opens it when it has seen what it wants to see, and never sleeps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpufleet.virtual.engine import Executable, KernelFault, Launch
from gpufleet.virtual.ptx import Module, PtxError

SECONDS = 20
"""How long a test waits before it calls something stuck."""

Body = Callable[[Launch], None]


class FakeEngine:
    """Runs `bodies[name]` for the kernel of that name; a kernel without a body does nothing.

    A body that is a `PtxError` makes the kernel one that the engine does not know.
    """

    name = "fake"

    def __init__(self) -> None:
        self.bodies: dict[str, Body | PtxError] = {"fill": fill}
        self.symbols: dict[str, int] = {}
        self.launches: list[tuple[str, Launch]] = []

    def load(self, module: Module, kernel: str, symbols: Mapping[str, int]) -> Executable:
        body = self.bodies.get(kernel, lambda launch: None)
        if isinstance(body, PtxError):
            raise body
        self.symbols = dict(symbols)
        return _Executable(self, kernel, body)


class _Executable:
    def __init__(self, engine: FakeEngine, kernel: str, body: Body) -> None:
        self._engine = engine
        self._kernel = kernel
        self._body = body

    def run(self, launch: Launch) -> None:
        self._engine.launches.append((self._kernel, launch))
        self._body(launch)


class Latch:
    """A kernel body that runs until it is opened, or until the driver cancels its launch."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()
        self.thread: threading.Thread | None = None
        self.was_cancelled = False

    def __call__(self, launch: Launch) -> None:
        self.thread = threading.current_thread()
        self.entered.set()
        while not self._opened.wait(0.001):
            if launch.cancelled.is_set():
                self.was_cancelled = True
                raise KernelFault("LAUNCH_FAILED", "cancelled")

    def open(self) -> None:
        self._opened.set()

    def wait_until_entered(self) -> None:
        assert self.entered.wait(SECONDS), "the kernel did not start"


def fill(launch: Launch) -> None:
    """`void fill(int *p, int v)`: p[thread] = v."""
    address = int.from_bytes(launch.parameters[:8], "little")
    value = int.from_bytes(launch.parameters[8:12], "little", signed=True)
    threads = launch.block[0]
    check_reachable(launch, address, 4 * threads)
    (ctypes.c_int * threads).from_address(address)[:] = [value] * threads


def store_argument(launch: Launch) -> None:
    """`void store(int *p, int v)`: *p = v, which faults like a GPU where p is not reachable."""
    address = int.from_bytes(launch.parameters[:8], "little")
    check_reachable(launch, address, 4)
    ctypes.memmove(address, launch.parameters[8:12], 4)


def check_reachable(launch: Launch, address: int, size: int) -> None:
    starts, ends = launch.memory.spans()
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if start <= address and address + size <= end:
            return
    raise KernelFault("ILLEGAL_ADDRESS", f"{address:#x} is {launch.memory.describe(address)}")


def ptx(*kernels: str, variables: str = "", target: str = "sm_75") -> bytes:
    """A PTX text with kernels that take (int *p, int v)."""
    entries = "".join(
        f".visible .entry {name}(.param .u64 {name}_p, .param .u32 {name}_v) {{ ret; }}\n" for name in kernels
    )
    return f".version 8.0\n.target {target}\n.address_size 64\n{variables}\n{entries}\0".encode()


def value(result: Any) -> Any:
    """The value of an answer, which must be a success."""
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]


def code(result: Any) -> str:
    """The name of an answer's CUresult without CUDA_ and ERROR_."""
    return str(result[0].name).removeprefix("CUDA_").removeprefix("ERROR_")


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function on a new thread and return what it returns."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(function()))
    thread.start()
    thread.join(SECONDS)
    assert box, "the thread is stuck or raised"
    return box[0]


def assert_waits_for(latch: Latch, call: Callable[[], object]) -> None:
    """Make a call on a new thread: it must not end before the latch is opened, and must end then."""
    ended = threading.Event()

    def run() -> None:
        call()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not ended.wait(0.05)
    latch.open()
    assert ended.wait(SECONDS)
    thread.join()


def read_ints(driver: Any, pointer: Any, count: int) -> list[int]:
    """Read ints of device memory."""
    host = (ctypes.c_int * count)()
    assert code(driver.cuMemcpyDtoH(ctypes.addressof(host), pointer, 4 * count)) == "SUCCESS"
    return list(host)


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpufleet virtual GPU")]
