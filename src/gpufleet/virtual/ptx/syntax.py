"""The syntax tree of a PTX module.

`parse` (see parser.py) reads declarations at once and function bodies at first use
(`Function.body`). Sizes, alignments and offsets are in bytes. Everything here is immutable once
built, so trees are shared freely between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpufleet.virtual.ptx.errors import unsupported
from gpufleet.virtual.ptx.operations import Operation

CODE_WINDOW = 0x7C0D_0000_0000_0000
"""Function addresses start here: no canonical data address, so a call through a wild pointer is noticed."""


# ---------------------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class Register:
    """A register of one function. Names declared again in an inner `{ }` are different registers."""

    name: str
    type: str
    """The declared type: b32, f64, pred, ... Only its size binds; the instruction says what the bits mean."""
    index: int
    """Dense within the function: `function.body.registers[index]` is this register."""


@dataclass(frozen=True)
class Immediate:
    """A constant, already as the bits of the type that the instruction wants there."""

    bits: int
    type: str


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x or %clock64 (PTX ISA 10)."""

    name: str
    type: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, parameter or function, in its own space (not generic)."""

    name: str
    """Unique: an inner redeclaration of `x` is called `x#2` here and in `Body.variables`."""
    space: str
    """global, const, shared, local, param (of this function or of a call), or code."""
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A place in the same function."""

    name: str
    block: int
    """Index in `Body.blocks`."""


@dataclass(frozen=True)
class Address:
    """A memory operand `[base + offset]`; no base means an absolute address."""

    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True)
class Vector:
    """Several operands in braces."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations `d|p`."""

    first: Register | Discard
    second: Register | Discard


@dataclass(frozen=True)
class Selected:
    """Some bytes or halves of a register, as video instructions take them: `%r1.b3`, `%r1.h10`."""

    register: Register
    selector: str


@dataclass(frozen=True)
class Negated:
    """A predicate operand with `!`."""

    register: Register


@dataclass(frozen=True)
class Discard:
    """The destination `_`."""


@dataclass(frozen=True)
class CallTarget:
    """All of a call: where to, with what, and what is expected back."""

    target: Register | Symbol
    """A symbol in the space `code` for a direct call."""
    results: tuple[Operand, ...]
    arguments: tuple[Operand, ...]
    """Symbols in the space `param`, registers or immediates."""
    prototype: Prototype | None = None
    candidates: tuple[str, ...] = ()
    """Functions that an indirect call may reach, where `.calltargets` lists them."""


@dataclass(frozen=True)
class Targets:
    """The labels that a `brx.idx` chooses from."""

    labels: tuple[Label, ...]


@dataclass(frozen=True)
class Raw:
    """Operands of an instruction whose shape the table does not give."""

    text: str


Operand = (
    Register
    | Immediate
    | Special
    | Symbol
    | Label
    | Address
    | Vector
    | Pair
    | Selected
    | Negated
    | Discard
    | CallTarget
    | Targets
    | Raw
)


# ------------------------------------------------------------------------------------ instructions


@dataclass(frozen=True)
class Location:
    """A place in the CUDA source, from `.loc`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(eq=False)
class Instruction:
    """One instruction: `@guard operation operands;`."""

    __slots__ = ("guard", "guard_negated", "line", "operands", "operation", "source")

    operation: Operation
    """Opcode, modifiers and types, looked up in the table of instructions."""
    operands: tuple[Operand, ...]
    """In the order of the table's shape; destinations first."""
    guard: Register | None
    guard_negated: bool
    line: int
    """1-based line of the PTX text."""
    source: Location | None

    @property
    def opcode(self) -> str:
        """The name alone: `ld` for ld.global.f32."""
        return self.operation.name

    def __str__(self) -> str:
        return self.operation.text


@dataclass(eq=False)
class BasicBlock:
    """Instructions `start` to `stop` (exclusive), entered at the first and left after the last."""

    index: int
    start: int
    stop: int
    labels: tuple[str, ...]
    successors: tuple[int, ...]
    """Blocks that may follow; the last is the next in the text if control can fall through."""


@dataclass
class Body:
    """What stands between the braces of a function."""

    instructions: list[Instruction]
    registers: list[Register]
    variables: dict[str, Variable]
    """Declared inside, by unique name: shared, local, and param (the blocks that calls use)."""
    blocks: list[BasicBlock]
    """In the order of the text; the first is the entry."""


# ------------------------------------------------------------------------------------ declarations


