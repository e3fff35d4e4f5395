"""Which driver, and how is it called? The only way from gpufleet to a `cu*` function.

A `Driver` wraps an object with the functions of `cuda.bindings.driver`: `driver.cuMemAlloc(16)`
returns the value alone and raises `CudaError` for anything but success. Which object that is says
`get_driver`; nothing is loaded, read or called before its first use.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from gpufleet.errors import STICKY, CudaError, ForkedProcess, GpufleetError, NoDriver, StickyError
from gpufleet.launchlog import LaunchLog

DriverLike = Any
"""What `driver=` takes everywhere: None, "auto", "nvidia", "virtual", a `Driver`, or a raw driver object."""

CHOICES = ("auto", "nvidia", "virtual")

ANSWER_AFTER_FAULT = frozenset(
    {"cuInit", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxSetCurrent", "cuCtxDestroy"}
    | {"cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName", "cuGetErrorName", "cuGetErrorString"}
)
"""What still succeeds after a sticky fault (seen on driver 580); the rest would answer its code."""


class Driver:
    """One CUDA driver whose calls raise instead of answering a `CUresult`.

    Each `cu*` attribute is the raw function, checked: it returns nothing, the value, or a tuple of
    values, and raises `CudaError`, `StickyError` after a kernel's fault (for good: poison is per
    driver), or `ForkedProcess` in a child that inherited an initialised driver. All may be called from
    any thread.

    Attributes
    ----------
    raw : object
        The wrapped driver, for calls whose cost counts.
    name : str
        "nvidia" or "virtual".
    reason : str
        Why `auto` did not choose a real driver; empty where it did, or where none was asked for.
    launches : LaunchLog
        What is in flight.
    borrowed : dict
        The contexts that somebody else made and gpufleet was asked to use: address to (id, `Context`).
    unfinished : list of Transfer and LastUse
        What is to be done on the host when work is complete; each wait sees to it (`stream.settle`).
    belongings : dict
        What parts above keep for this driver, such as its pinned memory, by their own keys.
    """

    def __init__(self, raw: Any, name: str, reason: str = "") -> None:
        self.raw = raw
        self.name = name
        self.reason = reason
        self.launches = LaunchLog()
        self.borrowed: dict[int, tuple[int, Any]] = {}
        self.unfinished: list[Any] = []
        self.belongings: dict[str, Any] = {}
        self.is_lost = False  # forked or poisoned: one flag, since entering a context looks at it
        self.is_forked = False
        self.poison: CudaError | None = None
        self._initialized = False
        self._lock = threading.Lock()
        _watch_forks(self)

    @property
    def is_virtual(self) -> bool:
        """Whether its devices are virtual ones."""
        return self.name == "virtual"

    @property
    def waits_are_interruptible(self) -> bool:
        """Whether Ctrl-C ends a wait inside the driver itself."""
        return bool(getattr(self.raw, "waits_are_interruptible", False))

    def initialize(self) -> Driver:
        """Call `cuInit` once; raise `NoDriver` where there is no driver or no visible device."""
        if not self._initialized:
            with self._lock:
                if not self._initialized:
                    self._initialize()
        return self

    def _initialize(self) -> None:
        try:
            self.cuInit(0)
        except CudaError as error:
            if error.name != "CUDA_ERROR_NO_DEVICE":
                raise NoDriver(f"the {self.name} driver does not start: {error}") from error
            raise NoDriver(self._no_device()) from error
        except RuntimeError as error:  # cuda.bindings: DynamicLibNotFoundError, a RuntimeError
            raise NoDriver("no NVIDIA driver found (libcuda cannot be loaded)") from error
        self._initialized = True

    def reset(self) -> None:
        """Make a virtual driver as a new process would find it; the real one has no such thing."""
        self.raw.reset()
        self.poison = None
        self.is_lost = False
        self.launches = LaunchLog()
        self.borrowed.clear()
        self.unfinished.clear()
        self.belongings.clear()
        self._initialized = False

    def _no_device(self) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return f"the {self.name} driver has no device"
        return f"no {self.name} device is visible with CUDA_VISIBLE_DEVICES={visible!r}"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cu"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        checked = self._checked(name, getattr(self.raw, name))
        setattr(self, name, checked)
        return checked

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        answers_after_fault = name in ANSWER_AFTER_FAULT

        def call(*arguments: Any) -> Any:
            if self.is_lost:
                self._refuse(name, answers_after_fault)
            result = function(*arguments)
            if result[0]:
                raise self.failure(result[0], name)
            if len(result) == 2:
                return result[1]
            return result[1:] or None

        call.__name__ = name
        return call

    def _refuse(self, name: str, answers_after_fault: bool) -> None:
        if self.is_forked:
            raise self._forked(name)
        if not answers_after_fault:
            raise self._poisoned(name)

    def failure(self, result: Any, name: str) -> GpufleetError:
        """Turn a `CUresult` that is not success into the error to raise."""
        code = int(result)
        error_name = STICKY.get(code) or str(getattr(result, "name", code))
        if code in STICKY and self.poison is None:
            self.poison = CudaError(code, error_name, name, self._describe(result))
            self._suspects = self.launches.suspects()
            self.is_lost = True
        if code in STICKY:
            return self._poisoned(name)
        return CudaError(code, error_name, name, self._describe(result))

    def _poisoned(self, name: str) -> StickyError:
        assert self.poison is not None
        cause = self.poison
        return StickyError(cause.code, cause.name, name, cause.detail, self._suspects, self.is_virtual)

    def _forked(self, name: str) -> ForkedProcess:
        return ForkedProcess(
            f"{name} was called in a forked child, but a CUDA driver does not survive a fork: start the "
            "process with multiprocessing's 'spawn' (or 'forkserver'), or use gpufleet first after the fork"
        )

    def _describe(self, result: Any) -> str:
        fault = getattr(self.raw, "fault", None)
        if fault is not None and int(result) in STICKY:
            return str(fault)
        try:
            error, text = self.raw.cuGetErrorString(result)
        except (AttributeError, RuntimeError):
            return ""
        if error or not text:
            return ""
        return text.decode() if isinstance(text, bytes) else str(text)

    def __repr__(self) -> str:
        return f"<Driver {self.name}{f' ({self.reason})' if self.reason else ''}>"


def get_driver(driver: DriverLike = None) -> Driver:
    """Return the `Driver` that `driver` means, initialised.

    Parameters
    ----------
    driver : None, str, Driver or object
        None: what the environment variable ``GPUFLEET_DRIVER`` says, else "auto". "nvidia": the real
        driver. "virtual": ``GPUFLEET_VIRTUAL_DEVICES`` (2) devices on the CPU. "auto": the real driver
        where it has a device, else the virtual one. An object with the functions of
        `cuda.bindings.driver`: that object. The same argument gives the same `Driver` each time.

    Raises
    ------
    NoDriver
        Where there is no such driver or it has no visible device.
    """
    if isinstance(driver, Driver):
        return driver.initialize()
    source = "there is no driver"
    if driver is None:
        driver = os.environ.get("GPUFLEET_DRIVER") or "auto"
        source = "GPUFLEET_DRIVER names no driver"
    if not isinstance(driver, str):
        return _wrapped(driver).initialize()
    if driver not in CHOICES:
        raise NoDriver(f"{source} {driver!r}: expected one of {', '.join(CHOICES)}")
    return _automatic() if driver == "auto" else _named(driver).initialize()


_lock = threading.RLock()
_by_name: dict[str, Driver] = {}
_by_object: weakref.WeakValueDictionary[int, Driver] = weakref.WeakValueDictionary()


def _named(name: str, reason: str = "") -> Driver:
    with _lock:
        key = f"{name} {bool(reason)}"
        found = _by_name.get(key)
        if found is None:
            raw = _nvidia() if name == "nvidia" else _virtual(fallback=bool(reason))
            found = _by_name[key] = Driver(raw, name, reason)
        return found


def _wrapped(raw: Any) -> Driver:
    with _lock:
        found = _by_object.get(id(raw))
        if found is None:
            name = "virtual" if getattr(raw, "is_virtual", False) else "nvidia"
            found = _by_object[id(raw)] = Driver(raw, name)
        return found


def _automatic() -> Driver:
    with _lock:
        found = _by_name.get("auto")
        if found is None:
            found = _by_name["auto"] = _choose()
        return found.initialize()


def _choose() -> Driver:
    try:
        return _named("nvidia").initialize()
    except NoDriver as error:
        return _named("virtual", reason=str(error))


def _nvidia() -> Any:
    from cuda.bindings import driver

    return driver


def _virtual(*, fallback: bool) -> Any:
    from gpufleet.virtual import VirtualDriver

    text = os.environ.get("GPUFLEET_VIRTUAL_DEVICES") or "2"
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= 64:
        raise NoDriver(f"GPUFLEET_VIRTUAL_DEVICES is {text!r}: expected a number from 1 to 64")
    raw = VirtualDriver(devices=int(text))
    if fallback and raw.cuInit(0)[0]:
        # CUDA_VISIBLE_DEVICES leaves no device at all: then it was meant for the real ones.
        raw = VirtualDriver(devices=int(text), visible_devices=None)
    return raw


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_watching = False


def _watch_forks(driver: Driver) -> None:
    global _watching
    _drivers.add(driver)
    if not _watching and hasattr(os, "register_at_fork"):
        _watching = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    for driver in list(_drivers):
        if driver._initialized:
            driver.is_forked = driver.is_lost = True
