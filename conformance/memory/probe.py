"""How a chapter of probes asks a driver, and what it keeps of the answers.

A chapter is a list of groups: functions of one `Probe`, each of which stands alone, so that a
group that ends the process can be left out of a second run (`skip`). A group may not depend on
time: where a stream must be busy, `Probe.latch` keeps it so until the probe opens the latch.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import threading

MAPPED_AND_PORTABLE = 3
BRIEF = 0.3
"""Seconds that a latch holds where a call may wait for it; one that does not wait takes less than 10 ms."""
PARAMETERS = {
    "fill": (ctypes.c_void_p, ctypes.c_int),
    "add": (ctypes.c_void_p, ctypes.c_int),
    "copy": (ctypes.c_void_p, ctypes.c_void_p),
    "latch": (ctypes.c_void_p, ctypes.c_longlong),
    "reverse": (ctypes.c_void_p,),
    "reverse_static": (ctypes.c_void_p,),
    "bounded": (ctypes.c_void_p,),
    "lookup": (ctypes.c_void_p,),
    "mixed": (ctypes.c_int, ctypes.c_double, ctypes.c_void_p),
}


def run_chapter(groups, driver, image, *, skip=(), journal=None, devices=1):
    """Run the groups of a chapter in order; return {"group.probe": answer}.

    `journal`, if given, is called with (name) before a call and with (name, answer) for each answer:
    what it has seen last tells where a process ended. Fewer than `devices` devices answer nothing.
    """
    probe = Probe(driver, image, journal)
    if probe.device_count < devices:
        return {}
    for group in groups:
        if group.__name__ not in skip:
            probe.run(group)
            probe.clean_up()
        if probe.poisoned:
            break
    return probe.answers


def run_alone(group, driver, image, *, skip=(), journal=None, devices=1):
    """Run one group and leave everything as it is then: looking at it might end the process."""
    probe = Probe(driver, image, journal)
    if probe.device_count >= devices and group.__name__ not in skip:
        probe.run(group)
    return probe.answers


class Probe:
    """A driver with one context on device 0, which is current whenever a group begins."""

    def __init__(self, driver, image, journal=None):
        self.d = Guarded(driver)
        self.image = image
        self.answers = {}
        self.group = "setup"
        self.poisoned = False
        self._journal = journal or (lambda *entry: None)
        self._kept = []
        self._latches = []
        self._capturing = []
        self._streams = []
        self._kernels = {}
        self.need(self.d.cuInit, 0)
        self.device_count = self.need(self.d.cuDeviceGetCount)
        self.context = self.need(self.d.cuCtxCreate, None, 0, 0)
        self._states = self.need(self.d.cuMemHostAlloc, 1 << 16, MAPPED_AND_PORTABLE)
        self.kernel("latch")

    def run(self, group):
        """Ask one group; what Python raises in it is an answer too."""
        self.group = group.__name__
        try:
            group(self)
        except Exception as error:
            self.keep("exception", describe(error))

    # Asking and keeping

    def ask(self, name, function, *arguments, **keywords):
        """Keep the code that a call answers under `name`; return its value (None if it failed)."""
        self.journal(name)
        answer, value = self.call(function, *arguments, **keywords)
        self.keep(name, answer)
        return value

    def code(self, function, *arguments, **keywords):
        """The code that a call answers, not kept: for answers that belong together in one list."""
        return self.call(function, *arguments, **keywords)[0]

    def need(self, function, *arguments, **keywords):
        """Make a call that the group cannot do without; return its value."""
        answer, value = self.call(function, *arguments, **keywords)
        if answer != "SUCCESS":
            raise Unanswered(f"{getattr(function, '__name__', function)} answered {answer}")
        return value

    def each(self, name, function, choices):
        """Keep {label: code} for one function and several argument lists."""
        answers = {}
        for label, arguments in choices.items():
            self.journal(f"{name}.{label}")
            answers[str(label)] = self.code(function, *arguments)
        self.keep(name, answers)

    def note(self, name, value):
        """Keep a value that every driver should answer alike."""
        self.keep(name, plain(value))

    def hardware(self, name, value):
        """Keep a value that depends on the machine: on the GPU, or on the operating system."""
        self.keep(f"{name}.value.hardware", plain(value))

    def journal(self, name):
        """Say which call comes next, so that it is known if the process ends in it."""
        self._journal(f"{self.group}.{name}")

    def keep(self, name, answer):
        """Keep an answer as it is."""
        self.answers[f"{self.group}.{name}"] = answer
        self._journal(f"{self.group}.{name}", answer)

    def call(self, function, *arguments, **keywords):
        """(code, value) of a call, not kept."""
        # A stream that a group destroys must not be touched again when the group is cleaned up.
        if any(getattr(each, "__name__", "") == "cuStreamDestroy" for each in (function, *arguments)):
            self._streams = [each for each in self._streams if each not in arguments]
            self._capturing = [each for each in self._capturing if each not in arguments]
        try:
            result = function(*arguments, **keywords)
        except Exception as error:
            return describe(error), None
        answer = code(result)
        return answer, values(result) if answer == "SUCCESS" else None

    # Work for a stream

    def kernel(self, name, context=None):
        """One of the kernels, loaded (not lazily: a late load would wait for a latch) where we are."""
        context = int(self.need(self.d.cuCtxGetCurrent)) if context is None else int(context)
        if context not in self._kernels:
            module = self.need(self.d.cuModuleLoadData, self.image)
            loaded = {
                each: self.need(self.d.cuModuleGetFunction, module, each.encode()) for each in PARAMETERS
            }
            for function in loaded.values():
                self.code(self.d.cuFuncLoad, function)
            self._kernels[context] = loaded
        return self._kernels[context][name]

    def forget_kernels(self, context):
        """A context is gone; another may get its handle."""
        self._kernels.pop(int(context), None)

    def launch(self, name, *arguments, stream=0, block=1, grid=1, shared=0, handle=None):
        """Launch a kernel of the current context, or `handle`, which has the same parameters."""
        function = self.kernel(name) if handle is None else handle
        parameters = (tuple(arguments), PARAMETERS[name])
        return self.d.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream, parameters, 0)

    def latch(self, stream=0, seconds=2.0):
        """Keep a stream of the current context busy until the latch that is returned is opened."""
        latch = Latch(self._states + 16 * len(self._latches))
        self._latches.append(latch)
        device = self.need(self.d.cuCtxGetDevice)
        kilohertz = self.need(
            self.d.cuDeviceGetAttribute, self.d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, device
        )
        self.need(self.launch, "latch", latch.address, int(kilohertz * 1000 * seconds), stream=stream)
        return latch

    def waits(self, name, busy, function, *arguments, **keywords):
        """Keep what a call answers while the stream `busy` is, and whether it waited for that stream."""
        latch = self.latch(busy, BRIEF)
        value = self.ask(name, function, *arguments, **keywords)
        self.note(f"{name}.waits", latch.has_timed_out)
        latch.open()
        self.need(self.d.cuCtxSynchronize)
        return value

    def begin_capture(self, stream, mode=0):
        """Begin a capture that ends with `end_capture`, or with the group if that never comes."""
        self.need(self.d.cuStreamBeginCapture, stream, self.d.CUstreamCaptureMode(mode))
        self._capturing.append(stream)

    def end_capture(self, stream):
        """End a capture; return the graph, or None where the driver answers none."""
        self._capturing.remove(stream)
        return self.call(self.d.cuStreamEndCapture, stream)[1]

    # Things to ask about; memory lives as long as the probe unless a group frees it

    def device(self, size=4096):
        return int(self.need(self.d.cuMemAlloc, size))

    def pinned(self, size=4096, flags=0):
        address = self.need(self.d.cuMemHostAlloc, size, flags)
        ctypes.memset(address, 0, size)
        return address

    def pages(self, size=4096):
        """Anonymous memory that begins and ends with a page; zero."""
        area = mmap.mmap(-1, size)
        view = (ctypes.c_char * size).from_buffer(area)
        self._kept.append((area, view))
        return ctypes.addressof(view)

    def pageable(self, size=4096):
        """Ordinary memory; zero."""
        buffer = (ctypes.c_char * size)()
        self._kept.append(buffer)
        return ctypes.addressof(buffer)

    def stream(self, flags=1):
        """A stream that lives as long as the group: few at a time have a hardware queue each."""
        stream = self.need(self.d.cuStreamCreate, flags)
        if self.is_current(self.context):
            self._streams.append(stream)
        return stream

    def event(self, flags=0):
        return self.need(self.d.cuEventCreate, flags)

    def new_context(self, device=0):
        """A context that is current afterwards, above what was current before."""
        context = self.need(self.d.cuCtxCreate, None, 0, device)
        self.forget_kernels(context)
        return context

    def read(self, address, count=1):
        """The first ints at a device address."""
        values = (ctypes.c_int * count)()
        self.need(self.d.cuMemcpyDtoH, ctypes.addressof(values), address, 4 * count)
        return list(values)

    def write(self, address, *values):
        """Set the first ints at a device address."""
        source = (ctypes.c_int * len(values))(*values)
        self.need(self.d.cuMemcpyHtoD, address, ctypes.addressof(source), 4 * len(values))

    def is_current(self, context):
        return int(self.need(self.d.cuCtxGetCurrent)) == int(context)

    def alive(self, thing):
        """Keep a Python object (a callback, a file's mapping) until the process ends."""
        self._kept.append(thing)
        return thing

    # Between groups

    def clean_up(self):
        """Open what is latched, leave every context but ours, and see whether the driver still works."""
        for latch in self._latches:
            latch.open()
        for stream in self._capturing:
            self.code(self.d.cuStreamEndCapture, stream)
        self._capturing.clear()
        for _ in range(64):
            answer, current = self.call(self.d.cuCtxGetCurrent)
            if answer != "SUCCESS" or not int(current):
                break
            self.code(self.d.cuCtxSynchronize)
            self.code(self.d.cuCtxPopCurrent)
        self.code(self.d.cuCtxPushCurrent, self.context)
        for stream in list(self._streams):
            self.code(self.d.cuStreamDestroy, stream)
        answer = self.code(self.d.cuCtxSynchronize)
        if answer != "SUCCESS":
            self.keep("poisoned", answer)
            self.poisoned = True


class Latch:
    """What a latch kernel spins on: two ints of pinned memory."""

    def __init__(self, address):
        self.address = address
        self._state = (ctypes.c_int * 2).from_address(address)
        self._state[0] = self._state[1] = 0

    def open(self):
        self._state[0] = 1

    @property
    def has_timed_out(self):
        return self._state[1] != 0


class Guarded:
    """A driver whose missing functions can be named; calling one raises `MissingFunction`."""

    def __init__(self, driver):
        self._driver = driver

    def __getattr__(self, name):
        try:
            return getattr(self._driver, name)
        except AttributeError:
            if name.startswith("cu"):
                return MissingFunction.of(name)
            raise


class MissingFunction(Exception):
    """The driver or its bindings do not have this function."""

    @classmethod
    def of(cls, name):
        def missing(*arguments):
            raise cls(name)

        missing.__name__ = name
        return missing


class Unanswered(Exception):
    """A call that a group needs failed, so that the rest of the group has nothing to ask."""


def code(result):
    """Name of the CUresult in a result tuple, without its CUDA_ prefix."""
    first = result[0] if isinstance(result, tuple) else result
    return first.name.removeprefix("CUDA_")


def values(result):
    """What a call answers beside its code: nothing, one value, or a tuple of them."""
    rest = result[1:] if isinstance(result, tuple) else ()
    return rest[0] if len(rest) == 1 else (rest or None)


def describe(error):
    """What is kept of a Python exception; a missing function is an answer of its own."""
    if isinstance(error, MissingFunction):
        return {"missing": str(error)}
    missing = re.fullmatch(r"[Ff]unction \"?(\w+)\"? (is )?not found", str(error))  # what the bindings say
    if missing:
        return {"missing": missing.group(1)}
    return {"exception": f"{type(error).__name__}: {error}"}


def plain(value):
    """The same value as JSON can hold it. Handles and addresses differ from run to run: refused."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "name") and hasattr(value, "value"):
        return value.name
    if type(value) in (int, float):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    raise TypeError(f"{type(value).__name__} is not an answer that can be compared")


def ints(address, count=1):
    """A view of ints at a host address."""
    return (ctypes.c_int * count).from_address(address)


def in_thread(function, *arguments):
    """Call a function on a new thread, which no context is current on; return what it returns."""
    outcome = []

    def call():
        try:
            outcome.append((function(*arguments), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    if not outcome:
        raise TimeoutError("the thread did not return within 20 s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
