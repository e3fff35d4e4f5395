"""`gpufleet build`: one CUDA C++ file into one image for many GPUs, with no toolkit installed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gpufleet.cli.options import JsonOption
from gpufleet.cli.output import print_error, print_json, print_line
from gpufleet.errors import CompileError, GpufleetError

if TYPE_CHECKING:
    from gpufleet.build import BuildResult


def build(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The CUDA C++ file.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="k.fatbin for any number of architectures; k.cubin or k.ptx for one.",
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Architectures to make machine code for, such as 80,90a; or none.",
            show_default="in a .fatbin 75,80,86,87,89,90,100,110,120",
        ),
    ] = None,
    ptx: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Architectures to add PTX for, which newer and virtual GPUs take; or none.",
            show_default="in a .fatbin or .ptx 75",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", "-G", help="Compile without optimisation, for a debugger.")
    ] = False,
    define: Annotated[
        list[str] | None, typer.Option("--define", "-D", metavar="NAME=VALUE", help="Define a macro.")
    ] = None,
    include: Annotated[
        list[Path] | None, typer.Option("--include", "-I", metavar="DIR", help="Search DIR for headers.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print what the file holds, and how long it took.")
    ] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Print a stage of the way to a virtual GPU instead: ptx, llvm, optimized or asm.",
        ),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --emit: which kernel, if there are several.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a CUDA C++ file for many GPUs at once. Needs no GPU and no CUDA toolkit."""
    from gpufleet.build import BuildError
    from gpufleet.build import build as build_image
    from gpufleet.compiler import UnknownArchitecture

    start = time.perf_counter()
    try:
        options = [f"--define-macro={_macro(text)}" for text in define or ()]
        if emit is not None:
            if output is not None or as_json:
                raise BuildError("--emit prints its text: leave out --output and --json.")
            (target,) = (_split(ptx) or ["75"])[:1]
            _print_stage(source, emit, target, kernel, options, include or ())
            return
        if output is None:
            raise BuildError("No output is named: write -o k.fatbin, k.cubin or k.ptx.")
        result = build_image(
            source,
            output,
            archs=_split(arch),
            ptx=_split(ptx),
            debug=debug,
            options=options,
            include_dirs=include or (),
        )
    except (BuildError, UnknownArchitecture, FileNotFoundError, IsADirectoryError) as error:
        _fail(error, as_json, code=2)
    except CompileError as error:
        _fail(error, as_json, code=1)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(_document(result, seconds))
        return
    if result.log:
        print_error(result.log)
    if not result.kernels:
        print_error(f"{source.name} has no kernel: mark it __global__, and instantiate templates")
    if verbose:
        _print_entries(result, seconds)
    _print_summary(output, result)


def _print_stage(
    source: Path,
    stage: str,
    arch: str,
    kernel: str | None,
    options: Sequence[str],
    include_dirs: Sequence[Path],
) -> None:
    from gpufleet.build import BuildError
    from gpufleet.stages import emit

    try:
        text = emit(source, stage, arch=arch, kernel=kernel, options=options, include_dirs=include_dirs)
    except CompileError:
        raise
    except (GpufleetError, ValueError) as error:
        raise BuildError(f"{error}.") from error
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def _split(lists: list[str] | None) -> list[str] | None:
    """Take "80,90" and repeated options apart; "none" is an empty list, no option at all is None."""
    if lists is None:
        return None
    names = [name.strip() for part in lists for name in part.split(",")]
    return [name for name in names if name not in ("", "none")]


def _macro(text: str) -> str:
    from gpufleet.build import BuildError

    if not re.fullmatch(r"[A-Za-z_]\w*(\([^)]*\))?(=.*)?", text, re.DOTALL):
        raise BuildError(f"{text!r} is no macro: write -D NAME or -D NAME=VALUE.")
    return text


def _fail(error: Exception, as_json: bool, code: int) -> NoReturn:
    """Say what is wrong, in a sentence, with the compiler's own text where it spoke."""
    log = error.log if isinstance(error, CompileError) else ""
    message = _sentence(error)
    if as_json:
        print_json({"error": type(error).__name__, "message": message, "log": log})
    print_error(f"{message}\n\n{log}" if log else message)
    raise typer.Exit(code) from None


def _sentence(error: Exception) -> str:
    """The error's first line: what may follow is an excerpt of the log, which is printed whole."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error).partition("\n")[0]


def _document(result: BuildResult, seconds: float) -> dict[str, object]:
    return {
        "output": str(result.output),
        "size": result.size,
        "entries": [
            {
                "kind": e.kind,
                "target": e.target,
                "size": e.size,
                "stored": len(e.stored),
                "compression": e.compression,
            }
            for e in result.entries
        ],
        "archs": list(result.archs),
        "ptx": list(result.ptx),
        "kernels": list(result.kernels),
        "log": result.log,
        "seconds": round(seconds, 3),
    }


def _print_entries(result: BuildResult, seconds: float) -> None:
    from gpufleet.compiler import nvrtc_version

    for entry in result.entries:
        print_line("  ", str(entry))
    version = "{}.{}".format(*nvrtc_version())
    print_line(f"  built with NVRTC {version} in {seconds:.1f} s")


MOST_NAMES = 8


def _print_summary(output: Path, result: BuildResult) -> None:
    """One line: which file, how large, for which GPUs, with which kernels."""
    parts = [
        f"{what} for {', '.join(f'sm_{arch}' for arch in archs)}"
        for what, archs in (("machine code", result.archs), ("PTX", result.ptx))
        if archs
    ]
    more = len(result.kernels) - MOST_NAMES
    names = ", ".join(result.kernels[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    parts.append(f"kernels: {names or 'none'}")
    print_line((str(output), "bold"), f"  {result.size:,} bytes  ", "; ".join(parts))
