"""What all code of one LLVM function shares: registers, and values that never change in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpufleet.virtual.jit.abi import Job, Worker, offset
from gpufleet.virtual.jit.barriers import Frame
from gpufleet.virtual.jit.llvm import Target
from gpufleet.virtual.jit.nodes import Graph
from gpufleet.virtual.jit.shapes import BlockShape, Facts
from gpufleet.virtual.jit.storage import storage_types
from gpufleet.virtual.jit.text import Code, Masks, constant, vector, width
from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.layout import SharedLayout, local_layout
from gpufleet.virtual.ptx.syntax import Function, Instruction, Module, Variable


@dataclass
class Program:
    """What all functions of one compiled kernel share."""

    module: Module
    kernel: Function
    target: Target
    block: BlockShape
    shared: SharedLayout
    dynamic_shared: bool
    """Whether the kernel has shared memory that the launch sizes."""
    local_bytes: int
    """Local memory per thread, with room for recursion."""
    symbols: list[str] = field(default_factory=list)
    """Variables whose addresses the kernel reads from the job's table, in the table's order."""
    sites: list[dict[str, Any]] = field(default_factory=list)
    """What a fault may be about: the accesses, or the instruction, that a check stands for."""
    declarations: set[str] = field(default_factory=set)
    functions: list[Function] = field(default_factory=list)
    """The kernel, and the functions that it may call."""
    with_barriers: set[str] = field(default_factory=set)
    """Functions that contain barriers."""
    ending: set[str] = field(default_factory=set)
    """Functions from which not all lanes may come back, because they `exit`."""
    called: dict[str, Function] = field(default_factory=dict)
    """Functions that generated code calls so far."""
    helpers: dict[str, str] = field(default_factory=dict)
    """Functions that generated code calls, by name (helpers.py)."""

    @property
    def lanes(self) -> int:
        """Lanes of a vector."""
        return self.block.lanes

    def another_module(self) -> Program:
        """For a second LLVM module of the same kernel: what it calls, it has for itself."""
        return replace(self, declarations=set(), called={}, helpers={})

    def symbol_index(self, name: str) -> int:
        """Place of a variable's address in the job's table."""
        if name not in self.symbols:
            self.symbols.append(name)
        return self.symbols.index(name)


class Unit:
    """One LLVM function being made from one PTX function."""

    def __init__(self, program: Program, function: Function, graph: Graph, known: Facts) -> None:
        self.program = program
        self.function = function
        self.graph = graph
        self.facts = known
        self.lanes = program.lanes
        self.masks = Masks(program.lanes, program.target.mask_bits)
        self.code = Code(program.declarations)
        self.storage = storage_types(graph.body)
        self.local_offsets, self.local_bytes = local_layout(function)
        self.local_top: str = "0"
        """Where this function's local variables begin in a thread's local memory, i64."""
        self.parameter_blocks: dict[str, str] = {}
        """Pointers to the words of parameters (calls.py), by name."""
        self.place_in_state: Callable[[str, int], int] | None = None
        """Where in %state a kernel keeps the words of a call's parameter: a name and bytes to an offset."""
        self.owners: dict[str, tuple[str, str]] = {}
        """For variables of functions copied into this one (inlining.py): the function, and the name there."""
        self._scalars: dict[int, str] = {}
        self._vectors: dict[int, str] = {}
        self._constants: dict[str, str] = {}
        self._carry: str | None = None
        self._waiting: str | None = None
        self.plain_barriers = True
        """Whether the only barrier is `bar.sync 0`."""
        self.frame = Frame({}, {}, {}, {}, 0)
        self.spelled_out = 0
        """Gathers and scatters so far that LLVM turns into an access per lane (memory.py)."""

    def place_locals(self, variables: Mapping[str, Variable]) -> None:
        """Give places to local variables of functions that were copied into this one."""
        for name, variable in variables.items():
            if variable.space == "local" and name not in self.local_offsets:
                place = -(-self.local_bytes // variable.align) * variable.align
                self.local_offsets[name] = place
                self.local_bytes = -(-(place + variable.size) // 16) * 16

    # ------------------------------------------------------------------------------------ registers

    def scalar_slot(self, register: int) -> str:
        """Where a uniform or affine register is kept: lane 0."""
        if register not in self._scalars:
            self._scalars[register] = self.code.slot(self.storage[register])
        return self._scalars[register]

    def vector_slot(self, register: int) -> str:
        """Where a varying register is kept."""
        if register not in self._vectors:
            self._vectors[register] = self.code.slot(self.vector_type(register))
        return self._vectors[register]

    def forget_registers(self) -> list[str]:
        """Code after which all registers are 0, so that LLVM carries nothing from warp to warp.

        Not poison: a lane that never defined a register must not make a branch of others undefined.
        """
        scalars = [
            f"  store {self.storage[r]} {constant(self.storage[r], 0)}, ptr {s}"
            for r, s in self._scalars.items()
        ]
        vectors = [
            f"  store {self.vector_type(r)} zeroinitializer, ptr {s}" for r, s in self._vectors.items()
        ]
        return scalars + vectors

    def vector_type(self, register: int) -> str:
        """Predicates are kept as masks."""
        element = self.storage[register]
        return self.masks.type if element == "i1" else vector(element, self.lanes)

    def vector_bytes(self, register: int) -> int:
        """Size of a varying register in a frame."""
        element = self.storage[register]
        bits = (1 if self.masks.bits else 32) if element == "i1" else width(element)
        return max(bits * self.lanes // 8, 4)

    def carry_slot(self) -> str:
        """Where the carry flag is kept, for all lanes."""
        if self._carry is None:
            self._carry = self.code.slot(vector("i1", self.lanes))
        return self._carry

    def waiting_slot(self) -> str:
        """The barrier at which parked lanes of the current warp wait, or -1."""
        if self._waiting is None:
            self._waiting = self.code.slot("i32")
        return self._waiting

    # ------------------------------------------------------------------------------------ constants

    def once(self, key: str, *texts: str) -> str:
        """A value computed at the start of the function; `{}` in a text stands for the one before."""
        if key not in self._constants:
            value = ""
            for text in texts:
                value = self.code.once(text.replace("{}", value))
            self._constants[key] = value
        return self._constants[key]

    def job(self, name: str, type: str, index: int = 0) -> str:
        """A field of the job."""
        place = offset(Job, name) + 4 * index
        return self.once(
            f"job.{name}.{index}",
            f"getelementptr i8, ptr %job, i64 {place}",
            f"load {type}, ptr {{}}, !invariant.load !0",
        )

    def worker_field(self, name: str) -> str:
        """Address of a field of the worker."""
        return self.once(f"worker.{name}", f"getelementptr i8, ptr %worker, i64 {offset(Worker, name)}")

    def memory_base(self) -> str:
        """First address of the region that kernels may touch, i64."""
        memory = self.job("memory", "ptr")
        return self.once("memory.base", f"ptrtoint ptr {memory} to i64")

    def arena(self) -> str:
        """The worker's arena: shared memory, barriers, frames, local memory."""
        return self.once("arena", f"load ptr, ptr {self.worker_field('arena')}")

    def arena_base(self) -> str:
        """The same as i64: the generic address of the block's shared memory."""
        return self.once("arena.base", f"ptrtoint ptr {self.arena()} to i64")

    def locals(self) -> str:
        """Local memory of the block's threads."""
        start = self.job("locals", "i64")
        return self.once("locals", f"getelementptr i8, ptr {self.arena()}, i64 {start}")

    def shared_bytes(self) -> str:
        """Size of the block's shared memory: a constant where the launch cannot change it."""
        if self.program.dynamic_shared:
            return self.job("shared_bytes", "i64")
        return str(self.program.shared.static_bytes)

    def symbol_address(self, name: str) -> str:
        """Device address of a variable, i64."""
        index = self.program.symbol_index(name)
        table = self.job("symbols", "ptr")
        return self.once(
            f"symbol.{name}",
            f"getelementptr i64, ptr {table}, i64 {index}",
            "load i64, ptr {}, !invariant.load !0",
        )

    def site(self, instruction: Instruction, **more: Any) -> int:
        """Number of a place that a fault can name."""
        entry = {"line": instruction.line, "text": str(instruction), **more}
        if instruction.source is not None:
            entry["source"] = str(instruction.source)
        if self.function is not self.program.kernel:
            entry["function"] = self.function.name
        self.program.sites.append(entry)
        return len(self.program.sites) - 1

    def refuse(self, instruction: Instruction, why: str = "") -> Exception:
        """The error for what this engine does not carry out."""
        return unsupported(f"{instruction}{' ' + why if why else ''}", instruction.line)
