"""CUDA C++ to PTX and machine code, through NVRTC. Needs neither a GPU nor a CUDA toolkit."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpufleet.errors import CompileError
from gpufleet.fatbin import identify

HEADER_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
"""The packages on PyPI that hold CUDA's own headers, such as cuda_fp16.h."""


NOWHERE = "/dev/null/"
"""The folder that NVRTC is told the source lies in, which cannot exist: it would look there for what the
source includes. Told no folder it looks in the current one, and its option against that
(``--no-source-include``) keeps headers too from including what lies beside them, as CUDA's own do."""


@dataclass(frozen=True)
class CompileResult:
    """What NVRTC made of one source.

    Attributes
    ----------
    code : bytes
        What was asked for: a cubin, or PTX text (without the NUL that ends it in C).
    ptx : bytes
        The PTX, which NVRTC makes on the way to a cubin too; it tells the parameters' types.
    log : str
        The compiler's warnings, or an empty string.
    names : mapping of str to str
        The mangled name of each name expression that was given.
    """

    code: bytes
    ptx: bytes
    log: str
    names: Mapping[str, str]


class UnknownArchitecture(CompileError):
    """An architecture that this NVRTC does not compile for."""


def compile_source(
    source: str,
    *,
    name: str = "kernel.cu",
    arch: int | str,
    target: Literal["ptx", "cubin"],
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    debug: bool = False,
    line_info: bool = False,
    name_expressions: Sequence[str] = (),
) -> CompileResult:
    """Compile CUDA C++ for one architecture.

    Several threads may compile at once: NVRTC runs without the GIL, and nothing is shared.

    Parameters
    ----------
    source : str
        The text. Nothing is included from the current folder unless `include_dirs` names it.
    name : str
        What messages call the source. Only its base name is used, so the result does not depend on
        where the source lies (unless `debug` or `line_info` asks for that).
    arch : int or str
        The architecture: ``90``, ``"90"``, ``"90a"`` or ``"sm_90"``.
    target : {"ptx", "cubin"}
        PTX, or machine code for exactly this architecture (and newer minor versions of it).
    options : sequence of str
        Further options of NVRTC, such as ``"--use_fast_math"`` or ``"-DN=4"``.
    include_dirs : sequence of path
        Folders to search for included files, before CUDA's own (`include_paths`).
    debug : bool
        Compile without optimisation, for a debugger (``-G``).
    line_info : bool
        Relate the code to the source's lines (``-lineinfo``).
    name_expressions : sequence of str
        C++ names whose mangled form is wanted, such as ``"scale<float>"``; templates named here are
        instantiated.

    Raises
    ------
    CompileError
        The source does not compile (`log` is the compiler's own text, the message has the first
        error with its line and a caret), or NVRTC is not installed.
    UnknownArchitecture
        NVRTC does not compile for `arch`.
    """
    nvrtc = _nvrtc()
    label = base_name(name)
    arch = parse_arch(arch)
    text = _encoded(source, label)
    folders = [os.fspath(folder) for folder in include_dirs]
    if b"#" in text and b"include" in text:
        # Only then, since looking for the headers takes 0.2 s the first time.
        folders += include_paths()
    arguments = [
        f"--gpu-architecture={'sm' if target == 'cubin' else 'compute'}_{arch}",
        *(["--device-debug"] if debug else []),
        *(["--generate-line-info"] if line_info else []),
        *options,
        *(f"--include-path={folder}" for folder in folders),
    ]

    text = _called(label) + text
    program = _checked(nvrtc.nvrtcCreateProgram(text, f"{NOWHERE}{label}".encode(), 0, [], []))
    try:
        for expression in name_expressions:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [os.fsencode(a) for a in arguments])
        log = _fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        log_text = log.rstrip(b"\0").decode(errors="replace").strip().replace(NOWHERE, "")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _compile_error(label, arch, log_text or status.name, folders)
        names = {
            e: _checked(nvrtc.nvrtcGetLoweredName(program, e.encode())).decode() for e in name_expressions
        }
        ptx = _fetch(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0")
        code = ptx if target == "ptx" else _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return CompileResult(code, ptx, log_text, names)


def read_source(path: str | os.PathLike[str]) -> str:
    """Read a CUDA C++ file.

    Raises
    ------
    CompileError
        It is not UTF-8, or compiled already.
    OSError
        It cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    if (kind := identify(data)) != "unknown":
        raise CompileError(f"{path.name} is no CUDA C++: it is compiled already ({kind}).")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CompileError(
            f"{path.name} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}); "
            f"convert it, for example with: iconv -f latin1 -t utf-8 {path.name}"
        ) from None


def base_name(path: str | os.PathLike[str]) -> str:
    """Return the name that a source has in messages and images: no folder, and nothing but Unicode."""
    # Linux allows file names that are no UTF-8; Python carries them as lone surrogates.
    return Path(path).name.encode(errors="replace").decode() or "kernel.cu"


def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of NVRTC, such as ``(13, 0)``."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Return the architectures that NVRTC compiles for, lowest first."""
    return tuple(_checked(_nvrtc().nvrtcGetSupportedArchs()))


def parse_arch(arch: int | str) -> str:
    """Return an architecture as a number with its suffix: ``"sm_90a"`` gives ``"90a"``.

    Raises
    ------
    UnknownArchitecture
        It is no architecture, or NVRTC does not compile for it.
    """
    found = re.fullmatch(r"(?:sm_|compute_)?(\d+)([af]?)", str(arch).strip())
    if not found or int(found[1]) not in supported_archs():
        raise _unknown_arch(str(arch))
    return found[1] + found[2]


def include_paths() -> list[str]:
    """Return the folders that hold CUDA's own headers, or an empty list if there are none.

    Looked for in the packages `HEADER_PACKAGES`, in conda, and in an installed toolkit, in this order.
    """
    from cuda.pathfinder import locate_nvidia_header_directory

    found = (locate_nvidia_header_directory(library) for library in ("cudart", "cccl"))
    return [folder.abs_path for folder in found if folder and folder.abs_path]


@functools.cache
def _nvrtc() -> Any:
    """The bindings' module, once it is known that it finds its library."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        nvrtc.nvrtcVersion()
    except DynamicLibNotFoundError:
        raise CompileError(
            "CUDA C++ cannot be compiled, since the library NVRTC is not found; "
            "install it with: pip install 'nvidia-cuda-nvrtc>=13,<14'"
        ) from None
    return nvrtc


def _checked(answer: tuple[Any, ...]) -> Any:
    """The values behind a status, or an error if the status is one."""
    status, *values = answer
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC answered {status.name}.")
    return values[0] if len(values) == 1 else tuple(values)


def _fetch(program: Any, size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    """What one of NVRTC's pairs of functions (size, content) has of a program."""
    buffer = bytearray(_checked(size(program)))
    _checked(get(program, buffer))
    return bytes(buffer)


def _encoded(source: str, name: str) -> bytes:
    try:
        text = source.encode()
    except UnicodeEncodeError as error:
        raise CompileError(
            f"{name} has a character that UTF-8 cannot express, at position {error.start}; "
            "read the file with the encoding that it was written in"
        ) from None
    if (position := text.find(b"\0")) >= 0:
        # NVRTC takes a C string and would silently compile only what stands before.
        raise CompileError(f"{name} has a NUL character at byte {position}: is it a text file?")
    return text


def _called(name: str) -> bytes:
    """A first line by which messages and ``__FILE__`` have the source's name, and right line numbers."""
    quoted = re.sub(r"[\x00-\x1f]", "?", name).replace("\\", r"\\").replace('"', r"\"")
    return f'#line 1 "{quoted}"\n'.encode()


def _compile_error(name: str, arch: str, log: str, folders: Sequence[str]) -> CompileError:
    """Put NVRTC's log into words: what is wrong first, where, and what to do."""
    if "gpu-architecture" in log or "--nv_arch" in log:
        return _unknown_arch(arch)
    missing = re.search(r'(?:could not|cannot) open source file "([^"]+)"', log)
    cause = _missing_header(missing[1], folders) if missing else _first_error(name, log)
    return CompileError(f"{name} does not compile for sm_{arch}: {cause}{_excerpt(log)}", log)


def _first_error(name: str, log: str) -> str:
    """The first error of a log, as "line 3: identifier "foo" is undefined (2 errors in all)"."""
    errors = re.findall(r"^(.*?)\((\d+)\): (?:catastrophic )?error(?: #\S+)?: (.*)$", log, re.MULTILINE)
    if not errors:
        # From the assembler or about an option: "ptxas fatal   : Unresolved extern function 'f'".
        found = re.search(r"(?:error|fatal)\s*: (.*)", log)
        return found[1] if found else log.partition("\n")[0]
    file, line, text = errors[0]
    where = f"line {line}" if file == name else f"line {line} of {file}"
    return f"{where}: {text}" + (f" ({len(errors)} errors in all)" if len(errors) > 1 else "")


def _missing_header(header: str, folders: Sequence[str]) -> str:
    if header in BUILT_IN:
        return f"{header} is not there, and not needed: leave the #include out, what it declares is built in"
    if (own := OF_THE_DEVICE.get(header)) is not None:
        return (
            f"{header} belongs to the host's compiler, which is not used; on the device there is {own}, "
            f"which comes with `pip install {HEADER_PACKAGES[-1]}`"
        )
    searched = ", ".join(folders) if folders else "no folder at all"
    return (
        f"the included file {header} was not found (searched: {searched}); CUDA's own headers come with "
        f"`pip install {' '.join(HEADER_PACKAGES)}`, other folders are named by include_dirs (-I)"
    )


BUILT_IN = frozenset({"math.h", "cmath", "stdio.h", "cstdio", "assert.h", "cassert"})
"""Headers of the host whose functions for the device NVRTC knows without them."""

OF_THE_DEVICE = {
    **{f"{name}.h": f"<cuda/std/c{name}>" for name in ("stdint", "stddef", "stdlib", "limits", "float")},
    **{f"c{name}": f"<cuda/std/c{name}>" for name in ("stdint", "stddef", "stdlib", "limits", "float")},
    **{name: f"<cuda/std/{name}>" for name in ("type_traits", "limits", "utility", "tuple", "array")},
}
"""Headers of the C and C++ libraries, and what CUDA's C++ library has in their place."""


def _excerpt(log: str) -> str:
    """The source line of the first error and the caret below it, as the compiler shows them."""
    found = re.search(r"^.*\(\d+\): (?:catastrophic )?error.*\n((?:[ \t].*\n?)+)", log, re.MULTILINE)
    return "\n" + found[1].rstrip() if found else ""


def _unknown_arch(arch: str) -> UnknownArchitecture:
    known = ", ".join(str(number) for number in supported_archs())
    major, minor = nvrtc_version()
    return UnknownArchitecture(
        f"{arch!r} is no architecture that NVRTC {major}.{minor} compiles for; it knows {known} "
        "(from 90 on also with the suffix a, from 100 on with f)."
    )
