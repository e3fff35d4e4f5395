"""A module loaded into a context: its variables have memory, its kernels become executable on demand."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from gpufleet.virtual import ptx
from gpufleet.virtual.calls import Refusal
from gpufleet.virtual.handles import new_handle
from gpufleet.virtual.host_pointers import write_bytes
from gpufleet.virtual.images import accepts
from gpufleet.virtual.parameters import ParameterSpace

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.engine import Engine, Executable, Launch
    from gpufleet.virtual.libraries import Library
    from gpufleet.virtual.memory import Memory
    from gpufleet.virtual.spans import Allocation

DYNAMIC_SHARED = "MAX_DYNAMIC_SHARED_SIZE_BYTES"
"""The attribute that allows a kernel more shared memory."""
DEFAULT_SHARED = 49_152
"""Shared memory of a block, static and dynamic, unless cuFuncSetAttribute allows more."""
BRIEF_SECONDS = 0.001


class Module:
    """One module in one context.

    Attributes
    ----------
    tree : ptx.Module
    variables : dict
        The allocation of each variable in global or constant memory.
    functions : dict
        The `Function` of each kernel, by name.
    """

    def __init__(self, context: Context, tree: ptx.Module, engine: Engine) -> None:
        self.handle = new_handle()
        self.context = context
        self.tree = tree
        self.engine = engine
        self.library: Library | None = None
        """The library that it is a part of."""
        self.variables: dict[str, Allocation] = {}
        self.functions = {name: Function(self, kernel) for name, kernel in tree.kernels.items()}

    @property
    def symbols(self) -> dict[str, int]:
        """The device address of each variable."""
        return {name: allocation.start for name, allocation in self.variables.items()}

    def place_variables(self, memory: Memory) -> None:
        """Allocate the variables in global and constant memory and give them their initial values."""
        arena = self.context.device.arena
        placed = [
            variable
            for variable in self.tree.variables.values()
            if variable.space in ("global", "const") and variable.size and not variable.external
        ]
        for variable in placed:
            allocation = memory.allocate(arena, variable.size, "variable", self.context)
            if allocation is None:
                raise Refusal("OUT_OF_MEMORY", f"no memory for the variable {variable.name!r}")
            self.variables[variable.name] = allocation
        addresses = {**self.tree.code_addresses, **self.symbols}
        for variable in placed:
            _initialize(variable, addresses)


class Function:
    """A kernel of a loaded module.

    Attributes
    ----------
    kernel : ptx.Kernel
    parameters : ParameterSpace
    """

    def __init__(self, module: Module, kernel: ptx.Kernel) -> None:
        self.handle = new_handle()
        self.module = module
        self.kernel = kernel
        self.parameters = ParameterSpace(kernel)
        self.settings: dict[str, int] = {}
        """What cuFuncSetAttribute was told, by the attribute's name."""
        self._executable: Executable | None = None
        self._lock = threading.Lock()
        self._last_run: tuple[float, int] | None = None

    @property
    def context(self) -> Context:
        """The context of its module."""
        return self.module.context

    @property
    def max_dynamic_shared(self) -> int:
        """The most dynamic shared memory a launch may ask for."""
        return self.settings.get(DYNAMIC_SHARED, default_dynamic_shared(self.kernel))

    @property
    def is_loaded(self) -> bool:
        """Whether it was made executable."""
        return self._executable is not None

    @property
    def max_threads(self) -> int:
        """The most threads a block may have."""
        return max_threads(self.kernel)

    def load(self) -> Executable:
        """Return what runs the kernel, made at the first call; refuse a kernel the engine cannot run."""
        if self._executable is None:
            with self._lock:
                if self._executable is None:
                    self._executable = self._prepare()
        return self._executable

    def is_brief(self, threads: int) -> bool:
        """Say whether a launch of so many threads likely ends within a millisecond, by its last run."""
        if self._last_run is None:
            return False
        seconds, threads_then = self._last_run
        return seconds * max(threads / threads_then, 1) < BRIEF_SECONDS

    def run(self, executable: Executable, launch: Launch, threads: int) -> None:
        """Execute a launch and remember how long it took."""
        start = time.perf_counter()
        executable.run(launch)
        self._last_run = time.perf_counter() - start, threads

    def _prepare(self) -> Executable:
        module = self.module
        try:
            return module.engine.load(module.tree, self.kernel.name, module.symbols)
        except ptx.PtxError as error:
            raise Refusal(error.code, f"kernel {self.kernel.name!r}: {error}") from error


def max_threads(kernel: ptx.Kernel) -> int:
    """Return the most threads a block of a kernel may have."""
    return min(kernel.max_threads or 1024, 1024)


def default_dynamic_shared(kernel: ptx.Kernel) -> int:
    """Return how much dynamic shared memory a kernel may have without asking for more."""
    return max(DEFAULT_SHARED - kernel.static_shared, 0)


def parse(text: str, capability: tuple[int, int]) -> ptx.Module:
    """Return the syntax tree of a PTX text that a device of this compute capability accepts.

    PTX for a newer target is INVALID_PTX, as driver 580 answers.
    """
    try:
        tree = ptx.parse(text)
    except ptx.PtxError as error:
        raise Refusal(error.code, str(error)) from error
    if not accepts(capability, tree.target, tree.target_features):
        major, minor = capability
        raise Refusal(
            "INVALID_PTX",
            f"the PTX is for sm_{tree.target}{tree.target_features}, the device has compute capability "
            f"{major}.{minor}: compile it for sm_{major}{minor} or an older one",
        )
    return tree


def _initialize(variable: ptx.Variable, addresses: dict[str, int]) -> None:
    base = addresses[variable.name]
    if variable.initial:
        write_bytes(base, variable.initial[: variable.size])
    for offset, symbol, addend in variable.relocations:
        if symbol not in addresses:
            text = f"{variable.name!r} refers to {symbol!r}, which is not defined"
            raise Refusal("SHARED_OBJECT_SYMBOL_NOT_FOUND", text)
        value = (addresses[symbol] + addend) & (2**64 - 1)
        write_bytes(base + offset, value.to_bytes(8, "little"))
