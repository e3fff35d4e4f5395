"""The JIT engine: kernels compiled with LLVM, one variant per class of block shape, run on all cores."""

from __future__ import annotations

import ctypes as c
import itertools
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpufleet.virtual.engine import Executable, Launch
from gpufleet.virtual.jit import cache, callbacks, faults
from gpufleet.virtual.jit.abi import SLACK, Job
from gpufleet.virtual.jit.handover import DIVERGED
from gpufleet.virtual.jit.kernel import BARRIERS_BYTES, ENTRY, Generated, generate
from gpufleet.virtual.jit.llvm import Effort, compiler
from gpufleet.virtual.jit.nodes import Graph, build_graph
from gpufleet.virtual.jit.optimiser import optimiser
from gpufleet.virtual.jit.plan import WARP, block_shape, needs_whole_warps, widest_vector
from gpufleet.virtual.jit.runtime import is_supported, runtime
from gpufleet.virtual.jit.shapes import BlockShape, Facts, facts
from gpufleet.virtual.jit.unit import Program
from gpufleet.virtual.jit.variant import Code, Later, Variant
from gpufleet.virtual.ptx import Module
from gpufleet.virtual.ptx.layout import local_layout, reachable, shared_layout
from gpufleet.virtual.ptx.syntax import Function


class JitEngine:
    """Compiles kernels to machine code; implements `gpufleet.virtual.engine.Engine`."""

    name = "jit"

    def __init__(self, effort: Effort | None = None) -> None:
        """Make an engine.

        Parameters
        ----------
        effort : Effort, optional
            How kernels are compiled. By default quickly, and again with all optimisation when their
            launches have run for a while (variant.py).
        """
        if not is_supported():
            raise OSError("the JIT engine needs 64-bit Linux to catch faults; use the interpreter here")
        self._effort = effort

    def load(self, module: Module, kernel: str, symbols: Mapping[str, int]) -> JitExecutable:
        """Compile a kernel for the most common class of block shapes; others follow when they are used.

        Raises
        ------
        PtxError
            NOT_SUPPORTED for an instruction that this engine does not carry out, with its line.
        """
        executable = JitExecutable(module, kernel, symbols, self._effort)
        executable.prepare(module.kernels[kernel].required_block or (256, 1, 1))
        return executable


