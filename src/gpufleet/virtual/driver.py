"""`VirtualDriver`: the functions of `cuda.bindings.driver`, carried out on the CPU."""

from __future__ import annotations

import importlib
import re
import weakref
from typing import Any

from gpufleet.virtual.bindings import bindings
from gpufleet.virtual.calls import CALLS
from gpufleet.virtual.engine import Engine, KernelFault
from gpufleet.virtual.state import FROM_ENVIRONMENT, Configuration, State

CHAPTERS = (
    "initialization", "devices", "contexts", "primary_contexts", "memory", "host_memory", "managed", "pools",
    "copies", "boxes", "fills", "pointers", "streams", "stream_attributes", "stream_values", "events",
    "modules", "libraries", "functions", "launches", "occupancy", "capture", "graphs", "graph_nodes",
    "graph_launches", "graph_memory", "device_resources", "green_contexts",
)  # fmt: skip
"""The files of `gpufleet.virtual.api`."""

RESET_SECONDS = 10.0


class VirtualDriver:
    """CUDA devices on the CPU, with the functions of `cuda.bindings.driver` 13.

    All functions take the same arguments, give the same `(CUresult, value...)` tuples and use that
    module's enums and handle types, which are attributes here too. Two drivers share nothing; of one, all
    functions may be called from any thread.

    Parameters
    ----------
    devices : int
    compute_capability : tuple of int
        Which PTX the devices accept, and some of their limits.
    memory : int
        Bytes of each device; by default a quarter of the machine's memory, divided by the devices.
    engine : Engine
        What executes kernels; by default the interpreter.
    visible_devices : str or None
        A value as of CUDA_VISIBLE_DEVICES, or None for all devices. By default the environment variable
        says it, when cuInit is called.
    multiprocessors : int
        Of each device; by default the CPU cores that this process may use. More do not make it faster.

    Attributes
    ----------
    is_virtual, waits_are_interruptible : bool
        True. Ctrl-C ends a wait in the driver; the work goes on.
    """

    is_virtual = True
    waits_are_interruptible = True

    def __init__(
        self,
        devices: int = 2,
        compute_capability: tuple[int, int] = (9, 0),
        memory: int | None = None,
        engine: Engine | None = None,
        visible_devices: str | None = FROM_ENVIRONMENT,
        multiprocessors: int | None = None,
    ) -> None:
        if devices < 1:
            raise ValueError(f"a virtual driver with {devices} devices: expected at least 1")
        if memory is not None and memory < 1:
            raise ValueError(f"virtual devices with {memory} bytes of memory: expected at least 1")
        if multiprocessors is not None and multiprocessors < 1:
            raise ValueError(f"virtual devices with {multiprocessors} multiprocessors: expected at least 1")
        configuration = Configuration(
            devices, compute_capability, multiprocessors, memory, engine, visible_devices
        )
        self._configuration = configuration
        self._state = State(configuration)
        self._stop = weakref.finalize(self, self._state.abandon)
        self._stop.atexit = False

    @property
    def fault(self) -> KernelFault | None:
        """The fault after which every call fails, with its message; None without one."""
        return self._state.fault

    @property
    def last_error_log(self) -> str:
        """Why this thread's last refused call was refused, where there is more to say than the code."""
        return self._state.thread.error_log

    def reset(self) -> None:
        """Begin anew, as a new process would: nothing initialised, nothing allocated, no fault.

        All handles become invalid, on every thread. Running kernels are stopped and waited for.

        Raises
        ------
        RuntimeError
            If a kernel does not stop within 10 s; its memory stays mapped.
        """
        state, self._state = self._state, State(self._configuration)
        self._stop.detach()
        self._stop = weakref.finalize(self, self._state.abandon)
        self._stop.atexit = False
        state.end(RESET_SECONDS)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(bindings(), name, None)
        if attribute is None:
            raise AttributeError(f"neither VirtualDriver nor cuda.bindings.driver has {name!r}")
        if re.match("cu[A-Z]", name):
            raise AttributeError(
                f"the virtual driver has no {name}: gpufleet's virtual devices do not support it"
            )
        return attribute

    def __repr__(self) -> str:
        major, minor = self._configuration.compute_capability
        count = self._configuration.devices
        return f"<VirtualDriver with {count} devices of compute capability {major}.{minor}>"


for _chapter in CHAPTERS:
    importlib.import_module(f"gpufleet.virtual.api.{_chapter}")
for _name, _method in CALLS.items():
    setattr(VirtualDriver, _name, _method)
