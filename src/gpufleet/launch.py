"""How is a kernel started, in either parameter style?

A launch costs a few microseconds, so what does not change from launch to launch is prepared once: a
`Plan` per kernel and context, and in it a `Configuration` per grid and block.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from gpufleet import native
from gpufleet.bound import BoundKernel, bound
from gpufleet.configuration import Configuration, Limits, Size
from gpufleet.errors import KernelArgumentError
from gpufleet.frame import STYLES, Frame, Layout, check_style, counted, parameter_table
from gpufleet.pointers import keep_passed, passed
from gpufleet.queue import Queue, as_stream, main_queue
from gpufleet.stream import Stream

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.program import Program
    from gpufleet.signature import ParameterType


class Kernel:
    """One kernel of a program. Made by `Program.kernel`.

    It belongs to no context: it loads itself into each one at the first launch there. Safe to use from
    many threads, and in several contexts and devices, at once.

    Attributes
    ----------
    program : Program
    name : str
    """

    def __init__(
        self, program: Program, name: str, types: tuple[ParameterType, ...] | None, plans: dict[int, Plan]
    ) -> None:
        self.program = program
        self.name = name
        self._types = types
        # By the id of the context, which a plan must not keep alive: it goes when the context goes.
        self._plans = plans

    def launch(
        self,
        grid: Size,
        block: Size,
        *arguments: Any,
        stream: Any = None,
        shared: int = 0,
        style: str = "packed",
    ) -> None:
        """Start the kernel, and return without waiting for it.

        The calling thread's current context is the same afterwards, also after an error. If this raises,
        nothing was started.

        Parameters
        ----------
        grid, block : int or tuple of 1 to 3 ints
            Blocks in the grid, and threads in a block, in x, y and z.
        *arguments
            One value per parameter, in the order of the CUDA signature; `gpufleet.arguments` says what
            fits which parameter.
        stream : Stream or object with ``__cuda_stream__``
            Where the kernel runs, and in whose context, whatever is current. None: the main stream of
            the context that is current on this thread.
        shared : int
            Bytes of dynamic shared memory per block. For more than the usual limit (48 KiB) the kernel
            is told to take more, up to what the device has.
        style : {"packed", "pointers"}
            How the driver is given the values: in one buffer, or as an array of their addresses. The
            effect is the same.

        Raises
        ------
        KernelArgumentError
            If a value does not fit its parameter, or there are too many or too few.
        LaunchError
            If grid, block or shared memory are beyond what the device or the kernel allows.
        WrongContext
            If a buffer is of a device that this one has no access to, or no context is current.
        ContextClosed
            If the stream, a buffer, or the context of one was closed.
        ImageError, UnsupportedPtx, CompileError
            If the kernel cannot be loaded into this context (its first launch there).
        """
        queue: Queue = stream if type(stream) is Stream else self._queue(stream)
        queue.check_open()
        if queue.is_foreign and queue.must_enter:
            with queue.context:
                self.launch(grid, block, *arguments, stream=queue, shared=shared, style=style)
            return
        plan = self._plans.get(id(queue.context)) or self._plan(queue.context)
        configuration = plan.configuration(queue, grid, block, shared)
        try:
            plan.launch(queue, configuration, arguments, style)
        except BaseException:
            passed.pop(threading.get_ident(), None)
            raise
        if queue.graph is not None:
            queue.graph.keep(self, *arguments)
        if passed:
            keep_passed(queue)

    def bind(
        self, grid: Size, block: Size, *, stream: Any, shared: int = 0, style: str = "packed"
    ) -> BoundKernel:
        """Fix everything of a launch but the values: ``kernel.bind(...)(*arguments)`` is the launch.

        What is the same for each launch is checked once, here. With the C extension a bound kernel costs
        hardly more than the driver's own call.

        Parameters
        ----------
        grid, block, stream, shared, style
            As in `launch`.

        Raises
        ------
        LaunchError, WrongContext, ContextClosed, ImageError, UnsupportedPtx, CompileError
            As `launch` does.
        """
        queue: Queue = stream if type(stream) is Stream else self._queue(stream)
        queue.check_open()
        plan = self._plans.get(id(queue.context)) or self._plan(queue.context)
        check_style(style)
        return bound(self, queue, plan.configuration(queue, grid, block, shared), style)

    def launch_packed(
        self, grid: Size, block: Size, buffer: Any, *, stream: Any = None, shared: int = 0
    ) -> None:
        """Start the kernel with parameters that are packed into one buffer already, as C lays them out.

        As `launch`, but what the bytes mean is the caller's business.

        Parameters
        ----------
        buffer : bytes-like
            The values, each at its offset.

        Raises
        ------
        KernelArgumentError
            If the buffer's size is not exactly the end of the last parameter. The driver itself takes a
            shorter one without a word, and refuses a longer one, be it by C's padding at the end.
        """
        queue: Queue = stream if type(stream) is Stream else self._queue(stream)
        queue.check_open()
        if queue.must_enter:
            with queue.context:
                self.launch_packed(grid, block, buffer, stream=queue, shared=shared)
            return
        plan = self._plans.get(id(queue.context)) or self._plan(queue.context)
        configuration = plan.configuration(queue, grid, block, shared)
        plan.start(queue, configuration, plan.copied(buffer), "packed")
        if queue.graph is not None:
            queue.graph.keep(self)

    def load(self, context: Context) -> None:
        """Load the kernel into `context` now, rather than at its first launch there.

        Raises
        ------
        ImageError, UnsupportedPtx, CompileError
            If it cannot be loaded.
        KernelArgumentError
            If its signature is not what the driver says.
        """
        self._plan(context)

    def _plan(self, context: Context) -> Plan:
        context.check_open()
        key, plans = id(context), self._plans
        found = plans.get(key)
        if found is not None:
            return found
        function, read = self.program.function(context, self.name)
        plan = Plan(self.name, context, function, self._types, read)
        plan.gone = weakref.ref(context, lambda _: plans.pop(key, None))
        return plans.setdefault(key, plan)

    def _queue(self, stream: Any) -> Queue:
        if stream is None:
            return main_queue(self.program.driver, self.name)
        return as_stream(stream, self.program.driver)

    def __repr__(self) -> str:
        return f"<Kernel {self.name} of {self.program!r}>"


MOST_CONFIGURATIONS = 1024
"""So many grids and blocks are remembered per kernel and context, then all are forgotten."""


class Plan:
    """One kernel in one context: all that its launches have in common."""

    gone: weakref.ref[Context]
    """Kept for its callback, which removes the plan when the context is gone."""

    def __init__(
        self,
        name: str,
        context: Context,
        function: Any,
        said: tuple[ParameterType, ...] | None,
        read: tuple[ParameterType, ...] | None,
    ) -> None:
        self.name = name
        self._function = function
        self._limits = Limits(name, context, function)
        self._layout = Layout(name, parameter_table(context, function), said, read)
        self._frames: list[Frame] = []  # those that no launch is using now
        self._configurations: dict[Any, Configuration] = {}

    def configuration(self, queue: Queue, grid: Any, block: Any, shared: int) -> Configuration:
        """Return what is prepared for these sizes, checking them the first time."""
        key = (grid, block, shared)
        try:
            found = self._configurations.get(key)
        except TypeError:  # a list has no hash
            return self._configure(queue, grid, block, shared)
        if found is None:
            found = self._configure(queue, grid, block, shared)
            if len(self._configurations) >= MOST_CONFIGURATIONS:
                self._configurations.clear()
            self._configurations[key] = found
        return found

    def _configure(self, queue: Queue, grid: Any, block: Any, shared: int) -> Configuration:
        found = self._limits.configure(queue.context, grid, block, shared)
        found.launcher = native.launcher(queue.context.driver, self._layout, self._function, found)
        return found

    def launch(
        self, queue: Queue, configuration: Configuration, arguments: tuple[Any, ...], style: str
    ) -> None:
        """Start the kernel with these arguments: in C where that can be, else in Python.

        A launch that fails in C has started nothing, and is tried again in Python, which says what is wrong.
        """
        layout, launcher = self._layout, configuration.launcher
        if len(arguments) != layout.count:
            raise KernelArgumentError(
                f"kernel {self.name!r} takes {counted(layout.count)}, but {len(arguments)} "
                f"{'was' if len(arguments) == 1 else 'were'} given"
            )
        can_be_in_c = launcher is not None and style in STYLES and not queue.context.driver.is_lost
        if can_be_in_c and not launcher.launch(queue, style == "packed", arguments):
            self._note(queue, configuration)
        else:
            self.start(queue, configuration, self._converted(queue, arguments), style)

    def _converted(self, queue: Queue, arguments: tuple[Any, ...]) -> Frame:
        """Return a frame that holds these arguments."""
        frame = self._frame()
        self._layout.pack(frame.memory, queue, arguments)
        return frame

    def copied(self, buffer: Any) -> Frame:
        """Return a frame that holds the bytes of a packed buffer."""
        size = self._layout.size
        view = memoryview(buffer).cast("B")
        if view.nbytes != size:
            raise KernelArgumentError(
                f"the packed buffer has {view.nbytes} bytes, but kernel {self.name!r} takes exactly {size}: "
                f"the end of the last of {counted(self._layout.count)}, without padding behind it"
            )
        frame = self._frame()
        frame.memory[:size] = view
        return frame

    def _frame(self) -> Frame:
        try:
            return self._frames.pop()
        except IndexError:
            return Frame(self._layout)

    def start(self, queue: Queue, configuration: Configuration, frame: Frame, style: str) -> None:
        """Call the driver, and note the launch when it has accepted it."""
        context = queue.context
        driver = context.driver
        if driver.is_lost:
            driver.cuCtxSynchronize()  # raises, saying which
        parameters, extra = frame.form(style)
        error = configuration.start(queue.handle, parameters, extra)[0]
        if error and error == INVALID_CONTEXT:
            # The stream names the context; a driver that wants one to be current as well gets it.
            with context:
                error = configuration.start(queue.handle, parameters, extra)[0]
        if error:
            raise driver.failure(error, "cuLaunchKernel")
        self._frames.append(frame)
        self._note(queue, configuration)

    def _note(self, queue: Queue, configuration: Configuration) -> None:
        """Note a launch that the driver has accepted."""
        context = queue.context
        if queue.graph is None:
            context.driver.launches.add(context.address, queue.address, configuration)
        else:
            queue.graph.note_launch(configuration)
        if queue.is_foreign:
            queue.has_work()


INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""
