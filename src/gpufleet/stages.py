"""What does a kernel become on its way to a virtual GPU? Each stage as text, to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gpufleet.compiler import compile_source, read_source
from gpufleet.errors import GpufleetError, ImageError, UnsupportedPtx

STAGES = ("ptx", "llvm", "optimized", "asm")
"""PTX; the LLVM IR that the JIT engine makes of it; the same optimised; and the CPU's machine code."""

BLOCK = (256, 1, 1)
"""The shape of a block, on which the JIT's code depends, where the kernel requires none."""


def emit(
    source: str | os.PathLike[str],
    stage: str,
    *,
    arch: int | str = 75,
    kernel: str | None = None,
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
) -> str:
    """Return a stage of a CUDA C++ or PTX file's way to a virtual GPU.

    After PTX, the text is that of one kernel, and of two functions: one for blocks whose threads stay
    together, one for warps whose threads have parted.

    Parameters
    ----------
    source : path
        A ``.ptx`` file is taken as it is, anything else is CUDA C++.
    stage : str
        One of `STAGES`.
    arch : int or str
        What CUDA C++ is compiled to PTX for.
    kernel : str, optional
        Which kernel; None: the only one.
    options, include_dirs
        As `gpufleet.build.build` takes them.

    Raises
    ------
    ValueError
        If there is no such stage.
    ImageError
        If there is no such kernel, or none is named and there are several.
    CompileError, OSError
        If CUDA C++ does not compile, or the file cannot be read.
    UnsupportedPtx
        If virtual devices do not carry the kernel out.
    """
    if stage not in STAGES:
        raise ValueError(f"the stage is {stage!r}: expected one of {', '.join(STAGES)}")
    path = Path(source)
    if path.suffix == ".ptx":
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        folders = [path.parent, *include_dirs]
        result = compile_source(
            read_source(path), name=path.name, arch=arch, target="ptx", options=options, include_dirs=folders
        )
        text = result.code.rstrip(b"\0").decode()
    return text if stage == "ptx" else _of_the_jit(text, stage, kernel)


def _of_the_jit(text: str, stage: str, wanted: str | None) -> str:
    from gpufleet.virtual.ptx.errors import PtxError

    try:
        name, parts = _generated(text, wanted)
    except PtxError as error:
        raise (UnsupportedPtx if error.code == "NOT_SUPPORTED" else ImageError)(str(error)) from error
    try:
        from gpufleet.virtual.jit.llvm import compiler

        shows: dict[str, Callable[[str], str]] = {
            "llvm": str,
            "optimized": compiler().optimised_text,
            "asm": compiler().assembly,
        }
    except ImportError as error:
        raise GpufleetError(f"{stage} needs llvmlite: pip install 'gpufleet[jit]'") from error
    mark = "#" if stage == "asm" else ";"
    return "\n".join(f"{mark} {name}: {what}\n{shows[stage](part)}" for what, part in parts.items())


def _generated(text: str, wanted: str | None) -> tuple[str, dict[str, str]]:
    """Return a kernel's name, and the LLVM IR of its two functions by what they are for."""
    from gpufleet.virtual.jit.engine import JitExecutable
    from gpufleet.virtual.ptx import parse

    module = parse(text)
    kernel = module.kernels[_chosen(list(module.kernels), wanted)]
    generated = JitExecutable(module, kernel.name, {}).generated(kernel.required_block or BLOCK)
    return kernel.name, {
        "threads that stay together": generated.source,
        "threads that have parted": generated.diverged,
    }


def _chosen(names: list[str], wanted: str | None) -> str:
    there = ", ".join(names) or "none"
    if wanted is not None and wanted not in names:
        raise ImageError(f"there is no kernel {wanted!r}: expected one of {there}")
    if wanted is None and len(names) != 1:
        raise ImageError(f"a kernel must be named where there is not exactly one; there are {there}")
    return wanted or names[0]
