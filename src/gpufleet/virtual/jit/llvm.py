"""LLVM, set up once: the machine that code is made for, and how text becomes code in memory.

llvmlite serialises compilation with a lock of its own; linking an object takes about 0.1 ms.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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
        machine = self._new_machine()
        return Target(
            llvm.get_host_cpu_name(),
            features.flatten(),
            wide,
            llvm.get_process_triple(),
            str(machine.target_data),
        )

    def _new_machine(self) -> Any:
        llvm = self._llvm
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            opt=3,
            reloc="pic",
            codemodel="default",
        )

    @cached_property
    def _machine(self) -> Any:
        return self._new_machine()

    @cached_property
    def _jit(self) -> Any:
        return self._llvm.create_lljit_compiler(self._new_machine())

    def optimise(self, source: str, level: int = 2) -> Any:
        """Parse LLVM IR and run the optimiser over it."""
        llvm = self._llvm
        target = self.target
        module = llvm.parse_assembly(
            f'target triple = "{target.triple}"\ntarget datalayout = "{target.layout}"\n{source}'
        )
        options = llvm.create_pipeline_tuning_options(speed_level=level)
        options.loop_vectorization = False
        options.slp_vectorization = False
        builder = llvm.create_pass_builder(self._machine, options)
        builder.getModulePassManager().run(module, builder)
        return module

    def compile(self, source: str, level: int = 2) -> bytes:
        """Turn LLVM IR into a relocatable object."""
        with self._lock:
            return bytes(self._machine.emit_object(self.optimise(source, level)))

    def optimised_text(self, source: str) -> str:
        """Return the LLVM IR after optimisation, to read."""
        with self._lock:
            return str(self.optimise(source))

    def assembly(self, source: str) -> str:
        """Return the machine code as text, to read."""
        with self._lock:
            return str(self._machine.emit_assembly(self.optimise(source)))

    def link(self, image: bytes, exports: Iterable[str], imports: Mapping[str, int]) -> Any:
        """Load an object; the result gives addresses by name and must be kept alive while they are used."""
        builder = self._llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
        for name in exports:
            builder.export_symbol(name)
        for name, address in imports.items():
            builder.import_symbol(name, address)
        with self._lock:
            return builder.link(self._jit, f"gpufleet{next(self._names)}")


_compiler: Compiler | None = None
_compiler_lock = threading.Lock()


def compiler() -> Compiler:
    """Return the process's compiler."""
    global _compiler
    with _compiler_lock:
        if _compiler is None:
            _compiler = Compiler()
        return _compiler