class JitExecutable:
    """One kernel; implements `gpufleet.virtual.engine.Executable`. Safe to use from several threads."""

    def __init__(
        self, module: Module, kernel: str, symbols: Mapping[str, int], effort: Effort | None = None
    ) -> None:
        self._module = module
        self._effort = effort
        self._kernel = module.kernels[kernel]
        self._symbols = symbols
        self._variants: dict[BlockShape, Variant] = {}
        self._lock = threading.RLock()

    def prepare(self, block: tuple[int, int, int]) -> None:
        """Compile the code that blocks of this shape need, if that has not happened yet."""
        self._variant(block)

    def prepare_diverged(self, block: tuple[int, int, int]) -> None:
        """Compile also what runs when lanes part, which otherwise happens when they first do."""
        self._variant(block).code.diverged.get()

    def run(self, launch: Launch) -> None:
        """Execute the whole grid, or raise `KernelFault`."""
        if launch.cooperative or launch.memory.view(np.uint8).nbytes >= _ALL_ADDRESSES:
            self._interpreted.run(launch)
            return
        variant = self._variant(launch.block)
        code = variant.code
        job = Job()
        keep = _describe(job, launch, code)
        if not job.total:
            return
        with callbacks.announced(job, launch, code.diverged.get), variant.running(job, code) as still_running:

            def cancelled() -> bool:
                still_running()
                return launch.cancelled.is_set()

            runtime().run(job, not code.generated.loops, cancelled)
        del keep
        if job.faulted:
            raise faults.describe(job, launch, self._kernel.name, code.generated)

    @cached_property
    def _interpreted(self) -> Executable:
        """The interpreter's form of this kernel, for what compiled code does not do: cooperative grids,
        whose blocks wait for each other, and host memory registered with the driver, which lies outside
        the region that compiled code checks its accesses against."""
        from gpufleet.virtual.interpreter import InterpreterEngine

        return InterpreterEngine().load(self._module, self._kernel.name, self._symbols)

    # ---- compiling

    def generated(self, block: tuple[int, int, int]) -> Generated:
        """Return the LLVM IR for blocks of this shape, to read."""
        return self.generate(block_shape(block, *self._plan))

    def _variant(self, block: tuple[int, int, int]) -> Variant:
        shape = block_shape(block, *self._plan)
        variant = self._variants.get(shape)
        if variant is None:
            with self._lock:
                variant = self._variants.get(shape)
                if variant is None:
                    variant = self._variants[shape] = self._build(shape)
        return variant

    @cached_property
    def _plan(self) -> tuple[int, bool]:
        """The widest vector, and whether lanes of a warp must run in step."""
        target = compiler().target
        name = cache.key("plan", self._module.digest, self._kernel.name, target.vector_bytes)
        found = cache.load(name) if self._module.digest else None
        if found is not None:
            return found[0]["widest"], found[0]["whole_warps"]
        widest = widest_vector(*self._analysed, target.vector_bytes)
        whole_warps = any(needs_whole_warps(f) for f in self._functions if f.build is not None)
        if self._module.digest:
            cache.store(name, {"widest": widest, "whole_warps": whole_warps}, b"")
        return widest, whole_warps

    def _build(self, shape: BlockShape) -> Variant:
        """The best code that is on disk; if there is none, new code."""
        effort = self._effort or Effort.QUICK
        if self._effort is None:
            best = self._from_disk(shape, Effort.BEST)
            if best is not None:
                return Variant(best, None)
        code = self._from_disk(shape, effort) or self._compile(shape, effort)
        return Variant(code, None if self._effort else partial(self._improve_later, shape))

    def _improve_later(self, shape: BlockShape, variant: Variant) -> None:
        optimiser().submit(lambda: variant.replace(self._compile(shape, Effort.BEST)))

    def _compile(self, shape: BlockShape, effort: Effort) -> Code:
        generated = self.generate(shape)
        image = compiler().compile(generated.source, effort)
        later = zlib.compress(generated.diverged.encode(), 1)
        generated = generated.without_source()
        code = self._link(shape, effort, generated, image, later)
        if effort is Effort.BEST:
            code.diverged.get()
        if self._module.digest:
            description = {**asdict(generated), "code_bytes": len(image)}
            cache.store(self._key(shape, effort), description, image + later)
        return code

    def _from_disk(self, shape: BlockShape, effort: Effort) -> Code | None:
        found = cache.load(self._key(shape, effort)) if self._module.digest else None
        if found is None:
            return None
        description, data = found
        size = description.pop("code_bytes")
        return self._link(shape, effort, Generated(**description), data[:size], data[size:])

    def _key(self, shape: BlockShape, effort: Effort, function: str = ENTRY) -> str:
        target = compiler().target
        place = (self._module.digest, self._kernel.name, shape, effort.value, function)
        return cache.key("code", *place, target.cpu, target.features, target.triple)

    def _link(
        self, shape: BlockShape, effort: Effort, generated: Generated, image: bytes, later: bytes
    ) -> Code:
        """Code in memory; `later` is the compressed source of diverged code."""
        linked = _in_memory(image, ENTRY)
        addresses = [self._symbols[name] for name in generated.symbols]
        table = (c.c_uint64 * max(len(addresses), 1))(*addresses)
        diverged = Later(partial(self._diverged, self._key(shape, effort, DIVERGED), effort, later))
        return Code(generated, effort, linked[ENTRY], diverged, table, linked)

    def _diverged(self, key: str, effort: Effort, source: bytes) -> tuple[int, Any]:
        """Compile what runs warps whose lanes have parted."""
        found = cache.load(key) if self._module.digest else None
        image = found[1] if found else compiler().compile(zlib.decompress(source).decode(), effort)
        if found is None and self._module.digest:
            cache.store(key, {}, image)
        linked = _in_memory(image, DIVERGED)
        return linked[DIVERGED], linked

    @cached_property
    def _analysed(self) -> tuple[Graph, Facts]:
        graph = build_graph(self._kernel.body)
        return graph, facts(graph)

    @cached_property
    def _functions(self) -> list[Function]:
        return reachable(self._module, self._kernel)

    def generate(self, shape: BlockShape) -> Generated:
        """Generate LLVM IR for a class of block shapes."""
        names = frozenset().union(*(f.names_used for f in self._functions))
        dynamic = any(
            v.external and v.space == "shared" and v.name in names for v in self._module.variables.values()
        ) or any(v.external and v.space == "shared" for f in self._functions for v in f.declared)
        program = Program(
            self._module,
            self._kernel,
            compiler().target,
            shape,
            shared_layout(self._module, self._kernel),
            dynamic,
            _local_bytes(self._module, self._functions),
            functions=self._functions,
        )
        return generate(program, *self._analysed)


