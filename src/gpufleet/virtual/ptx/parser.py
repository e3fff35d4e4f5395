"""PTX text to a module: the statements outside functions (PTX ISA 11)."""

from __future__ import annotations

import re
from functools import partial
from hashlib import sha256

from gpufleet.virtual.ptx import declarations
from gpufleet.virtual.ptx.bodies import ModuleNames, read_body
from gpufleet.virtual.ptx.cursor import Cursor
from gpufleet.virtual.ptx.errors import PtxError, invalid
from gpufleet.virtual.ptx.layout import local_layout, reachable, shared_layout
from gpufleet.virtual.ptx.scan import scan_body, skip_file, skip_location
from gpufleet.virtual.ptx.stack import give_stacks
from gpufleet.virtual.ptx.syntax import Function, Kernel, Module, Parameter, Variable
from gpufleet.virtual.ptx.tokens import tokenize

NEWEST_VERSION = (9, 9)
"""PTX up to this `.version` is accepted; a newer one may mean something else than is known here."""

HEAP = "malloc.heap"
"""The variable in which `malloc` of a module's kernels finds memory; no name of PTX has a dot."""
HEAP_BYTES = 8 << 20
"""As CU_LIMIT_MALLOC_HEAP_SIZE is if nobody sets it."""
HEAP_FUNCTIONS = ("malloc", "free")

_TARGET = re.compile(r"(?:sm|compute)_(\d+)([a-z]?)\Z")


def parse(text: str) -> Module:
    """Read a PTX text.

    Declarations are read at once; bodies are only searched for opcodes that PTX does not have, and
    become trees at first use.

    Parameters
    ----------
    text : str
        A whole PTX module; what follows a NUL character is ignored.

    Raises
    ------
    PtxError
        INVALID_PTX for a malformed text, UNSUPPORTED_PTX_VERSION for a `.version` above 9.9,
        NOT_SUPPORTED for declarations that gpufleet does not know. Nothing else is raised.
    """
    cursor = Cursor(tokenize(text))
    try:
        module = _ModuleReader(cursor).read()
    except RecursionError:
        raise invalid("the text is nested too deeply", cursor.line) from None
    module.digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
    return module