@dataclass(frozen=True)
class Parameter:
    """One `.param` of a kernel or function, placed in the parameter space as the driver lays it out."""

    name: str
    type: str
    """PTX type without the dot: u64, f32, b8 (an array of b8 for a struct)."""
    size: int
    align: int
    offset: int
    pointer: bool = False
    """Declared with `.ptr`; without it a u64 may still be one."""
    register: bool = False
    """Declared `.reg`, in a function: passed in the register of that name."""


@dataclass(frozen=True)
class Variable:
    """A variable of a module or a function."""

    name: str
    space: str
    """global, const or shared; inside a function also local and param."""
    size: int
    align: int
    initial: bytes = b""
    """Initial bytes, zero-padded to `size` by the loader; empty: all zero."""
    relocations: tuple[tuple[int, str, int], ...] = ()
    """(offset, symbol, addend): at `offset` belongs the 8-byte address of `symbol` plus `addend`.

    The symbol is a variable, or a function, whose address `Module.code_addresses` gives.
    """
    visible: bool = False
    external: bool = False
    """Declared `.extern`: defined in another module, or, for shared of size 0, sized by the launch."""


@dataclass(frozen=True)
class Prototype:
    """Parameters and results of an indirect call."""

    results: tuple[Parameter, ...]
    parameters: tuple[Parameter, ...]
    noreturn: bool = False


@dataclass(eq=False)
class Function:
    """A function or kernel; its body is read at first use."""

    name: str
    line: int
    parameters: tuple[Parameter, ...]
    results: tuple[Parameter, ...] = ()
    noreturn: bool = False
    visible: bool = False
    build: Callable[[], Body] | None = field(default=None, repr=False)
    """Reads the body; None for a function that is only declared (`vprintf`, `__assertfail`)."""
    names_used: frozenset[str] = frozenset()
    """Every identifier in the body: what it may call and touch, known without building the tree."""
    declared: tuple[Variable, ...] = ()
    """Shared and local variables declared in the body."""
    local_area: int = 0
    """Bytes of local memory before those variables, for `alloca` (stack.py)."""

    @cached_property
    def body(self) -> Body:
        """The instructions. Raises `PtxError` for a malformed body or one that is not there."""
        if self.build is None:
            raise unsupported(f"function {self.name!r} is declared but not defined", self.line)
        return self.build()


@dataclass(eq=False)
class Kernel(Function):
    """A function that the host launches (`.entry`)."""

    max_threads: int | None = None
    """From `.maxntid` or `.reqntid`: the product of its dimensions."""
    required_block: tuple[int, int, int] | None = None
    """From `.reqntid`: a launch with any other block is refused."""
    registers: int = 0
    """An estimate of what a compiler would need, 16 to 255."""
    static_shared: int = 0
    """Bytes of shared memory that the kernel and the functions it calls declare."""
    local_bytes: int = 0
    """Bytes of local memory per thread that they declare."""

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter space: the last offset plus size, without tail padding."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass
class Module:
    """One PTX text."""

    version: tuple[int, int]
    target: int
    """The number in sm_NN."""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    """Device functions (`.func`) by name, also those only declared."""
    variables: dict[str, Variable] = field(default_factory=dict)
    """Module-scope variables; the driver gives memory to those in global and const."""
    target_features: str = ""
    """What follows the number: "a" in sm_90a, "f" in sm_100f, or nothing."""
    address_size: int = 64
    aliases: Mapping[str, str] = field(default_factory=dict)
    """From `.alias`: name to the function it stands for."""
    digest: bytes = b""
    """SHA-256 of the text: what caches of compiled code know a module by."""

    @cached_property
    def code_addresses(self) -> dict[str, int]:
        """Address of every function and kernel, for tables of function pointers and indirect calls."""
        names = [*self.functions, *self.kernels, *self.aliases]
        return {name: CODE_WINDOW + 16 * i for i, name in enumerate(dict.fromkeys(names), 1)}

    def function(self, name: str) -> Function | None:
        """Return the function or kernel of that name, through aliases."""
        name = self.aliases.get(name, name)
        return self.functions.get(name) or self.kernels.get(name)

    def is_missing(self, name: str) -> bool:
        """Say whether a function is declared, but not defined."""
        found = self.functions.get(name)
        return found is not None and found.build is None

    def check(self) -> None:
        """Read every body now; raises `PtxError` for the first malformed one."""
        for function in (*self.functions.values(), *self.kernels.values()):
            if function.build is not None:
                _ = function.body
