"""The interpreter as the virtual driver sees it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from gpufleet.virtual.engine import Dim3, Launch
from gpufleet.virtual.interpreter.addresses import GlobalMemory
from gpufleet.virtual.interpreter.batch import Batch
from gpufleet.virtual.interpreter.code import Code
from gpufleet.virtual.interpreter.decode import decode
from gpufleet.virtual.interpreter.decoder import Decoder
from gpufleet.virtual.interpreter.lanes import Geometry
from gpufleet.virtual.interpreter.scheduler import Scheduler
from gpufleet.virtual.interpreter.values import Array
from gpufleet.virtual.ptx.errors import invalid
from gpufleet.virtual.ptx.layout import reachable, shared_layout
from gpufleet.virtual.ptx.syntax import Function, Kernel, Module

BATCH_LANES = 64 << 10
"""Lanes executed together: enough to make Python's share small, few enough to stay near the CPU's caches.

Measured with 512 KiB of second-level cache: mandelbrot 570 ms with 32 Ki, 380 with 64 Ki, 320 with 128 Ki
lanes; saxpy 19, 20, 28 ms; tiled matmul 160, 143, 166 ms.
"""
_SHARED_AT_ONCE = 64 << 20
_LOCAL_AT_ONCE = 256 << 20
"""Bytes of shared and of local memory that the blocks of one batch may have together."""
_REMEMBERED_GEOMETRIES = 8


class InterpreterEngine:
    """Executes PTX with NumPy, checking every access.

    It reads and writes only inside `DeviceMemory.spans()`, and answers what a GPU answers with a
    sticky error by `KernelFault`. Launches of one engine may run at the same time in several threads;
    their atomic operations exclude each other.
    """

    name = "interpreter"

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def load(self, module: Module, kernel: str, symbols: Mapping[str, int]) -> InterpretedKernel:
        """Decode a kernel and every function that it may call.

        Raises
        ------
        PtxError
            NOT_SUPPORTED for valid PTX that is not carried out, INVALID_PTX for a malformed body.
        """
        function = module.kernels.get(kernel)
        if function is None:
            raise invalid(f"the module has no kernel {kernel!r}")
        return InterpretedKernel(_Program(module, function, symbols, self._lock), function.name)


class _Program:
    """A kernel and the functions it reaches, decoded (see decoder.Linker)."""

    def __init__(
        self, module: Module, kernel: Kernel, symbols: Mapping[str, int], lock: threading.Lock
    ) -> None:
        self.module = module
        self.lock = lock
        self.layout = shared_layout(module, kernel)
        self._kernel = kernel
        self._addresses = dict(symbols) | module.code_addresses
        self._addresses |= {
            name: offset for (owner, name), offset in self.layout.offsets.items() if not owner
        }
        self._codes: dict[str, Code] = {}
        self.kernel = self.code(kernel)
        self.local_bytes = kernel.local_bytes

    def code(self, function: Function) -> Code:
        """Return the decoded function."""
        known = self._codes.get(function.name)
        if known is not None:
            return known
        code = self._codes[function.name] = Code(function.name, len(self._codes))
        own = {
            name: offset for (owner, name), offset in self.layout.offsets.items() if owner == function.name
        }
        decode(Decoder(self, function, code, self._addresses | own))
        return code

    def candidates(self) -> list[Function]:
        """Return the functions that an indirect call may reach."""
        return [
            f for f in reachable(self.module, self._kernel) if f is not self._kernel and f.build is not None
        ]


class InterpretedKernel:
    """A kernel ready to run."""

    def __init__(self, program: _Program, name: str) -> None:
        self.name = name
        self._kernel = program.kernel
        self._static_shared = program.layout.static_bytes
        self._dynamic_offset = program.layout.dynamic_offset
        self._local_bytes = program.local_bytes
        self._geometries: dict[tuple[Dim3, int], Geometry] = {}

    def run(self, launch: Launch) -> None:
        """Execute the whole grid, or raise `KernelFault`. Safe to call from several threads."""
        with np.errstate(all="ignore"):
            self._run(launch)

    def _run(self, launch: Launch) -> None:
        grid, block = launch.grid, launch.block
        total = grid[0] * grid[1] * grid[2]
        shared = max(self._static_shared, self._dynamic_offset + launch.dynamic_shared)
        at_once = total if launch.cooperative else self._blocks_at_once(block, shared, total)
        memory = GlobalMemory(launch.memory)
        template = self._template(launch)
        for first in range(0, total, at_once):
            geometry = self._geometry(block, min(at_once, total - first))
            batch = Batch(self._kernel, launch, memory, template, geometry, first, shared)
            try:
                Scheduler(batch).run(batch.first_group())
            finally:
                batch.close()

    def _blocks_at_once(self, block: Dim3, shared: int, total: int) -> int:
        threads = block[0] * block[1] * block[2]
        blocks = max(1, BATCH_LANES // threads)
        if shared:
            blocks = min(blocks, _SHARED_AT_ONCE // shared)
        if self._local_bytes:
            blocks = min(blocks, _LOCAL_AT_ONCE // (self._local_bytes * threads))
        return max(1, min(blocks, total))

    def _template(self, launch: Launch) -> list[Array]:
        """Return the kernel's initial values with this launch's parameters."""
        template = self._kernel.template.copy()
        for slot, dtype, offset in self._kernel.launch_slots:
            template[slot] = np.frombuffer(launch.parameters, dtype, 1, offset)
        return template

    def _geometry(self, block: Dim3, blocks: int) -> Geometry:
        """Return a geometry, remembered: launches come back with the same shapes."""
        key = block, blocks
        found = self._geometries.get(key)
        if found is None:
            found = Geometry(block, blocks)
            if len(self._geometries) >= _REMEMBERED_GEOMETRIES:
                self._geometries = {}
            self._geometries[key] = found
        return found
