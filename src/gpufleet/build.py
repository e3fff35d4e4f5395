"""One CUDA C++ source into one image for many architectures: what `gpufleet build` does."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.compiler import CompileResult, base_name, compile_source, parse_arch, read_source
from gpufleet.errors import CompileError, GpufleetError
from gpufleet.fatbin import Entry, read

DEFAULT_ARCHS = (75, 80, 86, 87, 89, 90, 100, 110, 120)
"""From Turing to Blackwell. Machine code also runs on higher minor versions of its architecture: 100 on
103, 120 on 121 (CUDA C++ Programming Guide, "Binary Compatibility")."""

DEFAULT_PTX = (75,)
"""PTX of the lowest target serves virtual devices, and GPUs that are newer than the compiler."""

# What nvcc -G writes beside PTX, so that the driver's compiler does not optimise either.
_DEBUG_PTX_OPTIONS = "-g --dont-merge-basicblocks --return-at-end"


class BuildError(GpufleetError, ValueError):
    """What was asked of `build` does not fit together; nothing was compiled or written."""


@dataclass(frozen=True)
class BuildResult:
    """What was built.

    Attributes
    ----------
    output : Path
        The file that was written.
    size : int
        Its bytes.
    entries : tuple of Entry
        What a fatbin holds; empty for a ``.cubin`` or ``.ptx``.
    archs, ptx : tuple of str
        The architectures that it has machine code and PTX for, such as ``("80", "90a")``.
    kernels : tuple of str
        The kernels' names, mangled where they are C++. None at all is no error: a template has none
        until it is instantiated.
    log : str
        The compiler's warnings, each once.
    """

    output: Path
    size: int
    entries: tuple[Entry, ...]
    archs: tuple[str, ...]
    ptx: tuple[str, ...]
    kernels: tuple[str, ...]
    log: str


def build(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    archs: Sequence[int | str] | None = None,
    ptx: Sequence[int | str] | None = None,
    debug: bool = False,
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
) -> BuildResult:
    """Compile a CUDA C++ file for many architectures and put the results into one file.

    The bytes depend on the text, its base name, the options and the compiler's version only: not on
    folders, time, or the order in which architectures are named. (Two exceptions: `debug` records the
    folder, and ``__FILE__`` in an included file is the path it was found by.) The file appears as a
    whole or not at all; one that exists stays as it is if anything fails.

    Parameters
    ----------
    source : path
        The CUDA C++ file. Files beside it can be included.
    output : path
        Where to write, by its suffix: ``.fatbin`` takes machine code and PTX for any number of
        architectures, ``.cubin`` machine code for one, ``.ptx`` PTX for one.
    archs : sequence of int or str, optional
        Architectures to make machine code for, such as ``(80, "90a")``. For a fatbin `DEFAULT_ARCHS`.
    ptx : sequence of int or str, optional
        Architectures to add PTX for. For a fatbin, and for a ``.ptx`` where `archs` names none either,
        `DEFAULT_PTX`.
    debug : bool
        Compile without optimisation, for a debugger.
    options : sequence of str
        Further options of NVRTC.
    include_dirs : sequence of path
        Folders to search for included files.

    Raises
    ------
    BuildError
        Architectures and the kind of output do not fit together, or the output cannot be written.
    CompileError
        The source does not compile, is not UTF-8, or NVRTC or nvFatbin is not installed.
    OSError
        The source cannot be read.
    """
    source, output = Path(source), Path(os.path.realpath(output))
    plan = _plan(output, archs, ptx)
    text = read_source(source)
    _check_writable(output)
    if plan.suffix == ".fatbin":
        _nvfatbin()

    def compile_one(arch: str) -> CompileResult:
        return compile_source(
            text,
            name=source.name,
            arch=arch,
            target="cubin" if arch in plan.archs else "ptx",
            options=options,
            include_dirs=[source.parent, *include_dirs],
            debug=debug,
        )

    results = _compile_all(plan.all, compile_one)
    content = _assemble(plan, results, base_name(source), debug)
    entries = tuple(read(content)) if plan.suffix == ".fatbin" else ()
    _write_whole(output, content)
    log = "\n\n".join(dict.fromkeys(result.log for result in results.values() if result.log))
    return BuildResult(output, len(content), entries, plan.archs, plan.ptx, _kernels(results), log)


@dataclass(frozen=True)
class _Plan:
    """What to compile for: architectures in ascending order, each once."""

    suffix: str
    archs: tuple[str, ...]
    ptx: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return _ascending((*self.archs, *self.ptx))


def _plan(output: Path, archs: Sequence[int | str] | None, ptx: Sequence[int | str] | None) -> _Plan:
    suffix = output.suffix
    if suffix == ".fatbin":
        archs = DEFAULT_ARCHS if archs is None else archs
        ptx = DEFAULT_PTX if ptx is None else ptx
    elif suffix == ".ptx" and not ptx:
        # One architecture is asked, whichever way it was said.
        archs, ptx = (), archs or (DEFAULT_PTX if ptx is None else ())
    elif suffix not in (".cubin", ".ptx"):
        raise BuildError(f"{output.name} must end in .fatbin, .cubin or .ptx, which says what to build.")
    plan = _Plan(suffix, _known(archs or ()), _known(ptx or ()))
    if not plan.all:
        option = {".cubin": "--arch, such as --arch 90", ".ptx": "--ptx, such as --ptx 75"}
        raise BuildError(
            f"No architecture is named to build {output.name} for; name one with "
            f"{option.get(suffix, '--arch or --ptx')}."
        )
    if suffix == ".cubin" and (len(plan.archs) != 1 or plan.ptx):
        raise BuildError(
            f"{output.name} takes machine code for exactly one architecture and no PTX, such as --arch 90; "
            f"asked for was {_asked(plan)}. A .fatbin takes any number."
        )
    if suffix == ".ptx" and (len(plan.ptx) != 1 or plan.archs):
        raise BuildError(
            f"{output.name} takes PTX for exactly one architecture, such as --ptx 75; "
            f"asked for was {_asked(plan)}. A .fatbin takes any number."
        )
    return plan


def _known(archs: Iterable[int | str]) -> tuple[str, ...]:
    return _ascending(parse_arch(arch) for arch in archs)


def _ascending(archs: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(archs), key=lambda arch: (int(arch.rstrip("af")), arch)))


def _asked(plan: _Plan) -> str:
    parts = [f"--arch {','.join(plan.archs)}"] if plan.archs else []
    parts += [f"--ptx {','.join(plan.ptx)}"] if plan.ptx else []
    return " ".join(parts)


def _compile_all(
    archs: Sequence[str], compile_one: Callable[[str], CompileResult]
) -> dict[str, CompileResult]:
    """Compile for all architectures at once: NVRTC runs without the GIL."""
    with ThreadPoolExecutor(min(len(archs), os.cpu_count() or 1)) as executor:
        futures = [executor.submit(compile_one, arch) for arch in archs]
        try:
            return {arch: future.result() for arch, future in zip(archs, futures, strict=True)}
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _kernels(results: dict[str, CompileResult]) -> tuple[str, ...]:
    """The kernels of any architecture: `#if` may hide some from others."""
    # PTX ISA, "Kernel and Function Directives: .entry"; NVRTC writes comments in no such place.
    found = (re.findall(rb"^(?:\.\w+ )?\.entry ([\w$]+)", r.ptx, re.MULTILINE) for r in results.values())
    return tuple(dict.fromkeys(name.decode() for names in found for name in names))


def _assemble(plan: _Plan, results: dict[str, CompileResult], name: str, debug: bool) -> bytes:
    if plan.suffix == ".cubin":
        return results[plan.archs[0]].code
    if plan.suffix == ".ptx":
        return results[plan.ptx[0]].ptx
    nvfatbin = _nvfatbin()
    # Size, not speed: the nine architectures of kernels/migrate.cu take 10 KiB instead of 37.
    options = ["-64", "-compress-mode=size", *(["-g"] if debug else [])]
    handle = nvfatbin.create(options, len(options))
    try:
        for arch in plan.archs:
            nvfatbin.add_cubin(handle, results[arch].code, len(results[arch].code), arch, name)
        for arch in plan.ptx:
            text = results[arch].ptx
            nvfatbin.add_ptx(handle, text, len(text), arch, name, _DEBUG_PTX_OPTIONS if debug else "")
        content = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, content)
    except nvfatbin.nvFatbinError as error:
        raise CompileError(f"nvFatbin cannot put the image for {name} together: {error}") from error
    finally:
        nvfatbin.destroy(handle)
    return bytes(content)


def _nvfatbin() -> Any:
    """The bindings' module, once it is known that it finds its library."""
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        from cuda.bindings import nvfatbin

        nvfatbin.version()
    except ImportError:
        raise CompileError(
            "A fatbin cannot be put together, since cuda-bindings has nvFatbin from version 13.2 on; "
            "install it with: pip install 'cuda-bindings>=13.2,<14'"
        ) from None
    except DynamicLibNotFoundError:
        raise CompileError(
            "A fatbin cannot be put together, since the library nvFatbin is not found; "
            "install it with: pip install 'nvidia-nvfatbin>=13,<14'"
        ) from None
    return nvfatbin


def _check_writable(output: Path) -> None:
    """Find out before the work is done."""
    if output.is_dir():
        raise BuildError(f"{output} is a folder; name a file in it.")
    if not output.parent.is_dir():
        raise BuildError(f"The folder {output.parent} does not exist; make it first.")
    if not os.access(output.parent, os.W_OK):
        raise BuildError(f"The folder {output.parent} cannot be written to.")


def _write_whole(path: Path, content: bytes) -> None:
    """Put the content in place in one step, so that nobody ever reads half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written ({error.strerror})", str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