class _ModuleReader:
    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.module = Module((0, 0), 0)
        self.symbols: dict[str, str] = {}
        self.files: dict[int, str] = {}
        self.aliases: dict[str, str] = {}

    def read(self) -> Module:
        cursor = self.cursor
        self._header()
        while not cursor.at_end:
            self._statement()
        self.module.aliases = self.aliases
        give_stacks([*self.module.kernels.values(), *self.module.functions.values()])
        if any(self.module.is_missing(name) for name in HEAP_FUNCTIONS):
            self.module.variables[HEAP] = Variable(HEAP, "global", HEAP_BYTES, 16)
        for kernel in self.module.kernels.values():
            _measure(self.module, kernel)
        return self.module

    def _header(self) -> None:
        cursor = self.cursor
        while cursor.peek() == ".file":
            index, path = skip_file(cursor)
            self.files[index] = path
        cursor.expect(".version")
        major, dot, minor = cursor.peek().partition(".")
        if not (dot and major.isdigit() and minor.isdigit() and len(major + minor) < 9):
            raise cursor.error("expected a version such as 8.0")
        self.module.version = int(major), int(minor)
        if self.module.version > NEWEST_VERSION:
            newest = ".".join(map(str, NEWEST_VERSION))
            raise PtxError(
                "UNSUPPORTED_PTX_VERSION",
                f"PTX {major}.{minor} is newer than {newest}, the newest known",
                cursor.line,
            )
        cursor.next()
        cursor.expect(".target")
        while True:
            match = _TARGET.match(cursor.peek())
            if match and not self.module.target:
                self.module.target, self.module.target_features = int(match[1]), match[2]
            cursor.name("a target such as sm_75")
            if not cursor.accept(","):
                break
        if not self.module.target:
            raise cursor.error("expected a target such as sm_75 before this")
        if cursor.accept(".address_size"):
            self.module.address_size = cursor.integer()
            if self.module.address_size not in (32, 64):
                raise cursor.error("expected an address size of 32 or 64 before this")

    # -------------------------------------------------------------------------------- statements

    def _statement(self) -> None:
        cursor = self.cursor
        linkage = set()
        while cursor.peek() in declarations.LINKAGE:
            linkage.add(cursor.next())
        token = cursor.peek()
        if token in (".entry", ".func"):
            self._function(frozenset(linkage))
        elif token in declarations.SPACES:
            for variable in declarations.variables(cursor, frozenset(linkage)):
                known = self.module.variables.get(variable.name)
                if known is None or known.external:
                    self.module.variables[variable.name] = variable
                    self.symbols[variable.name] = variable.space
        elif linkage:
            raise cursor.error("expected a variable or function")
        elif token == ".section":
            self._section()
        elif token == ".file":
            index, path = skip_file(cursor)
            self.files[index] = path
        elif token == ".loc":
            skip_location(cursor)
        elif token == ".alias":
            self._alias()
        elif token == ".pragma":
            cursor.skip_past(";")
        else:
            raise cursor.error("expected a declaration")

    def _section(self) -> None:
        cursor = self.cursor
        cursor.next()
        cursor.next()
        cursor.skip_braces()

    def _alias(self) -> None:
        cursor = self.cursor
        cursor.next()
        name = cursor.name()
        cursor.expect(",")
        self.aliases[name] = cursor.name()
        cursor.expect(";")
        self.symbols[name] = "code"

    # --------------------------------------------------------------------------------- functions

    def _function(self, linkage: frozenset[str]) -> None:
        cursor = self.cursor
        is_kernel = cursor.next() == ".entry"
        results: tuple[Parameter, ...] = ()
        while cursor.peek() in (".attribute",):
            cursor.next()
            cursor.skip_past(")")
        if not is_kernel and cursor.peek() == "(":
            results = declarations.parameters(cursor)
        line = cursor.line
        name = cursor.name("the name of a function")
        parameters = declarations.parameters(cursor) if cursor.peek() == "(" else ()
        function: Function
        if is_kernel:
            function = Kernel(name, line, parameters, visible=".visible" in linkage)
        else:
            function = Function(name, line, parameters, results, visible=".visible" in linkage)
        self._attributes(function)
        defined = cursor.peek() == "{"
        if defined:
            self._body(function)
        else:
            cursor.expect(";")
        self._add(function, defined)

    def _attributes(self, function: Function) -> None:
        """Read what may stand between the parameters and the body, such as `.maxntid 256, 1, 1`."""
        cursor = self.cursor
        while cursor.peek().startswith("."):
            token = cursor.next()
            if token == ".noreturn":
                function.noreturn = True
                continue
            values: list[int] = []
            while cursor.peek()[:1].isdigit():
                values.append(cursor.integer())
                if not cursor.accept(","):
                    break
            if isinstance(function, Kernel) and token in (".maxntid", ".reqntid") and values:
                x, y, z = (*values, 1, 1)[:3]
                function.max_threads = x * y * z
                if token == ".reqntid":
                    function.required_block = x, y, z
            elif token == ".pragma":
                cursor.skip_past(";")
            elif token not in _ATTRIBUTES:
                cursor.position -= 1
                raise cursor.error("unexpected word before the body of a function")

    def _body(self, function: Function) -> None:
        start = self.cursor.position
        parameters = (*function.parameters, *function.results)
        scan = scan_body(self.cursor, (p.name for p in parameters))
        names = ModuleNames(self.symbols, self.files)
        function.build = partial(read_body, self.cursor.tokens, start, parameters, names)
        function.names_used = scan.names
        function.declared = tuple(scan.declared)
        if isinstance(function, Kernel):
            function.registers = min(255, max(16, scan.register_words))

    def _add(self, function: Function, defined: bool) -> None:
        if isinstance(function, Kernel):
            if not defined:
                return
            self.module.kernels[function.name] = function
        elif defined or function.name not in self.module.functions:
            self.module.functions[function.name] = function
        self.symbols[function.name] = "code"


_ATTRIBUTES = frozenset(
    {
        *(".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".maxclusterrank"),
        *(".reqnctapercluster", ".explicitcluster", ".noreturn", ".abi_preserve", ".abi_preserve_control"),
        *(".blocksareclusters",),
    }
)


def _measure(module: Module, kernel: Kernel) -> None:
    kernel.static_shared = shared_layout(module, kernel).static_bytes
    kernel.local_bytes = sum(local_layout(function)[1] for function in reachable(module, kernel))
