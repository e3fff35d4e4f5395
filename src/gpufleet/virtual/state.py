"""All that a virtual driver knows: what in the real one belongs to the process."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.capture import Captures
from gpufleet.virtual.contexts import Context
from gpufleet.virtual.deferred import DeferredCalls
from gpufleet.virtual.devices import Device, uuid_text
from gpufleet.virtual.engine import Engine, KernelFault
from gpufleet.virtual.engines import engine_from_environment
from gpufleet.virtual.graph_objects import Graphs
from gpufleet.virtual.green_contexts import GreenContext, Share
from gpufleet.virtual.libraries import Library, LibraryKernel
from gpufleet.virtual.memory import Memory, physical_memory
from gpufleet.virtual.modules import Function, Module
from gpufleet.virtual.pools import Pool
from gpufleet.virtual.streams import LEGACY, PER_THREAD, Event, Stream
from gpufleet.virtual.visible_devices import visible_devices
from gpufleet.virtual.work import Scheduler

BEFORE_INIT = "cuInit was not called"
FORKED = "a driver that was initialised in the parent process does not work in a forked child"
ENDED = "the interpreter is ending, or VirtualDriver.reset was called"

FROM_ENVIRONMENT = "from the environment"
"""`visible_devices=` that stands for the value that CUDA_VISIBLE_DEVICES has when cuInit is called."""


@dataclass(frozen=True)
class Configuration:
    """What a `VirtualDriver` was made with."""

    devices: int
    compute_capability: tuple[int, int]
    multiprocessors: int | None
    memory: int | None
    engine: Engine | None
    visible_devices: str | None


class ThreadState(threading.local):
    """What the driver knows of one thread."""

    in_callback = False
    """Whether a host function of cuLaunchHostFunc is running, which may not call the driver."""
    in_deferred = False
    """Whether it is carrying out calls that were deferred."""
    error_log = ""
    """Why this thread's last refused call was refused."""

    capture_mode: Any = None
    """What cuThreadExchangeStreamCaptureMode was told last."""

    def __init__(self) -> None:
        self.stack: list[Context] = []