def _in_memory(image: bytes, function: str) -> Any:
    return compiler().link(image, [function], {**runtime().imports, **callbacks.imports()})


_ALL_ADDRESSES = 1 << 46
"""A region of this size is not one: it stands for all addresses of the process."""


def _describe(job: Job, launch: Launch, code: Code) -> Sequence[Any]:
    """Fill in a job; returns what must be kept alive while it runs."""
    generated = code.generated
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    ids, stride = _thread_ids(launch.block)
    parameters = c.create_string_buffer(launch.parameters, len(launch.parameters) + SLACK)
    job.memory = launch.memory.base
    job.memory_bytes = launch.memory.view(np.uint8).nbytes
    job.parameters = c.addressof(parameters)
    job.parameter_bytes = len(launch.parameters)
    job.symbols = c.addressof(code.symbols)
    job.thread_ids = ids.ctypes.data
    job.thread_id_stride = stride
    job.entry = code.entry
    job.diverged = code.diverged.address
    job.grid[:] = launch.grid
    job.block[:] = launch.block
    job.threads = threads
    job.warps = -(-threads // generated.lanes)
    job.lanes = generated.lanes
    job.warps32 = -(-threads // WARP)
    job.dynamic_shared = launch.dynamic_shared
    job.multiprocessors = launch.multiprocessors
    job.clock_rate = launch.clock_rate
    job.grid_id = next(_grid_ids)
    job.total = launch.grid[0] * launch.grid[1] * launch.grid[2] if threads else 0
    _lay_out_arena(job, generated, launch.dynamic_shared)
    return parameters, ids


def _local_bytes(module: Module, functions: list[Function]) -> int:
    """Local memory per thread: every function once, and where calls may nest deeper, room for that."""
    total = sum(local_layout(function)[1] for function in functions)
    calls = {f.name: f.names_used for f in functions}
    nested = any(name in calls and f.name != functions[0].name for f in functions for name in calls[f.name])
    return total + _NESTED_LOCALS if nested and any(local_layout(f)[1] for f in functions[1:]) else total


_NESTED_LOCALS = 16 * 1024
"""Bytes of local memory per thread for functions that call functions, which may be recursive."""


def _lay_out_arena(job: Job, generated: Generated, dynamic_shared: int) -> None:
    """Shared memory, then barriers and frames, then local memory; all on cache lines."""
    shared = max(generated.static_shared, generated.dynamic_offset + dynamic_shared)
    job.shared_bytes = job.shared_total = shared
    place = -(-(shared + SLACK) // 64) * 64
    if generated.frame_bytes:
        place += BARRIERS_BYTES
        job.frames = place
        place += generated.frame_bytes * job.warps
    job.locals = place
    place += generated.local_bytes * job.warps * generated.lanes
    job.arena_bytes = place + SLACK


@lru_cache(maxsize=64)
def _thread_ids(block: tuple[int, int, int]) -> tuple[NDArray[np.uint32], int]:
    """Thread indices along x, y and z for thread 0, 1, ..., padded to whole vectors."""
    x, y, z = block
    count = -(-(x * y * z) // 64) * 64
    linear = np.arange(count, dtype=np.uint32)
    table = np.stack([linear % x, linear // x % y, linear // (x * y)]).astype(np.uint32)
    return table, count * 4


_grid_ids = itertools.count(1)
