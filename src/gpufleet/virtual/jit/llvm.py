"""LLVM, set up once: the machine that code is made for, and how text becomes code in memory.

llvmlite serialises compilation with a lock of its own; linking an object takes about 0.1 ms.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any


class Effort(Enum):
    """How much time LLVM takes for how good a code."""

    QUICK = "quick"
    """Stack slots become values and empty blocks go; instructions are selected one by one."""
    BEST = "best"
    """All of LLVM's optimisation, but for its loop vectoriser: code is made of vectors already."""


@dataclass(frozen=True)
class Target:
    """The CPU that code is made for."""

    cpu: str
    features: str
    vector_bytes: int
    """Width of its vector registers: 64 with AVX-512, 32 with AVX2, else 16."""
    triple: str
    layout: str

    @property
    def mask_bits(self) -> bool:
        """Whether masks live in mask registers (AVX-512) and not in vectors of the data's width."""
        return self.vector_bytes == 64 and self.triple.startswith("x86_64")


class Compiler:
    """Makes object code for this machine, and links it into the process."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        self._llvm: Any = llvm
        self._lock = threading.Lock()
        self._names = itertools.count()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()

    @cached_property
    def target(self) -> Target:
        """Name and features both: the name alone is misdetected on some virtual machines."""
        llvm = self._llvm
        features = llvm.get_host_cpu_features()
        wide = (
            64
            if features.get("avx512vl") and features.get("avx512bw")
            else 32
            if features.get("avx2")
            else 16
        )
        machine = self._machines[Effort.BEST]
        return Target(
            llvm.get_host_cpu_name(),
            features.flatten(),
            wide,
            llvm.get_process_triple(),
            str(machine.target_data),
        )

    def _new_machine(self, level: int) -> Any:
        llvm = self._llvm
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            opt=level,
            reloc="pic",
            codemodel="default",
        )

    @cached_property
    def _machines(self) -> dict[Effort, Any]:
        return {Effort.QUICK: self._new_machine(0), Effort.BEST: self._new_machine(3)}

    @cached_property
    def _jit(self) -> Any:
        return self._llvm.create_lljit_compiler(self._new_machine(3))

    def compile(self, source: str, effort: Effort = Effort.BEST) -> bytes:
        """Turn LLVM IR into a relocatable object."""
        with self._lock:
            module = self._optimise(source, effort)
        with self._lock:  # let others in between: one step of a large kernel may take a second
            return bytes(self._machines[effort].emit_object(module))

    def optimised_text(self, source: str) -> str:
        """Return the LLVM IR after optimisation, to read."""
        with self._lock:
            return str(self._optimise(source, Effort.BEST))

    def assembly(self, source: str) -> str:
        """Return the machine code as text, to read."""
        with self._lock:
            return str(self._machines[Effort.BEST].emit_assembly(self._optimise(source, Effort.BEST)))

    def _optimise(self, source: str, effort: Effort) -> Any:
        """Parse LLVM IR and run the optimiser over it."""
        llvm = self._llvm
        target = self.target
        module = llvm.parse_assembly(
            f'target triple = "{target.triple}"\ntarget datalayout = "{target.layout}"\n{source}'
        )
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = False
        options.slp_vectorization = False
        builder = llvm.create_pass_builder(self._machines[effort], options)
        if effort is Effort.BEST:
            builder.getModulePassManager().run(module, builder)
            return module
        passes = llvm.create_new_function_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)
        return module

    def link(self, image: bytes, exports: Iterable[str], imports: Mapping[str, int]) -> Any:
        """Load an object; the result gives addresses by name and must be kept alive while they are used."""
        builder = self._llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
        for name in exports:
            builder.export_symbol(name)
        for name, address in imports.items():
            builder.import_symbol(name, address)
        with self._lock:
            return builder.link(self._jit, f"gpufleet{next(self._names)}")

    def pause(self) -> None:
        """Let nothing be compiled until `resume`: LLVM must be at rest when the process forks."""
        self._lock.acquire()

    def resume(self) -> None:
        """Go on."""
        self._lock.release()


_compiler: Compiler | None = None
_compiler_lock = threading.Lock()


def compiler() -> Compiler:
    """Return the process's compiler."""
    global _compiler
    with _compiler_lock:
        if _compiler is None:
            _compiler = Compiler()
        return _compiler


def _before_fork() -> None:
    _compiler_lock.acquire()
    if _compiler is not None:
        _compiler.pause()


def _after_fork() -> None:
    if _compiler is not None:
        _compiler.resume()
    _compiler_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