class State:
    """Everything between `cuInit` and the end of the process (or `VirtualDriver.reset`).

    Attributes
    ----------
    lock : RLock
        Guards everything here; never held while work runs.
    gate : str
        Empty where calls are let through; otherwise why they are not.
    thread : ThreadState
        Of the calling thread.
    fault : KernelFault or None
        The fault after which every call fails.
    cancelled : Event
        Tells running kernels to stop.
    deferred : DeferredCalls
        Calls of finalizers that came at a bad moment.
    contexts, streams, events, modules, functions, libraries, kernels, pools, green_contexts : dict
        The objects behind the handles; destroyed contexts stay, since they may still be pushed.
    shares, share_numbers : dict
        What resources and their descriptors stand for, by number, and the numbers; they stay, as the real
        ones do.
    detached_streams : set of int
        The streams of destroyed green contexts.
    captures : Captures
        Which streams are captured.
    graphs : Graphs
        The graphs, and what belongs to them.
    """

    devices: list[Device]
    memory: Memory
    scheduler: Scheduler

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.lock = threading.RLock()
        self.thread = ThreadState()
        self.gate = BEFORE_INIT
        self.deferred = DeferredCalls(self)
        self._engine: Engine | None = None
        self.fault: KernelFault | None = None
        self.cancelled = threading.Event()
        self.contexts: dict[int, Context] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.modules: dict[int, Module] = {}
        self.functions: dict[int, Function] = {}
        self.libraries: dict[int, Library] = {}
        self.kernels: dict[int, LibraryKernel] = {}
        self.pools: dict[int, Pool] = {}
        self.green_contexts: dict[int, GreenContext] = {}
        self.shares: dict[int, Share] = {}
        self.share_numbers: dict[Share, int] = {}
        self.detached_streams: set[int] = set()
        self.graphs = Graphs()
        self.captures = Captures(self.graphs)
        _watch(self)

    @property
    def is_initialized(self) -> bool:
        """Whether there are devices, memory and a scheduler that this process may use."""
        return not self.gate

    def check_gate(self, any_time: bool) -> None:
        """Refuse, except for a call that may come before cuInit."""
        if self.gate == ENDED:
            raise Refusal("DEINITIALIZED", self.gate)
        if self.gate == FORKED or (self.gate and not any_time):
            raise Refusal("NOT_INITIALIZED", self.gate)

    def initialize(self) -> None:
        """Do what cuInit does, once."""
        with self.lock:
            if self.is_initialized:
                return
            configuration = self.configuration
            text = configuration.visible_devices
            if text == FROM_ENVIRONMENT:
                text = os.environ.get("CUDA_VISIBLE_DEVICES")
            indices = visible_devices(text, [uuid_text(index) for index in range(configuration.devices)])
            if not indices:
                raise Refusal("NO_DEVICE", f"CUDA_VISIBLE_DEVICES={text!r} leaves no virtual device")
            self._build(indices)
            self.gate = ""

    def _build(self, indices: list[int]) -> None:
        configuration = self.configuration
        capacity = configuration.memory or physical_memory() // 4 // configuration.devices
        self.memory = Memory(self.lock, [capacity] * len(indices))
        self.scheduler = Scheduler(self.lock, len(indices), self.set_fault, self.deferred.run)
        self.devices = []
        for ordinal, index in enumerate(indices):
            arena = self.memory.arenas[ordinal]
            capability, multiprocessors = configuration.compute_capability, configuration.multiprocessors
            device = Device(ordinal, index, capability, multiprocessors, arena)
            device.default_pool = device.current_pool = Pool(device)
            self.pools[device.default_pool.handle] = device.default_pool
            self.contexts[device.primary.handle] = device.primary
            self.devices.append(device)

    def engine(self) -> Engine:
        """Return what executes kernels."""
        if self.configuration.engine is not None:
            return self.configuration.engine
        if self._engine is None:
            self._engine = engine_from_environment()
        return self._engine

    # ---- looking up

    def device(self, ordinal: Any) -> Device:
        """Return the device of a CUdevice."""
        number = int(ordinal)
        if not 0 <= number < len(self.devices):
            raise Refusal("INVALID_DEVICE", f"there is no device {number}: there are {len(self.devices)}")
        return self.devices[number]

    def context(self, handle: Any) -> Context:
        """Return the context of a handle, alive or not."""
        context = self.contexts.get(int(handle or 0))
        if context is None:
            raise Refusal("INVALID_CONTEXT", f"{int(handle or 0):#x} is no context")
        return context

    def live_context(self, handle: Any) -> Context:
        """Return the context of a handle, which must be alive."""
        context = self.context(handle)
        if context.is_destroyed:
            raise Refusal("CONTEXT_IS_DESTROYED", f"context {context.handle:#x} was destroyed")
        return context

    def current(self) -> Context:
        """Return the context that is current on this thread, which must be alive."""
        stack = self.thread.stack
        if not stack:
            raise Refusal("INVALID_CONTEXT", "no context is current on this thread")
        if stack[-1].is_destroyed:
            raise Refusal("CONTEXT_IS_DESTROYED", f"context {stack[-1].handle:#x} was destroyed")
        return stack[-1]

    def stream(self, handle: Any) -> Stream:
        """Return the stream of a handle; the default streams are those of the current context."""
        number = int(handle or 0)
        if number in (0, LEGACY):
            return self.current().legacy
        if number == PER_THREAD:
            return self.current().per_thread_stream()
        stream = self.streams.get(number)
        if stream is None:
            if number in self.detached_streams:
                raise Refusal("CONTEXT_IS_DESTROYED", f"stream {number:#x} is of a destroyed green context")
            raise Refusal("INVALID_HANDLE", f"{number:#x} is no stream")
        return stream

    def event(self, handle: Any) -> Event:
        """Return the event of a handle."""
        event = self.events.get(int(handle or 0))
        if event is None:
            raise Refusal("INVALID_HANDLE", f"{int(handle or 0):#x} is no event")
        return event

    # ---- waiting

    def wait(self, stream_or_context: Stream | Context) -> None:
        """Wait until all work of a stream or context has ended; refuse if it, or other work, failed."""
        with self.lock:
            pending = stream_or_context.pending()
        for operation in pending:
            self.scheduler.wait(operation)
        self.check_fault()

    def wait_for_device(self, device: Device) -> None:
        """Wait until all work of all contexts of a device has ended."""
        with self.lock:
            contexts = [context for context in self.contexts.values() if context.device is device]
        for context in contexts:
            self.wait(context)

    def is_busy(self) -> bool:
        """Say whether any work has not ended."""
        with self.lock:
            return any(context.pending() for context in self.contexts.values())

    # ---- faults and the end

    def set_fault(self, fault: KernelFault) -> None:
        """Let every later call fail with this fault, and all work end."""
        with self.lock:
            if self.fault is None:
                self.fault = fault
        self.cancelled.set()
        self.scheduler.drop()

    def check_fault(self) -> None:
        """Refuse if a kernel has failed."""
        if self.fault is not None:
            raise Refusal(self.fault.code, str(self.fault))

    def close(self, timeout: float) -> bool:
        """Stop all work and refuse every later call; False if some work goes on after so many seconds."""
        if not self.is_initialized:
            return True
        self.gate = ENDED
        self.cancelled.set()
        is_quiet = self.scheduler.close(timeout)
        self.deferred.join(timeout)
        return is_quiet

    def end(self, timeout: float) -> None:
        """Close, and give all memory back."""
        was_initialized = self.is_initialized
        if not self.close(timeout):
            raise RuntimeError(f"a kernel did not stop within {timeout:.0f} s; its memory stays mapped")
        if was_initialized:
            self.memory.release()

    def abandon(self) -> None:
        """Stop all work soon: nobody can ask for its results any more."""
        if self.is_initialized:
            self.cancelled.set()
            self.scheduler.drop()


_states: weakref.WeakSet[State] = weakref.WeakSet()
_is_watching = False


def _watch(state: State) -> None:
    """See to it that forks and the interpreter's exit reach a driver."""
    global _is_watching
    _states.add(state)
    if _is_watching:
        return
    _is_watching = True
    atexit.register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """Stop running kernels, so that no worker is inside one while the interpreter is taken apart."""
    for state in list(_states):
        state.close(timeout=1.0)


def _after_fork() -> None:
    for state in list(_states):
        if state.is_initialized:
            state.gate = FORKED
